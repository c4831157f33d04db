"""Saying on stderr what is being waited for."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any


class progress:  # noqa: N801 - used like a function
    """A line that says what is being waited for: rewritten on a terminal, one line a change elsewhere."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._terminal = sys.stderr.isatty()
        self._last = ""
        self._status: Any = None
        self._started = time.monotonic()

    @property
    def terminal(self) -> bool:
        """Somebody watches: what changes often may be shown."""
        return self._terminal and not self._quiet

    def __enter__(self) -> Callable[[str], None]:
        if self._terminal and not self._quiet:
            from rich.console import Console

            self._status = Console(stderr=True).status("")
        return self._say

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def _say(self, text: str) -> None:
        if self._quiet or text == self._last:
            return
        self._last = text
        if self._status is not None:
            if text:
                self._status.update(text)
                self._status.start()
            else:
                self._status.stop()
        elif text:
            print(f"[{time.monotonic() - self._started:5.1f}s] {text}", file=sys.stderr, flush=True)
