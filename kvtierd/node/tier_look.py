"""One look at the tier: what its keeper gets to see, and what the cluster makes of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from kvtierd.cluster.comeback import DEADLINE_SECONDS
from kvtierd.endpoint.status import lets_everybody_in
from kvtierd.errors import KvtierError
from kvtierd.node.elsewhere import missing_survivors
from kvtierd.node.mastership import Mastership
from kvtierd.node.state import Node
from kvtierd.plan.units import META_ID
from kvtierd.tier.machine import SURVIVORS_SECONDS, TierInputs

REST_SECONDS = 2.0  # between two looks when all is well


class TierLook:
    """Looks at MetaService, pool and endpoint, and has the keeper act.

    Attributes:
        mastership: This node's part in its cluster, once it has one.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self.mastership: Mastership | None = None
        self._meta_instance: str | None = None
        self._next_seconds = 0.0

    @property
    def is_well(self) -> bool:
        """The tier is as it should be, for everybody."""
        node = self._node
        nothing_to_see = node.keeper is None and node.master_tier is None
        return (nothing_to_see or node.tier.state == "joinable") and self.endpoint_is_open

    @property
    def endpoint_is_open(self) -> bool:
        """In a cluster: this node's endpoint lets everything and everybody pass; one that says nothing counts as open."""
        endpoint = self._node.endpoint_status
        return self.mastership is None or endpoint is None or lets_everybody_in(endpoint)

    async def round(self, *, at_rest: bool) -> None:
        """Looks, seldom when all is well."""
        if at_rest and time.monotonic() < self._next_seconds:
            return
        self._next_seconds = time.monotonic() + REST_SECONDS
        await self._look()

    async def _look(self) -> None:
        node, keeper = self._node, self._node.keeper
        if keeper is None:
            return
        mastership = self.mastership
        if mastership is not None and not mastership.is_master:
            node.endpoint_status = await self._ask_endpoint()
            return  # the master looks after the tier
        meta = node.view(META_ID)
        instance = meta.instance if meta is not None and meta.pid is not None else None
        pool, node.endpoint_status = await asyncio.gather(
            keeper.look() if instance is not None else _nothing(), self._ask_endpoint()
        )
        if keeper is not node.keeper:
            return  # a reload has put another in its place
        clean = node.clean_stop_instance is not None and node.clean_stop_instance == self._meta_instance
        status = node.endpoint_status
        direct = mastership is not None and mastership.clients.plan is not None
        await keeper.step(
            TierInputs(
                now_seconds=time.monotonic(),
                instance=instance,
                meta_up=meta is not None and meta.state == "ready",
                meta_problem=f"the MetaService is {meta.state}: {meta.reason}"
                if meta
                else "no MetaService here",
                pool=pool,
                endpoint_mode=str(status["mode"]) if status else None,
                endpoint_admission=str(status["admission"]) if status else None,
                clean_stop=clean,
                handed_over=mastership is not None and mastership.elsewhere.handed_over,
                founding=mastership is not None and mastership.elsewhere.founding,
                many_nodes=mastership is not None and (node.endpoint is not None or direct),
                survivors_missing=missing_survivors(status)
                + (mastership.elsewhere.survivors_missing() if mastership is not None else 0)
                + (mastership.clients.missing if mastership is not None else 0),
                inherited=mastership is not None and mastership.elsewhere.inherited,
                survivors_seconds=DEADLINE_SECONDS if direct else SURVIVORS_SECONDS,
                # Without the endpoint, clients of other nodes may be there that only the MetaService knows.
                clients_alive=node.endpoint is None
                or mastership is not None
                or any(v.kind in {"pool", "engine"} and v.pid for v in node.supervisor.views()),
            )
        )
        if mastership is not None and (direct or not self.endpoint_is_open):
            if keeper.view.phase == "recovering":
                mastership.elsewhere.hear_from_all()
            elif not direct:  # it may just have been opened: the others wait to hear of it
                node.endpoint_status = await self._ask_endpoint()
                if self.endpoint_is_open:
                    node.supervisor.poke()
        if instance is not None:
            self._meta_instance = instance

    async def _ask_endpoint(self) -> Mapping[str, Any] | None:
        if self._node.endpoint is None:
            return None
        try:
            return await self._node.endpoint.status()
        except KvtierError:
            return None


async def _nothing() -> None:
    return None
