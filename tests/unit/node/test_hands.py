"""What actions do to a node: by the operators' ways, each bounded."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kvtierd.act.hands import UnitNow
from kvtierd.errors import ActionError, ClusterError, UnitError
from kvtierd.node import hands as node_hands
from kvtierd.node.hands import NodeHands
from kvtierd.plan.adjustments import NOTHING, AddedHolder, Adjustments

GIB = 1024**3
UNIT = "kvtier-pool-added-1"
KEPT = Adjustments(
    holders=(AddedHolder(index=1, dram_bytes=2 * GIB), AddedHolder(index=11, dram_bytes=9 * GIB))
)


class World:
    """A node, a takeover, the verbs and a network that write down what they are asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.views: dict[str, Any] = {}
        self.units = {UNIT, "kvtier-pool-added-11", "kvtier-pool-0"}
        self.node: Any = SimpleNamespace(
            plan=SimpleNamespace(
                node="a", unit=lambda u: u if u in self.units else None,
                pool=SimpleNamespace(dram_bytes_per_provider=8 * GIB),
            ),
            adjusted=KEPT, hugepages=SimpleNamespace(problem=""), view=self.views.get, due_engines=[],
            events=SimpleNamespace(add=lambda *a, **k: self.calls.append(("event", *a))),
            supervisor=SimpleNamespace(
                poke=lambda: self.calls.append(("poke",)),
                request_stop=lambda unit, remember: self.calls.append(("stop", unit, remember)),
            ),
        )  # fmt: skip
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.hands = NodeHands(
            self.node,
            SimpleNamespace(adjust=self._adjust),  # type: ignore[arg-type]
            SimpleNamespace(act=self._act, switch_l3=self._l3, purge=self._purge),  # type: ignore[arg-type]
        )

    async def _adjust(self, change: Any) -> None:
        await self.go_on.wait()
        self.node.adjusted = change(self.node.adjusted)

    async def _act(self, *call: Any) -> None:
        self.calls.append(call)

    async def _l3(self, unit: str, *, on: bool, wait_seconds: float, by: str) -> Any:
        self.calls.append(("l3", unit, on, wait_seconds, by))
        return SimpleNamespace(note="as it is")

    async def _purge(self, *, by: str) -> Any:
        self.calls.append(("purge", by))
        return SimpleNamespace(seconds=2.5)

    async def _change(self, *call: Any, **more: Any) -> tuple[str, int]:
        self.calls.append((*call, more))
        return UNIT, GIB

    def join(self, *, is_master: bool = True) -> None:
        network = SimpleNamespace(links={"b": None}, change_holders=self._change)
        self.hands.mastership = SimpleNamespace(  # type: ignore[assignment]
            is_master=is_master, part=SimpleNamespace(network=network),
            coordinator=SimpleNamespace(standing=SimpleNamespace(epoch=4)),
        )  # fmt: skip

    def view(self, state: str, pid: int | None = None, instance: str | None = "1") -> None:
        self.views[UNIT] = SimpleNamespace(state=state, pid=pid, instance=instance, reason="so it is")


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(node_hands, "POLL_SECONDS", 0.005)
    return World()


async def test_what_it_says_of_the_node(world: World) -> None:
    hands = world.hands
    assert (hands.node, hands.adjustments(), hands.shortage(), hands.picture()) == ("a", KEPT, "", None)
    world.node.hugepages.problem = "asked 512, got 3\nnode 0: 1\nnode 1: 2"
    assert hands.shortage() == "asked 512, got 3"
    assert hands.planned_bytes(UNIT) == 2 * GIB
    assert hands.planned_bytes("kvtier-pool-added-11") == 8 * GIB, "no rank brings more than the plan says"
    assert hands.planned_bytes("kvtier-pool-0") is None, "it was not added"
    world.units.clear()
    assert hands.planned_bytes(UNIT) is None, "the plan has left it out"
    world.node.plan = None
    assert (hands.node, hands.planned_bytes(UNIT)) == ("", None)


async def test_a_unit_s_run_counts_only_while_it_runs(world: World) -> None:
    assert world.hands.unit(UNIT) is None
    world.view("ready", pid=7)
    assert world.hands.unit(UNIT) == UnitNow("ready", "1", "so it is")
    world.view("stopped")
    assert world.hands.unit(UNIT) == UnitNow("stopped", None, "so it is")


async def test_a_plan_that_is_being_taken_over_is_taken_over_whole(world: World) -> None:
    world.go_on.clear()
    adjusting = asyncio.ensure_future(world.hands.adjust(lambda _: NOTHING))
    await asyncio.sleep(0)
    adjusting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await adjusting
    world.go_on.set()
    await asyncio.sleep(0.01)
    assert world.node.adjusted == NOTHING
    await world.hands.adjust(lambda _: KEPT)
    assert world.calls[-1] == ("poke",)


async def test_a_stop_waits_until_it_has_ended_and_is_not_the_operator_s(world: World) -> None:
    world.view("ready", pid=7)
    stopping = asyncio.ensure_future(world.hands.stop_unit(UNIT))
    await asyncio.sleep(0.02)
    assert world.calls == [("stop", UNIT, False)]
    world.view("stopping")
    await asyncio.sleep(0.02)
    assert not stopping.done()
    world.view("stopped")
    await stopping


async def test_a_stop_that_does_not_end_is_given_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_hands, "STOP_SECONDS", 0.02)
    world.view("stopping", pid=7)
    with pytest.raises(UnitError, match="did not stop within") as raised:
        await world.hands.stop_unit(UNIT)
    assert raised.value.stable_code == "unit.stop-late"


async def test_restarts_go_the_operators_ways(world: World) -> None:
    await world.hands.restart_unit("kvtier-meta-main", "it hangs")
    assert world.calls == [("kvtier-meta-main", "restart", "it hangs")]
    for _ in range(2):
        await world.hands.roll_engine("kvtier-engine-e", "its loads fail")
    assert world.node.due_engines == ["kvtier-engine-e"]
    assert (
        "event",
        "warning",
        "policy.roll",
        "it is drained and started anew: its loads fail",
    ) in world.calls
    for _ in range(2):
        world.hands.call_off_roll("kvtier-engine-e")
    assert world.node.due_engines == []


async def test_l3_and_purge(world: World) -> None:
    assert await world.hands.switch_l3("kvtier-engine-e", on=False) == "as it is"
    assert world.calls == [("l3", "kvtier-engine-e", False, node_hands.L3_WAIT_SECONDS, "the policy")]
    assert await world.hands.purge() == 2.5
    assert world.calls[-1] == ("purge", "the policy")


async def test_only_the_master_has_holders_changed_elsewhere(world: World) -> None:
    with pytest.raises(ActionError, match="not the master"):
        await world.hands.holder_elsewhere("b", "add-1", "why", add_bytes=GIB)
    world.join(is_master=False)
    with pytest.raises(ActionError, match="not the master any more"):
        await world.hands.holder_elsewhere("b", "add-1", "why", add_bytes=GIB)
    world.join()
    with pytest.raises(ClusterError, match="c is no other node of this cluster"):
        await world.hands.holder_elsewhere("c", "add-1", "why", add_bytes=GIB)
    assert world.calls == []
    assert await world.hands.holder_elsewhere("b", "add-1", "why", add_bytes=GIB) == (UNIT, GIB)
    (name, epoch, token, reason, seconds, more) = world.calls[-1]
    assert (name, epoch, reason, seconds) == ("b", 4, "why", node_hands.ELSEWHERE_SECONDS)
    assert more == {"add_bytes": GIB, "remove_unit": ""}
    assert token.startswith("4-")
    assert token.endswith("-add-1")


async def test_a_daemon_that_counts_anew_does_not_repeat_an_earlier_one_s_tokens(world: World) -> None:
    tokens = set()
    for one in (world, World()):
        one.join()
        for _ in range(2):
            await one.hands.holder_elsewhere("b", "add-1", "why", add_bytes=GIB)
        tokens |= {call[2] for call in one.calls}
    assert len(tokens) == 2
