"""The daemon as a service of a real systemd, with the real MetaService, pool holder and the reference engine under it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvtierd.errors import KvtierError
from kvtierd.workload.demo import DemoNode
from kvtierd.workload.stream import complete

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]
SERVICE = "kvtierd-under-test.service"
TEXT = "The quick brown fox jumps over the lazy dog and thinks about caches. " * 12


class ServiceNode(DemoNode):
    """The demo's node, with the daemon as a service of its own (Type=notify, a watchdog)."""

    def start_daemon(self) -> None:
        subprocess.run(
            ["systemd-run", "--quiet", "--collect", f"--unit={SERVICE}", "--property=Type=notify",
             "--property=WatchdogSec=10", f"--working-directory={Path.cwd()}",
             sys.executable, "-m", "kvtierd.daemon", "--settings", str(self.settings)],
            check=True, timeout=60,
        )  # fmt: skip
        self._daemon = self._Handle()  # type: ignore[assignment]

    def stop_daemon(self, number: signal.Signals = signal.SIGTERM) -> int:
        if number is signal.SIGKILL:
            subprocess.run(["systemctl", "kill", "--signal=SIGKILL", "--kill-who=main", SERVICE], check=False)
        subprocess.run(["systemctl", "stop", SERVICE], check=False, capture_output=True)
        return 0

    class _Handle:
        returncode = None

        def poll(self) -> None:
            return None


@pytest.fixture
def node() -> Iterator[ServiceNode]:
    with ServiceNode(lambda _: None, pool="64MiB", orderly=False, backend="systemd") as running:
        yield running
    left = subprocess.run(
        ["systemctl", "list-units", "--all", "--plain", "--no-legend", "kvtier-*"],
        capture_output=True,
        text=True,
    )
    assert left.stdout.strip() == ""


def units(node: DemoNode) -> dict[str, object]:
    return {u.id.removeprefix("kvtier-"): u for u in node.status().units}


def wait_until(condition, seconds: float = 30.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(KvtierError):
            if result := condition():
                return result
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds} s")


def ask(node: DemoNode) -> str:
    return complete("127.0.0.1", node.engine_port, model="refengine", prompt=TEXT, max_tokens=4).text


def kvtierctl(node: DemoNode, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "kvtierd.cli", "--settings", str(node.settings), *arguments],
        capture_output=True, text=True, timeout=90, check=True,
    ).stdout  # fmt: skip


def test_kill_9_of_the_daemon_costs_nothing_and_the_next_one_adopts(node: ServiceNode) -> None:
    first = ask(node)
    status = node.status()
    assert status.backend == "systemd"
    before = {u.id: u.pid for u in status.units}
    assert len(before) >= 3
    assert all("/kvtierd.slice/" in Path(f"/proc/{pid}/cgroup").read_text() for pid in before.values())
    node.stop_daemon(signal.SIGKILL)
    assert all(psutil.pid_exists(pid) for pid in before.values())
    assert ask(node) == first, "the engine serves without the daemon"
    node.start_daemon()
    wait_until(lambda: all(u.state == "ready" for u in node.status().units) and node.status().units)
    after = node.status()
    assert {u.id: u.pid for u in after.units} == before
    assert [u.restarts for u in after.units] == [0] * len(before)
    assert ask(node) == first


def test_a_stopped_daemon_leaves_units_and_says_nothing_in_their_name(node: ServiceNode) -> None:
    before = {u.id: u.pid for u in node.status().units}
    for pid in before.values():
        names = {entry.split(b"=")[0] for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")}
        assert not names & {b"NOTIFY_SOCKET", b"WATCHDOG_USEC", b"WATCHDOG_PID", b"INVOCATION_ID"}
    subprocess.run(["systemctl", "stop", SERVICE], check=True)
    assert all(psutil.pid_exists(pid) for pid in before.values())
    node.start_daemon()
    wait_until(lambda: {u.id: u.pid for u in node.status().units} == before)


def test_a_killed_engine_is_restarted_and_its_output_read_from_the_journal(node: ServiceNode) -> None:
    engine = units(node)["engine-ref"]
    os.kill(engine.pid, signal.SIGKILL)
    wait_until(lambda: (u := units(node)["engine-ref"]).state == "ready" and u.pid != engine.pid)
    assert kvtierctl(node, "logs", "ref", "--lines", "5").strip()
    by_journalctl = subprocess.run(
        ["journalctl", "--quiet", "--output=cat", "--unit=kvtier-engine-ref.service"],
        capture_output=True,
        text=True,
    ).stdout
    assert kvtierctl(node, "logs", "ref", "--lines", "1").strip() in by_journalctl
    assert "(systemd)" in kvtierctl(node, "status")


def test_the_daemon_lives_on_without_a_bus(node: ServiceNode) -> None:
    before = {u.id: u.pid for u in node.status().units}
    daemon = subprocess.run(
        ["systemctl", "show", "--value", "-pMainPID", SERVICE], capture_output=True, text=True
    ).stdout
    subprocess.run(["systemctl", "stop", "dbus.socket", "dbus.service"], check=True)
    try:
        wait_until(lambda: any("D-Bus" in problem for problem in node.status().problems))
        time.sleep(12)  # longer than the watchdog's time
    finally:
        subprocess.run(["systemctl", "start", "dbus.socket", "dbus.service"], check=True)
    wait_until(lambda: all(u.state == "ready" for u in node.status().units) and not node.status().problems)
    assert {u.id: u.pid for u in node.status().units} == before
    now = subprocess.run(
        ["systemctl", "show", "--value", "-pMainPID", SERVICE], capture_output=True, text=True
    ).stdout
    assert now == daemon


def test_units_of_shims_are_not_doubled_by_a_change_to_systemd() -> None:
    with DemoNode(lambda _: None, pool="64MiB", orderly=False, backend="shim") as node:
        before = {u.id: u.pid for u in node.status().units}
        node.stop_daemon()
        node.settings.write_text(node.settings.read_text().replace('backend = "shim"', 'backend = "auto"'))
        node.start_daemon()
        wait_until(lambda: {u.id: u.pid for u in node.status().units} == before)
        status = wait_until(lambda: (s := node.status()).problems and s)
        assert status.backend == "shim"
        assert any("still run under shims" in problem for problem in status.problems)
