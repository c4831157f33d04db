"""Measurements of the daemon on one host: plan, start, rest, adoption, and the MetaService's death."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from bench.report import Row
from kvtierd.emulator.build import ensure_driver
from kvtierd.errors import KvtierError
from kvtierd.provision.assembly import cache_directory
from kvtierd.workload.demo import DemoNode, free_ports

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "e2e"))

from lab import RawClient, RealTier  # noqa: E402 - the end-to-end tests' clients

REST_SECONDS = 20.0
LOAD = {"size": 4096, "threads": 2, "pause_seconds": 0.005}


def quiet(_text: str) -> None:
    pass


def plan_time() -> list[Row]:
    """The whole process, and beside it what its two largest libraries take to import in the same run."""
    plan = [
        "-m", "kvtierd.cli", "plan", "--json", "--settings", str(ROOT / "examples/single-host-a2.toml"),
        "--inventory", str(ROOT / "tests/fixtures/inventory/a2-2cards.json"),
    ]  # fmt: skip
    libraries = ["-c", "import pydantic.types, pydantic.fields, typer._adapters"]
    taken: dict[str, list[float]] = {"plan": [], "libraries": []}
    for _ in range(7):
        for what, arguments in (("plan", plan), ("libraries", libraries)):
            started = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
            taken[what].append(time.perf_counter() - started)
    median, base = statistics.median(taken["plan"]), statistics.median(taken["libraries"])
    text = f"{median:.2f} s = {median / base:.1f} x"
    return [
        Row("kvtierctl plan, whole process, median of 7", text, "<= 0.5 s", median <= 0.5),
        Row("  of it: Python, pydantic and typer alone (1 x)", f"{base:.2f} s", "-", holds=True),
    ]


def eight_units() -> list[Row]:
    ports = free_ports(3)
    engines = "".join(
        f'\n[[engine]]\nname = "e{i}"\nplugin = "refengine"\nport = {p}\n' for i, p in enumerate(ports)
    )
    node = DemoNode(quiet, pool="256MiB", extra=engines, orderly=False)
    node.settings.write_text(node.settings.read_text().replace("[pool]\n", "[pool]\nholders = 2\n"))
    with node:
        assert len(node.status().units) == 8
        rows = [_at_rest(node)]
        node.stop_daemon(signal.SIGKILL)
        ready, adopted = _restart(node)
        rows.append(Row("daemon ready after exec", f"{ready:.2f} s", "<= 1.5 s", ready <= 1.5))
        rows.append(Row("8 units adopted and ready after READY", f"{adopted:.2f} s", "<= 1 s", adopted <= 1))
        return rows


def _at_rest(node: DemoNode) -> Row:
    time.sleep(3)
    process = psutil.Process(node.daemon_pid)
    before = process.cpu_times()
    time.sleep(REST_SECONDS)
    after = process.cpu_times()
    share = (after.user + after.system - before.user - before.system) / REST_SECONDS
    rss = process.memory_info().rss / 1024**2
    return Row(
        "daemon at rest with 8 units, 1 s scrapes: memory, share of a core",
        f"{rss:.0f} MiB, {share:.1%}", "<= 80 MB, <= 1 %", rss <= 80e6 / 1024**2 and share <= 0.01,
    )  # fmt: skip


def _restart(node: DemoNode) -> tuple[float, float]:
    """Seconds from exec to READY=1, and from there until all units are known and ready again."""
    with (
        tempfile.TemporaryDirectory() as directory,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify,
    ):
        notify.bind(f"{directory}/notify")
        notify.settimeout(30)
        os.environ["NOTIFY_SOCKET"] = f"{directory}/notify"
        started = time.monotonic()
        node.start_daemon()
        del os.environ["NOTIFY_SOCKET"]
        while b"READY=1" not in notify.recv(4096):
            pass
        ready = time.monotonic()
    while True:
        with contextlib.suppress(KvtierError):
            units = node.status().units
            if len(units) == 8 and all(u.state == "ready" and u.restarts == 0 for u in units):
                return ready - started, time.monotonic() - ready
        time.sleep(0.02)


@contextlib.contextmanager
def clients_of(node: DemoNode) -> Iterator[dict[str, RawClient]]:
    """F and S clients of the node's pool, connected through its endpoint."""
    tier = RealTier(node.directory / "run" / "emulation", ensure_driver(cache_directory()))
    text = node.settings.read_text()
    tier.client_meta_port = _setting(text, "port")
    tier.client_store_port = _setting(text, "config_store_port")
    try:
        yield {
            "F": tier.client(max_dram="256MB"),
            "S": tier.client(init_bm=False, max_dram="256MB"),
        }
    finally:
        for unit in reversed(tier.units):
            unit.kill()


def _setting(text: str, key: str) -> int:
    return next(int(line.split("=")[1]) for line in text.splitlines() if line.startswith(f"{key} ="))


def meta_service_killed(rounds: int = 3) -> list[Row]:
    """kill -9 of the MetaService under load of P, F and S clients, through kvtierd's endpoint."""
    health, longest, hits = [], [], []
    with DemoNode(quiet, pool="256MiB", orderly=False) as node, clients_of(node) as clients:
        for number in range(rounds):
            one = _kill_once(node, clients, f"r{number}")
            health.append(one[0])
            longest.append(one[1])
            hits.append(one[2])
            time.sleep(2)
    return [
        Row("MetaService killed: /health again", _span(health), "<= 2 s", max(health) <= 2),
        Row("MetaService killed: longest client call", _span(longest), "<= 1 s", max(longest) <= 1),
        Row("MetaService killed: hits again", _span(hits), "<= 4 s", max(hits) <= 4),
    ]


def _span(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f} s"


def _kill_once(node: DemoNode, clients: dict[str, RawClient], name: str) -> tuple[float, float, float]:
    clients["F"].call("start_load", prefix=name, **LOAD)
    time.sleep(2)
    meta = next(u for u in node.status().units if u.kind == "meta")
    os.kill(meta.pid, signal.SIGKILL)
    started = time.monotonic()
    healthy = hit = None
    while hit is None and time.monotonic() - started < 30:
        if healthy is None and _answers(node.metrics_port):
            healthy = time.monotonic() - started
        if healthy is not None:
            key = f"{name}-probe-{time.monotonic()}"
            if clients["F"].call("put", key=key, size=4096) == 0 and clients["S"].call("exist", key=key) == 1:
                hit = time.monotonic() - started
        time.sleep(0.02)
    result = clients["F"].call("stop_load")
    assert result["stuck"] == 0, result
    assert result.get("gets_wrong", 0) == 0, "a value came back wrong"
    return healthy or 99.0, result["longest_seconds"], hit or 99.0


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 0.2) as connection:
            connection.settimeout(0.5)
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            return b'"status":"ok"' in connection.recv(4096)
    except OSError:
        return False


def rows() -> list[Row]:
    return [*plan_time(), *eight_units(), *meta_service_killed()]
