"""The demo's node: a daemon with settings of its own in a private directory, and everything gone afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from kvtierd.control.client import ControlClient
from kvtierd.control.v1 import control_pb2 as pb
from kvtierd.emulator.launch import cleanup
from kvtierd.errors import KvtierError
from kvtierd.events import NO_PLAN_EVENT
from kvtierd.units.backend import UnitBackend
from kvtierd.units.shim_backend import ShimBackend
from kvtierd.units.systemd_backend import SystemdBackend

ENGINE = "ref"
READY_SECONDS = 60.0
REFERENCE_ENGINE = 'plugin = "refengine"\n'
Say = Callable[[str], None]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, below the range the kernel takes for outgoing connections."""
    found: list[int] = []
    with contextlib.ExitStack() as held:
        for port in random.sample(range(20000, 32000), 1000):
            listener = held.enter_context(socket.socket())
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(port)
            if len(found) == count:
                return found
    raise KvtierError("there are no free ports between 20000 and 32000", code="demo.ports")


class DemoNode:
    """Context manager: starts kvtierd in emulation on free ports, and leaves nothing behind, also on Ctrl-C.

    Args:
        say: called with what is being waited for.
        pool: size of the pool.
        extra: further settings, TOML text behind what the demo writes.
        wait: wait until every unit is ready.
        engine: the engine's settings, TOML lines; its port is written by the demo.
        ready_seconds: how long everything may take to be ready.
        backend: what keeps the units; a demo beside a real kvtierd keeps out of systemd.
        orderly: stop units as kvtierd would; else kill them, which spares the tests ten seconds.
    """

    def __init__(
        self,
        say: Say,
        *,
        pool: str = "512MiB",
        extra: str = "",
        wait: bool = True,
        orderly: bool = True,
        backend: Literal["shim", "systemd"] = "shim",
        engine: str = REFERENCE_ENGINE,
        ready_seconds: float = READY_SECONDS,
    ) -> None:
        self._say = say
        self._wait = wait
        self._orderly = orderly
        self._backend = backend
        self._ready_seconds = ready_seconds
        # Short, since a unix socket's path must be; private, since it holds the control socket.
        self.directory = Path(tempfile.mkdtemp(prefix="kvtierd-demo-"))
        self.settings = self.directory / "kvtierd.toml"
        ports = free_ports(7)
        self.port, self.store_port = ports[0], ports[1]
        self.metrics_port, self.engine_port = ports[4], ports[5]
        self.settings.write_text(
            _settings(self.directory, ports, pool, engine, backend) + extra, encoding="utf-8"
        )
        self._log = self.directory / "kvtierd.log"
        self._daemon: subprocess.Popen[bytes] | None = None
        self.client = ControlClient(self.directory / "run" / "kvtierd.sock")

    def __enter__(self) -> Self:
        try:
            self.start_daemon()
            if self._wait:
                self.wait_ready()
        except BaseException:
            self._clean_up()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clean_up()

    @property
    def daemon_pid(self) -> int | None:
        """Process id of the daemon while it runs."""
        return self._daemon.pid if self._daemon is not None and self._daemon.poll() is None else None

    def start_daemon(self) -> None:
        """Starts kvtierd and does not wait."""
        with self._log.open("ab") as log:
            # A session of its own: Ctrl-C must reach us, not the daemon behind our back.
            self._daemon = subprocess.Popen(
                [sys.executable, "-m", "kvtierd.daemon", "--settings", str(self.settings)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={k: v for k, v in os.environ.items() if not k.startswith("KVTIERD_")},
            )  # fmt: skip

    def stop_daemon(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ends the daemon only; its units go on. The exit status, negative for a signal."""
        assert self._daemon is not None
        if self._daemon.poll() is None:
            self._daemon.send_signal(number)
        try:
            return self._daemon.wait(15)
        except subprocess.TimeoutExpired:
            self._daemon.kill()
            return self._daemon.wait(5)

    def status(self) -> pb.StatusReply:
        """The node's status."""
        return self.client.status()

    def restart_engine(self) -> None:
        """Restarts the engine and waits until it is ready."""
        unit = self.client.control_unit(ENGINE, "restart", self._ready_seconds)
        if unit.state != "ready":
            raise KvtierError(
                f"the engine did not come back: it is {unit.state}: {unit.reason}",
                why="\n".join(unit.last_lines),
            )

    def wait_ready(self) -> None:
        """Until every unit is ready and nothing is wrong.

        Raises:
            KvtierError: there is no plan (with its own code), a unit failed, the daemon ended, or it took too long.
        """
        deadline = time.monotonic() + self._ready_seconds
        while time.monotonic() < deadline:
            self._check_daemon()
            reply = self._status_or_none()
            if reply is not None:
                self._check_plan(reply)
                self._check_units(reply)
                if reply.units and not reply.problems and all(u.state == "ready" for u in reply.units):
                    return
                self._say(_waiting_for(reply))
            time.sleep(0.1)
        raise KvtierError(
            f"not everything was ready within {self._ready_seconds:.0f} s",
            why=self._tail(),
            code="demo.timeout",
        )

    def _status_or_none(self) -> pb.StatusReply | None:
        try:
            return self.status()
        except KvtierError:  # not listening yet
            return None

    def _check_plan(self, reply: pb.StatusReply) -> None:
        """A first plan that failed is final: nobody here reloads. Asked once more, the daemon says why and what to do."""
        if reply.units or not reply.problems:
            return
        if any(event.kind == NO_PLAN_EVENT for event in self.client.events()):
            self.client.reload(restart_changed=False)

    def _check_units(self, reply: pb.StatusReply) -> None:
        failed = [u for u in reply.units if u.state == "failed"]
        if failed:
            raise KvtierError(
                f"{failed[0].id} failed: {failed[0].reason}",
                why="\n".join(failed[0].last_lines),
                code="demo.failed",
            )

    def _check_daemon(self) -> None:
        assert self._daemon is not None
        if self._daemon.poll() is not None:
            raise KvtierError(
                f"kvtierd ended at once (exit {self._daemon.returncode})",
                why=self._tail(),
                code="demo.daemon",
            )

    def _tail(self) -> str:
        with contextlib.suppress(OSError):
            return "\n".join(self._log.read_text(errors="replace").splitlines()[-8:])
        return ""

    def _clean_up(self) -> None:
        """Ends everything. A second Ctrl-C must not leave half of it."""
        with _IgnoredInterrupts():
            # Who reads it may be gone (head): all the more is to be stopped.
            with contextlib.suppress(OSError):
                self._say("stopping everything")
            if self._orderly:
                with contextlib.suppress(KvtierError):
                    self.client.stop_all(30.0)
            if self._daemon is not None:
                self.stop_daemon()
            self.client.close()
            asyncio.run(_kill_leftovers(self.directory, self._backend))
            cleanup(self.directory / "run" / "emulation")
            shutil.rmtree(self.directory, ignore_errors=True)


async def _kill_leftovers(directory: Path, kind: str) -> None:
    """Units that the daemon could not stop, because it was killed or never came so far."""
    backend: UnitBackend = ShimBackend(directory / "run", directory / "logs" / "units")
    if kind == "systemd":
        backend = SystemdBackend(directory / "run")
    try:
        known = [p.unit_id for p in await backend.list()]
        running = [p.unit_id for p in await backend.list() if p.running]
        await asyncio.gather(
            *(backend.stop(u, signal="SIGKILL", timeout_seconds=5) for u in running), return_exceptions=True
        )
        await asyncio.gather(*(backend.forget(u) for u in known), return_exceptions=True)
    finally:
        await backend.close()


class _IgnoredInterrupts:
    """While cleaning up, nothing may interrupt."""

    def __enter__(self) -> None:
        self._before = {
            number: signal.signal(number, signal.SIG_IGN)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _waiting_for(reply: pb.StatusReply) -> str:
    for unit in reply.units:
        if unit.state != "ready":
            return f"{unit.id.removeprefix('kvtier-')} is {unit.state}{f': {unit.reason}' if unit.reason else ''}"
    return reply.problems[0] if reply.problems else "kvtierd is planning"


def _settings(directory: Path, ports: list[int], pool: str, engine: str, backend: str) -> str:
    return f"""# made by kvtierctl demo
[node]
name = "demo"
series = "emulated"

[paths]
state = "{directory}/state"
runtime = "{directory}/run"
logs = "{directory}/logs"

[pool]
dram = "{pool}"
host_reserve = "256MiB"
host_free = "256MiB"

[meta]
port = {ports[0]}
config_store_port = {ports[1]}
backend_port = {ports[2]}
backend_config_store_port = {ports[3]}
metrics_port = {ports[4]}

[observe]
exporter = "127.0.0.1:{ports[6]}"

[daemon]
backend = "{backend}"

[[engine]]
name = "{ENGINE}"
{engine}port = {ports[5]}
"""
