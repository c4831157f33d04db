"""Adding and removing pool holders: ready or undone, and what could not be undone is said."""

from __future__ import annotations

import asyncio

import pytest

from kvtierd.act.hands import HalfDoneError, UnitNow
from kvtierd.act.holders import Holders, Requests
from kvtierd.errors import ActionError, KvtierError
from kvtierd.plan.adjustments import NOTHING, AddedHolder, Adjustments

from .act_lab import GIB, FakeHands, fault, hurry

UNIT = "kvtier-pool-added-0"
ONE = Adjustments(holders=(AddedHolder(index=0, dram_bytes=2 * GIB),))


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> FakeHands:
    hurry(monkeypatch)
    return FakeHands()


def with_one(hands: FakeHands) -> FakeHands:
    hands.kept, hands.units[UNIT] = ONE, UnitNow("ready", "1")
    return hands


async def test_one_that_is_ready_is_there_with_the_lowest_free_number(hands: FakeHands) -> None:
    holders = Holders(hands)
    assert await holders.add(4 * GIB) == (UNIT, 4 * GIB)
    assert await holders.add(2 * GIB) == ("kvtier-pool-added-1", 2 * GIB)
    await holders.remove(UNIT)
    assert await holders.add(1 * GIB) == (UNIT, 1 * GIB)


async def test_no_room_in_the_plan(hands: FakeHands) -> None:
    hands.room = False
    with pytest.raises(ActionError, match="no room") as raised:
        await Holders(hands).add(GIB)
    assert raised.value.stable_code == "act.no-room"
    assert hands.kept == NOTHING


async def test_hugepages_that_cannot_be_had(hands: FakeHands) -> None:
    hands.short = "asked for 512 pages, got 3"
    with pytest.raises(ActionError, match="not enough hugepages: asked for 512 pages, got 3"):
        await Holders(hands).add(GIB)
    assert hands.kept == NOTHING, "the pages that were had are given back with the plan"
    assert ("stop", UNIT) in hands.calls


@pytest.mark.parametrize(
    ("state", "code", "told"),
    [
        (UnitNow("failed", reason="no such device"), "act.holder-failed", "has failed"),
        (UnitNow("starting", "1", "it registers"), "act.holder-late", "did not join within"),
    ],
)
async def test_one_that_does_not_come_up_is_taken_away(
    hands: FakeHands, state: UnitNow, code: str, told: str
) -> None:
    hands.starts_as = state
    with pytest.raises(ActionError, match=told) as raised:
        await Holders(hands, join_seconds=0.03).add(GIB)
    assert (raised.value.stable_code, state.reason in raised.value.why) == (code, True)
    assert (hands.kept, hands.units) == (NOTHING, {})
    assert [c[0] for c in hands.calls] == ["adjust", "stop", "adjust"], "stopped before the plan forgets it"


async def test_what_never_became_part_of_the_plan_is_not_taken_away(hands: FakeHands) -> None:
    hands.fails["adjust"] = fault("the plan is refused", "plan.refused")
    with pytest.raises(KvtierError, match="the plan is refused"):
        await Holders(hands).add(GIB)
    assert [c[0] for c in hands.calls] == ["adjust"]


async def test_an_undo_that_does_not_undo_is_half_done(hands: FakeHands) -> None:
    hands.starts_as = UnitNow("failed", reason="no such device")
    hands.fails["stop"] = fault("it did not stop")
    with pytest.raises(HalfDoneError, match=f"{UNIT} could not be undone: it did not stop") as raised:
        await Holders(hands).add(GIB)
    assert "no such device" in raised.value.why
    assert hands.kept.holders, "and that is true"


async def test_a_caller_that_gives_up_leaves_nothing(hands: FakeHands) -> None:
    hands.starts_as = UnitNow("starting", "1")
    adding = asyncio.ensure_future(Holders(hands).add(GIB))
    await asyncio.sleep(0.02)
    assert hands.kept.holders
    adding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await adding
    assert (hands.kept, hands.units) == (NOTHING, {})


async def test_a_caller_that_gives_up_while_the_plan_is_taken_over(hands: FakeHands) -> None:
    go_on = asyncio.Event()
    adjust = hands.adjust

    async def slow(change):  # type: ignore[no-untyped-def]
        if not hands.kept.holders:
            await go_on.wait()
        await adjust(change)

    hands.adjust = slow  # type: ignore[method-assign]
    adding = asyncio.ensure_future(Holders(hands).add(GIB))
    await asyncio.sleep(0.02)
    adding.cancel()
    await asyncio.sleep(0.02)
    assert not adding.done(), "what is being taken over is waited for, or nobody would undo it"
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await adding
    assert hands.kept == NOTHING


async def test_a_plan_that_is_never_taken_over_is_not_waited_for_without_end(hands: FakeHands) -> None:
    hands.hangs.add("adjust")
    adding = asyncio.ensure_future(Holders(hands).add(GIB))
    await asyncio.sleep(0.02)
    adding.cancel()
    with pytest.raises(HalfDoneError, match="still being taken over"):
        await asyncio.wait_for(adding, 2.0)


async def test_a_daemon_that_ends_does_not_wait_for_units_that_nobody_stops(hands: FakeHands) -> None:
    hands.starts_as = UnitNow("starting", "1")
    hands.hangs.add("stop")
    holders = Holders(hands)
    adding = asyncio.ensure_future(holders.add(GIB))
    await asyncio.sleep(0.02)
    holders.closing = True
    adding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(adding, 1.0)
    assert hands.kept.holders, "the next daemon goes on with it"


async def test_only_what_was_added_is_removed(hands: FakeHands) -> None:
    with pytest.raises(ActionError, match="no pool holder that kvtierd has added") as raised:
        await Holders(with_one(hands)).remove("kvtier-pool-0")
    assert raised.value.stable_code == "act.not-added"
    assert hands.calls == []
    assert await Holders(hands).remove(UNIT) == (UNIT, 2 * GIB)
    assert (hands.kept, hands.units) == (NOTHING, {})


async def test_one_that_the_plan_left_out_can_be_removed(hands: FakeHands) -> None:
    hands.kept, hands.room = ONE, False
    assert await Holders(hands).remove(UNIT) == (UNIT, 2 * GIB)
    assert hands.kept == NOTHING


@pytest.mark.parametrize("call", ["stop", "adjust"])
async def test_a_removal_that_stops_half_way_is_half_done(hands: FakeHands, call: str) -> None:
    with_one(hands).fails[call] = fault("it did not work")
    with pytest.raises(HalfDoneError, match=f"{UNIT} was told to stop, but it is not gone: it did not work"):
        await Holders(hands).remove(UNIT)
    assert hands.kept == ONE


async def test_one_change_at_a_time(hands: FakeHands) -> None:
    hands.starts_as = UnitNow("starting", "1")
    holders = Holders(hands, join_seconds=0.05)
    first, second = asyncio.ensure_future(holders.add(GIB)), asyncio.ensure_future(holders.add(GIB))
    await asyncio.sleep(0.02)
    assert len(hands.kept.holders) == 1
    await asyncio.gather(first, second, return_exceptions=True)
    assert hands.kept == NOTHING


async def test_the_64_numbers_run_out_with_words() -> None:
    full = Adjustments(holders=tuple(AddedHolder(index=i, dram_bytes=1) for i in range(64)))
    with pytest.raises(KvtierError, match="64 pool holders were added already"):
        full.with_holder(1)


# -- what a master asks for


async def test_a_request_that_is_repeated_gets_the_first_answer(hands: FakeHands) -> None:
    said: list[str] = []
    requests = Requests(Holders(hands))
    asked = [requests.take("t", add_bytes=GIB, remove_unit="", say=said.append) for _ in range(2)]
    assert await asyncio.gather(*asked) == [(UNIT, GIB), (UNIT, GIB)]
    assert await requests.take("t", add_bytes=GIB, remove_unit="", say=said.append) == (UNIT, GIB)
    assert (len(hands.kept.holders), said) == (1, [f"{UNIT} was added (1 GiB)"])
    await requests.take("u", add_bytes=0, remove_unit=UNIT, say=said.append)
    assert said[1:] == [f"{UNIT} was removed (1 GiB)"]


async def test_a_refusal_is_repeated_too_and_said_once(hands: FakeHands) -> None:
    hands.room, said = False, []
    requests = Requests(Holders(hands))
    for _ in range(2):
        with pytest.raises(ActionError, match="no room"):
            await requests.take("t", add_bytes=GIB, remove_unit="", say=said.append)
    assert said == [
        "that did not work and has changed nothing: the plan of this node has no room for one more pool holder"
    ]


async def test_half_done_is_not_called_undone(hands: FakeHands) -> None:
    said: list[str] = []
    with_one(hands).fails["stop"] = fault("it did not stop")
    with pytest.raises(HalfDoneError):
        await Requests(Holders(hands)).take("t", add_bytes=0, remove_unit=UNIT, say=said.append)
    assert "is half done" in said[0]


async def test_a_caller_that_hangs_up_does_not_stop_it(hands: FakeHands) -> None:
    hands.starts_as = UnitNow("starting", "1")
    requests = Requests(Holders(hands))
    first = asyncio.ensure_future(requests.take("t", add_bytes=GIB, remove_unit="", say=lambda _: None))
    await asyncio.sleep(0.02)
    first.cancel()
    await asyncio.sleep(0.02)
    hands.units[UNIT] = UnitNow("ready", "1")
    assert await requests.take("t", add_bytes=GIB, remove_unit="", say=lambda _: None) == (UNIT, GIB)
    assert len(hands.kept.holders) == 1


async def test_answers_are_not_kept_without_end(hands: FakeHands) -> None:
    requests = Requests(Holders(hands))
    for number in range(Requests.MOST_KEPT + 5):
        await requests.take(f"add {number}", add_bytes=GIB, remove_unit="", say=lambda _: None)
        await requests.take(f"remove {number}", add_bytes=0, remove_unit=UNIT, say=lambda _: None)
    assert len(requests._answers) <= Requests.MOST_KEPT
    hands.hangs.add("adjust")
    hanging = [
        asyncio.ensure_future(requests.take(f"{n}", add_bytes=GIB, remove_unit="", say=lambda _: None))
        for n in range(Requests.MOST_KEPT)
    ]
    await asyncio.sleep(0.02)
    with pytest.raises(ActionError, match="too many changes are under way"):
        await requests.take("one more", add_bytes=GIB, remove_unit="", say=lambda _: None)
    for task in (*hanging, *requests._answers.values()):
        task.cancel()
    await asyncio.gather(*hanging, *requests._answers.values(), return_exceptions=True)
