"""Pictures of a node where all is well; tests change what they are about."""

import dataclasses

from kvtierd.decide.decider import Decider
from kvtierd.decide.finding import Memory
from kvtierd.decide.policy import default_policy
from kvtierd.decide.rules import REGISTRY
from kvtierd.observe.picture import (
    EnginePicture,
    HostPicture,
    Picture,
    PoolPicture,
    PoolWindow,
    SegmentPicture,
    TierWindow,
)

GIB = 1024**3
MIB = 1024**2
NOW = 100_000.0

QUIET = PoolWindow(
    evicted_keys_per_second=0.0,
    evicted_bytes_per_second=0.0,
    turnovers_per_hour=0.0,
    failed_allocations=0,
    allocations=5000,
    query_keys=10_000,
    hit_keys=9_000,
)
PRESSED = dataclasses.replace(QUIET, evicted_keys_per_second=20.0, turnovers_per_hour=3.0, hit_keys=4_000)


def policy(**changes):
    """The defaults with a shorter hold, so that times in tests are round."""
    return dataclasses.replace(default_policy(), **{"grow_hold_seconds": 300.0, **changes})


def pool(window=QUIET, *, hour=None, **changes):
    values = {
        "at_seconds": NOW - 1,
        "instance": "1",
        "capacity_bytes": 64 * GIB,
        "used_bytes": 50 * GIB,
        "segments": (
            SegmentPicture("rank-0-dram", "cpu", 0, 32 * GIB, 25 * GIB, "a", "kvtier-pool-0"),
            SegmentPicture("rank-1-dram", "cpu", 1, 32 * GIB, 25 * GIB, "b", "kvtier-pool-0"),
        ),
        "stored_keys": 25_600,
        "mean_value_bytes": 2.0 * MIB,
        "evict_high_percent": 90,
        "evict_low_percent": 80,
        "windows": {60: window, 300: window, 3600: hour or window},
    }
    return PoolPicture(**{**values, **changes})


def host(node="a", **changes):
    values = {
        "node": node,
        "at_seconds": NOW - 2,
        "available_bytes": 100 * GIB,
        "total_bytes": 512 * GIB,
        "headroom_bytes": 16 * GIB,
        "room_bytes": 20 * GIB,
    }
    return HostPicture(**{**values, **changes})


HITS = {
    "L1": TierWindow(1_000_000, 300_000),
    "L2": TierWindow(700_000, 100_000),
    "L3": TierWindow(600_000, 300_000),
}


def engine(name="one", *, hour=HITS, failed=0, **changes):
    values = {
        "unit": f"kvtier-engine-{name}",
        "group": "chat",
        "instance": "7",
        "ready": True,
        "at_seconds": NOW - 1,
        "registered": True,
        "can_switch_l3": True,
        "hash_seed": "0",
        "model": "qwen",
        "block_tokens": 128,
        "windows": {3600: hour},
        "failed_loads": 0,
        "failed_loads_windows": {60: failed, 300: failed, 3600: failed},
    }
    return EnginePicture(**{**values, **changes})


def picture(**changes):
    values = {
        "now_seconds": NOW,
        "node": "a",
        "master": "a",
        "is_master": True,
        "pool": pool(),
        "engines": (engine("one"), engine("two")),
        "host": host("a"),
        "peers": (host("b", room_bytes=40 * GIB),),
        "tiers": {3600: HITS},
    }
    return Picture(**{**values, **changes})


def at(seconds, scene):
    """The same scene later: everything in it is as fresh."""
    by = seconds - scene.now_seconds
    return dataclasses.replace(
        scene,
        now_seconds=seconds,
        pool=scene.pool and dataclasses.replace(scene.pool, at_seconds=scene.pool.at_seconds + by),
        host=scene.host and dataclasses.replace(scene.host, at_seconds=scene.host.at_seconds + by),
        peers=tuple(dataclasses.replace(p, at_seconds=p.at_seconds + by) for p in scene.peers),
        engines=tuple(
            dataclasses.replace(e, at_seconds=None if e.at_seconds is None else e.at_seconds + by)
            for e in scene.engines
        ),
    )


def findings(rule, scene, a_policy=None, memory=None):
    return list(REGISTRY[rule](scene, a_policy or policy(), memory or Memory()))


def play(decider: Decider, scene, seconds, *, step=None, around=None, succeed=True):
    """Steps through so many seconds of an unchanging scene; the proposals with their times."""
    step = step or (5.0 if seconds <= 2000 else 20.0)
    fired, now = [], scene.now_seconds
    end = now + seconds
    while now <= end:
        for proposal in decider.step(at(now, scene), around):
            fired.append((now - scene.now_seconds, proposal))
            if succeed is not None:
                decider.outcome(proposal.id, ok=succeed, text="test", now_seconds=now)
        now += step
    return fired


def verdict(decider, rule, key=None):
    return next(e for e in decider.explain() if e.rule == rule and key in {None, e.key})
