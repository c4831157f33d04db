"""Traffic and mishaps, and what must hold in each: how much better, with how many actions at most."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

from .world import GIB, MIB

VALUE = 16 * MIB
A_TICK = 60  # lookups: 3 a second


@functools.cache
def weights(count, exponent):
    return tuple(itertools.accumulate(1 / (i + 1) ** exponent for i in range(count)))


def zipf(world, count, exponent, lookups=A_TICK, *, name="z", size=VALUE, node="a"):
    for key in world.rng.choices(range(count), cum_weights=weights(count, exponent), k=lookups):
        yield (name, key), size, node


def fresh(world, now, lookups, *, size=VALUE, node="a"):
    """Keys that nobody asks for again."""
    for i in range(lookups):
        yield ("once", now, i), size, node


@dataclasses.dataclass(frozen=True)
class Scenario:
    """``gain``: hit rate that acting must bring at least; ``most_turns``: changes of direction at most."""

    name: str
    traffic: Callable
    gain: float
    most_actions: int
    most_turns: int = 0
    least_actions: int = 0
    events: Callable | None = None
    hours: float = 6.0
    pool: tuple = (("a", 16 * GIB), ("b", 16 * GIB))
    hosts: tuple = (("a", 128 * GIB, 60 * GIB), ("b", 256 * GIB, 160 * GIB))
    thresholds: tuple = (90, 80)
    local_first: bool = False
    engines: int = 0
    failing: float = 0.0
    action_seconds: float = 60.0
    quiet_at_the_end: bool = True


def small_pool(world, now):
    return zipf(world, 20_000, 0.8)


def fitting(world, now):
    return zipf(world, 2_500, 0.8)


def bursts(world, now):
    """A pool that fits, and every 40 minutes 4 minutes of keys that are asked for once."""
    yield from zipf(world, 1_500, 0.9)
    if now % 2400 < 240:
        yield from fresh(world, now, 60)


def lukewarm(world, now):
    """Evicts, but less than the level; misses much."""
    yield from zipf(world, 300, 0.9, 15)
    yield from fresh(world, now, 8)


def diurnal(world, now):
    """Between a pool that fits and one that is far too small, once in 4 hours."""
    swing = 0.5 - 0.5 * math.cos(2 * math.pi * now / (4 * 3600))
    return zipf(world, int(2_000 + 16_000 * swing), 0.8, int(20 + 60 * swing))


def scan(world, now):
    """Round and round over much more than the pool: least recently used is always what comes next."""
    start = int(now / 20) * A_TICK
    for i in range(A_TICK):
        yield ("scan", (start + i) % 60_000), VALUE, "a"


def one_hit_wonders(world, now):
    """A small hot set, and twice as many keys that never come again."""
    yield from zipf(world, 500, 0.9, 20)
    yield from fresh(world, now, 40)


def scan_between(world, now):
    """A working set that is a little too large, with a scan of an hour in the middle."""
    yield from zipf(world, 6_000, 0.8, 40)
    if 2 * 3600 <= now < 3 * 3600:
        yield from fresh(world, now, 60)


def large_values(world, now):
    """2 % of the pool each; at 99 % they never lead to an eviction."""
    return zipf(world, 120, 0.9, 20, size=660 * MIB)


def one_sided(world, now):
    """All writers are on a, whose part of the pool is small; b's lies idle."""
    return zipf(world, 3_000, 0.8)


def short_later(world, now):
    """After three hours something else needs b's memory."""
    world.hosts[1].other_bytes = (160 if now < 3 * 3600 else 234) * GIB


def tide(world, now):
    """Something needs b's memory for a quarter of every hour."""
    world.hosts[1].other_bytes = (160 if now % 3600 < 2700 else 234) * GIB


def spikes(world, now):
    """Once b has holders, its memory is short for a moment every five minutes."""
    world.hosts[1].other_bytes = (234 if now > 2 * 3600 and now % 300 == 0 else 160) * GIB


def blind(world, now):
    """The MetaService's figures stand still, at their worst, from a moment on."""
    if now >= 1400:
        world.pool_frozen_at = now


def losing_engines(world, now):
    """Every engine loses its registration a few minutes after it has come back."""
    if now % 300 == 0:
        for engine in world.engines[:-1]:
            if engine.ready:
                engine.registered = False


def paused(world, now):
    world.paused = True


B_FULL = (("a", 128 * GIB, 100 * GIB), ("b", 256 * GIB, 160 * GIB))

SCENARIOS = [
    Scenario("too small", small_pool, gain=0.05, least_actions=2, most_actions=8),
    Scenario("fits", fitting, gain=-0.001, most_actions=0),
    Scenario("bursts", bursts, gain=-0.001, most_actions=0),
    Scenario("lukewarm", lukewarm, gain=-0.001, most_actions=0),
    Scenario("diurnal", diurnal, gain=0.03, least_actions=1, most_actions=8, hours=8.0, quiet_at_the_end=False),
    Scenario("scan", scan, gain=-0.001, most_actions=2),
    Scenario("one-hit wonders", one_hit_wonders, gain=0.0, most_actions=4),
    Scenario("scan between", scan_between, gain=0.0, most_actions=5),
    Scenario("large values", large_values, gain=0.04, least_actions=1, most_actions=8, thresholds=(99, 90)),
    Scenario("one-sided", one_sided, gain=0.05, least_actions=1, most_actions=6, local_first=True,
             pool=(("a", 8 * GIB), ("b", 24 * GIB))),
    Scenario("memory gets short", small_pool, gain=0.02, least_actions=3, most_actions=12, most_turns=1,
             events=short_later, hosts=B_FULL),
    Scenario("tide", small_pool, gain=-0.01, least_actions=2, most_actions=8, most_turns=1, events=tide, hosts=B_FULL,
             quiet_at_the_end=False),
    Scenario("spikes of memory", small_pool, gain=0.05, least_actions=2, most_actions=8, events=spikes),
    Scenario("figures stand still", small_pool, gain=-0.001, most_actions=0, events=blind),
    Scenario("engines get lost", fitting, gain=-0.001, least_actions=4, most_actions=24, events=losing_engines, engines=6,
             quiet_at_the_end=False),
    Scenario("actions fail", small_pool, gain=-0.001, least_actions=2, most_actions=8, failing=1.0,
             quiet_at_the_end=False),
    Scenario("slow actions", small_pool, gain=0.03, least_actions=1, most_actions=8, action_seconds=840.0,
             quiet_at_the_end=False),
    Scenario("paused", small_pool, gain=-0.001, most_actions=0, events=paused),
]  # fmt: skip
