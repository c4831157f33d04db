"""All ways of naming a master under one suite: by the voters' lease, by the operator's word, by an etcd.

The nodes are in one process, the voters' and the etcd's faults in memory; files and times are real. The same suite over a
real etcd is in ``tests/etcd``.
"""

import asyncio

import pytest
from coordinator_suite import CoordinatorSuite
from fake_etcd import FakeClient, FakeEtcd
from fake_network import JoinedNetwork

from kvtierd.cluster.election_config import ElectorConfig
from kvtierd.cluster.epoch_store import EpochStore, SeenEpochStore
from kvtierd.cluster.etcd import EtcdCoordinator
from kvtierd.cluster.etcd_config import EtcdConfig
from kvtierd.cluster.following import Following
from kvtierd.cluster.lease import LeaseCoordinator
from kvtierd.cluster.master_store import MasterStore
from kvtierd.cluster.static import StaticCoordinator

LEASE_SECONDS = 1.0


class PeersDriver:
    """Nodes that depend on each other."""

    def __init__(self, directory):
        self.directory = directory
        self.joined, self.lost = {}, set()
        self.tasks = []

    async def make(self, nodes):
        made = [self.coordinator(node, nodes) for node in nodes]
        self.tasks = [asyncio.create_task(network.run()) for network in self.joined.values()]
        return made

    async def lose(self, node):
        self.lost.add(node)

    async def restore(self, node):
        self.lost.discard(node)

    async def close(self):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


class LeaseDriver(PeersDriver):
    elects = True
    takeover_seconds = 5 * LEASE_SECONDS

    def coordinator(self, node, nodes):
        network = JoinedNetwork(node, tuple(nodes), self.joined, self.lost)
        config = ElectorConfig("prod", node, tuple(nodes), lease_seconds=LEASE_SECONDS)
        directory = self.directory / node
        following = Following(network.board, SeenEpochStore(directory / "seen", "prod"), network.refusals)
        return LeaseCoordinator(config, network, EpochStore(directory / "epoch", config), following)


class StaticDriver(PeersDriver):
    elects = False
    takeover_seconds = 1.0

    def coordinator(self, node, nodes):
        network = JoinedNetwork(node, tuple(nodes), self.joined, self.lost, master=nodes[0])
        return StaticCoordinator(
            network, MasterStore(self.directory / node / "master", "prod"), ask_seconds=0.5
        )


class EtcdDriver:
    elects = True
    takeover_seconds = 5 * LEASE_SECONDS

    async def make(self, nodes):
        self.etcd = FakeEtcd()
        self.alive = asyncio.create_task(self.etcd.run())
        self.clients = {node: FakeClient(self.etcd, attempt_seconds=0.3) for node in nodes}
        return [
            EtcdCoordinator(
                EtcdConfig("prod", node, tuple(nodes), ("etcd:2379",), lease_seconds=LEASE_SECONDS),
                boot=f"boot-of-{node}",
                client=self.clients[node],
            )
            for node in nodes
        ]

    async def lose(self, node):
        self.clients[node].cut = True

    async def restore(self, node):
        self.clients[node].cut = False

    async def close(self):
        self.alive.cancel()
        await asyncio.gather(self.alive, return_exceptions=True)


class TestLease(CoordinatorSuite):
    """Mode lease."""

    @pytest.fixture
    async def driver(self, tmp_path):
        made = LeaseDriver(tmp_path)
        yield made
        await made.close()


class TestStatic(CoordinatorSuite):
    """Mode static, as far as it applies to a master that nobody elects."""

    @pytest.fixture
    async def driver(self, tmp_path):
        made = StaticDriver(tmp_path)
        yield made
        await made.close()


class TestEtcd(CoordinatorSuite):
    """Mode etcd."""

    @pytest.fixture
    async def driver(self):
        made = EtcdDriver()
        yield made
        await made.close()
