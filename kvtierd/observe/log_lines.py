"""Reading what engines say in their output, through their drivers: room of the cache, rates, fatal signs.

A driver sees every line, on the loop's own thread, so it must be quick: one that raises, or is slow again and again,
is not asked any more and named.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping

from kvtierd.errors import KvtierError
from kvtierd.plan.engine import EngineDriver, EngineObservation

LINES_BEFORE = 400  # an adopted engine has said what room it has long ago
SLOW_SECONDS = 0.02
MOST_SLOW = 20
MOST_ERRORS = 5
LINES_A_TURN = 200  # then others get the loop
MOST_LINE_CHARS = 64 * 1024

Follow = Callable[[str, int], AsyncIterator[str]]


def merged(older: EngineObservation, newer: EngineObservation) -> EngineObservation:
    """What is known now: the newer figure where there is one."""
    return older.model_copy(update=newer.model_dump(exclude_none=True))


class LineObserver:
    """Follows the output of running engines; ``readings`` holds what their lines said so far, of the current run."""

    def __init__(self, follow: Follow) -> None:
        self._follow = follow
        self._tasks: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self.readings: dict[str, EngineObservation] = {}
        self.problems: dict[str, str] = {}

    def watch(self, engines: Mapping[str, tuple[str, EngineDriver]]) -> None:
        """Follows exactly these engines: unit id -> (instance of its run, driver). Returns at once."""
        for unit_id, (instance, task) in list(self._tasks.items()):
            if engines.get(unit_id, ("", None))[0] != instance:
                task.cancel()
                del self._tasks[unit_id]
                self.readings.pop(unit_id, None)
                self.problems.pop(unit_id, None)
        for unit_id, (instance, driver) in engines.items():
            if unit_id not in self._tasks:
                task = asyncio.create_task(self._read(unit_id, driver), name=f"lines of {unit_id}")
                self._tasks[unit_id] = (instance, task)

    async def close(self) -> None:
        """Stops following."""
        tasks = [task for _, task in self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()

    async def _read(self, unit_id: str, driver: EngineDriver) -> None:
        slow = errors = count = 0
        with contextlib.suppress(KvtierError):
            async with contextlib.aclosing(self._follow(unit_id, LINES_BEFORE)) as lines:  # type: ignore[type-var]
                async for line in lines:
                    started = time.perf_counter()
                    try:
                        said = driver.read_line(line[:MOST_LINE_CHARS])
                        if said is not None:
                            self.readings[unit_id] = merged(
                                self.readings.get(unit_id, EngineObservation()), said
                            )
                    except Exception as error:  # noqa: BLE001 - foreign code: anything may come out of it
                        errors += 1
                        why = f"{type(error).__name__}: {error}"
                        self.problems[unit_id] = f"its driver cannot read a line of its output: {why}"
                    slow += time.perf_counter() - started > SLOW_SECONDS
                    if errors >= MOST_ERRORS or slow >= MOST_SLOW:
                        fault = "fails" if errors >= MOST_ERRORS else "is too slow"
                        self.problems[unit_id] = (
                            f"its driver {fault} at reading its output and is not asked any more"
                        )
                        return
                    count += 1
                    if count % LINES_A_TURN == 0:
                        await asyncio.sleep(0)
