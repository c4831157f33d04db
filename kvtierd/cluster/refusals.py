"""What was refused, by peer and cause: every time counted, logged once.

A peer that does something wrong does it again and again; a log full of it would hide everything else. A pair that has
been quiet for a while is logged again when it comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import structlog

from kvtierd.cluster.clock import boottime_seconds

QUIET_SECONDS = 600.0
MOST_PAIRS = 512  # whoever makes names up gets no more memory than that
OTHERS = "(others)"

_log = structlog.get_logger(__name__)


class Refusals:
    """The counters of one node."""

    def __init__(self, now: Callable[[], float] = boottime_seconds) -> None:
        self._now = now
        self._counts: dict[tuple[str, str], int] = {}
        self._last_seconds: dict[tuple[str, str], float] = {}

    @property
    def counts(self) -> Mapping[tuple[str, str], int]:
        """By peer (or address, of a stranger) and cause."""
        return self._counts

    def note(self, peer: str, cause: str, why: str = "", *, what: str = "refused") -> None:
        """Counts a refusal (or another trouble, if ``what`` says so) and logs it unless that was done lately."""
        key = (peer, cause)
        if key not in self._counts and len(self._counts) >= MOST_PAIRS:
            key = (OTHERS, cause)
        now = self._now()
        last = self._last_seconds.get(key)
        self._counts[key] = self._counts.get(key, 0) + 1
        self._last_seconds[key] = now
        if last is None or now - last > QUIET_SECONDS:
            _log.warning(what, peer=key[0], cause=cause, why=why, times=self._counts[key])
