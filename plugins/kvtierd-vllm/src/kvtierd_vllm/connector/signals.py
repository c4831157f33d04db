"""Keeps the engine's signal handlers while MemCache joins.

MemCache's ``init`` installs native handlers for SIGTERM and its like over whoever was there first, and an ``init`` that
hangs swallows the signal: the engine could then only be killed. So the handlers that stood before are put back, again
and again while ``init`` runs and once behind it. Python cannot do that outside the main thread; libc's ``sigaction``
can.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import signal
import threading
from collections.abc import Iterator
from typing import Final

_log = logging.getLogger(__name__)
_KEPT: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGABRT, signal.SIGSEGV)
_PERIOD_SECONDS: Final = 0.05
# struct sigaction takes 152 bytes on x86_64 and aarch64 (glibc, musl); it is copied as it is, never looked into.
_SIGACTION_BYTES: Final = 512


class _Handlers:
    """A copy of this process' handlers."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._saved = {number: self._read(number) for number in _KEPT}

    def _read(self, number: int) -> bytes:
        now = ctypes.create_string_buffer(_SIGACTION_BYTES)
        return now.raw if self._libc.sigaction(int(number), None, now) == 0 else b""

    def put_back(self) -> list[str]:
        """Names of the signals whose handler had been changed."""
        changed = []
        for number, saved in self._saved.items():
            if saved and self._read(number) != saved:
                self._libc.sigaction(int(number), ctypes.create_string_buffer(saved, _SIGACTION_BYTES), None)
                changed.append(number.name)
        return changed


@contextlib.contextmanager
def kept_handlers() -> Iterator[None]:
    """While the body runs (in any thread) and behind it, the handlers of the process stay as they are now."""
    handlers = _Handlers()
    over = threading.Event()
    seen: set[str] = set()

    def watch() -> None:
        while not over.wait(_PERIOD_SECONDS):
            seen.update(handlers.put_back())

    watcher = threading.Thread(target=watch, name="kvtierd-signals", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        seen.update(handlers.put_back())
        if seen:
            _log.info("kvtierd: put back handlers that MemCache had replaced: %s", ", ".join(sorted(seen)))
