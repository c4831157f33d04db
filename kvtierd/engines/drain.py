"""Draining: wait until an engine has nothing to do, up to a deadline, and say what is cut off if it has.

kvtierd does not stand in front of engines, so it cannot turn requests away: whoever balances load takes the engine
out first. Draining then only waits, and a drain that ends early is told as such.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable

from kvtierd.plan.engine import EngineObservation

QUIET_SECONDS = 1.0
POLL_SECONDS = 0.25

Look = Callable[[], Awaitable[EngineObservation | None]]


@dataclasses.dataclass(frozen=True, slots=True)
class Drained:
    """How a drain ended. ``left`` requests were still there; ``None`` when the engine does not say."""

    seconds: float
    left: int | None

    @property
    def complete(self) -> bool:
        """Nothing was cut off, as far as the engine says."""
        return self.left == 0

    def describe(self) -> str:
        """For people."""
        if self.left is None:
            return f"it does not say how many requests it has; waited {self.seconds:.1f} s"
        if self.left:
            return f"{self.left} request(s) were still running after {self.seconds:.0f} s and are cut off"
        return f"drained in {self.seconds:.1f} s"


async def drain(
    look: Look, *, deadline_seconds: float, clock: Callable[[], float] = time.monotonic
) -> Drained:
    """Waits until the engine has been without requests for a moment.

    Args:
        look: one fresh observation of the engine, ``None`` when it does not answer.
        deadline_seconds: the longest to wait.
        clock: monotonic seconds.
    """
    started = clock()
    quiet_since: float | None = None
    left: int | None = None
    while True:
        seen = await look()
        now = clock()
        if seen is None or (seen.running is None and seen.waiting is None):
            left, quiet_since = None, None
        else:
            left = (seen.running or 0) + (seen.waiting or 0)
            quiet_since = (quiet_since if quiet_since is not None else now) if left == 0 else None
        if quiet_since is not None and now - quiet_since >= QUIET_SECONDS:
            return Drained(now - started, 0)
        if now - started >= deadline_seconds:
            return Drained(now - started, left)
        await asyncio.sleep(POLL_SECONDS)
