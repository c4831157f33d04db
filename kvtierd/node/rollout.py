"""Starting engines and pool holders anew: rolling restarts, those that did not come back, those that cannot.

One engine at a time, drained, and never so that a group has none that is ready; what decides is in ``engines.rolling`` and
``cluster.comeback``.
"""

from __future__ import annotations

import asyncio

from kvtierd.cluster.comeback import Roll
from kvtierd.engines.rolling import Member, ask_for, next_to_restart
from kvtierd.errors import KvtierError
from kvtierd.node.state import Node
from kvtierd.node.verbs import NodeVerbs
from kvtierd.plan.model import NodePlan

DRAIN_SECONDS = 30.0  # of one engine
ROLL_SECONDS = 1800.0  # until a restarted engine is ready: large models load for many minutes
STRANDED = (
    "the other nodes have let go of its memory while this one was out of reach, and take only a new process"
)


class Rollout:
    """What is to be started anew, one after the other. ``round`` does what is due and returns at once."""

    def __init__(self, node: Node, verbs: NodeVerbs) -> None:
        self._node = node
        self._verbs = verbs
        self._rolling: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        """Nothing is waited for any more."""
        if self._rolling is not None:
            self._rolling.cancel()

    def round(self, plan: NodePlan) -> None:
        """The next engine of a rolling restart, when its group can do without it."""
        node = self._node
        node.due_engines = [u for u in node.due_engines if plan.unit(u) is not None]
        if not node.due_engines or (self._rolling is not None and not self._rolling.done()):
            return
        members = {
            u.id: Member(u.id, u.group, (v := node.view(u.id)) is not None and v.state == "ready")
            for u in plan.units
            if u.kind == "engine"
        }
        unit_id = next_to_restart(node.due_engines, members)
        if unit_id is not None:
            node.due_engines.remove(unit_id)
            self._rolling = asyncio.create_task(self._restart_engine(unit_id))

    async def _restart_engine(self, unit_id: str) -> None:
        """Drains and restarts one engine, and waits until it is ready again or has failed."""
        node = self._node
        try:
            outcome = await self._verbs.drain_only(unit_id, DRAIN_SECONDS)
            node.events.add("info", "engine.drained", f"rolling restart: {outcome.describe()}", unit=unit_id)
            await self._verbs.control_unit(unit_id, "restart", ROLL_SECONDS)
        except KvtierError as error:
            node.events.add("warning", "engine.restart-failed", error.message, unit=unit_id)

    def restart_stranded(self) -> None:
        """A pool holder whose memory the others have let go of; an engine in that state serves on and says so."""
        node = self._node
        clients = node.endpoint_status["clients"] if node.endpoint_status is not None else ()
        stranded = {int(c["pid"]) for c in clients if c.get("stranded") and c.get("pid")}
        for view in node.supervisor.views():
            if view.kind == "pool" and view.pid in stranded and view.state in {"ready", "degraded"}:
                node.supervisor.request_restart(view.id, STRANDED)
            elif view.kind == "engine":
                node.supervisor.set_problem(view.id, "stranded", STRANDED if view.pid in stranded else None)

    def roll_client(self, roll: Roll) -> None:
        """A client that did not come back to the MetaService; an engine waits for its turn and is drained."""
        node = self._node
        node.events.add("warning", "cluster.client-rolled", f"it is started anew: {roll.why}", unit=roll.unit)
        if roll.kind == "pool":
            node.supervisor.request_restart(roll.unit, roll.why)
        else:
            ask_for(node.due_engines, roll.unit)
