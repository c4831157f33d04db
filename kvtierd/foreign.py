"""Calls into plugins, which are foreign code: each in a thread of its own, with a deadline.

A call that does not come back costs one thread, and no second one: until it is back, the same key is refused at once.
What no thread can help against is code that never lets go of the interpreter, such as a regular expression that
backtracks without end: the watchdog of the service manager ends that, and the units go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar, cast

from kvtierd.errors import KvtierError, PluginError

T = TypeVar("T")


class _Outcome(NamedTuple, Generic[T]):
    """What came of a call: a value, unless there is an exception."""

    value: T | None
    error: BaseException | None


class ForeignCalls:
    """Bounded calls, by key: what belongs together must not hang twice."""

    def __init__(self) -> None:
        self._late: dict[str, threading.Thread] = {}  # calls that were given up and are still not back

    def call(self, key: str, function: Callable[[], T], *, seconds: float) -> T:
        """Waits for the answer; for threads that may wait.

        Args:
            key: whose call it is, for people as well: ``"refengine launch()"``.
            function: the call.
            seconds: the longest to wait.

        Raises:
            PluginError: ``plugin.hangs``: no answer in time, or an earlier call that was given up is still not back.
            Exception: whatever the call raised.
        """
        answer: queue.SimpleQueue[_Outcome[T]] = queue.SimpleQueue()
        thread = self._start(key, function, answer.put)
        try:
            outcome = answer.get(timeout=seconds)
        except queue.Empty:
            raise self._give_up(key, thread, seconds) from None
        return _unwrap(outcome)

    async def ask(self, key: str, function: Callable[[], T], *, seconds: float) -> T:
        """The same from a coroutine: the loop goes on meanwhile."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_Outcome[T]] = loop.create_future()

        def tell(outcome: _Outcome[T]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_settle, answer, outcome)

        thread = self._start(key, function, tell)
        try:
            outcome = await asyncio.wait_for(answer, seconds)
        except TimeoutError:
            raise self._give_up(key, thread, seconds) from None
        return _unwrap(outcome)

    def _start(
        self, key: str, function: Callable[[], T], tell: Callable[[_Outcome[T]], None]
    ) -> threading.Thread:
        late = self._late.get(key)
        if late is not None:
            if late.is_alive():
                raise PluginError(f"{key} still hangs on an earlier call", code="plugin.hangs")
            del self._late[key]

        def run() -> None:
            try:
                outcome: _Outcome[T] = _Outcome(function(), None)
            except BaseException as error:  # noqa: BLE001 - foreign code; told to whoever waits
                outcome = _Outcome(None, error)
            tell(outcome)

        thread = threading.Thread(target=run, daemon=True, name=key)
        thread.start()
        return thread

    def _give_up(self, key: str, thread: threading.Thread, seconds: float) -> PluginError:
        self._late[key] = thread
        return PluginError(f"{key} has not come back within {seconds:g} s", code="plugin.hangs")


def told_of(error: BaseException) -> str:
    """An exception of foreign code, for people: with its type, unless it is an error of ours."""
    return error.message if isinstance(error, KvtierError) else f"{type(error).__name__}: {error}"


def _unwrap(outcome: _Outcome[T]) -> T:
    if outcome.error is None:
        return cast("T", outcome.value)
    if isinstance(outcome.error, Exception):
        raise outcome.error
    # SystemExit and the like: a plugin must not end who called it.
    raise RuntimeError(f"{type(outcome.error).__name__}: {outcome.error}") from outcome.error


def _settle(future: asyncio.Future[_Outcome[T]], outcome: _Outcome[T]) -> None:
    if not future.done():
        future.set_result(outcome)
