"""What the tests over real etcds share: three nodes with wires of their own to every member."""

import asyncio

from coordinator_suite import NODES, Cluster
from etcd_lab import Etcd, Wire

from kvtierd.cluster.etcd import EtcdCoordinator
from kvtierd.cluster.etcd_config import EtcdConfig

LEASE_SECONDS = 3.0


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
    # A renewal after that, with which the long first wait is over in etcd too.
    await asyncio.sleep(LEASE_SECONDS)
    return cluster, master
