"""What the tests over real etcds share: three nodes with wires of their own to every member, one version after another."""

import asyncio

import pytest
from coordinator_suite import NODES, Cluster
from etcd_lab import Etcd, Wire, found

from kvtierd.cluster.etcd import EtcdCoordinator
from kvtierd.cluster.etcd_config import EtcdConfig

LEASE_SECONDS = 3.0
VERSIONS = found() or {"none": None}


def versions():
    """A fixture: the program of each version that is here."""

    @pytest.fixture(params=VERSIONS, ids=lambda version: f"etcd-{version}")
    def program(request):
        if VERSIONS[request.param] is None:
            pytest.skip("no etcd on this machine: python tests/etcd/etcd_lab.py gets Debian's")
        return VERSIONS[request.param]

    return program


class EtcdDriver:
    """Three nodes, each with wires of its own to every member."""

    elects = True
    takeover_seconds = 2 * LEASE_SECONDS + 2

    def __init__(self, program, members=1):
        self.etcd = Etcd(program, members)
        self.wires = {}

    async def make(self, nodes):
        self.etcd.start()
        made = []
        for node in nodes:
            self.wires[node] = [Wire(endpoint) for endpoint in self.etcd.endpoints]
            for wire in self.wires[node]:
                await wire.open()
            made.append(self.coordinator(node, nodes))
        return made

    def coordinator(self, node, nodes=NODES, **more):
        endpoints = tuple(wire.endpoint for wire in self.wires[node])
        config = EtcdConfig("prod", node, tuple(nodes), endpoints, lease_seconds=LEASE_SECONDS)
        return EtcdCoordinator(config, boot=f"boot-of-{node}", **more)

    async def lose(self, node):
        for wire in self.wires[node]:
            wire.cut()

    async def restore(self, node):
        for wire in self.wires[node]:
            wire.mend()

    async def close(self):
        for wires in self.wires.values():
            for wire in wires:
                await wire.close()
        self.etcd.close()


async def serving(driver):
    cluster = Cluster(driver, NODES, await driver.make(NODES))
    cluster.begin()
    master = await cluster.until(cluster.agreed)
    await cluster.may_serve(master)
    await asyncio.sleep(
        LEASE_SECONDS
    )  # a renewal after that, with which the long first wait is over in etcd too
    return cluster, master
