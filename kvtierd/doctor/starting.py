"""The checks that come before a start: what surely cannot work is not started, and says why.

One run answers for all units of its time. Where nothing was ever found wrong, a restart does not wait for the next run:
a MetaService has to be back in a second or two. A check that cannot tell, or takes too long, holds nothing up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Final, Literal

from kvtierd.checks import Check, Patient
from kvtierd.doctor.run import Examined, examine

FRESH_SECONDS: Final = 60.0
AGAIN_SECONDS: Final = 5.0
FIRST_SECONDS: Final = 4.0
"""How long a first start waits for the first run."""

Tell = Callable[[Literal["info", "error"], str, str], object]
"""Severity, kind and text of an event."""


class StartChecks:
    """Runs the blocking checks beside the loop and keeps what they found.

    Args:
        checks: All checks; those without ``blocks`` are left out.
        admit: A fresh patient.
        tell: Where a finding, and its end, is told.
        now: A monotonic clock.
    """

    def __init__(
        self,
        checks: Iterable[Check],
        admit: Callable[[], Patient],
        tell: Tell,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._checks = tuple(check for check in checks if check.blocks)
        self._kinds = frozenset(kind for check in self._checks for kind in check.blocks)
        self._admit, self._tell, self._now = admit, tell, now
        self._failed: tuple[Examined, ...] = ()
        self._ended_at: float | None = None
        self._began_at = 0.0
        self._running: asyncio.Task[None] | None = None

    @property
    def failed(self) -> tuple[Examined, ...]:
        """What the last run found that must not be started upon."""
        return self._failed

    def begin(self) -> None:
        """The first run, before anything wants to start: a MetaService that is needed suddenly does not wait for it."""
        self._ask(FRESH_SECONDS)

    def problems(self) -> list[str]:
        """A line for each, for the status."""
        return [f"doctor {one.check.id}: {one.outcome.found}" for one in self._failed]

    def why_not(self, kind: str) -> str | None:
        """Why a unit of this kind may not start now; asks for a new run when the last one is old."""
        if kind not in self._kinds:
            return None
        in_its_way = [one for one in self._failed if kind in one.check.blocks]
        self._ask(AGAIN_SECONDS if in_its_way else FRESH_SECONDS)
        if in_its_way:
            first = in_its_way[0]
            return f"doctor {first.check.id}: {first.outcome.found} ({first.outcome.fix or first.check.fix})"
        if self._ended_at is None and self._now() - self._began_at < FIRST_SECONDS:
            return "waits for doctor's checks before the first start"
        return None

    async def close(self) -> None:
        """Ends a run under way."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    def _ask(self, oldest_seconds: float) -> None:
        if self._running is not None and not self._running.done():
            return
        if self._ended_at is not None and self._now() - self._ended_at < oldest_seconds:
            return
        if self._ended_at is None and self._running is None:
            self._began_at = self._now()
        self._running = asyncio.create_task(self._run(), name="doctor before starts")

    async def _run(self) -> None:
        examined = await examine(self._admit(), self._checks)
        failed = tuple(one for one in examined if one.severity == "fail")
        before = {one.check.id for one in self._failed}
        for one in failed:
            if one.check.id not in before:
                fix = one.outcome.fix or one.check.fix
                kinds = ", ".join(sorted(one.check.blocks))
                self._tell(
                    "error",
                    "doctor.failed",
                    f"{one.check.id}: {one.outcome.found}; {kinds} not started. Do: {fix}",
                )
        for name in sorted(before - {one.check.id for one in failed}):
            self._tell("info", "doctor.mended", f"{name}: mended")
        self._failed = failed
        self._ended_at = self._now()
