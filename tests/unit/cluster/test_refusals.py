"""Counted every time, logged once."""

import pytest
from structlog.testing import capture_logs

from kvtierd.cluster import refusals as module
from kvtierd.cluster.refusals import OTHERS, Refusals


@pytest.fixture
def now():
    return [1000.0]


@pytest.fixture
def refusals(now):
    return Refusals(lambda: now[0])


def test_logged_once_per_peer_and_cause_counted_always(refusals):
    with capture_logs() as logs:
        for _ in range(1000):
            refusals.note("b", "slow", "why")
            refusals.note("c", "slow")
        refusals.note("b", "not-listed")
    assert [(line["peer"], line["cause"]) for line in logs] == [
        ("b", "slow"),
        ("c", "slow"),
        ("b", "not-listed"),
    ]
    assert logs[0]["why"] == "why"
    assert refusals.counts == {("b", "slow"): 1000, ("c", "slow"): 1000, ("b", "not-listed"): 1}


def test_one_that_comes_all_the_time_is_never_logged_again_one_that_comes_back_is(refusals, now):
    with capture_logs() as logs:
        for _ in range(100):
            refusals.note("b", "slow")
            now[0] += module.QUIET_SECONDS
        assert len(logs) == 1
        now[0] += 1.0
        refusals.note("b", "slow")
    assert logs[1]["times"] == 101


def test_whoever_makes_names_up_gets_a_bounded_amount_of_memory_and_log(refusals):
    with capture_logs() as logs:
        for number in range(3 * module.MOST_PAIRS):
            refusals.note(f"n{number}", "not-listed")
    assert len(refusals.counts) == module.MOST_PAIRS + 1 == len(logs)
    assert refusals.counts[OTHERS, "not-listed"] == 2 * module.MOST_PAIRS
