"""PURE: do the eviction thresholds fit the size of the values?

A put is refused when the value finds no room, and eviction begins only above ``evict_high``. So the room above
``evict_high``, of one segment, must hold some values: at 99 % a value of 1 % of the segment never leads to an eviction, it
fails, again and again. The other way round, what lies above the threshold is memory that nobody uses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from kvtierd.decide.finding import (
    HOUR_SECONDS,
    Finding,
    Memory,
    known,
    share,
    watched_pool,
)
from kvtierd.decide.policy import Policy
from kvtierd.decide.proposals import POOL, Action, Advise, Proposal, SetThresholds, Severity, direction_of
from kvtierd.observe.picture import Picture, PoolPicture, PoolWindow
from kvtierd.quantities import format_size

RULE = "thresholds"
LEAST_ALLOCATIONS = 20  # fewer say nothing about how many fail
STEP_PERCENT = 5
RAISE_MARGIN = 2.0  # so many times what the values need must stay free after raising
RAISE_TURNOVERS = 0.25  # an hour: a pool that evicts less gains nothing


def thresholds(picture: Picture, policy: Policy, memory: Memory) -> Iterator[Finding]:
    """Lower them when values fail for lack of room above them; raise them when much is free for nothing."""
    watched = watched_pool(picture, policy, policy.window)
    if isinstance(watched, str):
        yield Finding(RULE, POOL, "unknown", watched, key="lower")
        return
    pool, window = watched
    high, low = pool.evict_high_percent, pool.evict_low_percent
    need = _need_percent(pool, policy)
    if high is None or low is None or need is None or not 0 < low < high < 100:
        yield Finding(
            RULE, POOL, "unknown", "thresholds, size of values or segments are not known", key="lower"
        )
        return
    yield _lower(pool, window, policy, high, low, need)
    yield _raise(pool, window, policy, memory, high, low, need)


def _need_percent(pool: PoolPicture, policy: Policy) -> float | None:
    """The room that values need above the threshold, in percent of the smallest segment."""
    mean = known(pool.mean_value_bytes)
    smallest = min((s.total_bytes for s in pool.segments if s.total_bytes > 0), default=0)
    room = smallest or known(pool.capacity_bytes)
    if mean is None or not room:
        return None
    return 100.0 * policy.value_headroom * mean / room


def _lower(
    pool: PoolPicture, window: PoolWindow, policy: Policy, high: int, low: int, need: float
) -> Finding:
    asked, failing = (
        known(window.allocations),
        share(window.failed_allocations, window.allocations or window.failed_allocations),
    )
    use = share(pool.used_bytes, pool.capacity_bytes)
    if asked is None or use is None or (failing is None and asked > 0):
        return Finding(RULE, POOL, "unknown", "allocations or use are not known", key="lower")
    if failing is None or asked < LEAST_ALLOCATIONS:
        return Finding(RULE, POOL, "clear", f"{asked:.0f} allocations in the window", key="lower")
    text = (
        f"{failing:.1%} of {asked:.0f} allocations failed at {use:.0%} use; eviction begins at {high} %, values of"
        f" {format_size(int(pool.mean_value_bytes or 0))} need {need:.1f} % above it"
    )
    if failing == 0 or 100 * use < low - need:
        return Finding(RULE, POOL, "clear", text, key="lower")
    if failing < policy.failed_allocations:
        return Finding(RULE, POOL, "between", text, key="lower")
    wanted = max(policy.evict_high_least, min(high - STEP_PERCENT, math.floor(100 - min(need, 99))))
    action: Action
    if wanted >= high:
        action = Advise(
            f"values fail though eviction begins at {high} %, the least that the policy allows: larger segments are needed"
            " (fewer holders of more memory), or smaller blocks"
        )
    else:
        action = SetThresholds(wanted, max(1, wanted - (high - low)))
    return _finding(
        action, "lower", text, high, {"failed_share": failing, "use": use, "need_percent": need, "high_percent": high},
        expected="allocations fail no more; some percent of the pool stay free for it",
    )  # fmt: skip


def _raise(
    pool: PoolPicture, window: PoolWindow, policy: Policy, memory: Memory, high: int, low: int, need: float
) -> Finding:
    hour = pool.windows.get(HOUR_SECONDS)
    turnovers = known(hour.turnovers_per_hour) if hour else None
    failed = known(hour.failed_allocations) if hour else None
    if turnovers is None or failed is None or known(window.failed_allocations) is None:
        return Finding(
            RULE, POOL, "unknown", "a whole hour of evictions and failures is not known yet", key="raise"
        )
    wanted = min(policy.evict_high_most, high + STEP_PERCENT, (memory.refused_high_percent or 100) - 1)
    text = (
        f"no allocation failed for an hour at {turnovers:.2f} turnovers; {100 - high} % are kept free and values need"
        f" {need:.1f} %"
    )
    if failed or window.failed_allocations or wanted <= high or 100 - wanted < need * RAISE_MARGIN:
        refused = memory.refused_high_percent
        told = f"; at {refused} % they failed not long ago" if refused else ""
        return Finding(
            RULE, POOL, "clear", f"{100 - high} % are kept free; values need {need:.1f} %{told}", key="raise"
        )
    if turnovers < RAISE_TURNOVERS:
        return Finding(RULE, POOL, "between", text, key="raise")
    return _finding(
        SetThresholds(wanted, wanted - min(high - low, wanted - 1)), "raise", text, high,
        {"turnovers_per_hour": turnovers, "need_percent": need}, expected="more of the pool is used", severity="info",
    )  # fmt: skip


def _finding(
    action: Action,
    key: str,
    text: str,
    high: int,
    numbers: dict[str, float | int | str],
    *,
    expected: str,
    severity: Severity = "warning",
) -> Finding:
    proposal = Proposal(
        RULE, POOL, action, text, severity=severity, numbers=numbers, expected=expected,
        verified_by="the MetaService evicts at the new threshold; failed allocations in the next window",
        direction=direction_of(action, high_now_percent=high),
    )  # fmt: skip
    return Finding(RULE, POOL, "holds", text, proposal, key=key)
