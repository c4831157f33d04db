"""A state with everything in it: what every metric, dashboard and page must be able to show."""

from __future__ import annotations

import dataclasses

from kvtierd.events import Event
from kvtierd.observe.families import ClusterFacts, Exported
from kvtierd.observe.meta_log import ERROR_KINDS
from kvtierd.observe.meta_metrics import COUNTERS
from kvtierd.observe.picture import (
    WINDOWS_SECONDS,
    EnginePicture,
    HostPicture,
    NpuPicture,
    NumaPicture,
    Picture,
    PoolPicture,
    PoolWindow,
    SegmentPicture,
    TierWindow,
)
from kvtierd.tier.machine import TierView
from kvtierd.units.unit_state import UnitState
from kvtierd.units.views import UnitView

GIB = 1024**3
NOW = 10_000.0
UNIX = 1_796_000_000.0


def unit(name, kind="engine", state=UnitState.READY, reason="", restarts=1):
    return UnitView(
        f"kvtier-{kind}-{name}", kind, name, state, reason, 5, UNIX - 60, restarts, None, (), False, "run-1", None
    )  # fmt: skip


def engine(number=0, **more):
    tiers = {"L1": TierWindow(1000, 250), "L2": TierWindow(750, 150), "L3": TierWindow(600, 480)}
    figures = {
        "unit": f"kvtier-engine-e{number}", "group": "g", "instance": "run-1", "ready": True,
        "at_seconds": NOW - 1, "registered": True, "windows": dict.fromkeys(WINDOWS_SECONDS, tiers),
        "failed_loads": 2, "failed_loads_windows": dict.fromkeys(WINDOWS_SECONDS, 1),
        "ttft_p50_seconds": 0.09, "ttft_p95_seconds": 1.2,
        "since_hit_seconds": {"L1": 1.0, "L2": 2.0, "L3": 3.0}, "l2_capacity_bytes": 8 * GIB,
        "waiting": 3, "running": 2, "l1_used_ratio": 0.5, "l1_capacity_tokens": 65536, "totals": tiers, "flagged": 1,
    }  # fmt: skip
    return EnginePicture(**(figures | more))


def pool(segments=2, **more):
    window = PoolWindow(12.0, 12e6, 1.5, 4, 900, 5000, 4000)
    figures = {
        "at_seconds": NOW - 1, "instance": "meta-1", "capacity_bytes": 64 * GIB, "used_bytes": 50 * GIB,
        "segments": tuple(
            SegmentPicture(f"rank-{n}-dram", "dram", n, 32 * GIB, 25 * GIB, f"host-{n}") for n in range(segments)
        ),
        "stored_keys": 50_000, "mean_value_bytes": 1e6, "evict_high_percent": 90, "evict_low_percent": 80,
        "windows": dict.fromkeys(WINDOWS_SECONDS, window), "totals": {n: 100 + i for i, n in enumerate(COUNTERS)},
        "log_errors": dict.fromkeys(ERROR_KINDS, 1), "log_evictions": 7, "metrics_at_seconds": NOW - 1,
    }  # fmt: skip
    return PoolPicture(**(figures | more))


def host(**more):
    figures = {
        "node": "host-0", "at_seconds": NOW - 2, "available_bytes": 100 * GIB, "total_bytes": 512 * GIB,
        "headroom_bytes": 4 * GIB, "hugepages": (NumaPicture(0, 32 * GIB, GIB), NumaPicture(1, 32 * GIB, 0)),
        "shm_free_bytes": 64 * GIB, "holders": ("kvtier-pool-extra",), "room_bytes": 16 * GIB,
        "npus": (NpuPicture(0, 0, "910B3", "OK", 64 * GIB, 60 * GIB), NpuPicture(1, 1, "910B3", "Alarm", 64 * GIB, 0)),
        "npus_at_seconds": NOW - 30,
    }  # fmt: skip
    return HostPicture(**(figures | more))


def picture(**more):
    tiers = {"L1": TierWindow(2000, 500), "L2": TierWindow(1500, 300), "L3": TierWindow(1200, 960)}
    figures = {
        "now_seconds": NOW, "node": "host-0", "master": "host-0", "is_master": True, "pool": pool(),
        "engines": (engine(0), engine(1)), "host": host(),
        "peers": (host(node="host-1", at_seconds=NOW - 3, room_bytes=8 * GIB),),
        "tiers": dict.fromkeys(WINDOWS_SECONDS, tiers), "saved_tokens": 123_456,
    }  # fmt: skip
    return Picture(**(figures | more))


def full(**more):
    """Every family of ``DECLARED`` has a value in it."""
    figures = {
        "now_seconds": NOW + 1, "now_unix_seconds": UNIX, "version": "0.6.0", "picture": picture(),
        "units": (unit("meta", "meta"), unit("p0", "pool"), unit("e0"), unit("e1", state=UnitState.DEGRADED, reason="slow")),
        "tier": TierView("joinable", ()),
        "cluster": ClusterFacts("master", "host-0", 7, 0.5, paused=False),
        "problems": ("npu 1 is not well",),
        "events": tuple(
            Event(n, UNIX - 60 + n, ("info", "warning", "error")[n % 3], "unit.ready", "kvtier-engine-e0", f"event {n}")
            for n in range(1, 9)
        ),
        "actions": {("pool-small", "done"): 2, ("zero-hits", "said"): 1},
    }  # fmt: skip
    return Exported(**(figures | more))


def crowded(engines=8, segments=256):
    """A large node's."""
    seen = picture(engines=tuple(engine(n) for n in range(engines)), pool=pool(segments))
    units = (
        unit("meta", "meta"),
        *(unit(f"p{n}", "pool") for n in range(4)),
        *(unit(f"e{n}") for n in range(engines)),
    )
    return dataclasses.replace(full(), picture=seen, units=units)
