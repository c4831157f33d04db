from __future__ import annotations

import asyncio

import pytest

from kvtierd.testing import FakeClock


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_sleepers_wake_in_order_and_not_before_their_time() -> None:
    clock = FakeClock(monotonic_seconds=5)
    woken: list[str] = []

    async def sleep(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append(name)

    tasks = [asyncio.create_task(sleep(*x)) for x in (("late", 3), ("early", 1), ("never", 100))]
    await settle()
    assert clock.sleepers == 3
    clock.advance(0.5)
    await settle()
    assert woken == []
    clock.advance(10)
    await settle()
    assert woken == ["early", "late"]
    assert (clock.monotonic(), clock.sleepers) == (15.5, 1)
    tasks[2].cancel()
    await settle()
    clock.advance(1000)  # nobody waits any more
    assert clock.sleepers == 0


def test_both_clocks_move_together_and_never_back() -> None:
    clock = FakeClock(monotonic_seconds=1, unix_seconds=100)
    clock.advance(2.5)
    assert (clock.monotonic(), clock.time()) == (3.5, 102.5)
    with pytest.raises(ValueError, match="back"):
        clock.advance(-1)


async def test_no_time_is_no_wait() -> None:
    await asyncio.wait_for(FakeClock().sleep(0), 1)
