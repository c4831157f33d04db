"""What happened on this node: kept in memory for the control service, appended to a bounded file.

An event that cannot be written (full disk) is still kept in memory; the loss is counted and said.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Literal

import structlog

log = structlog.get_logger(__name__)

Severity = Literal["info", "warning", "error"]
KEPT = 1000
MAX_FILE_BYTES = 1024 * 1024
QUEUE_LIMIT = 1000
NO_PLAN_EVENT = "daemon.no-plan"  # the first plan after a start failed; a reload tries again


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. ``id`` grows by one; ``unit`` is empty for the node as a whole."""

    id: int
    at_unix_seconds: float
    severity: Severity
    kind: str
    unit: str
    message: str


class EventLog:
    """The node's events, newest last. Two files at most: ``events.jsonl`` and ``events.jsonl.1``."""

    def __init__(self, directory: Path, *, now: Callable[[], float] = time.time) -> None:
        self._path = directory / "events.jsonl"
        self._now = now
        self._events: collections.deque[Event] = collections.deque(maxlen=KEPT)
        self._followers: set[asyncio.Queue[Event]] = set()
        self.unwritten = 0
        self._load()
        self._next = self._events[-1].id + 1 if self._events else 1

    def add(self, severity: Severity, kind: str, message: str, *, unit: str = "") -> Event:
        """Records an event and hands it to the followers; never blocks, never raises."""
        event = Event(self._next, self._now(), severity, kind, unit, message)
        self._next += 1
        self._events.append(event)
        self._append(event)
        for queue in self._followers:
            with contextlib.suppress(
                asyncio.QueueFull
            ):  # a follower that does not read loses events, not us memory
                queue.put_nowait(event)
        emit = {"info": log.info, "warning": log.warning, "error": log.error}[severity]
        emit(message, kind=kind, **({"unit": unit} if unit else {}))
        return event

    def last(self, count: int = 0) -> list[Event]:
        """The last ``count`` events, oldest first; 0: all that are kept."""
        return list(self._events)[-count:] if count else list(self._events)

    async def follow(self, count: int) -> AsyncIterator[Event]:
        """The last ``count`` events, then new ones as they come."""
        queue: asyncio.Queue[Event] = asyncio.Queue(QUEUE_LIMIT)
        self._followers.add(queue)
        try:
            for event in self.last(count):
                yield event
            while True:
                yield await queue.get()
        finally:
            self._followers.discard(queue)

    def _append(self, event: Event) -> None:
        line = json.dumps(dataclasses.asdict(event)) + "\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists() and self._path.stat().st_size + len(line) > MAX_FILE_BYTES:
                self._path.replace(self._path.with_suffix(".jsonl.1"))
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(line)
        except OSError:
            self.unwritten += 1

    def _load(self) -> None:
        for path in (self._path.with_suffix(".jsonl.1"), self._path):
            with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace") as stream:
                for line in stream:
                    with contextlib.suppress(ValueError, TypeError):  # a torn last line
                        self._events.append(Event(**json.loads(line)))
