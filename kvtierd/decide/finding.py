"""PURE: what a rule finds in a picture, and what rules share: freshness, doubtful numbers, hosts and holders.

A number that is not known, not finite or negative is unknown, and what is unknown or older than the policy allows never
leads to an action: the rule says ``unknown`` and why.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Literal

from kvtierd.decide.policy import Policy
from kvtierd.decide.proposals import AddHolder, Proposal, RemoveHolder
from kvtierd.observe.picture import (
    EnginePicture,
    HostPicture,
    Picture,
    PoolPicture,
    PoolWindow,
    Tier,
    TierWindow,
)
from kvtierd.quantities import GIB, MIB, align_down, format_duration

State = Literal["holds", "between", "clear", "unknown"]
"""holds: above the level at which one acts; clear: below the other level, at which it is over; between: as before."""

HOUR_SECONDS = 3600
_FUTURE_SECONDS = 1.0  # a figure from later than now is not from this clock


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One rule's word about one thing.

    Attributes:
        rule: Which.
        target: What it would change.
        state: Whether its condition holds.
        text: Why, with the numbers.
        proposal: What should be done, when it holds; ``None`` when there is nothing to do.
        key: What its time is counted for: the target, or more finely (a host, a direction).
        waiting: Why there is nothing to do yet.
        until_seconds: Until when, where that is known.
    """

    rule: str
    target: str
    state: State
    text: str
    proposal: Proposal | None = None
    key: str = ""
    waiting: str = ""
    until_seconds: float | None = None

    @property
    def name(self) -> tuple[str, str]:
        """By which the decider knows it again."""
        return (self.rule, self.key or self.target)


@dataclasses.dataclass(frozen=True, slots=True)
class Detached:
    """An engine whose L3 the decider took away. ``times``: how often lately; ``attached``: it has it back."""

    at_seconds: float
    times: int
    attached: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """What rules may know of earlier decisions.

    Attributes:
        detached: By unit, whose L3 was taken away.
        futile_until_seconds: Growing is known to be of no use until then.
        refused_high_percent: At this ``evict_high`` values failed not long ago.
        trial_until_seconds: Whether the last growth was of use is measured until then; ``None``: none is on trial.
        short_nodes: Hosts that had to be relieved of a holder not long ago.
    """

    detached: Mapping[str, Detached] = dataclasses.field(default_factory=dict)
    futile_until_seconds: float = 0.0
    refused_high_percent: int | None = None
    trial_until_seconds: float | None = None
    short_nodes: Set[str] = frozenset()


Rule = Callable[[Picture, Policy, Memory], Iterator[Finding]]


def known(value: float | None) -> float | None:
    """The number, unless it cannot be one."""
    if value is None or not math.isfinite(value) or value < 0:
        return None
    return value


def share(part: float | None, whole: float | None) -> float | None:
    """A part of a whole, 0 to 1; unknown when either is, or when the whole is nothing."""
    part, whole = known(part), known(whole)
    if part is None or not whole:
        return None
    return min(part / whole, 1.0)


def age_problem(what: str, at_seconds: float | None, picture: Picture, policy: Policy) -> str:
    """Why figures are too old to be acted on; "" when they are not."""
    if at_seconds is None or not math.isfinite(at_seconds):
        return f"{what} has not been seen yet"
    age = picture.now_seconds - at_seconds
    if age < -_FUTURE_SECONDS:
        return f"{what} was seen {format_duration(-age)} in the future"
    if age > policy.stale_seconds:
        return f"{what} was seen last {format_duration(age)} ago"
    return ""


def pool_of(picture: Picture, policy: Policy) -> PoolPicture | str:
    """The pool as it is now, or why it is not known."""
    pool = picture.pool
    if not picture.is_master:
        return "the master decides about the pool"
    if pool is None:
        return "the MetaService has not answered yet"
    if known(pool.hung_seconds) != 0:
        return "the MetaService does not answer"
    return age_problem("the pool", pool.at_seconds, picture, policy) or pool


def window_of(pool: PoolPicture, seconds: int) -> PoolWindow | str:
    """The pool's figures over a window, or why there are none."""
    window = pool.windows.get(seconds)
    return window if window is not None else f"it has not been watched for {format_duration(seconds)} yet"


def watched_pool(picture: Picture, policy: Policy, seconds: int) -> tuple[PoolPicture, PoolWindow] | str:
    """The pool as it is now and its figures over a window, or why either is not known."""
    pool = pool_of(picture, policy)
    if isinstance(pool, str):
        return pool
    window = window_of(pool, seconds)
    return window if isinstance(window, str) else (pool, window)


def hit_rate(window: PoolWindow | None) -> float | None:
    """Keys found over keys looked up."""
    return None if window is None else share(window.hit_keys, window.query_keys)


def engine_problem(engine: EnginePicture, picture: Picture, policy: Policy) -> str:
    """Why an engine's figures say nothing now; "" when they do."""
    if engine.instance is None:
        return "it does not run"
    if not engine.ready:
        return "it is not ready"
    if engine.problem:
        return f"its metrics cannot be read: {engine.problem}"
    return age_problem("it", engine.at_seconds, picture, policy)


def tier_of(engine: EnginePicture, seconds: int, tier: Tier) -> TierWindow | None:
    """One tier of one engine over a window."""
    return engine.windows.get(seconds, {}).get(tier)


def tokens(window: TierWindow | None) -> tuple[float | None, float | None]:
    """Tokens asked for and found; unknown unless they are numbers that can be."""
    if window is None:
        return None, None
    return known(window.query_tokens), known(window.hit_tokens)


def hosts_of(picture: Picture, policy: Policy) -> Iterator[HostPicture]:
    """The hosts whose memory is known as it is now, this one first."""
    for host in (*((picture.host,) if picture.host else ()), *sorted(picture.peers, key=lambda p: p.node)):
        if not age_problem(host.node, host.at_seconds, picture, policy):
            yield host


def unit_group(engine: EnginePicture) -> str:
    """The group whose load it shares; an engine without one is its own."""
    return engine.group or engine.unit


# -- holders


@dataclasses.dataclass(frozen=True, slots=True)
class Holder:
    """An added holder. ``bytes``: what it brings, 0 when unknown; ``used_bytes``: of these."""

    node: str
    unit: str
    bytes: int = 0
    used_bytes: int = 0

    @property
    def removal(self) -> RemoveHolder:
        """The action that takes it away."""
        return RemoveHolder(self.node, self.unit, self.bytes)


def holders_of(host: HostPicture, pool: PoolPicture) -> list[Holder]:
    """The added holders of a host, those that cost least to lose first, those whose segment is not known last."""
    brought = {(s.node, s.unit): s for s in pool.segments if s.unit}
    found = []
    for unit in host.holders:
        segment = brought.get((host.node, unit))
        found.append(
            Holder(host.node, unit, segment.total_bytes, segment.used_bytes)
            if segment
            else Holder(host.node, unit)
        )
    return sorted(found, key=lambda h: (h.bytes == 0, h.used_bytes, h.unit))


def holder_to_relieve(host: HostPicture, pool: PoolPicture, missing_bytes: float) -> Holder | None:
    """The smallest added holder that gives a host what it misses, else the largest."""
    found = holders_of(host, pool)
    enough = [h for h in found if h.bytes >= missing_bytes]
    if enough:
        return min(enough, key=lambda h: h.bytes)
    return max(found, key=lambda h: h.bytes, default=None)


def step_bytes(capacity_bytes: int, policy: Policy) -> int:
    """Size of one more holder: as the policy says, or a quarter of the pool."""
    return aligned(policy.grow_step_bytes or capacity_bytes // 4)


def aligned(size_bytes: int) -> int:
    """Downward, to what MemCache takes: 1 GiB where there are whole ones, 2 MiB below."""
    return align_down(size_bytes, GIB if size_bytes >= GIB else 2 * MIB)


def place_for_holder(
    picture: Picture,
    policy: Policy,
    memory: Memory,
    size_bytes: int,
    *,
    least_bytes: int,
    on: str = "",
    but: str = "",
) -> AddHolder | str:
    """Where one more holder fits best: the host with most room, this one among equals; or why nowhere.

    Args:
        picture: The node's.
        policy: For the most holders of a host.
        memory: For hosts that were short not long ago.
        size_bytes: What is wanted.
        least_bytes: Less is not worth it.
        on: Only this host; "" for any.
        but: Not this host.
    """
    told, best, best_room = [], "", 0
    for host in hosts_of(picture, policy):
        if (on and host.node != on) or host.node == but:
            continue
        room = known(host.room_bytes)
        if room is None:
            told.append(f"{host.node}: its room is not known")
        elif host.node in memory.short_nodes:
            told.append(f"{host.node} was short of memory not long ago")
        elif len(host.holders) >= policy.grow_holders:
            told.append(f"{host.node} has {len(host.holders)} added holders already")
        elif min(aligned(int(room)), size_bytes) < max(least_bytes, 2 * MIB):
            told.append(f"{host.node} has no room")
        elif room > best_room:
            best, best_room = host.node, int(room)
    if not best:
        return "; ".join(told) or (f"the memory of {on} is not known" if on else "no host's memory is known")
    return AddHolder(best, min(aligned(best_room), size_bytes))
