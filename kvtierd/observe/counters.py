"""PURE: counters that go on over a restart of their source, and what they did in the last minute, five, and hour.

A source counts from its own start. What is kept here goes on from what was: a restart is seen by a changed instance, or
by a fall. Sources lie (a sum read while it changes, a driver that parsed nonsense), so a value that is no count is set
aside and flagged, and so is a fall that is no restart.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

from kvtierd.observe.picture import WINDOWS_SECONDS

MOST_COUNT = 2.0**53
"""Beyond it a float does not count by ones any more: no counter of ours gets there honestly."""
MOST_NAMES = 512
POINTS = 60
"""How finely a window is kept: 1 s in a minute, a minute in an hour."""
LATE_SECONDS = 10.0
"""A counter that is born with what it counts counts from zero if it appears so much later than its source did."""
_STRETCH = 1.5
"""A window may reach back so many times its length before it is no window of this length any more."""
_MOST_FLAGS = 64


class Change(NamedTuple):
    """What happened between two looks: by how much each counter grew, over how many seconds."""

    seconds: float
    grown: Mapping[str, float]

    def rate(self, name: str) -> float | None:
        """By how much it grew in a second; ``None``: unknown."""
        return self.grown[name] / self.seconds if name in self.grown else None

    def whole(self, name: str) -> int | None:
        """By how much it grew; ``None``: unknown."""
        return round(self.grown[name]) if name in self.grown else None


@dataclasses.dataclass(slots=True)
class _Lifted:
    """One counter. ``raw`` is the highest its source said in this run; ``before`` what was before an inferred restart."""

    raw: float
    total: float = 0.0
    before: tuple[float, float] | None = None

    def take(self, raw: float, *, restarted: bool) -> str:
        """Counts on. Returns what is wrong with the value, "" for nothing."""
        if restarted:
            self.raw, self.total, self.before = raw, self.total + raw, None
            return ""
        if raw >= self.raw:
            if self.before is not None and raw >= self.before[0]:
                # It never was a restart: the one value in between was wrong.
                self.total = self.before[1] + (raw - self.before[0])
                self.raw, self.before = raw, None
                return "came back after a fall: the value in between was not counted"
            self.total += raw - self.raw
            self.raw, self.before = raw, None
            return ""
        if raw > self.raw / 2:
            # A sum read while its parts changed. What was counted stays, and counts again from there on.
            return "fell a little without a restart"
        self.before = (self.raw, self.total)
        self.raw, self.total = raw, self.total + raw
        return "fell, as after a restart"


class Counters:
    """The counters of one source, by name.

    Args:
        windows_seconds: The windows that ``over`` can be asked for.

    ``flags`` says what was wrong with values, newest last, as ``name: what``; at most 64 of them, each once.
    """

    def __init__(self, windows_seconds: tuple[int, ...] = WINDOWS_SECONDS) -> None:
        self._counters: dict[str, _Lifted] = {}
        self._instance: str | None = None
        self._at_seconds = self._began_seconds = -math.inf
        self._rings = {window: _Ring(window) for window in windows_seconds}
        self._late: set[str] = set()
        self._flags: collections.OrderedDict[str, None] = collections.OrderedDict()
        self.flagged = 0

    @property
    def flags(self) -> tuple[str, ...]:
        """What was wrong with values, newest last."""
        return tuple(self._flags)

    @property
    def at_seconds(self) -> float | None:
        """When the newest look was; ``None``: never."""
        return None if self._at_seconds == -math.inf else self._at_seconds

    def total(self, name: str) -> int | None:
        """What it counted since the first look at it; ``None``: it was never seen."""
        counter = self._counters.get(name)
        return None if counter is None else round(counter.total)

    def take(
        self,
        at_seconds: float,
        instance: str | None,
        values: Mapping[str, object],
        *,
        born_late: Collection[str] = (),
    ) -> dict[str, float]:
        """One look at the source.

        Args:
            at_seconds: When, by a monotonic clock. A look that is not newer than the last one is left out.
            instance: The source's run; ``None``: unknown, then only a fall tells of a restart.
            values: What it says. ``None`` is unknown and nothing more; anything else that is no count is flagged.
            born_late: Counters that a source does not have until they count for the first time.

        Returns:
            By how much each counter grew since the look before; without those seen for the first time.
        """
        if not math.isfinite(at_seconds) or at_seconds <= self._at_seconds:
            if at_seconds != self._at_seconds:
                self._flag("time", f"went back or is none ({at_seconds!r})")
            return {}
        restarted = instance is not None and self._instance is not None and instance != self._instance
        if instance is not None:
            self._instance = instance
        if restarted or self._at_seconds == -math.inf:
            self._began_seconds = at_seconds
        self._at_seconds = at_seconds
        grown: dict[str, float] = {}
        seen: dict[str, float] = {}
        for name, value in values.items():
            if value is None:
                continue
            raw, wrong = _count(value)
            if wrong:
                self._flag(name, wrong)
                continue
            counter = self._counters.get(name)
            if counter is None:
                if len(self._counters) >= MOST_NAMES:
                    self._flag("names", f"more than {MOST_NAMES}: the rest is left out")
                    continue
                counter = self._counters[name] = _Lifted(raw)
                if name in born_late and at_seconds - self._began_seconds >= LATE_SECONDS:
                    grown[name] = counter.total = raw
                    self._late.add(name)
            else:
                before = counter.total
                problem = counter.take(raw, restarted=restarted)
                if problem:
                    self._flag(name, problem)
                grown[name] = counter.total - before
            seen[name] = counter.total
        if restarted:  # what this run has not said yet will count from its zero
            for name, counter in self._counters.items():
                if name not in seen:
                    counter.raw, counter.before = 0.0, None
        point = _Point(at_seconds, seen)
        for ring in self._rings.values():
            ring.add(point)
        return grown

    def over(self, window_seconds: int, now_seconds: float) -> Change | None:
        """What happened in the last ``window_seconds``; ``None``: the window is not full yet, or the source went silent.

        A counter that was not known at both ends is not in it.
        """
        ring = self._rings[window_seconds]
        ends = ring.ends(now_seconds)
        if ends is None:
            return None
        first, last = ends
        grown = {
            # An undone restart can take back what was counted before the window began.
            name: max(0.0, total - first.totals.get(name, 0.0))
            for name, total in last.totals.items()
            if name in first.totals or name in self._late
        }
        return Change(last.at_seconds - first.at_seconds, grown)

    def _flag(self, name: str, what: str) -> None:
        self.flagged += 1
        text = f"{name[:80]}: {what}"
        self._flags.pop(text, None)
        self._flags[text] = None
        while len(self._flags) > _MOST_FLAGS:
            self._flags.popitem(last=False)


class _Point(NamedTuple):
    at_seconds: float
    totals: Mapping[str, float]


class _Ring:
    """The looks of one window, not closer than a sixtieth of it: memory does not grow with how often one looks."""

    def __init__(self, window_seconds: int) -> None:
        self._window = window_seconds
        self._spacing = window_seconds / POINTS
        self._points: collections.deque[_Point] = collections.deque(maxlen=int(POINTS * _STRETCH) + 2)
        self._last: _Point | None = None

    def add(self, point: _Point) -> None:
        self._last = point
        # A look that comes a little early counts as in time: loops are never exact.
        if not self._points or point.at_seconds - self._points[-1].at_seconds >= 0.9 * self._spacing:
            self._points.append(point)
        # One look at or before the window's beginning stays: from there the difference is taken.
        while len(self._points) > 1 and self._points[1].at_seconds <= point.at_seconds - self._window:
            self._points.popleft()

    def ends(self, now_seconds: float) -> tuple[_Point, _Point] | None:
        last = self._last
        if last is None or not 0 <= now_seconds - last.at_seconds <= self._window / 2:
            return None
        first = self._points[0]
        reach = last.at_seconds - first.at_seconds
        if not self._window <= reach <= self._window * _STRETCH:
            return None
        return first, last


def _count(value: object) -> tuple[float, str]:
    """A value as a count, or what is wrong with it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0, "is no number"
    try:
        raw = float(value)
    except OverflowError:
        return 0.0, "is too large to be a count"
    if not math.isfinite(raw):
        return 0.0, "is NaN or infinite"
    if raw < 0:
        return 0.0, "is negative"
    if raw > MOST_COUNT:
        return 0.0, "is too large to be a count"
    return raw, ""
