"""Reading what engines say in their output, through their drivers: room of the cache, rates, fatal signs.

A driver sees every line, some at a time in a thread of their own. It must be quick all the same: one that raises, is
slow again and again, or hangs, is not asked any more and named.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Protocol

from kvtierd.errors import KvtierError, PluginError
from kvtierd.foreign import ForeignCalls, told_of
from kvtierd.plan.engine import EngineDriver, EngineObservation
from kvtierd.plan.model import UnitSpec
from kvtierd.units.supervisor import Supervisor

LINES_BEFORE = 400  # an adopted engine has said what room it has long ago
SLOW_SECONDS = 0.02
MOST_SLOW = 20
MOST_ERRORS = 5
LINES_A_BATCH = 200
MOST_WAITING = 1000  # lines; the rest waits in the log
DRIVER_SECONDS = 5.0  # for a batch
MOST_LINE_CHARS = 64 * 1024


class Follow(Protocol):
    """A backend's ``follow``, for one run of a unit."""

    def __call__(self, unit_id: str, lines: int, *, instance: str) -> AsyncIterator[str]:
        """Lines of the run that are there already, then new ones."""
        ...


def merged(older: EngineObservation, newer: EngineObservation) -> EngineObservation:
    """What is known now: the newer figure where there is one."""
    return older.model_copy(update=newer.model_dump(exclude_none=True))


def _told_too(older: EngineObservation, newer: EngineObservation) -> EngineObservation:
    """What lines told so far; failed loads are told one at a time, so they are added up."""
    joined = merged(older, newer)
    counts = [o.failed_loads for o in (older, newer) if o.failed_loads is not None]
    return joined.model_copy(update={"failed_loads": sum(counts)}) if len(counts) > 1 else joined


class LineObserver:
    """Follows the output of running engines; ``readings`` holds what their lines said so far, of the current run."""

    def __init__(self, follow: Follow) -> None:
        self._follow = follow
        self._tasks: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self._calls = ForeignCalls()
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
                reading = self._read(unit_id, instance, driver)
                task = asyncio.create_task(reading, name=f"lines of {unit_id}")
                self._tasks[unit_id] = (instance, task)

    async def close(self) -> None:
        """Stops following."""
        tasks = [task for _, task in self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()

    async def _read(self, unit_id: str, instance: str, driver: EngineDriver) -> None:
        lines: asyncio.Queue[str] = asyncio.Queue(MOST_WAITING)
        follower = asyncio.create_task(
            self._follow_into(lines, unit_id, instance), name=f"output of {unit_id}"
        )
        record = _Record()
        try:
            while record.fault is None:
                batch = await _next_batch(lines, follower)
                if not batch:
                    return
                try:
                    said = await self._calls.ask(
                        f"read_line() for {unit_id}",
                        functools.partial(_read_batch, driver, batch, record),
                        seconds=DRIVER_SECONDS,
                    )
                except PluginError as error:
                    record.fault = f"its driver is not asked any more to read its output: {error.message}"
                else:
                    if said is not None:
                        self.readings[unit_id] = _told_too(
                            self.readings.get(unit_id, EngineObservation()), said
                        )
                told = record.fault or record.error
                if told is not None:
                    self.problems[unit_id] = told
        finally:
            follower.cancel()

    async def _follow_into(self, lines: asyncio.Queue[str], unit_id: str, instance: str) -> None:
        with contextlib.suppress(KvtierError):
            async with contextlib.aclosing(self._follow(unit_id, LINES_BEFORE, instance=instance)) as output:  # type: ignore[type-var]
                async for line in output:
                    await lines.put(line)


def watch_output(
    lines: LineObserver,
    supervisor: Supervisor,
    units: Iterable[UnitSpec],
    find_driver: Callable[[str], EngineDriver | None],
) -> None:
    """Follows the engines among these units that run, and passes on why one cannot go on. To be called again and again."""
    followed = {}
    for unit in units:
        view = supervisor.view(unit.id)
        driver = find_driver(unit.plugin) if unit.plugin else None
        if view is not None and view.pid and view.instance and driver is not None:
            followed[unit.id] = (view.instance, driver)
    lines.watch(followed)
    for unit_id, (instance, _) in followed.items():
        reading = lines.readings.get(unit_id)
        supervisor.report_output(unit_id, instance, reading.fatal if reading is not None else None)


@dataclasses.dataclass(slots=True)
class _Record:
    """How a driver has done on one run's output. ``fault``: why it is not asked any more."""

    slow: int = 0
    errors: int = 0
    error: str | None = None
    fault: str | None = None


async def _next_batch(lines: asyncio.Queue[str], follower: asyncio.Task[None]) -> list[str]:
    """The lines that are there, at least one; none when no more will come."""
    if lines.empty() and not follower.done():
        first = asyncio.create_task(lines.get())
        try:
            await asyncio.wait({first, follower}, return_when=asyncio.FIRST_COMPLETED)
            batch = [first.result()] if first.done() else []
        finally:
            first.cancel()
    else:
        batch = []
    while len(batch) < LINES_A_BATCH and not lines.empty():
        batch.append(lines.get_nowait())
    return batch


def _read_batch(driver: EngineDriver, batch: list[str], record: _Record) -> EngineObservation | None:
    """What these lines say together. Runs in a thread of its own."""
    together: EngineObservation | None = None
    for line in batch:
        started = time.thread_time()  # not the clock on the wall: a busy machine is not the driver's fault
        try:
            said = driver.read_line(line[:MOST_LINE_CHARS])
            if said is not None and not isinstance(said, EngineObservation):
                raise TypeError(f"read_line() returned {type(said).__name__}")
        except Exception as error:  # noqa: BLE001 - foreign code: anything may come out of it
            record.errors += 1
            record.error = f"its driver cannot read a line of its output: {told_of(error)}"
        else:
            if said is not None:
                together = said if together is None else _told_too(together, said)
        record.slow += time.thread_time() - started > SLOW_SECONDS
        if record.errors >= MOST_ERRORS or record.slow >= MOST_SLOW:
            fault = "fails" if record.errors >= MOST_ERRORS else "is too slow"
            record.fault = f"its driver {fault} at reading its output and is not asked any more"
            break
    return together
