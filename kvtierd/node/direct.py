"""Clients without endpoints in a cluster: leading this node's to the master, and looking whether they came.

The decisions are in ``plan.direct`` (how each client follows), ``cluster.duty`` (when) and ``cluster.comeback`` (who is
started anew). Here files are rewritten, the host name is led, and processes are looked at.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from kvtierd.cluster.comeback import ClientSeen, Member, Roll
from kvtierd.cluster.duty import ClientsSeen
from kvtierd.cluster.standing import PoolRank
from kvtierd.errors import HostError
from kvtierd.files import write_atomic
from kvtierd.host.containers import container_hosts_file, container_pid
from kvtierd.host.hosts_file import HOSTS_FILE, point_alias
from kvtierd.host.links import links_to
from kvtierd.memcache.answers import PROVIDER
from kvtierd.memcache.health import PoolState
from kvtierd.node.returning import ALIVE, Returning
from kvtierd.node.state import Node
from kvtierd.plan.direct import repointed
from kvtierd.plan.docker import container_of
from kvtierd.plan.model import DirectClient, DirectPlan
from kvtierd.provision.carry_out import save_plan, sync_files
from kvtierd.units.views import UnitView

STATE_FILE = "direct.json"
TAIL_LINES = 500
_RANK = re.compile(r"kvtierd-pool ready rank=(\d+)\b")


class DirectClients:
    """This node's clients. One instance a daemon; it does nothing while the plan has endpoints.

    Args:
        node: The running node.
        hosts_file: Where the host name of the master stands.
    """

    def __init__(self, node: Node, *, hosts_file: Path = HOSTS_FILE) -> None:
        self._node = node
        self._hosts_file = hosts_file
        self._file = node.state / STATE_FILE
        self._returning = Returning(node, self.see)
        self._epoch, self._master = self._recall()
        self._ranks: dict[str, tuple[str, int | None]] = {}  # unit -> (run, rank)

    @property
    def plan(self) -> DirectPlan | None:
        """How clients follow here; ``None``: they have an endpoint, or there is no cluster."""
        return self._node.plan.direct if self._node.plan is not None else None

    @property
    def seen(self) -> ClientsSeen | None:
        """Where clients were led. Files of a plan that point elsewhere (after a reload) have to be led again."""
        if self.plan is None:
            return None
        return ClientsSeen(self._epoch, self._master if self.plan.master == self._master else "")

    @property
    def life(self) -> str:
        """Under which master the clients here are, for the master that asks."""
        return f"epoch {self._epoch}"

    @property
    def missing(self) -> int:
        """Clients that are expected to come back by themselves and have not."""
        return self._returning.missing if self.plan is not None else 0

    def gate(self, epoch: int, *, up: bool, is_open: bool) -> str | None:
        """Why no client may start now: it would dial another MetaService, or take a survivor's rank."""
        seen = self.seen
        if seen is None:
            return None
        if not seen.master or seen.epoch != epoch:
            return "waits for a master to be led to"
        if not up:
            return f"waits for the MetaService of {seen.master}"
        return None if is_open else "waits until those that knew the MetaService are back"

    # -- leading

    async def point(self, epoch: int, master: str) -> None:
        """Leads this node's clients to a master: files first, then the host name.

        Raises:
            KvtierError: it could not be done, and is to be tried again; what was done stays.
        """
        node, plan = self._node, self._node.plan
        if plan is None or plan.direct is None:
            return
        if master not in plan.direct.addresses:
            raise HostError(f"{master} is not among the nodes that can be the master", code="direct.stranger")
        pointed = repointed(plan, master)
        written = await asyncio.to_thread(sync_files, pointed.files)
        await self._point_alias(plan.direct, plan.direct.addresses[master])
        if node.plan is not plan:
            return  # a reload came between: the next round leads anew
        node.plan = pointed
        await asyncio.to_thread(save_plan, node.settings, pointed)
        write_atomic(self._file, json.dumps({"epoch": epoch, "master": master}).encode(), mode=0o600)
        self._epoch, self._master = epoch, master
        self._returning.hurry()
        by_name = f", {plan.direct.alias} leads there" if plan.direct.alias else ""
        node.events.add(
            "info",
            "cluster.clients-led",
            f"clients here are led to {master}, epoch {epoch}: {len(written)} files rewritten{by_name}",
        )

    async def _point_alias(self, direct: DirectPlan, address: str) -> None:
        if not direct.alias:
            return
        await asyncio.to_thread(point_alias, direct.alias, address, path=self._hosts_file)
        for client in direct.clients:
            if client.means == "alias" and (container := self._container(client.unit)) is not None:
                file = await asyncio.to_thread(container_hosts_file, *container)
                if file is None:
                    continue  # it does not run: docker copies the host's file when it starts
                await asyncio.to_thread(point_alias, direct.alias, address, path=file, in_place=True)

    def _container(self, unit_id: str) -> tuple[str, str] | None:
        plan, view = self._node.plan, self._node.view(unit_id)
        unit = plan.unit(unit_id) if plan is not None else None
        return container_of(unit.argv) if unit is not None and view is not None and view.pid else None

    def _recall(self) -> tuple[int, str]:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            kept = json.loads(self._file.read_text(encoding="utf-8"))
            return int(kept["epoch"]), str(kept["master"])
        return 0, ""

    # -- looking

    def round(
        self,
        roll: Callable[[Roll], None],
        *,
        epoch: int,
        up: bool,
        is_open: bool,
        ranks: Mapping[int, PoolRank] | None,
    ) -> None:
        """Looks at the clients when it is time, and has those rolled that must be; see ``Returning.round``."""
        seen = self.seen
        if seen is not None and seen.master and seen.epoch == epoch:
            self._returning.round(roll, epoch=epoch, up=up, is_open=is_open, ranks=ranks)

    async def see(self) -> tuple[ClientSeen, ...]:
        """All clients of this node."""
        plan = self._node.plan
        if plan is None or plan.direct is None:
            return ()
        return tuple(
            [
                await self._client(client, view, plan.direct)
                for client in plan.direct.clients
                if (view := self._node.view(client.unit)) is not None
                and not self._node.detached.is_off(view.id, view.instance)
            ]
        )

    async def _client(self, client: DirectClient, view: UnitView, direct: DirectPlan) -> ClientSeen:
        plan, pool = self._node.plan, view.kind == "pool"
        address = direct.addresses[direct.master]
        ports = (direct.port, direct.config_store_port) if pool else (direct.port,)
        targets = [(address, port) for port in ports]
        alive = view.pid is not None and view.state in ALIVE
        linked: bool | None = None
        if alive and view.pid is not None:
            pid: int | None = view.pid
            container = self._container(client.unit)
            if container is not None:
                pid = await asyncio.to_thread(container_pid, *container)
            found = await asyncio.to_thread(links_to, pid, targets) if pid is not None else None
            linked = None if found is None else len(found) == len(targets)
        rank = await self._rank(view) if pool and alive else None
        brings_bytes = plan.pool.dram_bytes_per_provider if pool and plan is not None else 0
        return ClientSeen(
            unit=client.unit,
            kind="pool" if pool else "engine",
            # One that is still starting is not a survivor: its own deadline is over it.
            instance=view.instance if alive else None,
            ready=view.state == "ready",
            over=view.state in {"stopped", "failed"},
            follows=client.means != "restart",
            linked=linked,
            members=() if rank is None else (Member(rank, PROVIDER, brings_bytes),),
        )

    async def _rank(self, view: UnitView) -> int | None:
        """As the pool holder said when it joined; a client keeps its rank when it comes back."""
        run = view.instance or ""
        if self._ranks.get(view.id, ("", None))[0] != run:
            lines = await self._node.backend.tail(view.id, TAIL_LINES)
            found = [int(match[1]) for line in lines if (match := _RANK.search(line))]
            self._ranks[view.id] = (run, found[-1] if found else None)
        return self._ranks[view.id][1]


def pool_ranks(pool: PoolState | None) -> tuple[PoolRank, ...]:
    """The pool's members for the other nodes, by rank."""
    if pool is None:
        return ()
    brought: dict[int, int] = {}
    for segment in pool.segments:
        if segment.rank is not None:
            brought[segment.rank] = brought.get(segment.rank, 0) + segment.total_bytes
    return tuple(
        PoolRank(
            r.rank, r.role, r.state == "RANK_ACTIVE" and r.rank in pool.cluster.alive, brought.get(r.rank, 0)
        )
        for r in pool.cluster.ranks
    )
