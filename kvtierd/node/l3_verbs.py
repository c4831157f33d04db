"""An engine's L3 is taken off, or put on again: by an operator (``kvtierctl l3``), or by the policy."""

from __future__ import annotations

import asyncio

from kvtierd.control.v1 import control_pb2 as pb
from kvtierd.engines.l3_switch import CALL_SECONDS, OPERATOR, Switched, calls_of, switch
from kvtierd.engines.talk import ask
from kvtierd.errors import StateError, UnitError
from kvtierd.node.state import Node
from kvtierd.plan.engine import EngineObservation
from kvtierd.plan.model import HttpCall, UnitSpec

RUNNING = frozenset({"ready", "degraded"})


class L3Verbs:
    """Detaching and attaching, one at a time for each engine."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._locks: dict[str, asyncio.Lock] = {}

    async def switch(
        self, unit: str, *, on: bool, wait_seconds: float, by: str = OPERATOR
    ) -> pb.SwitchL3Reply:
        """Takes L3 of an engine off or on, waiting up to ``wait_seconds`` for a moment without requests.

        Raises:
            UnitError: it cannot, does not run, was busy all the time, refused, or restarted meanwhile.
        """
        node = self._node
        unit_id = node.resolve(unit)
        spec = node.plan.unit(unit_id) if node.plan else None
        if spec is None:
            raise UnitError(f"{unit_id} is not in the plan", code="unit.unknown")
        calls = calls_of(spec, on=on)
        lock = self._locks.setdefault(unit_id, asyncio.Lock())
        if lock.locked():
            raise UnitError(
                f"the L3 of {unit_id} is being taken off or on already",
                hint="wait for that, and look at kvtierctl status",
                code="engine.l3-busy",
            )
        async with lock:
            return await self._switch(spec, calls, on=on, wait_seconds=wait_seconds, by=by)

    async def _switch(
        self, spec: UnitSpec, calls: tuple[HttpCall, ...], *, on: bool, wait_seconds: float, by: str
    ) -> pb.SwitchL3Reply:
        node, verb = self._node, "attached" if on else "detached"
        instance = self._instance(spec.id)

        async def make(call: HttpCall) -> bytes:
            if self._instance(spec.id) != instance:
                raise UnitError(
                    f"{spec.id} restarted meanwhile: it has its L3 as at every start",
                    code="engine.restarted",
                )
            return await ask(spec, call, timeout_seconds=CALL_SECONDS)

        async def look() -> EngineObservation | None:
            return await node.observer.observe_now(spec.id)

        try:
            done = await switch(spec.id, calls, make, look, deadline_seconds=wait_seconds)
        except UnitError as error:
            why = f" ({error.why})" if error.why else ""
            node.events.add(
                "warning", "engine.l3-switch", f"L3 was not {verb}: {error.message}{why}", unit=spec.id
            )
            raise
        note = self._outcome(spec, done, on=on, by=by)
        try:
            node.detached.mark(spec.id, None if on else instance, by)
        except StateError as error:
            note += f". {error.message}: a restarted kvtierd will not know it"
        node.events.add("info" if on else "warning", f"engine.l3-{verb}", note, unit=spec.id)
        return pb.SwitchL3Reply(unit=spec.id, on=on, seconds=done.seconds, note=note)

    def _instance(self, unit_id: str) -> str:
        """The engine's run, which must be one that answers.

        Raises:
            UnitError: ``engine.not-running``.
        """
        view = self._node.view(unit_id)
        if view is None or view.instance is None or view.state not in RUNNING:
            state = view.state if view is not None else "not there"
            raise UnitError(
                f"{unit_id} is {state}: L3 is taken off and on while an engine runs",
                hint="an engine starts with its L3",
                code="engine.not-running",
            )
        return view.instance

    def _outcome(self, spec: UnitSpec, done: Switched, *, on: bool, by: str) -> str:
        if on:
            return f"L3 attached by {by} {done.describe()}"
        plan = self._node.plan
        text = f"L3 detached by {by} {done.describe()}: it computes what L1 and L2 do not have, until"
        text += f" kvtierctl l3 attach {spec.name}, or until it restarts"
        if plan is not None and plan.pool.placement == "engine" and plan.pool.providers:
            text += ". Its own part of the pool went with it, and what others had in that"
        return text
