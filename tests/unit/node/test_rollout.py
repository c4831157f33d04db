"""Engines and pool holders that are started anew: whose turn it is, what is said, what holds nobody up."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kvtierd.cluster.comeback import Roll
from kvtierd.errors import UnitError
from kvtierd.node.rollout import STRANDED, Rollout


class World:
    """Two engines of a group, one alone, and a pool holder."""

    def __init__(self) -> None:
        self.did: list[tuple[str, ...]] = []
        self.events: list[tuple[str, ...]] = []
        self.problems: dict[str, str | None] = {}
        self.states = {"e1": "ready", "e2": "ready", "alone": "ready", "pool-0": "ready"}
        self.drained: Any = SimpleNamespace(describe=lambda: "drained in 1.0 s")
        self.go = asyncio.Event()
        self.node: Any = SimpleNamespace(
            due_engines=[], endpoint_status=None,
            view=lambda u: SimpleNamespace(id=u, state=self.states[u]) if u in self.states else None,
            events=SimpleNamespace(add=lambda *a, **k: self.events.append((*a, k.get("unit", "")))),
            supervisor=SimpleNamespace(
                views=self.views, request_restart=lambda u, why: self.did.append(("restart", u, why)),
                set_problem=lambda u, _, text: self.problems.update({u: text}),
            ),
        )  # fmt: skip
        verbs: Any = SimpleNamespace(drain_only=self.drain_only, control_unit=self.control_unit)
        self.rollout = Rollout(self.node, verbs)
        units = {"e1": "g", "e2": "g", "alone": None}
        self.plan: Any = SimpleNamespace(
            unit=units.__contains__,
            units=[SimpleNamespace(id=u, kind="engine", group=g) for u, g in units.items()],
        )
        self.plan.unit = lambda u: u if u in units else None

    def views(self) -> list[Any]:
        pids = {"e1": 11, "e2": 12, "alone": 13, "pool-0": 14}
        return [
            SimpleNamespace(id=u, kind="pool" if u == "pool-0" else "engine", pid=pids[u], state=s)
            for u, s in self.states.items()
        ]

    async def drain_only(self, unit: str, seconds: float) -> Any:
        if isinstance(self.drained, Exception):
            raise self.drained
        self.did.append(("drain", unit))
        return self.drained

    async def control_unit(self, unit: str, action: str, seconds: float) -> None:
        self.states[unit] = "starting"
        await self.go.wait()
        self.states[unit] = "ready"
        self.did.append((action, unit))

    async def round(self) -> None:
        self.rollout.round(self.plan)
        await asyncio.sleep(0.01)


async def test_one_at_a_time_drained_and_never_a_whole_group() -> None:
    world = World()
    world.node.due_engines = ["e1", "e2", "gone from the plan"]
    await world.round()
    await world.round()
    assert world.did == [("drain", "e1")]
    assert world.node.due_engines == ["e2"], "the other one waits"
    world.go.set()
    await asyncio.sleep(0.01)
    await world.round()
    assert world.did == [("drain", "e1"), ("restart", "e1"), ("drain", "e2"), ("restart", "e2")]
    assert ("info", "engine.drained", "rolling restart: drained in 1.0 s", "e1") in world.events


async def test_the_last_ready_one_of_a_group_waits_for_the_other() -> None:
    world = World()
    world.states["e2"] = "starting"
    world.node.due_engines = ["e1"]
    await world.round()
    assert world.did == []
    world.states["e2"] = "ready"
    world.go.set()
    await world.round()
    assert world.did[0] == ("drain", "e1")


async def test_one_that_cannot_be_drained_is_said_and_the_next_has_its_turn() -> None:
    world = World()
    world.drained = UnitError("it does not say how many requests it has")
    world.node.due_engines = ["alone", "e1"]
    await world.round()
    assert (
        "warning",
        "engine.restart-failed",
        "it does not say how many requests it has",
        "alone",
    ) in world.events
    world.drained = SimpleNamespace(describe=lambda: "")
    world.go.set()
    await world.round()
    assert ("restart", "e1") in world.did
    assert ("restart", "alone") not in world.did, "it was not cut off"


@pytest.mark.parametrize("state", ["ready", "degraded", "starting"])
def test_a_stranded_pool_holder_is_started_anew_an_engine_says_so(state: str) -> None:
    async def run() -> None:
        world = World()
        world.states["pool-0"] = state
        world.node.endpoint_status = {
            "clients": [
                {"pid": 14, "stranded": True},
                {"pid": 11, "stranded": True},
                {"pid": 12, "stranded": False},
            ]
        }
        world.rollout.restart_stranded()
        assert world.did == ([] if state == "starting" else [("restart", "pool-0", STRANDED)])
        assert world.problems == {"e1": STRANDED, "e2": None, "alone": None}

    asyncio.run(run())


async def test_clients_that_did_not_come_back() -> None:
    world = World()
    world.rollout.roll_client(Roll("pool-0", "pool", "no link"))
    world.rollout.roll_client(Roll("e1", "engine", "no link"))
    world.rollout.roll_client(Roll("e1", "engine", "no link"))
    assert world.did == [("restart", "pool-0", "no link")]
    assert world.node.due_engines == ["e1"]
    assert [e[1] for e in world.events] == ["cluster.client-rolled"] * 3
