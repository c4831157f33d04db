"""The process: starts, stops, and says why it cannot."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from refengine_fakes import wait_for

Start = Callable[..., "Server"]


class Server:
    def __init__(self, port: int, log: Path, *arguments: str) -> None:
        self.port, self._log = port, log
        argv = [sys.executable, "-m", "kvtierd_refengine.server", "--port", str(port), "--preset", "tiny"]
        env = {name: value for name, value in os.environ.items() if not name.startswith("MMC_")}
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [*argv, *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                stdin=subprocess.DEVNULL,
            )

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            assert self.process.poll() is None, self.output()
            return False

    def ask(self, max_tokens: int) -> tuple[int, str]:
        body = json.dumps({"prompt": "hello", "max_tokens": max_tokens, "ignore_eos": True}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/completions", body)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)["choices"][0]["text"]

    def running(self) -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as answer:
            return b'vllm:num_requests_running{engine="0",model_name="refengine"} 1.0' in answer.read()

    def output(self) -> str:
        return self._log.read_text()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    servers: list[Server] = []

    def make(*arguments: str, port: int | None = None) -> Server:
        if port is None:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
        servers.append(Server(port, tmp_path / f"log-{len(servers)}", *arguments))
        return servers[-1]

    yield make
    for server in servers:
        server.process.kill()
        server.process.wait(10)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_it_serves_says_what_it_is_and_stops_cleanly(start: Start, number: signal.Signals) -> None:
    server = start("--stats-interval", "100ms")
    wait_for(server.ready, "ready")
    assert server.ask(3)[0] == 200
    wait_for(lambda: "Engine 000: Avg prompt throughput:" in server.output(), "the hit-rate line")
    server.process.send_signal(number)
    assert server.process.wait(5) == 0
    assert "not for serving" in server.output()
    assert "External prefix" not in server.output()  # there is no L3


def test_a_running_request_is_finished_before_the_end(start: Start) -> None:
    server = start()
    wait_for(server.ready, "ready")
    answers: list[tuple[int, str]] = []
    asking = threading.Thread(target=lambda: answers.append(server.ask(800)))
    asking.start()
    wait_for(server.running, "it runs")
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0
    asking.join(5)
    assert [(status, len(text)) for status, text in answers] == [(200, 800)]


def test_a_second_signal_ends_it_at_once(start: Start) -> None:
    server = start("--max-model-len", "10000")
    wait_for(server.ready, "ready")
    cut_off: list[OSError] = []

    def ask() -> None:
        try:
            server.ask(9000)
        except OSError as error:
            cut_off.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    wait_for(server.running, "it runs")
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "stopping: finishing" in server.output(), "it drains")
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(5) == 0
    asking.join(5)
    assert len(cut_off) == 1


def test_a_port_in_use_is_one_clear_line(start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = start(port=port)
        assert server.process.wait(20) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in server.output()
    assert "Traceback" not in server.output()


def test_l3_without_a_configuration_is_fatal(start: Start) -> None:
    server = start("--l3", "on")
    assert server.process.wait(20) == 2
    assert server.output() == (
        "refengine: fatal: --l3 on needs MMC_LOCAL_CONFIG_PATH in the environment: the path of mmc-local.conf\n"
    )


def test_a_cache_too_small_for_one_block_is_fatal(start: Start) -> None:
    server = start("--l1", "64KiB", "--block-size", "512")
    assert server.process.wait(20) == 1
    assert "refengine: fatal: cannot build the engine: an L1 cache of 65536 bytes" in server.output()
    assert "Traceback" not in server.output()
