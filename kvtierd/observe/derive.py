"""PURE: from looks at a node's sources to its picture. Keeps what figures need of the past; reads no clock.

Hit rates come from token counters, not from the window of an engine's log line. A figure that cannot be, such as more
hits than lookups, is unknown and said in ``Picture.problems``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Final

from kvtierd.memcache.health import PoolState
from kvtierd.observe.counters import Change, Counters
from kvtierd.observe.meta_log import MetaLogCounts
from kvtierd.observe.meta_metrics import COUNTERS, MetaMetrics
from kvtierd.observe.picture import (
    WINDOWS_SECONDS,
    EngineIdentity,
    EnginePicture,
    HostPicture,
    Picture,
    PoolPicture,
    PoolWindow,
    SegmentPicture,
    Tier,
    TierWindow,
)
from kvtierd.observe.quantiles import quantile
from kvtierd.plan.engine import EngineObservation

TIERS: Final[tuple[Tier, ...]] = ("L1", "L2", "L3")
TTFT_WINDOW_SECONDS: Final = 300
MOST_BUCKETS: Final = 64
MOST_PROBLEMS: Final = 32
SLACK: Final = 1.1
"""Hits and lookups are not counted at the same moment: so much more hits than lookups in a window are believed."""
_FAILED_LOADS: Final = "failed_loads"
_LOG_EVICTED: Final = "log_evicted_keys"


@dataclasses.dataclass(frozen=True, slots=True)
class EngineLook:
    """What is known of one engine now. See ``EnginePicture`` for the fields of the same name.

    ``observation`` is the newest there is, ``at_seconds`` when it was made; an old one may be given again and again.
    """

    unit: str
    group: str = ""
    instance: str | None = None
    ready: bool = False
    observation: EngineObservation | None = None
    at_seconds: float | None = None
    problem: str = ""
    uses_pool: bool = True
    registered: bool | None = None
    can_switch_l3: bool = False
    l3_detached: bool = False
    hash_seed: str | None = None
    model: str = ""
    block_tokens: int | None = None
    l2_capacity_bytes: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PoolLook:
    """What the MetaService of this node says now.

    Attributes:
        instance: Its run; ``None``: it does not run here.
        state: Its answer over REST, the newest of this run; ``None``: there is none now.
        state_at_seconds: When that was made.
        metrics: Its metrics, the newest of this run.
        metrics_at_seconds: When they were read.
        metrics_problem: Why they cannot be read now.
        log: What its log told since kvtierd's start; ``None``: it is not followed.
        evict_high_percent, evict_low_percent: The thresholds in force.
        owners: Rank -> its node and unit, where that is known.
    """

    instance: str | None
    state: PoolState | None = None
    state_at_seconds: float | None = None
    metrics: MetaMetrics | None = None
    metrics_at_seconds: float | None = None
    metrics_problem: str = ""
    log: MetaLogCounts | None = None
    evict_high_percent: int | None = None
    evict_low_percent: int | None = None
    owners: Mapping[int, tuple[str, str]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """One look at a node. ``pool`` is ``None`` where the MetaService is another node's."""

    now_seconds: float
    node: str
    master: str = ""
    is_master: bool = False
    engines: tuple[EngineLook, ...] = ()
    pool: PoolLook | None = None
    host: HostPicture | None = None
    peers: tuple[HostPicture, ...] = ()
    engines_elsewhere: tuple[EngineIdentity, ...] = ()


class Derivation:
    """Takes looks one after another and makes pictures of them."""

    def __init__(self) -> None:
        self._engines: dict[str, _Engine] = {}
        self._pool = _Pool()
        self._saved_tokens: int | None = None

    def take(self, look: Look) -> Picture:
        """The picture after this look."""
        for gone in self._engines.keys() - {engine.unit for engine in look.engines}:
            del self._engines[gone]
        problems: list[str] = []
        engines = []
        for seen in look.engines:
            engine = self._engines.setdefault(seen.unit, _Engine())
            saved = engine.take(seen)
            if saved is not None:
                self._saved_tokens = (self._saved_tokens or 0) + saved
            engines.append(engine.picture(seen, look.now_seconds, problems))
        pool = self._pool.picture(look.pool, look.now_seconds, problems) if look.pool is not None else None
        return Picture(
            now_seconds=look.now_seconds,
            node=look.node,
            master=look.master,
            is_master=look.is_master,
            pool=pool,
            engines=tuple(engines),
            host=look.host,
            peers=look.peers,
            engines_elsewhere=look.engines_elsewhere,
            tiers=_together(engines),
            saved_tokens=self._saved_tokens,
            problems=tuple(problems[-MOST_PROBLEMS:]),
        )


class _Engine:
    """One engine's past."""

    def __init__(self) -> None:
        self._counters = Counters()
        self._hit_at_seconds: dict[Tier, float] = {}
        self._read_in: str | None = None  # the run that was read last
        self._newest: EngineObservation | None = None

    def take(self, seen: EngineLook) -> int | None:
        """Counts on. Returns the tokens saved since the look before, ``None`` when nothing is known of it."""
        observation, at_seconds = seen.observation, seen.at_seconds
        if observation is None or at_seconds is None or at_seconds == self._counters.at_seconds:
            return None
        values: dict[str, object] = {_FAILED_LOADS: observation.failed_loads}
        for tier in TIERS:
            values[f"{tier}_query"], values[f"{tier}_hit"] = _tokens(observation, tier)
        for bound, count in sorted((observation.ttft_buckets or {}).items())[-MOST_BUCKETS:]:
            values[f"ttft:{bound!r}"] = count
        grown = self._counters.take(at_seconds, seen.instance, values, born_late={_FAILED_LOADS})
        self._read_in, self._newest = seen.instance, observation
        hits = {tier: grown[f"{tier}_hit"] for tier in TIERS if f"{tier}_hit" in grown}
        for tier, tokens in hits.items():
            if tokens > 0:
                self._hit_at_seconds[tier] = at_seconds
        return round(sum(hits.values())) if hits else None

    def picture(self, seen: EngineLook, now_seconds: float, problems: list[str]) -> EnginePicture:
        counters = self._counters
        problems += [f"{seen.unit}: {flag}" for flag in counters.flags]
        changes = {
            w: change for w in WINDOWS_SECONDS if (change := counters.over(w, now_seconds)) is not None
        }
        ttft = _buckets(changes.get(TTFT_WINDOW_SECONDS))
        fresh = seen.instance is not None and self._read_in == seen.instance
        newest = (self._newest if fresh else None) or EngineObservation()
        return EnginePicture(
            unit=seen.unit,
            group=seen.group,
            instance=seen.instance,
            ready=seen.ready,
            at_seconds=counters.at_seconds if fresh else None,
            problem=seen.problem,
            uses_pool=seen.uses_pool,
            registered=seen.registered,
            can_switch_l3=seen.can_switch_l3,
            l3_detached=seen.l3_detached,
            hash_seed=seen.hash_seed,
            model=seen.model,
            block_tokens=seen.block_tokens,
            windows={
                w: tiers for w, change in changes.items() if (tiers := _tiers(change, seen.unit, problems))
            },
            failed_loads=counters.total(_FAILED_LOADS),
            failed_loads_windows={
                w: count
                for w, change in changes.items()
                if (count := change.whole(_FAILED_LOADS)) is not None
            },
            ttft_p50_seconds=quantile(ttft, 0.5),
            ttft_p95_seconds=quantile(ttft, 0.95),
            since_hit_seconds={t: max(0.0, now_seconds - at) for t, at in self._hit_at_seconds.items()},
            l2_capacity_bytes=seen.l2_capacity_bytes,
            waiting=newest.waiting,
            running=newest.running,
            l1_used_ratio=_share(newest.l1_used_ratio),
            l1_capacity_tokens=newest.l1_capacity_tokens or newest.kv_tokens,
            totals={
                tier: TierWindow(counters.total(f"{tier}_query"), counters.total(f"{tier}_hit"))
                for tier in TIERS
                if counters.total(f"{tier}_query") is not None or counters.total(f"{tier}_hit") is not None
            },
            flagged=counters.flagged,
        )


class _Pool:
    """The MetaService's past."""

    def __init__(self) -> None:
        self._counters = Counters()
        self._log = Counters()
        self._instance: str | None = None
        self._answered_seconds = -math.inf
        self._answered = False
        self._flagged = 0
        self._last: PoolPicture | None = None

    def picture(self, seen: PoolLook, now_seconds: float, problems: list[str]) -> PoolPicture | None:
        if seen.log is not None:
            self._log.take(now_seconds, "log", {_LOG_EVICTED: seen.log.evicted_keys})
        if seen.instance is None:
            return None
        if seen.instance != self._instance:
            self._instance, self._answered, self._last = seen.instance, False, None
            self._answered_seconds = now_seconds
        metrics = seen.metrics
        if metrics is not None and seen.metrics_at_seconds is not None:
            if seen.metrics_at_seconds != self._counters.at_seconds:
                self._flagged += len(metrics.problems)
                self._counters.take(seen.metrics_at_seconds, seen.instance, metrics.counters)
            problems += [f"MetaService: {problem}" for problem in metrics.problems]
        problems += [f"MetaService: {flag}" for flag in self._counters.flags]
        answers = [a for a in (seen.state_at_seconds, seen.metrics_at_seconds) if a is not None]
        if seen.state is not None or metrics is not None:
            self._answered = True
            self._answered_seconds = max(self._answered_seconds, *answers) if answers else now_seconds
        return self._figures(seen, now_seconds)

    def _figures(self, seen: PoolLook, now_seconds: float) -> PoolPicture:
        state, metrics, last = seen.state, seen.metrics, self._last
        dram = metrics.media.get("dram") if metrics is not None else None
        capacity = used = stored = mean = None
        segments: tuple[SegmentPicture, ...] = ()
        if state is not None:
            capacity, used = state.capacity.dram.total_bytes, state.capacity.dram.used_bytes
            segments = tuple(_segments(state, seen.owners))
        elif last is not None:
            capacity, used, segments = last.capacity_bytes, last.used_bytes, last.segments
        elif dram is not None:
            capacity, used = dram.capacity_bytes, dram.allocated_bytes
        if metrics is not None:
            stored = metrics.stored_keys
            in_use = dram.allocated_bytes if dram is not None else None
            mean = in_use / stored if in_use is not None and stored else None
        silent = state is None and self._instance is not None
        made = PoolPicture(
            at_seconds=self._answered_seconds,
            instance=seen.instance or "",
            capacity_bytes=capacity,
            used_bytes=used,
            segments=segments,
            stored_keys=stored,
            mean_value_bytes=mean,
            evict_high_percent=seen.evict_high_percent,
            evict_low_percent=seen.evict_low_percent,
            windows=self._windows(now_seconds, capacity, mean),
            hung_seconds=max(0.0, now_seconds - self._answered_seconds) if silent else 0.0,
            totals={n: total for n in COUNTERS if (total := self._counters.total(n)) is not None},
            log_errors=dict(seen.log.errors) if seen.log is not None else {},
            told_thresholds=seen.log.thresholds if seen.log is not None else None,
            log_evictions=seen.log.evictions if seen.log is not None else None,
            metrics_at_seconds=seen.metrics_at_seconds,
            problem=seen.metrics_problem,
            flagged=self._flagged + self._counters.flagged,
        )
        self._last = made if self._answered else None
        return made

    def _windows(self, now_seconds: float, capacity: int | None, mean: float | None) -> dict[int, PoolWindow]:
        windows = {}
        for window in WINDOWS_SECONDS:
            change = self._counters.over(window, now_seconds)
            told = self._log.over(window, now_seconds)
            if change is None:
                # The log's count is of what was planned: better than nothing, where the metrics cannot be had.
                if told is None or self._counters.at_seconds is not None:
                    continue
                change = Change(told.seconds, {"evicted_keys": told.grown.get(_LOG_EVICTED, 0.0)})
            keys = change.rate("evicted_keys")
            evicted = 0.0 if keys == 0 else None if keys is None or mean is None else keys * mean
            windows[window] = PoolWindow(
                evicted_keys_per_second=keys,
                evicted_bytes_per_second=evicted,
                turnovers_per_hour=evicted * 3600 / capacity if evicted is not None and capacity else None,
                failed_allocations=change.whole("failed_allocations"),
                allocations=change.whole("allocations"),
                query_keys=change.whole("looked_up_keys"),
                hit_keys=change.whole("found_keys"),
            )
        return windows


def _tokens(observation: EngineObservation, tier: Tier) -> tuple[int | None, int | None]:
    return {
        "L1": (observation.l1_query_tokens, observation.l1_hit_tokens),
        "L2": (observation.l2_query_tokens, observation.l2_hit_tokens),
        "L3": (observation.l3_query_tokens, observation.l3_hit_tokens),
    }[tier]


def _tiers(change: Change, unit: str, problems: list[str]) -> dict[Tier, TierWindow]:
    """The tiers that anything is known of in this window."""
    found: dict[Tier, TierWindow] = {}
    for tier in TIERS:
        queries, hits = change.whole(f"{tier}_query"), change.whole(f"{tier}_hit")
        if queries is None and hits is None:
            continue
        if queries is not None and hits is not None and hits > queries:
            if hits > queries * SLACK + 1:
                problems.append(f"{unit}: {hits} tokens hit in {tier} of {queries} looked up: left out")
                hits = None
            else:
                hits = queries
        found[tier] = TierWindow(queries, hits)
    return found


def _together(engines: Iterable[EnginePicture]) -> dict[int, dict[Tier, TierWindow]]:
    """The tiers of all engines. One that does not know both its lookups and its hits is in neither sum."""
    sums: dict[int, dict[Tier, TierWindow]] = {}
    for engine in engines:
        for window, tiers in engine.windows.items():
            for tier, figures in tiers.items():
                if figures.query_tokens is None or figures.hit_tokens is None:
                    continue
                so_far = sums.setdefault(window, {}).get(tier, TierWindow(0, 0))
                sums[window][tier] = TierWindow(
                    (so_far.query_tokens or 0) + figures.query_tokens,
                    (so_far.hit_tokens or 0) + figures.hit_tokens,
                )
    return sums


def _segments(state: PoolState, owners: Mapping[int, tuple[str, str]]) -> Iterable[SegmentPicture]:
    for segment in state.segments:
        rank = segment.rank
        node, unit = owners.get(rank, ("", "")) if rank is not None else ("", "")
        yield SegmentPicture(
            segment.name, segment.medium, rank, segment.total_bytes, segment.used_bytes, node, unit
        )


def _buckets(change: Change | None) -> dict[float, float]:
    if change is None:
        return {}
    prefix = "ttft:"
    return {
        float(name[len(prefix) :]): grown for name, grown in change.grown.items() if name.startswith(prefix)
    }


def _share(value: float | None) -> float | None:
    return value if value is not None and 0 <= value <= 1 else None
