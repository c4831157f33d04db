"""A clock that stands still until a test moves it."""

from __future__ import annotations

import asyncio
import heapq
import itertools


class FakeClock:
    """Time as a value. Pass ``clock.monotonic``, ``clock.time`` and ``clock.sleep`` where the real ones would go.

    Args:
        monotonic_seconds: What :meth:`monotonic` starts at.
        unix_seconds: What :meth:`time` starts at.
    """

    def __init__(self, *, monotonic_seconds: float = 1000.0, unix_seconds: float = 1_700_000_000.0) -> None:
        self._started_seconds = monotonic_seconds
        self._unix_seconds = unix_seconds
        self._now_seconds = monotonic_seconds
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def monotonic(self) -> float:
        """Seconds of a clock that never goes back."""
        return self._now_seconds

    def time(self) -> float:
        """Seconds since 1970."""
        return self._unix_seconds + self._now_seconds - self._started_seconds

    @property
    def sleepers(self) -> int:
        """How many tasks wait in :meth:`sleep`."""
        return sum(not future.done() for _, _, future in self._sleepers)

    async def sleep(self, seconds: float) -> None:
        """Returns once the clock was moved that far. Zero and less only give other tasks a turn."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_seconds + seconds, next(self._order), future))
        await future

    def advance(self, seconds: float) -> None:
        """Moves the clock and wakes those whose time has come, in order. They run when the test next awaits.

        Raises:
            ValueError: ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError(f"a clock does not go back ({seconds:g} s)")
        end_seconds = self._now_seconds + seconds
        while self._sleepers and self._sleepers[0][0] <= end_seconds:
            due_seconds, _, future = heapq.heappop(self._sleepers)
            self._now_seconds = due_seconds
            if not future.done():
                future.set_result(None)
        self._now_seconds = end_seconds
