"""A time limit for every MemCache call, and a breaker that skips the tier until it answers again.

A call that is in flight when the MetaService goes away can block for 60 s, and nothing can wake it. So every call runs
in a thread of its own: when the limit passes, the caller goes on without an answer. What the call was given stays with
it until it ends; ``on_late`` says when.

After a failure the tier is skipped at once, and a probe in the background finds out when it answers again. So a hang
costs the requests of one moment, once, and not one in every cool-down.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar, cast

_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)
_LONGEST_PROBE_SECONDS: Final = 30.0


class TierUnavailableError(Exception):
    """The tier gave no usable answer. ``late``: the call still runs, and keeps what it was given."""

    def __init__(self, message: str, *, late: bool = False) -> None:
        super().__init__(message)
        self.late = late


class PendingCall(Generic[_Result]):
    """A call under way. Its starter looks at it when it likes."""

    def __init__(self, what: str, deadline: float) -> None:
        self.what = what
        self.deadline = deadline
        self.finished = threading.Event()
        self.abandoned = False
        self.result: _Result | None = None
        self.error: Exception | None = None


class TierGuard:
    """Runs calls with a limit. Thread-safe.

    Args:
        name: Stands in front of log lines.
        limit_seconds: The longest that a caller waits.
        probe: A cheap call; it returns when the tier answers as it should, else it raises. None: the tier is tried
            again after ``probe_seconds`` without one.
        probe_seconds: The time to the first probe; doubles with each that fails.
        clock: Monotonic seconds.
    """

    # Calls left behind: each holds a thread and perhaps a buffer, for a minute at the most.
    MOST_LATE: Final = 8

    def __init__(
        self,
        name: str,
        *,
        limit_seconds: float,
        probe: Callable[[], object] | None = None,
        probe_seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self.limit_seconds = limit_seconds
        self._probe = probe
        self._probe_seconds = probe_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._wake = threading.Event()  # set: shut for good
        self._skipping = False
        self._late = 0
        self._in_flight = 0

    @property
    def skipping(self) -> bool:
        """Whether calls are refused at the moment."""
        with self._lock:
            return self._refuses()

    @property
    def in_flight(self) -> int:
        """Calls that have not returned, late or not."""
        with self._lock:
            return self._in_flight

    def shut(self) -> None:
        """Refuses every further call."""
        self._wake.set()

    def trip(self, reason: str) -> None:
        """Skips the tier until a probe succeeds."""
        with self._lock:
            if self._skipping or self._wake.is_set():
                return
            self._skipping = True
        _log.warning("kvtierd: %s: the tier is skipped until it answers again: %s", self._name, reason)
        threading.Thread(target=self._recover, name=f"kvtierd-{self._name}-probe", daemon=True).start()

    def call(
        self,
        what: str,
        function: Callable[[], _Result],
        *,
        limit_seconds: float | None = None,
        on_late: Callable[[], None] = lambda: None,
    ) -> _Result:
        """The function's result.

        Raises:
            TierUnavailableError: The tier is being skipped, the limit has passed or the function raised. With ``late``
                the function still runs, and ``on_late`` is called when it has ended; otherwise it is not called.
        """
        pending = self.start(what, function, limit_seconds=limit_seconds, on_late=on_late)
        pending.finished.wait(max(0.0, pending.deadline - self._clock()))
        result = self.poll(pending)
        if result is None:
            raise TierUnavailableError(f"{what} gave nothing")
        return result

    def start(
        self,
        what: str,
        function: Callable[[], _Result],
        *,
        limit_seconds: float | None = None,
        on_late: Callable[[], None] = lambda: None,
    ) -> PendingCall[_Result]:
        """Starts a call; :meth:`poll` tells its outcome."""
        with self._lock:
            if self._refuses():
                raise TierUnavailableError(f"{what}: the tier is being skipped")
        limit = self.limit_seconds if limit_seconds is None else min(limit_seconds, self.limit_seconds)
        return self._spawn(what, function, limit, on_late)

    def poll(self, pending: PendingCall[_Result]) -> _Result | None:
        """The result of a call that has ended, None while it may still take its time.

        Raises:
            TierUnavailableError: As for :meth:`call`.
        """
        if not pending.finished.is_set():
            if self._clock() < pending.deadline:
                return None
            if self._abandon(pending):
                message = f"{pending.what} has not returned in time"
                self.trip(message)
                raise TierUnavailableError(message, late=True)
        if pending.error is not None:
            message = f"{pending.what}: {pending.error}"
            self.trip(message)
            raise TierUnavailableError(message) from pending.error
        return cast("_Result", pending.result)

    def _spawn(
        self, what: str, function: Callable[[], _Result], limit_seconds: float, on_late: Callable[[], None]
    ) -> PendingCall[_Result]:
        pending: PendingCall[_Result] = PendingCall(what, self._clock() + limit_seconds)
        thread = threading.Thread(
            target=self._run, args=(function, pending, on_late), name=f"kvtierd-{what}", daemon=True
        )
        with self._lock:
            self._in_flight += 1
        try:
            thread.start()
        except RuntimeError as error:  # the system gives no more threads
            with self._lock:
                self._in_flight -= 1
            raise TierUnavailableError(f"{what}: {error}") from error
        return pending

    def _abandon(self, pending: PendingCall[_Result]) -> bool:
        with self._lock:
            if pending.finished.is_set():
                return False
            if not pending.abandoned:
                pending.abandoned = True
                self._late += 1
            return True

    def _run(
        self, function: Callable[[], _Result], pending: PendingCall[_Result], on_late: Callable[[], None]
    ) -> None:
        try:
            pending.result = function()
        except Exception as error:  # noqa: BLE001 - whatever the native client raises is a failed call
            pending.error = error
        with self._lock:
            pending.finished.set()
            self._in_flight -= 1
            self._late -= pending.abandoned
        if pending.abandoned:
            on_late()

    def _refuses(self) -> bool:
        return self._skipping or self._wake.is_set() or self._late >= self.MOST_LATE

    def _recover(self) -> None:
        delay = self._probe_seconds
        while not self._wake.wait(delay):
            delay = min(2 * delay, _LONGEST_PROBE_SECONDS)
            if self._answers():
                with self._lock:
                    self._skipping = False
                _log.info("kvtierd: %s: the tier answers again", self._name)
                return

    def _answers(self) -> bool:
        if self._probe is None:
            return True
        with self._lock:
            if self._late >= self.MOST_LATE:
                return False
        try:
            pending = self._spawn("probe", self._probe, self.limit_seconds, lambda: None)
        except TierUnavailableError:
            return False
        pending.finished.wait(self.limit_seconds)
        return not self._abandon(pending) and pending.error is None
