"""Clusters of real daemons on one machine: each node with an address of its own, one emulated memory under all of them.

On loopback addresses (``Cluster``) they need no root; in network namespaces (``hosts``) they can be cut off as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Protocol

from kvtierd.control.v1 import control_pb2 as pb
from kvtierd.emulator.build import ensure_driver
from kvtierd.emulator.launch import MEMORY_OF, cleanup
from kvtierd.errors import KvtierError
from kvtierd.provision.assembly import cache_directory
from kvtierd.workload.demo import DemoNode
from kvtierd.workload.stream import Completion, complete

NAMES = ("a", "b", "c", "d", "e")
LEASE = 'mode = "lease"\nlease = "6s"'
# The first level holds one prompt and a bit, so that one that comes again has to come from the pool; and the engine's own
# pause after a failed call is short, since it is not what is measured.
ENGINE = 'plugin = "refengine"\nargs = { preset = "tiny", l1 = "640KiB", l3-cooldown = "500ms" }\n'
CLOCK = Path(__file__).parent / "clock"
PORTS = ("port", "config_store_port", "backend_port", "backend_config_store_port", "metrics_port")


class Hosts(Protocol):
    """Where nodes run, beside the machine's own network; ``number`` counts from 1."""

    def address(self, number: int) -> str: ...

    def enter(self, number: int) -> list[str]: ...

    def inside(self, number: int, function: Callable[[], Any]) -> Any: ...


class Loopback:
    """All on this machine, each behind 127.0.<net>.<number>."""

    def __init__(self, net: int) -> None:
        self._net = net

    def address(self, number: int) -> str:
        return f"127.0.{self._net}.{number}"

    def enter(self, number: int) -> list[str]:
        return []

    def inside(self, number: int, function: Callable[[], Any]) -> Any:
        return function()


class ClusterNode(DemoNode):
    """One node."""

    def __init__(self, name: str, cluster: str, memory: Path, hosts: Hosts, number: int, pool: str) -> None:
        super().__init__(lambda _: None, pool=pool, orderly=False, wait=False, engine=ENGINE)
        self.name = name
        self.own_clock = False
        self.hosts, self.number = hosts, number
        self.root = self.directory / "run" / "emulation"
        self.root.mkdir(parents=True)
        (self.root / MEMORY_OF).symlink_to(memory)
        text = self.settings.read_text().replace('name = "demo"', f'name = "{name}"')
        self.settings.write_text(text + cluster)
        self.ports = {key: int(re.search(rf"^{key} = (\d+)", text, re.MULTILINE)[1]) for key in PORTS}  # type: ignore[index]

    def start_daemon(self) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith("KVTIERD_")}
        if self.own_clock:
            env |= {"PYTHONPATH": str(CLOCK), "LAB_CLOCK": str(self.directory / "clock")}
        with self._log.open("ab") as log:
            self._daemon = subprocess.Popen(
                [*self.hosts.enter(self.number), sys.executable, "-m", "kvtierd.daemon", "--settings", str(self.settings)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=env,
            )  # fmt: skip

    def set_clock(self, ahead_seconds: float) -> None:
        """Steps the wall clock of this node's daemon; ``own_clock`` was set before it started."""
        file = self.directory / "clock"
        file.with_suffix(".new").write_text(str(ahead_seconds), encoding="ascii")
        file.with_suffix(".new").rename(file)

    @property
    def alive(self) -> bool:
        return self.daemon_pid is not None

    def inside(self, function: Callable[[], Any]) -> Any:
        """Calls it where this node's loopback is."""
        return self.hosts.inside(self.number, function)

    def ask(self, prompt: str, tokens: int = 4) -> Completion:
        """One request to the engine. Call it ``inside``."""
        return complete(
            "127.0.0.1", self.engine_port, model="refengine", prompt=prompt, max_tokens=tokens, timeout_seconds=30
        )  # fmt: skip

    def peers(self) -> pb.PeersReply | None:
        with contextlib.suppress(KvtierError):
            return self.client.peers()
        return None

    def kvtierctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "kvtierd.cli", "--settings", str(self.settings), *arguments],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    def peers_json(self) -> dict[str, Any]:
        done = self.kvtierctl("peers", "--json")
        assert done.returncode in {0, 1}, done.stderr
        told: dict[str, Any] = json.loads(done.stdout)
        return told

    def unit(self, name: str) -> pb.Unit | None:
        with contextlib.suppress(KvtierError):
            return next((u for u in self.status().units if u.id == f"kvtier-{name}"), None)
        return None

    def pid(self, name: str) -> int:
        """The unit's process; 0: it does not run, or the daemon does not answer."""
        unit = self.unit(name)
        return unit.pid if unit is not None else 0

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def kill_host(self) -> None:
        """Everything of this node at once, as when its power goes."""
        if self.alive:
            self.stop_daemon(signal.SIGKILL)
        while found := self.processes():
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def processes(self) -> list[int]:
        """All that belong to this node: its directory is in their command line or environment."""
        found = []
        for process in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                pid = int(process.name)
                marks = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
                dead = (process / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
                if str(self.directory).encode() in marks and pid != os.getpid() and not dead:
                    found.append(pid)
        return found


class Cluster:
    """Some nodes. Use as a context manager; ``settings`` is what stands in ``[cluster]``."""

    def __init__(
        self,
        count: int,
        settings: str = LEASE,
        *,
        net: int = 1,
        observers: int = 0,
        hosts: Hosts | None = None,
        pool: str = "64MiB",
    ) -> None:
        ensure_driver(cache_directory())  # here, since all daemons would build it at the same time
        self.memory = Path(tempfile.mkdtemp(prefix="kvtierd-cluster-"))
        self.hosts = hosts or Loopback(net)
        names = NAMES[: count + observers]
        self.addresses = {name: self.hosts.address(number) for number, name in enumerate(names, start=1)}
        peers = ",\n".join(
            f'  {{ name = "{n}", address = "{a}"{"" if n in NAMES[:count] else ", voter = false"} }}'
            for n, a in self.addresses.items()
        )
        text = f'\n[cluster]\nname = "lab"\ninsecure = true\n{settings}\npeers = [\n{peers}\n]\n'
        self.nodes: dict[str, ClusterNode] = {}
        used: set[int] = set()
        for number, name in enumerate(names, start=1):
            while True:
                node = ClusterNode(name, text, self.memory, self.hosts, number, pool)
                ports = {*node.ports.values(), node.engine_port}
                if not ports & used:
                    break
                shutil.rmtree(node.directory)
            used |= ports
            self.nodes[name] = node

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
                node.kill_host()
            with contextlib.suppress(Exception):
                node.__exit__(None, None, None)
        cleanup(self.memory)
        shutil.rmtree(self.memory, ignore_errors=True)

    def __getitem__(self, name: str) -> ClusterNode:
        return self.nodes[name]

    def others(self, name: str) -> list[ClusterNode]:
        return [node for node in self.nodes.values() if node.name != name]

    def living(self, *, but: Collection[str] = ()) -> list[ClusterNode]:
        """Nodes whose daemon runs, without those."""
        return [node for node in self.nodes.values() if node.alive and node.name not in but]

    def masters(self) -> list[str]:
        """Who says of itself that it is the master."""
        told = {node.name: node.peers() for node in self.living()}
        return [name for name, reply in told.items() if reply is not None and reply.role == "master"]

    def master(self, seconds: float = 40.0, *, but: Collection[str] = ()) -> str:
        """The one master, once there is one whose word the others follow; ``but``: these nodes do not count."""
        deadline = time.monotonic() + seconds
        while True:
            told = {node.name: node.peers() for node in self.living(but=but)}
            masters = [n for n, reply in told.items() if reply is not None and reply.role == "master"]
            if len(masters) == 1 and all(r is not None and r.master == masters[0] for r in told.values()):
                return masters[0]
            assert time.monotonic() < deadline, self.told()
            time.sleep(0.05)

    def epoch(self) -> int:
        """The highest that anybody knows."""
        return max((r.epoch for node in self.living() if (r := node.peers()) is not None), default=0)

    def wait_well(self, seconds: float = 90.0, *, but: Collection[str] = ()) -> str:
        """Until there is a master and everything runs everywhere with nothing to complain of. The master."""

        def well() -> bool:
            nodes = self.living(but=but)
            told = [(node.status(), node.peers()) for node in nodes]
            masters = [n.name for n, (_, p) in zip(nodes, told, strict=True) if p and p.role == "master"]
            return len(masters) == 1 and all(
                s.tier_state == "joinable"
                and not [t for t in s.problems if not _of_the_missing(t)]
                and len(s.units) == 4
                and all(u.state in {"ready", "stopped"} for u in s.units)
                and p is not None
                and p.master == masters[0]
                for s, p in told
            )

        wait_until(well, seconds, self.told)
        return self.master(but=but)

    def told(self) -> str:
        lines = []
        for node in self.nodes.values():
            lines.append(f"== {node.name}{'' if node.alive else ' (no daemon)'}")
            if not node.alive:
                continue
            try:
                status, events = node.status(), list(node.client.events())
            except KvtierError as error:
                lines += [str(error), node.log()[-1500:]]
                continue
            lines.append(
                f"role {status.role} epoch {status.epoch} master {status.master}: {status.master_why}; "
                f"tier {status.tier_state} {list(status.tier_reasons)}"
            )
            lines += [f"problem: {p}" for p in status.problems]
            lines += [f"{u.id} {u.state} {u.pid}: {u.reason}" for u in status.units]
            lines += [f"{e.at:.2f} {e.kind} {e.unit} {e.message}" for e in events[-40:]]
        return "\n".join(lines)


def _of_the_missing(problem: str) -> bool:
    """A node that is down is no reason to call the others unwell, and a pause is what the test wanted."""
    return any(text in problem for text in ("not heard of", "cannot be reached", "paused by an operator"))


def hits(lab: Cluster, writer: str, reader: str) -> bool:
    """Whether what one node's engine computes is read from the pool by the other's."""
    prompt = f"{time.monotonic()} what one has computed the other reads " * 12
    lab[writer].ask(prompt)
    time.sleep(0.5)
    return int(lab[reader].ask(prompt).usage.get("kvtier", {}).get("l3_tokens", 0)) > 0


def wait_until(condition: Callable[[], object], seconds: float, told: Callable[[], str] = str) -> float:
    """The seconds it took."""
    started = time.monotonic()
    while True:
        with contextlib.suppress(KvtierError):
            if condition():
                return time.monotonic() - started
        assert time.monotonic() - started < seconds, f"not within {seconds} s\n{told()}"
        time.sleep(0.05)


@contextlib.contextmanager
def cluster(count: int, settings: str = LEASE, **more: Any) -> Iterator[Cluster]:
    with Cluster(count, settings, **more) as running:
        yield running
