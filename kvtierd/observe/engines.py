"""Scraping the engines' metrics through their drivers: bounded, and a driver's fault stays with its engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from kvtierd.errors import KvtierError
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

    async def look(self, targets: Mapping[str, Target]) -> None:
        """Scrapes all targets at once; forgets engines that are not among them."""
        for gone in set(self.samples) | set(self.problems):
            if gone not in targets:
                self.samples.pop(gone, None)
                self.problems.pop(gone, None)
        await asyncio.gather(*(self._look_at(t) for t in targets.values()))

    async def _look_at(self, target: Target) -> None:
        try:
            text = await self._fetch(target.url)
            observation = await self._read(target.driver, text)
        except (KvtierError, OSError, TimeoutError) as error:
            self.problems[target.unit_id] = f"its metrics cannot be read: {error}"
        except Exception as error:  # noqa: BLE001 - foreign code: anything may come out of it
            self.problems[target.unit_id] = (
                f"the driver cannot read its metrics: {type(error).__name__}: {error}"
            )
        else:
            self.samples[target.unit_id] = Sample(time.time(), observation)
            self.problems.pop(target.unit_id, None)

    async def _read(self, driver: EngineDriver, text: str) -> EngineObservation:
        # In a thread, so that a driver that hangs holds up neither the loop nor the watchdog.
        observation = await asyncio.wait_for(asyncio.to_thread(driver.observe, text), DRIVER_SECONDS)
        if not isinstance(observation, EngineObservation):
            raise TypeError(f"observe() returned {type(observation).__name__}")
        return observation
