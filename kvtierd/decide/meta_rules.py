"""PURE: a MetaService that hangs, or that refuses allocations though there is room.

The supervisor kills one that fails its probes for 10 seconds. These rules are for what it does not see: probes that
still pass, or an operator who changed them.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvtierd.decide.finding import Finding, Memory, known, share, watched_pool
from kvtierd.decide.policy import Policy
from kvtierd.decide.proposals import POOL, Advise, Proposal, RestartUnit
from kvtierd.decide.threshold_rules import LEAST_ALLOCATIONS
from kvtierd.observe.picture import Picture
from kvtierd.plan.units import META_ID
from kvtierd.quantities import format_duration

ROOM_SHARE = 0.8  # of evict_low: below it there is room, and no reason for an allocation to fail
DEFAULT_LOW_PERCENT = 80


def meta_hung(picture: Picture, policy: Policy, _memory: Memory) -> Iterator[Finding]:
    """It runs and does not answer."""
    rule = "meta-hung"
    pool = picture.pool
    hung = None if pool is None else known(pool.hung_seconds)
    if not picture.is_master or hung is None:
        why = "the MetaService has not answered yet" if picture.is_master else "no MetaService is wanted here"
        yield Finding(rule, POOL, "unknown", why)
    elif hung == 0:
        yield Finding(rule, POOL, "clear", "the MetaService answers")
    else:
        text = f"the MetaService runs and has not answered for {format_duration(hung)}"
        if hung < policy.meta_hung_seconds:
            yield Finding(rule, POOL, "between", text)
            return
        yield Finding(rule, POOL, "holds", text, Proposal(
            rule, POOL, RestartUnit(META_ID), text, severity="error", urgent=True, numbers={"hung_seconds": hung},
            expected="clients come back within seconds; the pool may be purged first",
            verified_by="it answers, its instance is another one, and the segments are back",
        ))  # fmt: skip


def alloc_failing(picture: Picture, policy: Policy, _memory: Memory) -> Iterator[Finding]:
    """Allocations fail though there is room for them."""
    rule = "alloc-failing"
    watched = watched_pool(picture, policy, policy.window)
    if isinstance(watched, str):
        yield Finding(rule, POOL, "unknown", watched)
        return
    pool, window = watched
    capacity, asked, failed = (
        known(pool.capacity_bytes),
        known(window.allocations),
        known(window.failed_allocations),
    )
    if capacity is None or asked is None or failed is None:
        yield Finding(rule, POOL, "unknown", "capacity or allocations are not known")
        return
    if asked < LEAST_ALLOCATIONS:
        yield Finding(rule, POOL, "clear", f"{asked:.0f} allocations in the window")
        return
    failing = share(failed, asked) or 0.0
    text = f"{failing:.0%} of {asked:.0f} allocations failed"
    numbers: dict[str, float | int | str] = {"failed_share": failing, "capacity_bytes": int(capacity)}
    if failing < policy.alloc_failing / 2:
        yield Finding(rule, POOL, "clear", text)
        return
    if failing < policy.alloc_failing:
        yield Finding(rule, POOL, "between", text)
        return
    if not capacity:
        advice = Advise("the pool has no memory: no pool holder has joined; see kvtierctl status for why")
        yield Finding(rule, POOL, "holds", text, Proposal(
            rule, POOL, advice, f"{text}; no segment is there", severity="error", numbers=numbers,
        ))  # fmt: skip
        return
    use = share(pool.used_bytes, pool.capacity_bytes)
    low = pool.evict_low_percent or DEFAULT_LOW_PERCENT
    if use is None:
        yield Finding(rule, POOL, "unknown", f"{text}; how full the pool is is not known")
        return
    text = f"{text} at {use:.0%} use"
    if 100 * use >= low * ROOM_SHARE:
        yield Finding(
            rule, POOL, "clear", f"{text}: for lack of room, which thresholds and pool-small see to"
        )
        return
    yield Finding(rule, POOL, "holds", text, Proposal(
        rule, POOL, RestartUnit(META_ID), f"{text}: there is room, so the MetaService is at fault", severity="error",
        numbers={**numbers, "use": use}, expected="allocations succeed again",
        verified_by="failed allocations in the next window",
    ))  # fmt: skip
