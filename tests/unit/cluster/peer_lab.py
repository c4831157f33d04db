"""A cluster of real peers in one process: real gRPC servers on addresses of the loopback network, real TLS or none."""

import asyncio
import contextlib
import socket

import trustme
from certificates_lab import CLUSTER, put

from kvtierd.cluster.clock import boottime_seconds
from kvtierd.cluster.epoch_store import EpochStore, SeenEpochStore
from kvtierd.cluster.following import Following
from kvtierd.cluster.hello import NodeFacts
from kvtierd.cluster.lease import LeaseCoordinator, elector_config
from kvtierd.cluster.master_store import MasterStore
from kvtierd.cluster.network import PeerNetwork
from kvtierd.cluster.observer import ObserverCoordinator
from kvtierd.cluster.static import StaticCoordinator
from kvtierd.cluster.tls import PeerTls
from kvtierd.settings.cluster import ClusterSettings


def loopback(index):
    return f"127.0.77.{index + 1}"


def free_port(count):
    """A port that is free at all of the addresses."""
    for _ in range(100):
        with contextlib.ExitStack() as stack:
            port = 0
            try:
                for index in range(count):
                    probe = stack.enter_context(socket.socket())
                    probe.bind((loopback(index), port))
                    port = probe.getsockname()[1]
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


def settings(names, port, *, mode="lease", observers=(), witnesses=(), tls=None, **more):
    """[cluster] of a lab. ``tls``: directory of this node's files, ``None`` for insecure."""
    peers = [
        {
            "name": name,
            "address": loopback(index),
            "voter": name not in observers,
            "witness": name in witnesses,
        }
        for index, name in enumerate(names)
    ]
    made = {"mode": mode, "name": CLUSTER, "peers": peers, "port": port, "lease": "1s"}
    if mode == "static":
        made |= {"master": names[0]}
    if tls is None:
        made |= {"insecure": True}
    else:
        made |= {"tls": {k: str(tls / f"{v}") for k, v in _FILES.items()}}
    return ClusterSettings.model_validate(made | more)


_FILES = {"ca": "ca.pem", "cert": "node.pem", "key": "node.key"}


class LabNode:
    """One node: its network, its coordinator, and what its standing has been."""

    def __init__(self, lab, name):
        self.lab = lab
        self.name = name
        self.network = None
        self.coordinator = None
        self.told = []
        self.task = None

    async def start(self, **more):
        lab = self.lab
        chosen = lab.settings(self.name, **more)
        state = lab.directory / self.name
        self.network = PeerNetwork(
            chosen,
            self.name,
            PeerTls(chosen),
            facts=lambda: NodeFacts(self.name, **lab.facts.get(self.name, {})),
            greet_seconds=lab.greet_seconds,
        )
        if chosen.mode == "static":
            store = MasterStore(state / "master", CLUSTER)
            self.coordinator = StaticCoordinator(self.network, store, ask_seconds=lab.ask_seconds)
        else:
            following = Following(
                self.network.board, SeenEpochStore(state / "seen", CLUSTER), self.network.refusals
            )
            if self.name in chosen.voters:
                config = elector_config(chosen, self.name)
                self.coordinator = LeaseCoordinator(
                    config,
                    self.network,
                    EpochStore(state / "epoch", config),
                    following,
                    witness=self.name in lab.witnesses,
                )
            else:
                self.coordinator = ObserverCoordinator(self.network, following)
        self.task = asyncio.create_task(self._run())
        return self

    async def _run(self):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.network.run())
            tasks.create_task(self.coordinator.run(lambda s: self.told.append((boottime_seconds(), s))))

    async def stop(self):
        if self.task is None:
            return
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.task = None
        await self.coordinator.close()
        await self.network.close()

    async def coordinator_is_ready(self):
        """It has come to a conclusion of its own."""
        await self.lab.until(
            lambda: (
                self.told
                and self.standing.role in {"master", "follower"}
                and not self.standing.why.startswith("asks")
            )
        )

    @property
    def standing(self):
        return self.coordinator.standing

    @property
    def refused(self):
        return self.network.refusals.counts


class Lab:
    """The nodes, made and started on demand."""

    def __init__(
        self, directory, names, *, mode="lease", observers=(), witnesses=(), secure=False, **settings_more
    ):
        self.directory = directory
        self.names = list(names)
        self.mode = mode
        self.observers, self.witnesses = set(observers), set(witnesses)
        self.port = free_port(len(self.names))
        self.ca = trustme.CA() if secure else None
        self.more = settings_more
        self.facts = {}
        self.greet_seconds = 0.3
        self.ask_seconds = 1.0
        self.nodes = {name: LabNode(self, name) for name in self.names}
        self.others = []

    def settings(self, name, **more):
        tls = None
        if self.ca is not None:
            tls = self.directory / "tls" / name
            if not tls.exists():
                put(tls, self.ca, name)
        return settings(
            self.names,
            self.port,
            mode=self.mode,
            observers=self.observers,
            witnesses=self.witnesses,
            tls=tls,
            **(self.more | more),
        )

    def renew(self, name):
        """Another certificate in the place of the one that this node has."""
        put(self.directory / "tls" / name, self.ca, name)

    def __getitem__(self, name):
        return self.nodes[name]

    async def start(self, *names):
        await asyncio.gather(*(self.nodes[name].start() for name in names or self.names))

    async def stop(self):
        await asyncio.gather(*(node.stop() for node in self.nodes.values()))

    async def until(self, condition, seconds=10.0, what=""):
        """Waits until the condition holds; its value."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not (found := condition()):
                    await asyncio.sleep(0.01)
                return found
        told = "\n".join(f"{n.name}: {n.standing}" for n in self.nodes.values() if n.task is not None)
        raise AssertionError(f"{what or condition} did not come true within {seconds} s\n{told}")

    def masters(self):
        return [n for n in self.nodes.values() if n.task is not None and n.standing.role == "master"]

    async def master(self, seconds=10.0):
        """The one master, once every running node says so."""

        def agreed():
            running = [n for n in self.nodes.values() if n.task is not None]
            masters = self.masters()
            if len(masters) != 1:
                return None
            mine = masters[0].standing
            return (
                all((n.standing.master, n.standing.epoch) == (masters[0].name, mine.epoch) for n in running)
                and (masters[0])
            )

        return await self.until(agreed, seconds, "agreement on one master")


@contextlib.asynccontextmanager
async def running(lab, *names):
    await lab.start(*names)
    try:
        yield lab
    finally:
        await lab.stop()
