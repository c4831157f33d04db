"""Several nodes with an endpoint each around one real pool: on loopback addresses, or in network namespaces.

The pool's memory is shared memory and does not pass the network: as on RDMA, what is cut is only the way to the
MetaService. Certificates come from ``endpoint_lab`` of the unit tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "endpoint"))

from endpoint_lab import CLUSTER, Authority
from lab import RawClient, RealTier, Unit, wait_until
from netns_lab import NetLab

from kvtierd.emulator.build import EmulatedDriver
from kvtierd.endpoint.control import EndpointControl
from kvtierd.errors import EndpointError, MemcacheError
from kvtierd.memcache.rest import MetaClient
from kvtierd.workload.demo import free_ports

T = TypeVar("T")
SIZE = 1024


class HopNode:
    """A node: its endpoint, and a MetaService of its own when it is master."""

    def __init__(self, cluster: HopCluster, number: int) -> None:
        self.cluster, self.number, self.name = cluster, number, f"node-{'abc'[number - 1]}"
        lab = cluster.lab
        self.host = "127.0.0.1" if lab else f"127.0.0.{number}"
        self.ip = lab.address(number) if lab else self.host
        self.enter = lab.enter(number) if lab else []
        self.folder = cluster.folder / self.name
        self.folder.mkdir()
        self.ports = free_ports(3)
        self.process: subprocess.Popen[bytes] | None = None
        # A MetaService can run once an emulation; the pool's processes share that of node 1.
        self.meta_tier = (
            cluster.tier if number == 1 else RealTier(cluster.folder / f"tier-{number}", cluster.driver)
        )

    # -- the endpoint ----------------------------------------------------------------------------

    def config(self, **more: Any) -> dict[str, Any]:
        return {
            "listen": {
                "meta": f"{self.host}:{self.ports[0]}",
                "config_store": f"{self.host}:{self.ports[1]}",
            },
            "target": None,
            "control_socket": str(self.folder / "e.sock"),
            "state_file": str(self.folder / "e.state"),
            "cluster": CLUSTER,
            "node": self.name,
            "peer_listen": f"{self.ip}:{self.ports[2]}",
            "peers": [
                {"name": node.name, "address": f"{node.ip}:{node.ports[2]}"} for node in self.cluster.nodes
            ],
            "tls": self.cluster.authority.issue(self.name, self.ip),
            **more,
        }

    def launch(self, **more: Any) -> None:
        path = self.folder / "e.json"
        if more or not path.exists():
            path.write_text(json.dumps(self.config(**more)))
        with (self.folder / "endpoint.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*self.enter, sys.executable, "-m", "kvtierd.endpoint", "--config", str(path)], stderr=log
            )

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None

    def do(self, command: str, *arguments: Any, **named: Any) -> Any:
        async def call() -> Any:
            control = EndpointControl(self.folder / "e.sock")
            try:
                return await getattr(control, command)(*arguments, **named)
            finally:
                await control.close()

        return asyncio.run(call())

    def until(
        self, condition: Callable[[dict[str, Any]], bool], timeout_seconds: float = 10.0
    ) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_seconds
        status: dict[str, Any] = {}
        while time.monotonic() < deadline:
            with contextlib.suppress(EndpointError):
                status = self.do("status")
                if condition(status):
                    return status
            time.sleep(0.03)
        log = (self.folder / "endpoint.log").read_text()[-3000:]
        raise AssertionError(f"{self.name}, never: {json.dumps(status)}\n{log}")

    def await_back(self, survivors: int, timeout_seconds: float = 15.0) -> None:
        self.until(
            lambda s: bool(s["backend"]["reachable"]) and s["survivors"]["back"] >= survivors, timeout_seconds
        )

    # -- what runs on it -------------------------------------------------------------------------

    @property
    def local(self) -> dict[str, str]:
        """The target of this node's endpoint when it is master."""
        tier = self.meta_tier
        return {"meta": f"127.0.0.1:{tier.meta_port}", "config_store": f"127.0.0.1:{tier.store_port}"}

    def start_meta(self, **more: Any) -> Unit:
        tier = self.meta_tier
        tier.enter = self.enter
        unit = tier.start_meta(wait=False, **more)
        wait_until(lambda: self.healthy(unit), 15.0, f"/health of {self.name} says ok")
        return unit

    def healthy(self, unit: Unit) -> bool:
        assert unit.alive, f"the MetaService ended:\n{unit.output()[-2000:]}"
        with contextlib.suppress(Exception):
            return self.ask(MetaClient.health).ok
        return False

    def ask(self, question: Callable[[MetaClient], Coroutine[Any, Any, T]]) -> T:
        """Asks this node's MetaService by HTTP, from this node."""
        lab = self.cluster.lab
        client = self.meta_tier.meta_client
        if lab is None:
            return asyncio.run(question(client))
        return lab.inside(self.number, lambda: asyncio.run(question(client)))

    def roles(self) -> list[str]:
        """The roles of all ranks; none while the MetaService does not answer."""
        with contextlib.suppress(MemcacheError):
            return sorted(self.ask(MetaClient.cluster_status).roles().values())
        return []

    def start_pool(self, *, device: int = 0, **more: Any) -> Unit:
        self._direct()
        return self.cluster.tier.start_pool(device=device, **more)

    def client(self, **more: Any) -> RawClient:
        self._direct()
        return self.cluster.tier.client(**more)

    def _direct(self) -> None:
        """Clients from now on are this node's."""
        tier = self.cluster.tier
        tier.enter, tier.client_host = self.enter, self.host
        tier.client_meta_port, tier.client_store_port = self.ports[:2]


class HopCluster:
    """Nodes a, b and perhaps c. ``lab`` says where; without one they are 127.0.0.1 to 127.0.0.3."""

    def __init__(self, folder: Path, driver: EmulatedDriver, count: int, lab: NetLab | None) -> None:
        self.folder, self.driver, self.lab = folder, driver, lab
        self.authority = Authority(folder / "certificates")
        self.tier = RealTier(folder / "tier-1", driver)
        self.nodes: list[HopNode] = []
        for number in range(1, count + 1):
            self.nodes.append(HopNode(self, number))
        self.a, self.b = self.nodes[:2]
        self.c = self.nodes[-1]

    def start(self, **more: Any) -> None:
        """Endpoints everywhere; node-a is master in epoch 1 and its MetaService runs."""
        self.meta = self.a.start_meta()
        for node in self.nodes:
            node.launch(**more)
        for node in self.nodes:
            node.until(lambda s: s["inbound"]["listen_error"] == "")
        self.follow(self.a, 1)
        self.open_up()

    def follow(self, master: HopNode, epoch: int, *, nodes: list[HopNode] | None = None) -> None:
        """What the daemons do when they learn of a new master."""
        for node in nodes or self.nodes:
            node.do("set_target", master.local if node is master else {"peer": master.name}, epoch=epoch)

    def open_up(self, nodes: list[HopNode] | None = None) -> None:
        """What the daemons do when the pool is purged and all survivors are back."""
        for node in nodes or self.nodes:
            node.until(lambda s: bool(s["backend"]["reachable"]))
            node.do("serve")
            node.do("admit", "all")

    def close(self) -> None:
        for node in self.nodes:
            node.kill()
        for tier in {id(node.meta_tier): node.meta_tier for node in self.nodes}.values():
            tier.close()
