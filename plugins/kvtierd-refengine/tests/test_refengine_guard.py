"""A call that hangs costs its limit once, then nothing."""

from __future__ import annotations

import threading
import time

import pytest
from kvtierd_refengine.l3guard import CallGuard, TierUnavailableError
from refengine_fakes import wait_for


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(limit_seconds: float = 0.05) -> tuple[CallGuard, Clock, list[str]]:
    clock, trips = Clock(), list[str]()
    return (
        CallGuard(limit_seconds=limit_seconds, cooldown_seconds=5, clock=clock, on_trip=trips.append),
        clock,
        trips,
    )


def hang(guard: CallGuard, gate: threading.Event, late: list[str]) -> None:
    with pytest.raises(TierUnavailableError) as caught:
        guard.call("get", gate.wait, on_late=lambda: late.append("late"))
    assert caught.value.reason == "timeout"


def test_a_result_comes_through() -> None:
    guard, _, trips = make(limit_seconds=5)
    assert guard.call("exist", lambda: [1, 0]) == [1, 0]
    assert not guard.skipping
    assert trips == []
    wait_for(lambda: guard.in_flight == 0, "the call is over")


def test_a_hanging_call_lets_the_caller_go_and_opens_the_breaker() -> None:
    guard, clock, trips = make()
    gate, late = threading.Event(), list[str]()
    started = time.monotonic()
    hang(guard, gate, late)
    assert time.monotonic() - started < 2
    assert trips == ["get did not return within 0.05 s"]
    with pytest.raises(TierUnavailableError) as caught:
        guard.call("exist", lambda: pytest.fail("must not run"))
    assert caught.value.reason == "skipped"
    clock.now += 5
    guard.limit_seconds = 5
    assert guard.call("exist", lambda: 1) == 1  # works again while the old call is still stuck
    assert (guard.stuck, guard.in_flight) == (1, 1)
    assert late == []
    gate.set()
    wait_for(lambda: late == ["late"], "what the call held is given back")
    assert (guard.stuck, guard.in_flight) == (0, 0)


def test_stuck_calls_are_bounded() -> None:
    guard, clock, _ = make(limit_seconds=0.02)
    gate, late = threading.Event(), list[str]()
    for _ in range(CallGuard.MOST_STUCK):
        hang(guard, gate, late)
        clock.now += 5
    assert guard.skipping  # although the cool-down is over
    before = threading.active_count()
    with pytest.raises(TierUnavailableError):
        guard.call("get", gate.wait)
    assert threading.active_count() == before
    gate.set()
    wait_for(lambda: not guard.skipping and len(late) == CallGuard.MOST_STUCK, "the calls have returned")


def test_a_call_that_raises_is_an_error_and_opens_the_breaker() -> None:
    guard, clock, trips = make(limit_seconds=5)
    late: list[str] = []

    def fail() -> int:
        raise OSError("no pool")

    with pytest.raises(TierUnavailableError, match="no pool") as caught:
        guard.call("put", fail, on_late=lambda: late.append("late"))
    assert caught.value.reason == "error"
    assert late == []  # the caller has its things back at once
    assert trips == ["put: no pool"]
    assert guard.skipping
    clock.now += 5
    assert not guard.skipping


def test_shut_is_for_good() -> None:
    guard, clock, _ = make()
    guard.shut()
    clock.now += 1e6
    with pytest.raises(TierUnavailableError):
        guard.call("exist", lambda: 1)
