"""PURE: what a MetaService's /metrics says, as far as kvtierd reads it.

Names and meanings as measured on memcache_hybrid 1.3.0 (recorded in tests/fixtures/memcache): ``alloc_*`` and
``exist_key_*`` count keys, those of batches included, while ``batch_*`` count calls; ``evict_operations_total`` counts
keys; ``query_hit_keys_total`` leaves out what ``exist_key`` found. Families of other names are not looked at.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvtierd.errors import MemcacheError
from kvtierd.plan.samples import Sample as OurSample
from kvtierd.plan.samples import only_samples, read_samples

PREFIX: Final = "memcache_"
MOST_SEGMENTS: Final = 4096
MOST_CHARS: Final = 2 * 1024**2
_MOST_PROBLEMS: Final = 8
_SHOWN_CHARS: Final = 120

# Ours -> MemCache's: a counter of ours is the sum of these.
_COUNTERS: Final[Mapping[str, tuple[str, ...]]] = {
    "evicted_keys": ("evict_operations_total",),
    "allocations": ("alloc_requests_total",),
    "failed_allocations": ("alloc_failures_total",),
    "looked_up_keys": ("exist_key_requests_total", "query_requests_total"),
    "found_keys": ("exist_key_successes_total", "query_hit_keys_total"),
    "get_keys": ("get_requests_total",),
    "missed_get_keys": ("get_not_found_total",),
    "failed_get_keys": ("get_failures_total",),
    "ssd_hits": ("get_hits_ssd_total",),
    "rewarmed_bytes": ("rewarm_bytes_total",),
    "flushed_bytes": ("flush_bytes_total",),
}
COUNTERS: Final = tuple(_COUNTERS)
_SEGMENT: Final[Mapping[str, str]] = {
    f"{PREFIX}segment_capacity_bytes": "capacity_bytes",
    f"{PREFIX}segment_allocated_bytes": "allocated_bytes",
    f"{PREFIX}segment_fragmentation_bytes": "fragmentation_bytes",
}
_MEDIUM: Final[Mapping[str, str]] = {
    f"{PREFIX}total_capacity_bytes": "capacity_bytes",
    f"{PREFIX}allocated_bytes": "allocated_bytes",
}
_STORED: Final = f"{PREFIX}stored_keys"
_NAMES: Final = frozenset(
    {
        _STORED,
        *_MEDIUM,
        *(f"{PREFIX}{name}" for names in _COUNTERS.values() for name in names),
    }
)


@dataclasses.dataclass(slots=True)
class Room:
    """Room of a segment or a medium in bytes; ``None`` is unknown."""

    capacity_bytes: int | None = None
    allocated_bytes: int | None = None
    fragmentation_bytes: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class MetaMetrics:
    """One scrape.

    Attributes:
        counters: Those of ``COUNTERS`` that are there, as the service says them: for ``Counters.take``, which judges them.
        stored_keys: Keys at present.
        segments: By name.
        media: By MemCache's word: ``dram``, ``hbm``.
        problems: What was not as it should be, at most 8; what they name is unknown.
    """

    counters: Mapping[str, float]
    stored_keys: int | None = None
    segments: Mapping[str, Room] = dataclasses.field(default_factory=dict)
    media: Mapping[str, Room] = dataclasses.field(default_factory=dict)
    problems: tuple[str, ...] = ()


def read_meta_metrics(text: str) -> MetaMetrics:
    """Reads one scrape.

    Args:
        text: The body, in Prometheus' text format.

    Raises:
        MemcacheError: (``memcache.metrics``) it has more than 2 Mi characters, or there is no metric of MemCache's: a web
            page, another service, an empty answer.
    """
    if len(text) > MOST_CHARS:
        raise _unreadable(f"they have {len(text)} characters; the limit is {MOST_CHARS}")
    lines = only_samples(text, _NAMES)
    if not lines and not any(name in text for name in _SEGMENT):
        begin = " ".join(text[: 4 * _SHOWN_CHARS].split())[:_SHOWN_CHARS]
        kind = "a web page" if begin.lower().startswith(("<!doctype", "<html")) else "no metric of MemCache's"
        raise _unreadable(
            f"the answer is {kind}: it begins with {begin!r}" if begin else "the answer is empty"
        )
    problems: list[str] = []
    counts: dict[str, float] = {}
    segments: dict[str, Room] = {}
    media: dict[str, Room] = {}
    stored_keys = None
    for name, found in _segment_samples(text, problems).items():
        for labels, value in found:
            _note_room(segments, labels.get("segment"), name, _SEGMENT[name], value, problems)
    for name, labels, value, *_ in _samples(lines, problems):
        if name in _MEDIUM:
            _note_room(media, labels.get("medium"), name, _MEDIUM[name], value, problems)
        elif name == _STORED:
            stored_keys = _whole(name, value, problems)
        else:
            counts[name] = counts.get(name, 0.0) + value
    counters = {
        ours: sum(counts[PREFIX + theirs] for theirs in names if PREFIX + theirs in counts)
        for ours, names in _COUNTERS.items()
        if any(PREFIX + theirs in counts for theirs in names)
    }
    return MetaMetrics(counters, stored_keys, segments, media, tuple(problems[:_MOST_PROBLEMS]))


def _segment_samples(text: str, problems: list[str]) -> Mapping[str, Sequence[OurSample]]:
    """There can be hundreds of segments, at every scrape: read by what is many times faster than a general parser."""
    try:
        return read_samples(text, _SEGMENT)
    except ValueError as error:
        problems.append(str(error)[:_SHOWN_CHARS])
        return {}


def _samples(lines: str, problems: list[str]) -> Iterable[Sample]:
    """All samples; where a line is none, the others one by one: one bad line must not cost the rest."""
    try:
        return [sample for family in text_string_to_metric_families(lines) for sample in family.samples]
    except (ValueError, TypeError, IndexError):
        found: list[Sample] = []
        for line in lines.splitlines():
            try:
                found += [s for family in text_string_to_metric_families(f"{line}\n") for s in family.samples]
            except (ValueError, TypeError, IndexError):
                problems.append(f"not a sample: {line[:_SHOWN_CHARS]!r}")
        return found


def _note_room(
    rooms: dict[str, Room], key: str | None, name: str, field: str, value: float, problems: list[str]
) -> None:
    if not key:
        problems.append(f"{name} does not say whose it is")
        return
    if key not in rooms and len(rooms) >= MOST_SEGMENTS:
        problems.append(f"more than {MOST_SEGMENTS} segments: the rest is left out")
        return
    setattr(rooms.setdefault(key, Room()), field, _whole(f"{name}{{{key[:40]}}}", value, problems))


def _whole(name: str, value: float, problems: list[str]) -> int | None:
    if not math.isfinite(value) or value < 0 or value >= 2**63:
        problems.append(f"{name} is {value:g}")
        return None
    return int(value)


def _unreadable(why: str) -> MemcacheError:
    return MemcacheError(
        "the MetaService's metrics cannot be read",
        why=why,
        hint="is something else listening on [meta] metrics_port?",
        code="memcache.metrics",
    )
