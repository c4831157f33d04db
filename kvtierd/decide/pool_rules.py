"""PURE: is the pool as large as its traffic needs, and is its memory where it is needed?

A pool is too small when it turns over often *and* misses much: turnover alone is what a scan makes, and a scan misses in
any pool. So a growth is also on trial (``decider``): two in a row that did not raise the hit rate end the growing.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvtierd.decide.finding import (
    HOUR_SECONDS,
    Finding,
    Memory,
    hit_rate,
    holder_to_relieve,
    holders_of,
    hosts_of,
    known,
    place_for_holder,
    pool_of,
    share,
    step_bytes,
    watched_pool,
)
from kvtierd.decide.policy import Policy
from kvtierd.decide.proposals import (
    POOL,
    Action,
    AddHolder,
    Advise,
    Proposal,
    Rebalance,
    Severity,
    direction_of,
)
from kvtierd.observe.picture import HostPicture, Picture, PoolPicture
from kvtierd.quantities import format_size

CLEAR_HIT_RATE = 0.05  # so much above grow_hit_rate it is over
IDLE_TURNOVERS = 0.05  # an hour: less is no eviction to speak of
IDLE_USE_AFTER = 0.6  # the pool may be so full after a holder has gone
SHORT_CLEAR = 1.25  # of the reserve
UNBALANCED_CLEAR = 0.6  # of the difference at which it fires
LEAST_STEP = 0.5  # of the step: a smaller holder is not worth a rank


def pool_small(picture: Picture, policy: Policy, memory: Memory) -> Iterator[Finding]:
    """Sustained turnover with a poor or falling hit rate."""
    rule = "pool-small"
    watched = watched_pool(picture, policy, policy.window)
    if isinstance(watched, str):
        yield Finding(rule, POOL, "unknown", watched)
        return
    pool, window = watched
    hour = pool.windows.get(HOUR_SECONDS) if policy.window < HOUR_SECONDS else None
    # Eviction comes in bursts of a tenth of the pool, so a short window sees none or too much of it: the hour, once there.
    turnovers = known((hour or window).turnovers_per_hour)
    queries, rate = known(window.query_keys), hit_rate(window)
    capacity = known(pool.capacity_bytes)
    if turnovers is None or queries is None or not capacity:
        yield Finding(rule, POOL, "unknown", "turnovers, lookups or capacity are not known")
        return
    if queries < policy.min_queries or rate is None:
        yield Finding(rule, POOL, "clear", f"{queries:.0f} keys looked up say nothing about the hit rate")
        return
    before = hit_rate(hour)
    drop = 0.0 if before is None else before - rate
    text = f"the pool turns over {turnovers:.2f} times an hour at a hit rate of {rate:.0%}" + (
        f" ({before:.0%} over the last hour)" if before is not None else ""
    )
    poor = rate < policy.grow_hit_rate or drop >= policy.grow_hit_rate_drop
    fine = rate >= policy.grow_hit_rate + CLEAR_HIT_RATE and drop < policy.grow_hit_rate_drop / 2
    if turnovers < policy.grow_turnovers / 2 or fine:
        yield Finding(rule, POOL, "clear", text)
    elif turnovers < policy.grow_turnovers or not poor:
        yield Finding(rule, POOL, "between", text)
    elif known(window.turnovers_per_hour) == 0:
        yield Finding(rule, POOL, "between", f"{text}, but nothing is evicted now")
    elif memory.trial_until_seconds is not None:
        yield Finding(
            rule, POOL, "holds", text, waiting="whether the last growth is of use is still being measured",
            until_seconds=memory.trial_until_seconds,
        )  # fmt: skip
    else:
        step = step_bytes(int(capacity), policy)
        numbers: dict[str, float | int | str] = {
            "turnovers_per_hour": turnovers,
            "hit_rate": rate,
            "capacity_bytes": int(capacity),
            "query_keys": int(queries),
        }
        yield _grow(picture, policy, memory, text, step, numbers)


def _grow(
    picture: Picture,
    policy: Policy,
    memory: Memory,
    text: str,
    step: int,
    numbers: dict[str, float | int | str],
) -> Finding:
    action: Action
    if memory.futile_until_seconds > picture.now_seconds:
        action = Advise(
            "more memory did not raise the hit rate lately: prefixes repeat too rarely for this pool, or too far apart; "
            "see which engine asks for what never comes back"
        )
    else:
        place = place_for_holder(picture, policy, memory, step, least_bytes=int(step * LEAST_STEP))
        if isinstance(place, AddHolder):
            action = place
        elif any(h.room_bytes is not None for h in hosts_of(picture, policy)):
            action = Advise(f"the pool is too small and no host has room for more: {place}")
        else:
            return Finding("pool-small", POOL, "unknown", f"{text}; but {place}")
    return _finding(
        "pool-small", action, text, numbers=numbers, expected="a higher hit rate, fewer turnovers",
        verified_by="capacity grows by the holder's size; the hit rate is compared after the window has passed",
    )  # fmt: skip


def pool_idle(picture: Picture, policy: Policy, _memory: Memory) -> Iterator[Finding]:
    """Hardly used and nothing evicted: an added holder can go back to its host."""
    rule = "pool-idle"
    watched = watched_pool(picture, policy, HOUR_SECONDS)
    if isinstance(watched, str):
        yield Finding(rule, POOL, "unknown", watched)
        return
    pool, window = watched
    use, turnovers = share(pool.used_bytes, pool.capacity_bytes), known(window.turnovers_per_hour)
    if use is None or turnovers is None:
        yield Finding(rule, POOL, "unknown", "use or turnovers are not known")
        return
    text = f"{use:.0%} of the pool is used and it turns over {turnovers:.2f} times an hour"
    if use > policy.idle_use + 0.1 or turnovers > 2 * IDLE_TURNOVERS:
        yield Finding(rule, POOL, "clear", text)
        return
    if use > policy.idle_use or turnovers > IDLE_TURNOVERS:
        yield Finding(rule, POOL, "between", text)
        return
    victims = (holder for host in hosts_of(picture, policy) for holder in holders_of(host, pool))
    victim = min((v for v in victims if v.bytes), key=lambda v: (v.used_bytes, v.unit), default=None)
    numbers: dict[str, float | int | str] = {"use": use, "turnovers_per_hour": turnovers}
    if victim is None:
        advice = Advise("the pool is larger than its traffic needs: [pool] dram can be smaller")
        yield _finding(rule, advice, text, numbers=numbers, severity="info")
        return
    capacity, used = pool.capacity_bytes or 0, pool.used_bytes or 0
    after = share(used, capacity - victim.bytes)
    if after is None or after > IDLE_USE_AFTER:
        yield Finding(rule, POOL, "holds", f"{text}; but without {victim.unit} it would be too full")
        return
    yield _finding(
        rule, victim.removal, text, numbers=numbers, severity="info", expected="memory of the host is free again",
        verified_by="capacity falls by the holder's size, the host's available memory rises",
    )  # fmt: skip


def host_short(picture: Picture, policy: Policy, memory: Memory) -> Iterator[Finding]:
    """A host has less memory than must stay for it: an added holder there goes, or moves to a host with room."""
    rule = "host-short"
    pool = pool_of(picture, policy)
    if isinstance(pool, str):
        yield Finding(rule, POOL, "unknown", pool)
        return
    for host in hosts_of(picture, policy):
        available = known(host.available_bytes)
        if available is None:
            yield Finding(rule, POOL, "unknown", f"{host.node}: its memory is not known", key=host.node)
            continue
        text = (
            f"{host.node} has {format_size(int(available))} available, {format_size(host.headroom_bytes)}"
            " must stay for it"
        )
        if available >= host.headroom_bytes * SHORT_CLEAR:
            yield Finding(rule, POOL, "clear", text, key=host.node)
        elif available >= host.headroom_bytes:
            yield Finding(rule, POOL, "between", text, key=host.node)
        else:
            yield _finding(
                rule, _relieve(host, pool, picture, policy, memory), text, key=host.node, severity="error", urgent=True,
                numbers={"available_bytes": int(available), "headroom_bytes": host.headroom_bytes},
                expected="the host has its reserve again",
                verified_by="the holder's segment is gone and the host's available memory rises",
            )  # fmt: skip


def _relieve(
    host: HostPicture, pool: PoolPicture, picture: Picture, policy: Policy, memory: Memory
) -> Action:
    victim = holder_to_relieve(
        host, pool, host.headroom_bytes * SHORT_CLEAR - (known(host.available_bytes) or 0)
    )
    if victim is None:
        return Advise(
            f"{host.node} is short of memory and has no added pool holder: make [pool] dram smaller, or see what takes it"
        )
    window = pool.windows.get(policy.window)
    turnovers = known(window.turnovers_per_hour) if window else None
    if victim.bytes and turnovers is not None and turnovers >= policy.grow_turnovers / 2:
        place = place_for_holder(
            picture, policy, memory, victim.bytes, least_bytes=int(victim.bytes * LEAST_STEP), but=host.node
        )
        if isinstance(place, AddHolder):
            return Rebalance(place, victim.removal)
    return victim.removal


def pool_unbalanced(picture: Picture, policy: Policy, memory: Memory) -> Iterator[Finding]:
    """One node's segments are full and evict while another's have room."""
    rule = "pool-unbalanced"
    watched = watched_pool(picture, policy, policy.window)
    if isinstance(watched, str):
        yield Finding(rule, POOL, "unknown", watched)
        return
    pool, window = watched
    uses = _use_by_node(pool)
    evicted = known(window.evicted_keys_per_second)
    if uses is None or evicted is None:
        yield Finding(rule, POOL, "unknown", "whose segments they are, or what is evicted, is not known")
        return
    if len(uses) < 2:
        yield Finding(rule, POOL, "clear", "one node has all segments")
        return
    (full, most), (idle, least) = max(uses.items(), key=_by_use), min(uses.items(), key=_by_use)
    text = f"{full} uses {most:.0%} of its part of the pool, {idle} {least:.0%}; {evicted:.1f} keys/s are evicted"
    pressed = evicted > 0 or bool(known(window.failed_allocations))
    if most - least < policy.unbalanced * UNBALANCED_CLEAR or not pressed:
        yield Finding(rule, POOL, "clear", text)
    elif most - least < policy.unbalanced:
        yield Finding(rule, POOL, "between", text)
    else:
        yield _finding(
            rule, _balance(full, idle, pool, picture, policy, memory), text,
            numbers={"most_used": most, "least_used": least, "evicted_keys_per_second": evicted},
            expected=f"{full} evicts less", verified_by="the difference in use between the two nodes falls",
        )  # fmt: skip


def _by_use(item: tuple[str, float]) -> tuple[float, str]:
    return (item[1], item[0])


def _use_by_node(pool: PoolPicture) -> dict[str, float] | None:
    total: dict[str, int] = {}
    used: dict[str, int] = {}
    for segment in pool.segments:
        if not segment.node:
            return None
        total[segment.node] = total.get(segment.node, 0) + segment.total_bytes
        used[segment.node] = used.get(segment.node, 0) + segment.used_bytes
    return {node: min(used[node] / size, 1.0) for node, size in total.items() if size > 0} or None


def _balance(
    full: str, idle: str, pool: PoolPicture, picture: Picture, policy: Policy, memory: Memory
) -> Action:
    host = next((h for h in hosts_of(picture, policy) if h.node == idle), None)
    spare = next((h for h in holders_of(host, pool) if h.bytes), None) if host else None
    size = spare.bytes if spare else step_bytes(pool.capacity_bytes or 0, policy)
    place = place_for_holder(picture, policy, memory, size, least_bytes=int(size * LEAST_STEP), on=full)
    if not isinstance(place, AddHolder):
        return Advise(
            f"the pool's memory is on {idle} and its writers on {full}, which cannot take more: {place}; move an engine"
            f" to {idle}, or give {full} a larger [pool] dram"
        )
    return Rebalance(place, spare.removal) if spare else place


def idle_memory(picture: Picture, policy: Policy, _memory: Memory) -> Iterator[Finding]:
    """A host's memory lies idle for good while the pool evicts: the settings could give it to the pool."""
    rule = "idle-memory"
    watched = watched_pool(picture, policy, HOUR_SECONDS)
    if isinstance(watched, str):
        yield Finding(rule, POOL, "unknown", watched)
        return
    _, window = watched
    turnovers = known(window.turnovers_per_hour)
    for host in hosts_of(picture, policy):
        room, of = known(host.room_bytes), share(host.room_bytes, host.total_bytes)
        if turnovers is None or room is None or of is None:
            yield Finding(
                rule, POOL, "unknown", f"{host.node}: room or turnovers are not known", key=host.node
            )
            continue
        text = (
            f"{host.node} has room for {format_size(int(room))} more ({of:.0%} of its memory) while the pool turns over"
            f" {turnovers:.2f} times an hour"
        )
        if turnovers < policy.grow_turnovers / 8 or of < policy.idle_room / 2:
            yield Finding(rule, POOL, "clear", text, key=host.node)
        elif turnovers < policy.grow_turnovers / 4 or of < policy.idle_room:
            yield Finding(rule, POOL, "between", text, key=host.node)
        else:
            yield _finding(
                rule, Advise(f"[pool] dram of {host.node} can be larger by up to {format_size(int(room))}"), text,
                key=host.node, severity="info", numbers={"room_bytes": int(room), "turnovers_per_hour": turnovers},
            )  # fmt: skip


def _finding(
    rule: str,
    action: Action,
    text: str,
    *,
    numbers: dict[str, float | int | str],
    key: str = "",
    severity: Severity = "warning",
    urgent: bool = False,
    expected: str = "",
    verified_by: str = "",
) -> Finding:
    proposal = Proposal(
        rule, POOL, action, text, severity=severity, urgent=urgent, numbers=numbers,
        expected=expected, verified_by=verified_by, direction=direction_of(action),
    )  # fmt: skip
    return Finding(rule, POOL, "holds", text, proposal, key=key)
