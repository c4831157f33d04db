"""Calling foreign code under watch: what it touches outside itself, and how long it takes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar
from unittest import mock

ResultT = TypeVar("ResultT")

_TOUCHING = (
    "open",
    "os.",
    "socket.",
    "subprocess.",
    "shutil.",
    "tempfile.",
    "glob.",
    "sqlite3.",
    "urllib.",
    "fcntl.",
)
_STATS = ("stat", "lstat", "access")
_IMPORTING = "<frozen importlib"
_WALL_PER_CPU = 10  # a busy machine may take this many times longer than the processor time that is allowed
_AGAIN_SECONDS = 0.05

_seen: list[str] | None = None
_watched_thread = 0
_hooked = False


class TookTooLongError(Exception):
    """The call used more processor time than it may, or did not come back."""


class _TimeIsUp(BaseException):
    """Thrown into the call from outside; no ``except Exception`` keeps it."""


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """Collects what the block does to files, processes and the network, and forbids it (PermissionError).

    Sees everything that Python audits, also through C code, and looks at files (stat, access). Imports are allowed:
    a driver may load a library when it first needs it.
    """
    global _seen, _watched_thread, _hooked
    if not _hooked:
        sys.addaudithook(_audit)  # for ever: Python has no way to take one off
        _hooked = True
    seen: list[str] = []
    with contextlib.ExitStack() as stack:
        for name in _STATS:
            stack.enter_context(mock.patch.object(os, name, _recording(name, getattr(os, name))))
        _watched_thread, _seen = threading.get_ident(), seen
        try:
            yield seen
        finally:
            _seen = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _seen is not None and event.startswith(_TOUCHING):
        _note(event, arguments)


def _recording(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def record(*arguments: Any, **options: Any) -> Any:
        if _seen is not None:
            _note(f"os.{name}", arguments)
        return real(*arguments, **options)

    return record


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    seen = _seen
    if seen is None or threading.get_ident() != _watched_thread or _is_import():
        return
    shown = repr(arguments[0])[:120] if arguments else ""
    seen.append(f"{event}({shown})")
    raise PermissionError(f"{event}({shown}) is not allowed here: this method must be pure")


def _is_import() -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORTING):
            return True
        frame = frame.f_back
    return False


def timed(call: Callable[[], ResultT], cpu_seconds: float) -> ResultT:
    """The call's answer (or what it raises), unless it takes too long.

    Args:
        call: What to call.
        cpu_seconds: Processor time it may use. Ten times that by the clock ends it, as a call that sleeps uses none.

    Raises:
        TookTooLongError: It took longer.
    """
    if threading.current_thread() is threading.main_thread():
        return _with_alarm(call, cpu_seconds)
    return _with_thread(call, cpu_seconds)


def _with_alarm(call: Callable[[], ResultT], cpu_seconds: float) -> ResultT:
    """By signal, which also ends a regular expression that would run for hours with the interpreter's lock held."""
    armed = True
    wall_seconds = cpu_seconds * _WALL_PER_CPU

    def ring(*_: object) -> None:
        if armed:
            raise _TimeIsUp

    handler = signal.signal(signal.SIGALRM, ring)
    started, started_cpu = time.monotonic(), time.thread_time()
    # It rings again, since a bare "except" could swallow one.
    rest_seconds, interval_seconds = signal.setitimer(signal.ITIMER_REAL, wall_seconds, _AGAIN_SECONDS)
    try:
        return call()
    except _TimeIsUp:
        raise TookTooLongError(f"it did not come back within {wall_seconds:g} s") from None
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if rest_seconds:  # somebody else's alarm (pytest-timeout)
            left = max(rest_seconds - (time.monotonic() - started), 0.001)
            signal.setitimer(signal.ITIMER_REAL, left, interval_seconds)
        _check(time.thread_time() - started_cpu, cpu_seconds)


def _with_thread(call: Callable[[], ResultT], cpu_seconds: float) -> ResultT:
    answers: list[ResultT] = []
    errors: list[BaseException] = []
    used: list[float] = []

    def work() -> None:
        started = time.thread_time()
        try:
            answers.append(call())
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            errors.append(error)
        used.append(time.thread_time() - started)

    thread = threading.Thread(target=work, daemon=True, name="conformance call")
    thread.start()
    thread.join(cpu_seconds * _WALL_PER_CPU)
    if thread.is_alive():
        raise TookTooLongError(f"it did not come back within {cpu_seconds * _WALL_PER_CPU:g} s")
    _check(used[0], cpu_seconds)
    if errors:
        raise errors[0]
    return answers[0]


def _check(used_seconds: float, most_seconds: float) -> None:
    if used_seconds > most_seconds:
        raise TookTooLongError(
            f"it used {used_seconds:.2f} s of processor time; the limit is {most_seconds:g} s"
        )
