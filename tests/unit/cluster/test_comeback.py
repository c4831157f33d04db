"""Clients without endpoints after a change of master: who is back, and who is started anew, when and in which order."""

from __future__ import annotations

import dataclasses

import pytest

from kvtierd.cluster.comeback import (
    DEADLINE_SECONDS,
    LONGEST_ROLL_SECONDS,
    ClientSeen,
    Comeback,
    Look,
    why_not_back,
)
from kvtierd.cluster.standing import PoolRank

POOL = ClientSeen("pool-0", "pool", "p1", linked=True, rank=0, brings_bytes=64)
ENGINE = ClientSeen("engine-e", "engine", "e1", linked=True)
OTHER = ClientSeen("engine-f", "engine", "f1", linked=True)
RANKS = {0: PoolRank(0, "provider", True, 64)}


def look(
    *clients: ClientSeen, at: float = 0.0, up: bool = True, is_open: bool = True, epoch: int = 2
) -> Look:
    return Look(at, epoch, up, is_open, clients, RANKS)


def lost(client: ClientSeen, **changes: object) -> ClientSeen:
    return dataclasses.replace(client, linked=False, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "ranks", "word"),
    [
        ({"linked": False}, RANKS, "link"),
        ({}, {}, "knows nothing of its rank 0"),
        ({}, {0: PoolRank(0, "unknown", True, 64)}, "role unknown"),
        ({}, {0: PoolRank(0, "provider", False, 64)}, "not active"),
        ({}, {0: PoolRank(0, "provider", True, 32)}, "32 bytes of 64"),
    ],
)
def test_link_rank_role_and_memory_must_be_there(
    changes: dict[str, object], ranks: dict[int, PoolRank], word: str
) -> None:
    assert word in why_not_back(dataclasses.replace(POOL, **changes), ranks)  # type: ignore[arg-type]


def test_what_cannot_be_seen_is_not_held_against_a_client() -> None:
    assert why_not_back(dataclasses.replace(POOL, linked=None), None) == ""
    assert why_not_back(dataclasses.replace(POOL, rank=None), RANKS) == ""
    assert why_not_back(POOL, RANKS) == ""


def test_those_that_come_back_in_time_are_left_alone() -> None:
    back = Comeback()
    assert back.step(look(lost(POOL), lost(ENGINE))) == ()
    assert (back.waited_for, back.settled) == (2, False)
    assert back.step(look(POOL, ENGINE, at=11.0)) == ()
    assert (back.missing, back.settled) == ({}, True)
    assert back.step(look(POOL, ENGINE, at=DEADLINE_SECONDS + 1)) == ()


def test_the_deadline_counts_from_when_the_meta_service_answers() -> None:
    back = Comeback()
    assert back.step(look(lost(ENGINE), up=False)) == ()
    assert "does not answer" in back.missing["engine-e"]
    assert back.step(look(lost(ENGINE), at=100.0)) == ()
    assert back.step(look(lost(ENGINE), at=100.0 + DEADLINE_SECONDS - 1)) == ()
    assert [r.unit for r in back.step(look(lost(ENGINE), at=100.0 + DEADLINE_SECONDS))] == ["engine-e"]


def test_they_are_rolled_one_at_a_time_pool_holders_first() -> None:
    back, late = Comeback(), DEADLINE_SECONDS
    all_lost = lost(OTHER), lost(ENGINE), lost(POOL)
    back.step(look(*all_lost))
    assert [r.unit for r in back.step(look(*all_lost, at=late))] == ["pool-0"]
    assert back.step(look(*all_lost, at=late + 1)) == (), "it still runs"
    down = dataclasses.replace(POOL, instance=None, ready=False, linked=False)
    assert back.step(look(*all_lost[:2], down, at=late + 2)) == (), "it is down"
    again = dataclasses.replace(POOL, instance="p2", ready=False)
    assert back.step(look(*all_lost[:2], again, at=late + 3)) == (), "it is not ready"
    again = dataclasses.replace(again, ready=True)
    assert [r.unit for r in back.step(look(*all_lost[:2], again, at=late + 4))] == ["engine-f"]
    f2 = dataclasses.replace(OTHER, instance="f2")
    assert [r.unit for r in back.step(look(f2, lost(ENGINE), again, at=late + 5))] == ["engine-e"]
    e2 = dataclasses.replace(ENGINE, instance="e2")
    assert back.step(look(f2, e2, again, at=late + 6)) == ()
    assert back.settled


@pytest.mark.parametrize("how", ["over", "too long"])
def test_one_that_does_not_come_up_does_not_hold_the_others_for_ever(how: str) -> None:
    back, late = Comeback(), DEADLINE_SECONDS
    back.step(look(lost(ENGINE), lost(OTHER)))
    back.step(look(lost(ENGINE), lost(OTHER), at=late))
    down = dataclasses.replace(ENGINE, instance=None, ready=False, over=how == "over")
    at = late + 1 if how == "over" else late + LONGEST_ROLL_SECONDS
    assert [r.unit for r in back.step(look(down, lost(OTHER), at=at))] == ["engine-f"]


def test_nobody_is_started_anew_while_newcomers_may_not_join() -> None:
    back = Comeback()
    back.step(look(lost(ENGINE)))
    assert back.step(look(lost(ENGINE), at=DEADLINE_SECONDS, is_open=False)) == ()
    assert len(back.step(look(lost(ENGINE), at=DEADLINE_SECONDS + 1))) == 1


def test_what_nothing_leads_is_not_waited_for() -> None:
    back = Comeback()
    (roll,) = back.step(look(lost(ENGINE, follows=False), lost(OTHER)))
    assert roll.unit == "engine-e"
    assert "nothing leads it" in roll.why
    assert Comeback().step(look(dataclasses.replace(ENGINE, follows=False))) == (), "it is there already"


def test_each_is_rolled_once_for_one_meta_service() -> None:
    back, late = Comeback(), DEADLINE_SECONDS
    back.step(look(lost(ENGINE)))
    assert back.step(look(lost(ENGINE), at=late))
    new = dataclasses.replace(lost(ENGINE), instance="e2")
    assert back.step(look(new, at=late + 5)) == ()
    assert back.step(look(new, at=late + 5000)) == ()
    # Another master: from the beginning, the run that is there now included.
    assert back.step(look(new, at=late + 6000, epoch=3)) == ()
    assert [r.unit for r in back.step(look(new, at=2 * late + 6000, epoch=3))] == ["engine-e"]


def test_one_that_was_started_since_is_not_rolled_for_a_link_that_it_makes_later() -> None:
    back, late = Comeback(), DEADLINE_SECONDS
    back.step(look(dataclasses.replace(ENGINE, instance="e1")))
    fresh = dataclasses.replace(lost(ENGINE), instance="e2", ready=False)
    assert back.step(look(fresh, at=late + 1)) == ()
    assert back.missing == {}
