"""Every action: done and seen to work, undone, half done, out of time, cut off; here and on another node."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from kvtierd.act.executor import Executor, Outcome
from kvtierd.act.hands import UnitNow
from kvtierd.act.holders import Holders
from kvtierd.decide.proposals import (
    Action,
    AddHolder,
    Advise,
    AttachL3,
    DetachL3,
    Purge,
    Rebalance,
    RemoveHolder,
    RestartUnit,
    SetThresholds,
)
from kvtierd.errors import ClusterError
from kvtierd.plan.adjustments import NOTHING, AddedHolder, Adjustments

from .act_lab import GIB, FakeHands, FakeRecord, fault, hurry, proposal

UNIT = "kvtier-pool-added-0"
META = "kvtier-meta-main"
ENGINE = "kvtier-engine-e"
ONE = Adjustments(holders=(AddedHolder(index=0, dram_bytes=4 * GIB),))
HERE, THERE = AddHolder("a", 4 * GIB), AddHolder("b", 4 * GIB)
AWAY = RemoveHolder("b", UNIT, 4 * GIB)
LOWER = SetThresholds(70, 60)
ROLL = RestartUnit(ENGINE, drained=True, rolling=True)


class World:
    """An executor over a node that remembers."""

    def __init__(self) -> None:
        self.hands, self.record = FakeHands(), FakeRecord()
        self.executor = Executor(self.hands, Holders(self.hands), self.record, deadline_seconds=2.0)

    async def carry_out(self, action: Action) -> Outcome:
        outcome = await self.executor.carry_out(proposal(action))
        number, state, text = self.record.ended[-1]
        assert (number, state, text) == (len(self.record.begun), outcome.state, outcome.text), (
            "as it is written down"
        )
        assert outcome.text, "something is said of it"
        return outcome

    def grows(self, call: str, by_bytes: int = 4 * GIB) -> None:
        """The pool follows what is done."""

        def react(done: tuple[Any, ...]) -> None:
            pool = self.hands.pool
            assert pool is not None
            assert pool.capacity_bytes is not None
            if done[0] == call:
                self.hands.show(capacity_bytes=pool.capacity_bytes + by_bytes)

        self.hands.react = react

    def with_one(self) -> None:
        self.hands.kept, self.hands.units[UNIT] = ONE, UnitNow("ready", "1")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    hurry(monkeypatch)
    return World()


# -- thresholds


async def test_thresholds_that_the_metaservice_took_over(world: World) -> None:
    world.hands.react = lambda _: world.hands.show(told_thresholds=(70, 60))
    outcome = await world.carry_out(LOWER)
    assert outcome == Outcome("done", "in force: the MetaService took 70/60 over, as its log says")
    assert world.hands.kept.thresholds == (70, 60)
    assert world.record.begun[0][1] == "pool 64 GiB, 50 % used, evicts at 90/80 %"


async def test_thresholds_that_it_refused_are_taken_back(world: World) -> None:
    world.hands.kept = Adjustments(evict_high=85, evict_low=75)
    world.hands.show(log_errors={"config": 3})
    world.hands.react = lambda _: world.hands.show(log_errors={"config": 4})
    outcome = await world.carry_out(LOWER)
    assert outcome == Outcome("undone", "the MetaService refused the thresholds 70/60")
    assert world.hands.kept.thresholds == (85, 75)


async def test_refusals_of_before_do_not_count(world: World) -> None:
    world.hands.show(log_errors={"config": 3})
    assert (
        await world.carry_out(LOWER)
    ).text == "written; at 50 % of use nothing shows yet that 70/60 are in force"


async def test_what_its_log_said_before_proves_nothing(world: World) -> None:
    world.hands.show(told_thresholds=(70, 60))
    assert (
        await world.carry_out(LOWER)
    ).text == "written; at 50 % of use nothing shows yet that 70/60 are in force"


async def test_a_pool_that_stays_above_has_not_taken_them(world: World) -> None:
    world.hands.show(used_bytes=60 * GIB)
    outcome = await world.carry_out(LOWER)
    assert (outcome.state, "the pool is still 94 % full" in outcome.text) == ("undone", True)
    assert world.hands.kept == NOTHING


async def test_a_pool_that_empties_itself_has_taken_them(world: World) -> None:
    world.hands.show(used_bytes=60 * GIB)
    world.hands.react = lambda _: world.hands.show(used_bytes=40 * GIB)
    assert await world.carry_out(LOWER) == Outcome(
        "done", "in force: the pool has gone from 94 to 62 % of use"
    )


async def test_thresholds_that_cannot_be_taken_back_are_half_done(world: World) -> None:
    def refuse(_: tuple[Any, ...]) -> None:
        world.hands.show(log_errors={"config": 1})
        world.hands.fails["adjust"] = fault("the disk is full")

    world.hands.react = refuse
    outcome = await world.carry_out(LOWER)
    assert outcome.state == "half done"
    assert "refused" in outcome.text
    assert "could not be taken back: the disk is full" in outcome.text


async def test_a_pool_that_cannot_be_seen_proves_nothing(world: World) -> None:
    world.hands.no_picture = True
    outcome = await world.carry_out(LOWER)
    assert (outcome.state, "cannot be seen" in outcome.text) == ("done", True)


@pytest.mark.parametrize(("high", "low"), [(60, 60), (60, 70), (100, 50), (50, 0)])
async def test_what_are_no_thresholds_is_not_written(world: World, high: int, low: int) -> None:
    assert (await world.carry_out(SetThresholds(high, low))).state == "failed"
    assert world.hands.calls == []


async def test_a_change_that_is_refused_has_failed(world: World) -> None:
    world.hands.fails["adjust"] = fault("the plan is refused")
    assert await world.carry_out(LOWER) == Outcome("failed", "the plan is refused (as it is here)")


# -- holders here


async def test_a_holder_that_the_pool_grows_by(world: World) -> None:
    world.grows("adjust")
    assert await world.carry_out(HERE) == Outcome("done", f"{UNIT} on a holds 4 GiB; the pool has 68 GiB")
    assert [h.dram_bytes for h in world.hands.kept.holders] == [4 * GIB]


async def test_a_holder_that_the_pool_does_not_grow_by_is_removed(world: World) -> None:
    outcome = await world.carry_out(HERE)
    assert outcome.state == "undone"
    assert f"the pool did not grow within 0 s though {UNIT} said it was ready; it was removed" in outcome.text
    assert (world.hands.kept, world.hands.units) == (NOTHING, {})


async def test_a_holder_that_does_not_grow_the_pool_and_does_not_go_is_half_done(world: World) -> None:
    world.hands.fails["stop"] = fault("it did not stop")
    outcome = await world.carry_out(HERE)
    assert outcome.state == "half done"
    assert "did not grow" in outcome.text
    assert "it did not stop" in outcome.text


async def test_a_holder_that_fails_is_undone(world: World) -> None:
    world.hands.starts_as = UnitNow("failed", reason="no device")
    assert await world.carry_out(HERE) == Outcome("undone", f"{UNIT} has failed (no device)")
    world.hands.fails["stop"] = fault("it did not stop")
    assert (await world.carry_out(HERE)).state == "half done", "it is still there"


async def test_a_pool_without_a_figure_is_said_to_be_unseen(world: World) -> None:
    world.hands.pool = None
    outcome = await world.carry_out(HERE)
    assert outcome == Outcome("done", f"{UNIT} holds 4 GiB; the pool's capacity cannot be seen from here")


async def test_a_removed_holder_leaves_a_smaller_pool(world: World) -> None:
    world.with_one()
    world.grows("stop", -4 * GIB)
    outcome = await world.carry_out(RemoveHolder("a", UNIT, 4 * GIB))
    assert outcome == Outcome("done", f"{UNIT} on a is gone; the pool has 60 GiB")
    assert world.record.begun[0][1].endswith("added holders added-0")


async def test_memory_that_is_still_counted_is_half_done(world: World) -> None:
    world.with_one()
    outcome = await world.carry_out(RemoveHolder("a", UNIT, 4 * GIB))
    assert outcome == Outcome("half done", f"{UNIT} is gone, but the MetaService still counts its memory")


async def test_a_holder_of_the_settings_is_not_removed(world: World) -> None:
    outcome = await world.carry_out(RemoveHolder("a", "kvtier-pool-0", 4 * GIB))
    assert (outcome.state, world.hands.calls) == ("failed", [])


# -- holders on another node


async def test_a_holder_of_another_node(world: World) -> None:
    world.grows("add there")
    assert await world.carry_out(THERE) == Outcome("done", f"{UNIT} on b holds 4 GiB; the pool has 68 GiB")
    assert world.hands.calls == [("add there", "b", "add-7", 4 * GIB)]
    world.grows("remove there", -4 * GIB)
    assert await world.carry_out(AWAY) == Outcome("done", f"{UNIT} on b is gone; the pool has 64 GiB")
    assert world.hands.calls[1:] == [("remove there", "b", f"remove-7-{UNIT}", UNIT)]


async def test_another_node_that_refuses(world: World) -> None:
    world.hands.fails["add there"] = fault("b is paused by an operator", "act.paused")
    assert await world.carry_out(THERE) == Outcome("failed", "b is paused by an operator (as it is here)")


@pytest.mark.parametrize("code", ["cluster.unreachable", "cluster.malformed"])
async def test_an_answer_that_is_lost_is_neither_failed_nor_asked_for_again(world: World, code: str) -> None:
    world.hands.fails["add there"] = ClusterError("b cannot be reached", why="no answer", code=code)
    outcome = await world.carry_out(THERE)
    assert outcome == Outcome(
        "half done", "what became of it on b is not known: b cannot be reached (no answer)"
    )
    assert len(world.hands.calls) == 1


async def test_what_another_node_has_half_done_is_half_done(world: World) -> None:
    world.hands.fails["remove there"] = ClusterError("it was told to stop", code="act.half-done")
    assert await world.carry_out(AWAY) == Outcome("half done", "on b: it was told to stop")


async def test_a_holder_elsewhere_that_does_not_grow_the_pool(world: World) -> None:
    assert (await world.carry_out(THERE)).state == "undone"
    assert [c[0] for c in world.hands.calls] == ["add there", "remove there"]
    world.hands.fails["remove there"] = fault("this node is not the master any more")
    outcome = await world.carry_out(THERE)
    assert outcome.state == "half done"
    assert "could not be removed: this node is not the master any more" in outcome.text


# -- rebalance


def rebalance(world: World) -> None:
    """Grows by the new one, shrinks by the old one."""
    world.with_one()

    def react(done: tuple[Any, ...]) -> None:
        world.hands.show(capacity_bytes=(68 if done[0] == "add there" else 64) * GIB)

    world.hands.react = react


async def test_a_rebalance_adds_first(world: World) -> None:
    rebalance(world)
    outcome = await world.carry_out(Rebalance(THERE, RemoveHolder("a", UNIT, 4 * GIB)))
    assert outcome.state == "done"
    assert [c[0] for c in world.hands.calls] == ["add there", "stop", "adjust"]
    assert outcome.text == (
        f"{UNIT} on b holds 4 GiB; the pool has 68 GiB; {UNIT} on a is gone; the pool has 64 GiB"
    )


async def test_nothing_is_removed_when_nothing_could_be_added(world: World) -> None:
    rebalance(world)
    world.hands.fails["add there"] = fault("no room")
    assert (await world.carry_out(Rebalance(THERE, RemoveHolder("a", UNIT, 4 * GIB)))).state == "failed"
    assert UNIT in world.hands.units


async def test_a_rebalance_whose_old_holder_stays_is_half_done(world: World) -> None:
    rebalance(world)
    world.hands.fails["stop"] = fault("it did not stop")
    outcome = await world.carry_out(Rebalance(THERE, RemoveHolder("a", UNIT, 4 * GIB)))
    assert outcome.state == "half done"
    assert f"but {UNIT} is not gone" in outcome.text


# -- units


async def test_a_restart_in_place_is_done_when_another_run_is_ready(world: World) -> None:
    world.hands.units[META] = UnitNow("ready", "1")

    async def come_back() -> None:
        await asyncio.sleep(0.03)
        world.hands.units[META] = UnitNow("starting", "2")
        await asyncio.sleep(0.03)
        world.hands.units[META] = UnitNow("ready", "2")

    back = asyncio.ensure_future(come_back())
    outcome = await world.carry_out(RestartUnit(META))
    assert outcome == Outcome("done", f"{META} is ready again after 0 s")
    assert back.done()
    assert world.hands.calls == [("restart", META, "why not")]


async def test_a_restart_that_fails_is_half_done(world: World) -> None:
    world.hands.units[META] = UnitNow("ready", "1")
    world.hands.react = lambda _: world.hands.units.update({META: UnitNow("failed", reason="exit 1")})
    outcome = await world.carry_out(RestartUnit(META))
    assert outcome == Outcome("half done", f"{META} does not come back: it is failed: exit 1")
    del world.hands.units[META]
    assert await world.carry_out(RestartUnit(META)) == Outcome("failed", f"there is no unit {META}")


async def test_a_failure_of_before_is_not_the_restart_s(world: World) -> None:
    world.hands.units[META] = UnitNow("failed", reason="long ago")

    async def come_back() -> None:
        await asyncio.sleep(0.03)
        world.hands.units[META] = UnitNow("ready", "2")

    back = asyncio.ensure_future(come_back())
    assert (await world.carry_out(RestartUnit(META))).ok
    assert back.done()


async def test_an_engine_waits_for_its_turn_and_is_not_restarted_when_that_never_came(world: World) -> None:
    world.executor.deadline_seconds = 0.1
    world.hands.units[ENGINE] = UnitNow("ready", "1")
    outcome = await world.carry_out(ROLL)
    assert (outcome.state, "did not end within" in outcome.text) == ("half done", True)
    assert ("roll", ENGINE, "why not") in world.hands.calls
    assert world.hands.rolls == [], "nobody would know why, later"


# -- L3 and purge


@pytest.mark.parametrize(("action", "on"), [(DetachL3(ENGINE), False), (AttachL3(ENGINE), True)])
async def test_l3_is_switched(world: World, action: Action, on: bool) -> None:
    assert await world.carry_out(action) == Outcome("done", "as was wanted")
    assert world.hands.calls == [("l3", ENGINE, on)]
    world.hands.fails["l3"] = fault("the engine was busy all the time")
    assert (await world.carry_out(action)).state == "failed"


async def test_a_purge_that_emptied_the_pool(world: World) -> None:
    world.hands.react = lambda _: world.hands.show(stored_keys=3)
    assert await world.carry_out(Purge()) == Outcome("done", "the pool was emptied (1.5 s); 1000 keys before")


async def test_a_purge_after_which_the_keys_are_there_is_half_done(world: World) -> None:
    assert await world.carry_out(Purge()) == Outcome(
        "half done", "the purge ended, but most keys are there again"
    )
    world.hands.fails["purge"] = fault("the MetaService refused")
    assert (await world.carry_out(Purge())).state == "failed"


# -- bounds


@pytest.mark.parametrize(
    ("action", "call"),
    [
        (LOWER, "adjust"),
        (THERE, "add there"),
        (AWAY, "remove there"),
        (DetachL3(ENGINE), "l3"),
        (Purge(), "purge"),
    ],
)
async def test_what_hangs_is_ended_and_said_to_be_half_done(world: World, action: Action, call: str) -> None:
    world.executor.deadline_seconds = 0.05
    world.hands.hangs.add(call)
    assert await world.carry_out(action) == Outcome("half done", "it did not end within 0 s")


async def test_a_holder_that_is_out_of_time_is_undone_before_it_is_said(world: World) -> None:
    world.executor.deadline_seconds = 0.05
    world.hands.starts_as = UnitNow("starting", "1")
    assert not (await world.carry_out(HERE)).ok
    assert world.hands.kept == NOTHING


async def test_a_daemon_that_ends_writes_down_what_it_leaves(world: World) -> None:
    world.hands.hangs.add("purge")
    acting = asyncio.ensure_future(world.executor.carry_out(proposal(Purge())))
    await asyncio.sleep(0.03)
    acting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await acting
    assert world.record.ended == [(1, "half done", "kvtierd was stopped meanwhile")]


async def test_a_fault_of_ours_has_an_end_in_the_record(world: World) -> None:
    world.hands.fails["purge"] = ZeroDivisionError("by zero")  # type: ignore[assignment]
    assert await world.carry_out(Purge()) == Outcome(
        "half done", "internal error: ZeroDivisionError: by zero"
    )


async def test_a_record_on_a_disk_that_hangs_does_not_hang_the_loop(world: World) -> None:
    loop_thread, threads = threading.get_ident(), []
    for name in ("begin", "end"):
        write = getattr(world.record, name)
        setattr(
            world.record, name,
            lambda *a, _write=write, **k: (threads.append(threading.get_ident()), _write(*a, **k))[1],
        )  # fmt: skip
    await world.carry_out(Purge())
    assert len(threads) == 2
    assert loop_thread not in threads


async def test_advice_is_not_carried_out(world: World) -> None:
    assert (await world.carry_out(Advise("buy more memory"))).state == "failed"


async def test_unknown_use_is_not_no_use(world: World) -> None:
    world.hands.show(used_bytes=None)
    await world.carry_out(DetachL3(ENGINE))
    assert world.record.begun[0][1].startswith("pool 64 GiB, an unknown part used")
