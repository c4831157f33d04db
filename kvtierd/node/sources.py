"""What the observer and the other nodes are told of this node: engines, pool, memory, whose ranks are whose.

Everything here is known already to somebody; only whose ranks and links are whose has to be looked for, beside the loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

import structlog

from kvtierd.cluster.clock import boottime_seconds
from kvtierd.cluster.comeback import ClientSeen
from kvtierd.cluster.hello import EngineFacts, HostMemory, NodeFacts, OwnRank
from kvtierd.endpoint.status import lets_everybody_in
from kvtierd.node.coordination import HASH_SEED
from kvtierd.node.mastership import Mastership
from kvtierd.node.returning import RelayedClients
from kvtierd.node.state import Node
from kvtierd.observe.derive import EngineLook
from kvtierd.observe.observer import PoolSource, Sources, engine_look
from kvtierd.observe.picture import EngineIdentity, HostPicture, Picture
from kvtierd.plan.adjustments import ADDED, room_for_holder
from kvtierd.plan.pool import SHARED_MEMORY_PROTOCOL
from kvtierd.plan.units import META_ID, pool_id
from kvtierd.tier.meta_check import tls_files

log = structlog.get_logger(__name__)

CLIENTS_SECONDS = 5.0  # for the look whose ranks and links are whose


class NodeSources:
    """Over a running node.

    Attributes:
        mastership: This node's part in its cluster, once it has one.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self.mastership: Mastership | None = None
        self._relayed = RelayedClients(node)
        self._clients: tuple[ClientSeen, ...] = ()
        self._unseen = False

    async def look_at_clients(self) -> None:
        """Looks whose ranks and links are whose; some milliseconds in threads."""
        try:
            async with asyncio.timeout(CLIENTS_SECONDS):
                self._clients = await self._see_clients()
        except Exception as error:  # noqa: BLE001 - whose they are is unknown then, and nothing else
            if not self._unseen:
                log.warning("sources.clients-unseen", error=f"{type(error).__name__}: {error}")
            self._clients, self._unseen = (), True
        else:
            self._unseen = False

    async def _see_clients(self) -> tuple[ClientSeen, ...]:
        if self.mastership is not None and self.mastership.clients.plan is not None:
            return await self.mastership.clients.see()
        return await self._relayed.see() if self._node.endpoint_status is not None else ()

    def sources(self) -> Sources:
        """For the observer."""
        return Sources(
            node=lambda: self._node.plan.node if self._node.plan is not None else "",
            cluster=self._cluster,
            engines=self._engines,
            pool=self._pool,
            headroom_bytes=lambda: self._node.settings.pool.host_free,
            holders=self._holders,
            room_bytes=self._room,
            peers=self._peers,
            engines_elsewhere=self._engines_elsewhere,
        )

    def tell(self, facts: NodeFacts, picture: Picture | None) -> NodeFacts:
        """What this node says of itself to the others, with memory, ranks and engines."""
        host = picture.host if picture is not None else None
        memory = None
        if host is not None and host.available_bytes is not None:
            memory = HostMemory(
                host.available_bytes, host.total_bytes or 0, host.headroom_bytes, host.room_bytes, host.holders
            )  # fmt: skip
        engines = tuple(
            EngineFacts(e.unit, e.group, e.hash_seed, e.model, e.block_tokens)
            for e in self._engines()
            if e.uses_pool
        )
        ranks = tuple(OwnRank(rank, unit) for rank, (_, unit) in sorted(self._own_ranks().items()))
        return dataclasses.replace(facts, memory=memory, ranks=ranks, engines=engines)

    # -- parts

    def _cluster(self) -> tuple[str, bool]:
        if self._node.settings.cluster.mode == "standalone":
            name = self._node.plan.node if self._node.plan is not None else ""
            return name, True
        mastership = self.mastership
        return (mastership.master, mastership.is_master) if mastership is not None else ("", False)

    def _engines(self) -> list[EngineLook]:
        node = self._node
        # While the pool cannot be reached from here, a missing link is no fault of the engine's.
        linked = {c.unit: c.linked for c in self._clients} if self._reaches_pool() else {}
        looks = []
        for unit in node.plan.units if node.plan is not None else ():
            view = node.view(unit.id)
            if unit.kind != "engine" or view is None:
                continue
            look = engine_look(
                view,
                node.observer.samples.get(unit.id),
                node.lines.readings.get(unit.id),
                problem=node.observer.problems.get(unit.id, ""),
            )
            looks.append(
                dataclasses.replace(
                    look,
                    group=unit.group or "",
                    uses_pool=unit.uses_pool,
                    registered=linked.get(unit.id) if unit.uses_pool else None,
                    can_switch_l3=unit.talk is not None and bool(unit.talk.l3_detach),
                    l3_detached=node.detached.is_off(view.id, view.instance),
                    hash_seed=unit.env.get(HASH_SEED),
                    l2_capacity_bytes=unit.l2_bytes,
                )
            )
        return looks

    def _reaches_pool(self) -> bool:
        """The MetaService answers here, and anybody may join it."""
        node, mastership = self._node, self.mastership
        if mastership is not None and mastership.clients.plan is not None:
            return mastership.pool_is_open
        status = node.endpoint_status
        return status is not None and lets_everybody_in(status) and bool(status["backend"]["reachable"])

    def _pool(self) -> PoolSource | None:
        node, plan = self._node, self._node.plan
        _, is_master = self._cluster()
        if plan is None or plan.meta is None or node.keeper is None or not is_master:
            return None
        meta = node.view(META_ID)
        high, low = self._thresholds()
        return PoolSource(
            instance=meta.instance if meta is not None and meta.pid is not None else None,
            state=node.keeper.pool,
            metrics_base_url=plan.meta.metrics_url,
            tls=tls_files(plan.tls),
            log_file=Path(node.settings.paths.logs) / "memcache" / "logs" / "mmc-meta.log",
            evict_high_percent=high,
            evict_low_percent=low,
            owners=self._owners(plan.node),
        )

    def _thresholds(self) -> tuple[int, int]:
        pool = self._node.settings.pool
        return self._node.adjusted.thresholds or (pool.evict_high, pool.evict_low)

    def _own_ranks(self) -> dict[int, tuple[str, str]]:
        name = self._node.plan.node if self._node.plan is not None else ""
        return {m.rank: (name, c.unit) for c in self._clients for m in c.members}

    def _owners(self, name: str) -> Mapping[int, tuple[str, str]]:
        owners: dict[int, tuple[str, str]] = {}
        if self.mastership is not None:
            for peer, facts in self._fresh_facts():
                owners |= {r.rank: (peer, r.unit) for r in facts.ranks}
        return owners | self._own_ranks()

    def _holders(self) -> tuple[str, ...]:
        plan = self._node.plan
        prefix = pool_id(ADDED)
        return tuple(u.id for u in plan.units if u.id.startswith(prefix)) if plan is not None else ()

    def _room(self, host: HostPicture) -> int | None:
        plan, pool = self._node.plan, self._node.settings.pool
        if plan is None or host.available_bytes is None:
            return None
        in_shm = plan.pool.protocol == SHARED_MEMORY_PROTOCOL and not plan.hugepages.pages
        if in_shm and host.shm_free_bytes is None:
            return None
        return room_for_holder(
            plan.pool,
            devices=None if plan.emulated else plan.dies,
            added=len(host.holders),
            available_bytes=host.available_bytes,
            keep_free_bytes=2
            * pool.host_free,  # or the rule for a host that is short would take it away again
            shm_free_bytes=host.shm_free_bytes if in_shm else None,
        )

    def _peers(self) -> list[HostPicture]:
        if self.mastership is None or not self.mastership.is_master:
            return []
        network = self.mastership.part.network
        found = []
        for name, link in network.links.items():
            if link.facts is None or link.facts.memory is None or link.facts_at_seconds is None:
                continue
            memory = link.facts.memory
            found.append(
                HostPicture(
                    node=name,
                    at_seconds=link.facts_at_seconds,
                    available_bytes=memory.available_bytes,
                    total_bytes=memory.total_bytes or None,
                    headroom_bytes=memory.headroom_bytes,
                    holders=memory.holders,
                    room_bytes=memory.room_bytes,
                )
            )
        return found

    def _engines_elsewhere(self) -> list[EngineIdentity]:
        return [
            EngineIdentity(name, e.unit, e.group, e.hash_seed, e.model, e.block_tokens)
            for name, facts in self._fresh_facts()
            for e in facts.engines
        ]

    def _fresh_facts(self) -> Iterator[tuple[str, NodeFacts]]:
        """What the other nodes say of themselves; of one that is long silent neither ranks nor engines are known."""
        if self.mastership is None:
            return
        oldest = boottime_seconds() - self._node.settings.policy.stale
        for name, link in self.mastership.part.network.links.items():
            if link.facts is not None and (link.facts_at_seconds or 0.0) >= oldest:
                yield name, link.facts
