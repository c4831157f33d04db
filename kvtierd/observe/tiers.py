"""PURE: from what engines and the MetaService say to one line a tier.

Hit rates come from token counters since the engines' start, not from the log line's window. L1 is asked first;
what it misses is asked of L2, then of L3, so the tiers' query counts differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal

from kvtierd.memcache.health import PoolState
from kvtierd.plan.engine import EngineObservation
from kvtierd.tier.machine import TierView

TierState = Literal["ready", "degraded", "down", "unknown"]


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One engine's observation and when it was taken: by the wall clock, and by CLOCK_BOOTTIME for ages."""

    at_unix_seconds: float
    observation: EngineObservation
    at_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class TierLine:
    """One tier over all engines of the node. ``None`` is unknown."""

    name: str
    where: str
    state: TierState
    reason: str = ""
    capacity_bytes: int | None = None
    used_bytes: int | None = None
    capacity_tokens: int | None = None
    query_tokens: int | None = None
    hit_tokens: int | None = None
    age_seconds: float | None = None

    @property
    def hit_rate(self) -> float | None:
        """Hits over queries; unknown without queries."""
        if not self.query_tokens or self.hit_tokens is None:
            return None
        return self.hit_tokens / self.query_tokens


def tier_lines(
    samples: Sequence[Sample],
    pool: PoolState | None,
    pool_at_unix_seconds: float | None,
    tier: TierView,
    now: float,
    *,
    fresh_seconds: float = 10.0,
) -> tuple[TierLine, ...]:
    """The node's tiers: L1 (each engine's device memory), L2 if any engine has one, L3 (the pool).

    Args:
        samples: the newest observation of each engine; engines that never answered are left out.
        pool: the pool as last seen, ``None`` if it does not answer.
        pool_at_unix_seconds: when that was.
        tier: the pool's state.
        now: unix seconds.
        fresh_seconds: engines' figures older than this are shown, but not as if all were well.
    """
    seen = [s.observation for s in samples]
    age = max((now - s.at_unix_seconds for s in samples), default=None)
    lines = [
        TierLine(
            "L1",
            "engine (HBM)",
            *_engine_state(age, fresh_seconds),
            capacity_tokens=_sum(o.l1_capacity_tokens or o.kv_tokens for o in seen),
            query_tokens=_sum(o.l1_query_tokens for o in seen),
            hit_tokens=_sum(o.l1_hit_tokens for o in seen),
            age_seconds=age,
        )
    ]
    if any(o.l2_query_tokens is not None for o in seen):
        lines.append(
            TierLine(
                "L2",
                "engine (host DRAM)",
                "ready",
                capacity_tokens=_sum(o.l2_capacity_tokens for o in seen),
                query_tokens=_sum(o.l2_query_tokens for o in seen),
                hit_tokens=_sum(o.l2_hit_tokens for o in seen),
                age_seconds=age,
            )
        )
    pool_age = None if pool_at_unix_seconds is None else now - pool_at_unix_seconds
    lines.append(
        TierLine(
            "L3",
            "pool (DRAM)",
            _pool_state(tier),
            "; ".join(tier.reasons),
            capacity_bytes=pool.capacity.dram.total_bytes if pool else None,
            used_bytes=pool.capacity.dram.used_bytes if pool else None,
            query_tokens=_sum(o.l3_query_tokens for o in seen),
            hit_tokens=_sum(o.l3_hit_tokens for o in seen),
            age_seconds=max((a for a in (pool_age, age) if a is not None), default=None),
        )
    )
    return tuple(lines)


def _engine_state(age: float | None, fresh_seconds: float) -> tuple[TierState, str]:
    if age is None:
        return "unknown", "no engine has answered yet"
    if age > fresh_seconds:
        return "degraded", f"the newest figures of an engine are {age:.0f} s old"
    return "ready", ""


def _pool_state(tier: TierView) -> TierState:
    if tier.state == "joinable":
        return "ready"
    return "down" if tier.state == "down" else "degraded"


def _sum(values: Iterable[int | None]) -> int | None:
    known = [v for v in values if v is not None]
    return sum(known) if known else None
