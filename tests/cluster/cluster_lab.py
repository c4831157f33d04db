"""Clusters of real daemons on one machine: each node with an address of its own, one emulated memory under all of them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvtierd.control.v1 import control_pb2 as pb
from kvtierd.errors import KvtierError
from kvtierd.workload.demo import DemoNode

NAMES = ("a", "b", "c", "d", "e")


class ClusterNode(DemoNode):
    """One node, with its daemon behind 127.0.<cluster>.<number>."""

    def __init__(self, name: str, cluster: str, emulation: Path, *, pool: str = "64MiB") -> None:
        super().__init__(lambda _: None, pool=pool, orderly=False, wait=False)
        self.name = name
        self._emulation = emulation
        text = self.settings.read_text().replace('name = "demo"', f'name = "{name}"')
        self.settings.write_text(text + cluster)

    def start_daemon(self) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith("KVTIERD_")}
        with self._log.open("ab") as log:
            self._daemon = subprocess.Popen(
                [sys.executable, "-m", "kvtierd.daemon", "--settings", str(self.settings)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={**env, "EMULATED_ASCEND_ROOT": str(self._emulation)},
            )  # fmt: skip

    @property
    def alive(self) -> bool:
        return self.daemon_pid is not None

    def peers(self) -> pb.PeersReply | None:
        with contextlib.suppress(KvtierError):
            return self.client.peers()
        return None

    def unit(self, name: str) -> pb.Unit | None:
        with contextlib.suppress(KvtierError):
            return next((u for u in self.status().units if u.id == f"kvtier-{name}"), None)
        return None

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def kill_host(self) -> None:
        """Everything of this node at once, as when its power goes."""
        self.stop_daemon(signal.SIGKILL)
        for process in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                marks = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
                if str(self.directory).encode() in marks and int(process.name) != os.getpid():
                    os.kill(int(process.name), signal.SIGKILL)


class Cluster:
    """Some nodes. Use as a context manager."""

    def __init__(self, count: int, settings: str = 'mode = "lease"\nlease = "3s"', *, net: int = 1) -> None:
        self.emulation = Path(tempfile.mkdtemp(prefix="kvtierd-cluster-"))
        names = NAMES[:count]
        self.addresses = {name: f"127.0.{net}.{number}" for number, name in enumerate(names, start=1)}
        peers = ",\n".join(f'  {{ name = "{n}", address = "{a}" }}' for n, a in self.addresses.items())
        text = f'\n[cluster]\nname = "lab"\ninsecure = true\n{settings}\npeers = [\n{peers}\n]\n'
        self.nodes = {name: ClusterNode(name, text, self.emulation) for name in names}

    def __enter__(self) -> Cluster:
        try:
            for node in self.nodes.values():
                node.start_daemon()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for node in self.nodes.values():
            with contextlib.suppress(Exception):
                node.__exit__(None, None, None)
        shutil.rmtree(self.emulation, ignore_errors=True)

    def __getitem__(self, name: str) -> ClusterNode:
        return self.nodes[name]

    def others(self, name: str) -> list[ClusterNode]:
        return [node for node in self.nodes.values() if node.name != name]

    def masters(self) -> list[str]:
        """Who says of itself that it is the master."""
        told = {name: node.peers() for name, node in self.nodes.items() if node.alive}
        return [name for name, reply in told.items() if reply is not None and reply.role == "master"]

    def master(self, seconds: float = 30.0, *, but: str = "") -> str:
        """The one master, once there is one whose word the others follow; ``but``: another one than this."""
        deadline = time.monotonic() + seconds
        while True:
            masters = [m for m in self.masters() if m != but]
            if len(masters) == 1:
                living = [n for n in self.nodes.values() if n.alive and n.name != but]
                if all((p := n.peers()) is not None and p.master == masters[0] for n in living):
                    return masters[0]
            assert time.monotonic() < deadline, self.told()
            time.sleep(0.1)

    def wait_well(self, seconds: float = 60.0, *, but: str = "") -> None:
        """Until nothing is wrong anywhere."""
        wait_until(
            lambda: all(not n.status().problems for n in self.nodes.values() if n.alive and n.name != but),
            seconds,
            self.told,
        )

    def told(self) -> str:
        lines = []
        for node in self.nodes.values():
            lines.append(f"== {node.name}")
            try:
                status, events = node.status(), list(node.client.events())
            except KvtierError as error:
                lines += [str(error), node.log()[-1500:]]
                continue
            lines.append(
                f"role {status.role} epoch {status.epoch} master {status.master}: {status.master_why}"
            )
            lines += [f"problem: {p}" for p in status.problems]
            lines += [f"{u.id} {u.state} {u.pid}: {u.reason}" for u in status.units]
            lines += [f"{e.at:.2f} {e.kind} {e.unit} {e.message}" for e in events[-25:]]
        return "\n".join(lines)


def wait_until(condition: Callable[[], object], seconds: float, told: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(KvtierError):
            if condition():
                return
        assert time.monotonic() < deadline, f"not within {seconds} s\n{told()}"
        time.sleep(0.1)


@contextlib.contextmanager
def cluster(count: int, settings: str = 'mode = "lease"\nlease = "3s"', *, net: int = 1) -> Iterator[Cluster]:
    with Cluster(count, settings, net=net) as running:
        yield running
