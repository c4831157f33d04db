"""Keeps MemCache calls from holding up the engine: a time limit for each, and a breaker that skips the tier.

A call that is in flight when the MetaService goes away can block for 60 s, and nothing can wake it. So every call runs
in a thread of its own; when the limit passes, the caller goes on without an answer and the thread is left to end when
it may. Whatever the call was given (buffers above all) stays with it until then: that is what ``on_late`` is for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar, cast

_Result = TypeVar("_Result")


class TierUnavailableError(Exception):
    """The tier gave no usable answer; ``reason`` is ``skipped``, ``timeout`` or ``error``."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class _Box(Generic[_Result]):
    """Where a call leaves its outcome."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.abandoned = False
        self.result: _Result | None = None
        self.error: Exception | None = None


class CallGuard:
    """Runs calls with a limit and opens for ``cooldown_seconds`` after a failure. Thread-safe.

    At most ``MOST_STUCK`` abandoned calls may be outstanding; beyond that the tier is skipped until one returns.
    """

    MOST_STUCK: Final = 3

    def __init__(
        self,
        *,
        limit_seconds: float,
        cooldown_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        on_trip: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        self.limit_seconds = limit_seconds
        self.cooldown_seconds = cooldown_seconds
        self._clock = clock
        self._on_trip = on_trip
        self._lock = threading.Lock()
        self._open_until = float("-inf")
        self._shut = False
        self._stuck = 0
        self._in_flight = 0

    @property
    def stuck(self) -> int:
        """Calls whose limit has passed and that have not returned."""
        with self._lock:
            return self._stuck

    @property
    def in_flight(self) -> int:
        """Calls that have not returned, late or not."""
        with self._lock:
            return self._in_flight

    @property
    def skipping(self) -> bool:
        """Whether calls are refused at the moment."""
        with self._lock:
            return self._is_skipping()

    def trip(self, reason: str) -> None:
        """Skips the tier from now on for the cool-down."""
        with self._lock:
            self._open_until = self._clock() + self.cooldown_seconds
        self._on_trip(reason)

    def shut(self) -> None:
        """Refuses every further call, until :meth:`reopen`."""
        with self._lock:
            self._shut = True

    def reopen(self) -> None:
        """Allows calls again, with nothing held against the store."""
        with self._lock:
            self._shut = False
            self._open_until = float("-inf")

    def call(
        self, what: str, function: Callable[[], _Result], on_late: Callable[[], None] = lambda: None
    ) -> _Result:
        """The function's result, or ``TierUnavailableError`` once the limit has passed or it raised.

        After a ``timeout`` the function still runs and whatever it was given is still its own: ``on_late`` is called
        when it has ended. After any other outcome the caller has everything back, and ``on_late`` is not called.
        """
        with self._lock:
            if self._is_skipping():
                raise TierUnavailableError("skipped", f"{what}: the tier is being skipped")
            self._in_flight += 1
        box: _Box[_Result] = _Box()
        try:
            threading.Thread(
                target=self._run, args=(function, box, on_late), name=f"l3-{what}", daemon=True
            ).start()
        except RuntimeError as error:  # the system gives no more threads
            with self._lock:
                self._in_flight -= 1
            raise TierUnavailableError("error", f"{what}: {error}") from error
        if not box.done.wait(self.limit_seconds):
            with self._lock:
                box.abandoned = not box.done.is_set()
                self._stuck += box.abandoned
            if box.abandoned:
                message = f"{what} did not return within {self.limit_seconds:g} s"
                self.trip(message)
                raise TierUnavailableError("timeout", message)
        if box.error is not None:
            self.trip(f"{what}: {box.error}")
            raise TierUnavailableError("error", f"{what}: {box.error}") from box.error
        return cast("_Result", box.result)

    def _run(self, function: Callable[[], _Result], box: _Box[_Result], on_late: Callable[[], None]) -> None:
        try:
            box.result = function()
        except Exception as error:  # noqa: BLE001 - whatever the native client raises is a failed call
            box.error = error
        with self._lock:
            box.done.set()
            self._in_flight -= 1
            self._stuck -= box.abandoned
        if box.abandoned:
            on_late()

    def _is_skipping(self) -> bool:
        return self._shut or self._clock() < self._open_until or self._stuck >= self.MOST_STUCK
