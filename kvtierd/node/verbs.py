"""What operators can ask of the running node: the control service's verbs, apart from reloading.

Verbs that change something only say what is wanted; the loop's next round does it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from kvtierd.control.v1 import control_pb2 as pb
from kvtierd.emulator.launch import cleanup as cleanup_emulation
from kvtierd.engines.drain import Drained, drain
from kvtierd.engines.l3_switch import OPERATOR
from kvtierd.errors import PlanError, UnitError
from kvtierd.events import Event
from kvtierd.node.cluster_verbs import ClusterVerbs
from kvtierd.node.l3_verbs import L3Verbs
from kvtierd.node.policy_verbs import PolicyVerbs
from kvtierd.node.report import status_message, unit_message
from kvtierd.node.state import Node
from kvtierd.node.takeover import STOP_ORDER
from kvtierd.plan.engine import EngineObservation
from kvtierd.provision.assembly import emulation_root
from kvtierd.units.views import UnitView

POLL_SECONDS = 0.05
STOP_WAIT_SECONDS = 60.0
Reload = Callable[[bool], Awaitable[pb.ReloadReply]]


def _is_news(action: str, before: UnitView | None, view: UnitView) -> bool:
    """Whether what is seen came after the request: the state from before it says nothing of its outcome."""
    if before is None or action == "stop":
        return True
    if view.state == "failed":
        return view.since_unix_seconds != before.since_unix_seconds
    return action == "start" or view.instance != before.instance


class NodeVerbs:
    """The control service's ``NodeApi`` over a running node. ``reload`` is the daemon's own."""

    def __init__(self, node: Node, reload: Reload) -> None:
        self._node = node
        self._reload = reload
        self._l3 = L3Verbs(node)
        self.cluster = ClusterVerbs(node)
        self.policy = PolicyVerbs(node)

    def status(self) -> pb.StatusReply:
        """The node as last seen."""
        reply = status_message(self._node.snapshot())
        self.policy.decisions(reply)
        return reply

    def plan_json(self) -> str:
        """The plan in force."""
        if self._node.plan is None:
            raise PlanError("no plan is in force", hint="kvtierctl status says why", code="plan.none")
        return self._node.plan.model_dump_json()

    async def reload(self, *, restart_changed: bool) -> pb.ReloadReply:
        """Reads the settings again. A client that goes away does not leave half of it done."""
        return await asyncio.shield(asyncio.ensure_future(self._reload(restart_changed)))

    def events(self, last: int) -> list[Event]:
        """Kept events."""
        return self._node.events.last(last)

    def follow_events(self, last: int) -> AsyncIterator[Event]:
        """Kept, then new events."""
        return self._node.events.follow(last)

    async def cluster_events(self, last: int) -> list[tuple[str, Event]]:
        """Kept events of all nodes, each with its node."""
        return await self.cluster.events().next(last)

    def follow_cluster_events(self, last: int) -> AsyncIterator[tuple[str, Event]]:
        """Kept, then new events of all nodes."""
        return self.cluster.events().follow(last)

    async def tail(self, unit: str, lines: int) -> list[str]:
        """Last output lines of a unit."""
        return await self._node.backend.tail(self._node.resolve(unit), lines)

    def follow_log(self, unit: str, lines: int) -> AsyncIterator[str]:
        """Last, then new output lines of a unit."""
        return self._node.backend.follow(self._node.resolve(unit), lines)

    async def control_unit(self, unit: str, action: str, wait_seconds: float) -> pb.Unit:
        """start, stop or restart a unit, and wait until it has settled."""
        node = self._node
        unit_id = node.resolve(unit)
        before = node.view(unit_id)
        await self.act(unit_id, action, "asked for by kvtierctl")
        deadline = time.monotonic() + wait_seconds
        wanted = {"stopped"} if action == "stop" else {"ready", "failed"}
        while True:
            view = node.view(unit_id)
            if view is None:
                raise UnitError(f"{unit_id} is gone", code="unit.unknown")
            if (view.state in wanted and _is_news(action, before, view)) or time.monotonic() >= deadline:
                return unit_message(view, node.remark(view))
            await asyncio.sleep(POLL_SECONDS)

    async def drain(self, unit: str, deadline_seconds: float) -> pb.ControlUnitReply:
        """Waits until an engine has no requests, up to the deadline, then stops it; says what was cut off."""
        node = self._node
        unit_id = node.resolve(unit)
        outcome = await self.drain_only(unit_id, deadline_seconds)
        node.events.add(
            "info" if outcome.complete else "warning", "engine.drained", outcome.describe(), unit=unit_id
        )
        stopped = await self.control_unit(unit_id, "stop", STOP_WAIT_SECONDS)
        return pb.ControlUnitReply(unit=stopped, note=outcome.describe())

    async def drain_only(self, unit_id: str, deadline_seconds: float) -> Drained:
        """The waiting part of a drain.

        Raises:
            UnitError: it is not an engine of the plan.
        """
        node = self._node
        spec = node.plan.unit(unit_id) if node.plan else None
        if spec is None or spec.kind != "engine":
            raise UnitError(
                f"{unit_id} is not an engine: only engines have requests to drain", code="unit.not-engine"
            )

        async def look() -> EngineObservation | None:
            return await node.observer.observe_now(unit_id)

        return await drain(look, deadline_seconds=deadline_seconds)

    async def act(self, unit_id: str, action: str, reason: str, *, remember: bool = True) -> None:
        """Says what is wanted of a unit; a running MetaService is quiesced before it is stopped."""
        node = self._node
        view = node.view(unit_id)
        stops_meta = action != "start" and view is not None and view.kind == "meta" and view.pid is not None
        # A MetaService stopped with requests in flight leaves clients hanging and values in doubt.
        if stops_meta and node.keeper is not None and await node.keeper.quiesce():
            node.clean_stop_instance = view.instance if view else None
        if action == "start":
            node.supervisor.request_start(unit_id)
        elif action == "stop":
            node.supervisor.request_stop(unit_id, remember=remember)
        else:
            node.supervisor.request_restart(unit_id, reason)

    async def stop_all(self, wait_seconds: float, *, remember: bool = True) -> list[pb.Unit]:
        """Stops every unit: engines first, the endpoint last, each kind within the time that is left.

        ``remember``: they stay stopped for the next daemon too.
        """
        node = self._node
        deadline = time.monotonic() + wait_seconds
        for kind in STOP_ORDER:
            ids = [v.id for v in node.supervisor.views() if v.kind == kind]
            for unit_id in ids:
                await self.act(unit_id, "stop", "stop --all", remember=remember)
            while time.monotonic() < deadline and self._any_runs(ids):  # noqa: ASYNC110 - views have no event
                await asyncio.sleep(POLL_SECONDS)
        views = node.supervisor.views()
        if node.plan is not None and node.plan.emulated and not any(v.pid for v in views):
            await asyncio.to_thread(cleanup_emulation, emulation_root(node.settings))
        return [unit_message(v, node.remark(v)) for v in views]

    def _any_runs(self, ids: list[str]) -> bool:
        return any(v.pid or v.state == "stopping" for v in self._node.supervisor.views() if v.id in ids)

    async def purge(self, *, by: str = OPERATOR) -> pb.PurgeReply:
        """Empties the pool."""
        node = self._node
        if node.keeper is None:
            raise UnitError("no MetaService runs on this node", code="unit.missing")
        seconds = await node.keeper.purge()
        node.events.add("warning", "tier.purged", f"the pool was emptied by {by} ({seconds:.1f} s)")
        return pb.PurgeReply(seconds=seconds)

    async def switch_l3(
        self, unit: str, *, on: bool, wait_seconds: float, by: str = OPERATOR
    ) -> pb.SwitchL3Reply:
        """Takes an engine's L3 off or on. A client that goes away does not leave half of it done."""
        work = asyncio.ensure_future(self._l3.switch(unit, on=on, wait_seconds=wait_seconds, by=by))
        return await asyncio.shield(work)

    def peers(self) -> pb.PeersReply:
        """The nodes of the cluster."""
        return self.cluster.peers()

    async def switchover(self, node: str, wait_seconds: float) -> pb.SwitchoverReply:
        """Gives mastership to another node. A client that goes away does not leave half of it done."""
        return await asyncio.shield(asyncio.ensure_future(self.cluster.switchover(node, wait_seconds)))

    async def promote(self, *, force: bool) -> pb.PeersReply:
        """Makes this node the master by an operator's word."""
        return await asyncio.shield(asyncio.ensure_future(self.cluster.promote(force=force)))

    def pause(self, *, on: bool, reason: str) -> pb.PeersReply:
        """Holds this node back, or ends that."""
        return self.cluster.pause(on=on, reason=reason)

    async def why(self, unit: str, last: int) -> pb.WhyReply:
        """What the policy's rules see and do."""
        return await self.policy.why(unit, last)

    async def policy_in_force(self) -> pb.PolicyReply:
        """The policy, and what it has changed."""
        return await self.policy.show()

    async def reset_policy(self) -> pb.PolicyReply:
        """Takes back what it has changed. A client that goes away does not leave half of it done."""
        return await asyncio.shield(asyncio.ensure_future(self.policy.reset()))

    def pictures(self) -> Iterator[str]:
        """What was seen in the last hour, lines of JSON."""
        return self.policy.pictures()

    def plugins(self) -> list[pb.Plugin]:
        """Installed plugins."""
        return [
            pb.Plugin(
                name=p.name, distribution=p.distribution, version=p.version, drivers=p.drivers, problem=p.problem
            )
            for p in self._node.plugins.plugins
        ]  # fmt: skip
