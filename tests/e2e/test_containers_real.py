"""[meta] runner = "docker": the real MetaService and pool holder in containers of a stand-in docker on PATH."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from kvtierd.errors import KvtierError
from kvtierd.workload.demo import DemoNode
from kvtierd.workload.stream import complete

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]
META, POOL = "kvtier-meta-main", "kvtier-pool-0"
TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank. " * 12


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """The stand-in's directory, first on the daemon's PATH."""
    home = tmp_path / "docker"
    home.mkdir()
    shutil.copy(Path(__file__).parent / "stand_in_docker.py", home / "docker")
    (home / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{home}:{os.environ['PATH']}")
    yield home
    for name in (META, POOL):
        subprocess.run([home / "docker", "rm", "--force", name], timeout=30, capture_output=True)


@pytest.fixture
def node(docker):
    running = DemoNode(lambda _: None, pool="64MiB", wait=False, orderly=False)
    text = running.settings.read_text()
    boxed = f'[meta]\nrunner = "docker"\nimage = "registry/memcache:1"\npython = "{sys.executable}"\n'
    running.settings.write_text(text.replace("[meta]\n", boxed + 'version = "1.3.0"\n'))
    with running:
        running.wait_ready()
        yield running


def calls(docker: Path, verb: str) -> list[list[str]]:
    lines = (docker / "calls").read_text().splitlines()
    return [words for words in map(json.loads, lines) if words[0] == verb]


def container(docker: Path, name: str):
    return json.loads((docker / f"{name}.json").read_text())


def units(node: DemoNode):
    return {u.id: u for u in node.status().units}


def l3_used(node: DemoNode) -> int:
    return next(t.used_bytes for t in node.status().tiers if t.name == "L3")


def wait_until(condition, seconds: float = 40.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if condition():
                return
        except (KvtierError, FileNotFoundError):
            pass
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds} s")


def ask(node: DemoNode):
    return complete("127.0.0.1", node.engine_port, model="refengine", prompt=TEXT, max_tokens=4)


def kvtierctl(node: DemoNode, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, "-m", "kvtierd.cli", "--settings", str(node.settings), *arguments],
        capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert result.returncode == 0, (result.stdout, result.stderr)
    return result.stdout


def test_the_whole_tier_works_over_containers(node, docker):
    assert [words[words.index("--name") + 1] for words in calls(docker, "run")] == [META, POOL]
    inside = container(docker, META)
    assert inside["env"]["OF_THE_IMAGE"] == "1"
    assert inside["env"]["PATH"].startswith("/usr/local/bin"), "the image's own PATH, not the host's"
    process = psutil.Process(inside["pid"])
    assert process.cmdline()[-1].endswith("run_meta.py")
    assert units(node)[META].pid not in {p.pid for p in [process, *process.parents()]}, (
        "as with the real docker"
    )

    cold = ask(node)
    wait_until(lambda: l3_used(node) > 0)
    time.sleep(1)
    assert "nothing changed" in kvtierctl(node, "apply"), "the ports of its containers are kvtierd's own"

    kvtierctl(node, "restart", "meta")
    wait_until(lambda: node.status().tier_state == "joinable")
    assert [words[-1] for words in calls(docker, "stop")] == [META]
    assert container(docker, META)["pid"] != inside["pid"]
    assert not psutil.pid_exists(inside["pid"])
    assert "tier.purged" not in [e.kind for e in node.client.events()]
    node.restart_engine()
    warm = ask(node)
    assert warm.text == cold.text
    assert warm.usage["kvtier"]["l3_tokens"] > 700, "the keys survived"

    kvtierctl(node, "purge", "--yes")
    wait_until(lambda: l3_used(node) == 0)
    assert calls(docker, "exec")[-1][-1].endswith("run_purge.py")

    kvtierctl(node, "stop", "--all")
    assert {words[-1] for words in calls(docker, "stop")} == {META, POOL}
    assert not list(docker.glob("*.json")), "no container is left"
    kvtierctl(node, "start", "--all")
    assert all(u.state == "ready" for u in node.status().units)


def test_a_killed_container_comes_back_purged_and_a_killed_daemon_adopts_it(node, docker):
    cold = ask(node)
    wait_until(lambda: l3_used(node) > 0)
    first = container(docker, META)["pid"]
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: container(docker, META)["pid"] != first and node.status().tier_state == "joinable")
    assert "tier.purged" in [e.kind for e in node.client.events()]
    assert ask(node).text == cold.text

    before = {name: u.pid for name, u in units(node).items()}
    pid = container(docker, META)["pid"]
    node.stop_daemon(signal.SIGKILL)
    node.start_daemon()
    node.wait_ready()
    assert {name: u.pid for name, u in units(node).items()} == before
    assert container(docker, META)["pid"] == pid
