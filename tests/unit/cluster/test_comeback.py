"""Clients after a change of MetaService: who is back, and who is started anew, when and in which order."""

from __future__ import annotations

import dataclasses

import pytest

from kvtierd.cluster.comeback import (
    DEADLINE_SECONDS,
    LONGEST_ROLL_SECONDS,
    ClientSeen,
    Comeback,
    Look,
    Member,
    why_not_back,
)
from kvtierd.cluster.standing import PoolRank

POOL = ClientSeen("pool-0", "pool", "p1", linked=True, members=(Member(0, "provider", 64),))
ENGINE = ClientSeen("engine-e", "engine", "e1", linked=True)
OTHER = ClientSeen("engine-f", "engine", "f1", linked=True)
RANKS = {0: PoolRank(0, "provider", True, 64)}


def look(
    *clients: ClientSeen,
    at: float = 0.0,
    up: bool = True,
    is_open: bool = True,
    epoch: int = 2,
    life: str = "",
) -> Look:
    return Look(at, epoch, up, is_open, clients, RANKS, life)


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
        ({"members": (Member(0), Member(3))}, RANKS, "knows nothing of its rank 3"),
        ({"lost": "its memory is gone"}, RANKS, "memory is gone"),
    ],
)
def test_link_rank_role_and_memory_must_be_there(
    changes: dict[str, object], ranks: dict[int, PoolRank], word: str
) -> None:
    assert word in why_not_back(dataclasses.replace(POOL, **changes), ranks)  # type: ignore[arg-type]


def test_what_cannot_be_seen_is_not_held_against_a_client() -> None:
    assert why_not_back(dataclasses.replace(POOL, linked=None), None) == ""
    assert why_not_back(dataclasses.replace(POOL, members=()), {}) == ""
    assert why_not_back(dataclasses.replace(POOL, members=(Member(1),)), {1: PoolRank(1, "proxy")}) == ""
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
    # Another master: from the beginning, the run that is there now included, once it was there before.
    back.step(look(dataclasses.replace(new, linked=True), at=late + 5999))
    assert back.step(look(new, at=late + 6000, epoch=3)) == ()
    assert [r.unit for r in back.step(look(new, at=2 * late + 6000, epoch=3))] == ["engine-e"]


def test_one_that_was_started_since_is_not_rolled_for_a_link_that_it_makes_later() -> None:
    back, late = Comeback(), DEADLINE_SECONDS
    back.step(look(dataclasses.replace(ENGINE, instance="e1")))
    fresh = dataclasses.replace(lost(ENGINE), instance="e2", ready=False)
    assert back.step(look(fresh, at=late + 1)) == ()
    assert back.missing == {}


def test_who_was_back_once_is_not_rolled_for_a_link_that_it_loses_later() -> None:
    back, late = Comeback(), DEADLINE_SECONDS
    back.step(look(ENGINE))
    assert back.step(look(lost(ENGINE), at=late + 1)) == ()
    assert (back.missing, back.settled) == ({}, True)


def test_who_had_no_link_before_the_change_is_not_expected_after_it() -> None:
    """An engine whose L3 was taken off, for one."""
    back, late = Comeback(), DEADLINE_SECONDS
    back.step(look(ENGINE, OTHER))
    back.step(look(lost(ENGINE), OTHER, at=1.0))
    back.step(look(lost(ENGINE), lost(OTHER), at=2.0, epoch=3))
    assert list(back.missing) == ["engine-f"]
    assert [r.unit for r in back.step(look(lost(ENGINE), lost(OTHER), at=2 + late, epoch=3))] == ["engine-f"]


@pytest.mark.parametrize("how", ["it did not answer", "another process"])
def test_a_meta_service_that_was_started_anew_in_place_is_a_change_too(how: str) -> None:
    back, late = Comeback(), DEADLINE_SECONDS
    back.step(look(ENGINE, life="x"))
    if how == "another process":
        assert back.step(look(lost(ENGINE), at=1.0, life="y")) == ()
    else:
        assert back.step(look(lost(ENGINE), at=1.0, up=False, life="")) == ()
        assert back.step(look(lost(ENGINE), at=1.0, life="x")) == ()
    assert list(back.missing) == ["engine-e"]
    assert len(back.step(look(lost(ENGINE), at=1 + late, life="y" if how == "another process" else "x"))) == 1


def test_a_new_daemon_does_not_expect_who_left_after_all_were_back() -> None:
    late = DEADLINE_SECONDS
    knows = Comeback(settled_epoch=2)
    knows.step(look(lost(ENGINE)))
    assert knows.step(look(lost(ENGINE), at=late)) == ()
    assert knows.settled
    # It does after the next change, also one in place.
    knows.step(look(ENGINE, at=late + 1))
    knows.step(look(lost(ENGINE), at=late + 2, up=False))
    knows.step(look(lost(ENGINE), at=late + 3))
    assert len(knows.step(look(lost(ENGINE), at=2 * late + 3))) == 1
    other = Comeback(settled_epoch=1)
    other.step(look(lost(ENGINE)))
    assert len(other.step(look(lost(ENGINE), at=late))) == 1


def test_when_a_new_process_does_not_help_no_other_engine_is_started_anew() -> None:
    back, late = Comeback(), DEADLINE_SECONDS
    back.step(look(lost(ENGINE), lost(OTHER)))
    assert [r.unit for r in back.step(look(lost(ENGINE), lost(OTHER), at=late))] == ["engine-e"]
    again = dataclasses.replace(lost(ENGINE), instance="e2")
    assert back.step(look(again, lost(OTHER), at=late + 1)) == ()
    assert "engine-e was started anew" in back.no_help
    assert back.settled
    assert back.step(look(again, lost(OTHER), at=late + 5000)) == ()
    assert "engine-f" in back.missing, "it is still said"
