"""PURE: what mmc-meta.log says: evictions and errors, counted.

The file's lines and those of stdout have different shapes, and the eviction line has had three forms since 2025. A key
can hold any text, so only what stands behind a line's own header counts. How many keys were evicted, the line says
before it has happened: the metrics are better where they are there.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Final

ERROR_KINDS: Final = ("miss", "no-room", "duplicate", "heartbeat", "config", "link", "other")

# 2026-11-29 16:10:43.856478 8 info [MMC file.cpp:304 Function] text, and <date> INFO [8-8][MMC file.cpp:12 func] text
_DATE: Final = rb"\d{4}-\d\d-\d\d [\d:.]{8,15} "
_INFO: Final = re.compile(_DATE + rb"(?:\d+ info |INFO \[[\d-]+\] ?)\[\w+ [^\]\n]*\] ")
_ANY_LEVEL: Final = re.compile(_DATE + rb"\d+ \w+ \[\w+ [^\]\n]*\] ")
# MemCache 1.3.0, with the log level info or trace; at others a change of thresholds is silent.
_RELOADED: Final = b"Meta service config hot-reloaded, "
_THRESHOLDS: Final = re.compile(rb"evictThresholdHigh=(\d{1,3}), evictThresholdLow=(\d{1,3})")
_BEFORE_LEVEL: Final = re.compile(rb"\d{4}-\d\d-\d\d [\d:.]{8,15}(?: \d+)?")
# Looked for in a whole block at once, several times faster than looking at each line.
_EVICTIONS: Final = (b"Evicted ", b"Touched threshold evict, ")
_ERRORS: Final = tuple(
    text
    for level in (b"error", b"critical", b"fatal")
    for text in (b" %b [" % level, b" %b [" % level.upper())
)
_EVICTED: Final = re.compile(
    rb"Evicted (\d{1,20}) keys from (\w+)\.(?: Number of keys: (\d{1,20}) => (\d{1,20}))?"
)
_TOUCHED: Final = re.compile(rb"Touched threshold evict, total size: (\d{1,20}), evict size: (\d{1,20})")
_KINDS: Final = (
    ("miss", re.compile(rb"-3102\b")),
    ("duplicate", re.compile(rb"-3006\b")),
    ("no-room", re.compile(rb"[Aa]lloc\w* .{0,40}fail|failed to allocate|Simple alloc failed")),
    ("config", re.compile(rb"Invalid value for <|Invalid new evict thresholds")),
    ("heartbeat", re.compile(rb"[Hh]eart ?[Bb]eat")),
    ("link", re.compile(rb"\b(?:link|connect\w*|socket|reconnect\w*)\b", re.IGNORECASE)),
)
_MOST_KEYS: Final = 2**40


@dataclasses.dataclass(slots=True)
class MetaLogCounts:
    """What was counted, since its making.

    Attributes:
        evictions: Eviction lines.
        evicted_keys: Keys that they tell of, as planned.
        odd_evictions: Lines of an empty list, whose count wrapped around; they add no keys.
        thresholds: High and low in percent as it took them over last while it ran; ``None``: it has not said so.
        errors: Kind (``ERROR_KINDS``) -> lines. One miss of a get is two lines of the level error.
    """

    evictions: int = 0
    evicted_keys: int = 0
    odd_evictions: int = 0
    thresholds: tuple[int, int] | None = None
    errors: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(ERROR_KINDS, 0))

    def add(self, lines: bytes) -> None:
        """Counts whole lines, in any encoding."""
        for word in _EVICTIONS:
            for text in _from(lines, word, _INFO):
                if match := _EVICTED.match(text):
                    self._add_evicted(match)
                elif match := _TOUCHED.match(text):
                    self._count(int(match[2]))
        for text in _from(lines, _RELOADED, _ANY_LEVEL):
            if match := _THRESHOLDS.search(text):
                self.thresholds = (int(match[1]), int(match[2]))
        for word in _ERRORS:
            for text in _from(lines, word, _BEFORE_LEVEL):
                self.errors[_kind(text)] += 1

    def _add_evicted(self, match: re.Match[bytes]) -> None:
        if match[3] is not None and int(match[4]) > int(match[3]):  # 0 => 18446744073709551615
            self.evictions += 1
            self.odd_evictions += 1
        else:
            self._count(int(match[1]))

    def _count(self, keys: int) -> None:
        self.evictions += 1
        if keys < _MOST_KEYS:
            self.evicted_keys += keys
        else:
            self.odd_evictions += 1


def _from(lines: bytes, word: bytes, header: re.Pattern[bytes]) -> Iterator[bytes]:
    """The text from ``word`` to the line's end, for each line that has nothing but this header in front of it."""
    at = 0
    while (at := lines.find(word, at)) >= 0:
        if header.fullmatch(lines, lines.rfind(b"\n", 0, at) + 1, at):
            end = lines.find(b"\n", at)
            end = len(lines) if end < 0 else end
            yield lines[at:end]
            at = end
        else:
            at += len(word)


def _kind(text: bytes) -> str:
    text = text[:2048]
    return next((kind for kind, pattern in _KINDS if pattern.search(text)), "other")
