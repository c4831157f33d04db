"""Scraping the engines' metrics through their drivers: bounded, and a driver's fault stays with its engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from kvtierd.cluster.clock import boottime_seconds
from kvtierd.errors import KvtierError
from kvtierd.foreign import ForeignCalls, told_of
from kvtierd.observe.tiers import Sample
from kvtierd.plan.engine import EngineDriver, EngineObservation

DRIVER_SECONDS = 1.0
Fetch = Callable[[str], Awaitable[str]]


class Target(NamedTuple):
    """An engine to look at."""

    unit_id: str
    url: str
    driver: EngineDriver


class EngineObserver:
    """Keeps the newest sample of each engine, and what went wrong with the others."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self.samples: dict[str, Sample] = {}
        self.problems: dict[str, str] = {}
        self._targets: dict[str, Target] = {}
        self._calls = ForeignCalls()

    async def look(self, targets: Mapping[str, Target]) -> None:
        """Scrapes all targets at once; forgets engines that are not among them."""
        self._targets = dict(targets)
        for gone in set(self.samples) | set(self.problems):
            if gone not in targets:
                self.samples.pop(gone, None)
                self.problems.pop(gone, None)
        await asyncio.gather(*(self._look_at(t) for t in targets.values()))

    async def observe_now(self, unit_id: str) -> EngineObservation | None:
        """A fresh observation of one engine; ``None`` when it is not looked at or does not answer."""
        target = self._targets.get(unit_id)
        if target is None:
            return None
        await self._look_at(target)
        sample = self.samples.get(unit_id)
        return None if unit_id in self.problems or sample is None else sample.observation

    async def _look_at(self, target: Target) -> None:
        try:
            text = await self._fetch(target.url)
        except (KvtierError, OSError) as error:  # TimeoutError is an OSError
            told = error.message if isinstance(error, KvtierError) else str(error)
            self.problems[target.unit_id] = f"its metrics cannot be read: {told or 'no answer in time'}"
            return
        try:
            observation = await self._read(target, text)
        except Exception as error:  # noqa: BLE001 - foreign code: anything may come out of it
            self.problems[target.unit_id] = f"its driver cannot read its metrics: {told_of(error)}"
        else:
            self.samples[target.unit_id] = Sample(time.time(), observation, boottime_seconds())
            self.problems.pop(target.unit_id, None)

    async def _read(self, target: Target, text: str) -> EngineObservation:
        """The driver's reading, in a thread of its own: one that hangs holds up nothing but its engine's figures."""
        answer: object = await self._calls.ask(
            f"observe() for {target.unit_id}",
            lambda: target.driver.observe(text),
            seconds=DRIVER_SECONDS,
        )
        if not isinstance(answer, EngineObservation):
            raise TypeError(f"observe() returned {type(answer).__name__}")
        return answer
