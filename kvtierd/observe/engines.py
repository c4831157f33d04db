"""Scraping the engines' metrics through their drivers: bounded, and a driver's fault stays with its engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
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
        self._targets: dict[str, Target] = {}
        self._threads: dict[str, threading.Thread] = {}

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
            observation = await self._read(target, text)
        except (KvtierError, OSError) as error:  # TimeoutError is an OSError
            told = error.message if isinstance(error, KvtierError) else str(error)
            self.problems[target.unit_id] = f"its metrics cannot be read: {told or 'no answer in time'}"
        except Exception as error:  # noqa: BLE001 - foreign code: anything may come out of it
            self.problems[target.unit_id] = f"its driver cannot read its metrics: {error}"
        else:
            self.samples[target.unit_id] = Sample(time.time(), observation)
            self.problems.pop(target.unit_id, None)

    async def _read(self, target: Target, text: str) -> EngineObservation:
        """The driver's reading, in a thread of its own: one that hangs holds up nothing but its engine's figures."""
        earlier = self._threads.get(target.unit_id)
        if earlier is not None and earlier.is_alive():
            raise TimeoutError("its driver still hangs on an earlier reading")
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[object] = loop.create_future()

        def read() -> None:
            try:
                answer: object = target.driver.observe(text)
            except BaseException as error:  # noqa: BLE001 - foreign code; told to whoever waits
                answer = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_settle, outcome, answer)

        thread = threading.Thread(target=read, daemon=True, name=f"observe {target.unit_id}")
        self._threads[target.unit_id] = thread
        thread.start()
        answer = await asyncio.wait_for(outcome, DRIVER_SECONDS)
        if isinstance(answer, BaseException):
            raise RuntimeError(f"{type(answer).__name__}: {answer}") from answer
        if not isinstance(answer, EngineObservation):
            raise TypeError(f"observe() returned {type(answer).__name__}")
        return answer


def _settle(outcome: asyncio.Future[object], answer: object) -> None:
    if not outcome.done():
        outcome.set_result(answer)
