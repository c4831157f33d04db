"""PURE: the picture of a node: what was seen, when, and what follows from it. The input of rules, exporter and status.

Everything that may be unknown is ``None``: unknown is never zero. Times are seconds of one monotonic clock
(``CLOCK_BOOTTIME``), so that an age is ``now_seconds - at_seconds``; nothing here is compared with a wall clock. Counters
are *lifted*: they go on over a restart of their source, which began again with zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

Tier = Literal["L1", "L2", "L3"]
"""L1: device memory of the engine; L2: host memory of the engine; L3: the pool."""


@dataclasses.dataclass(frozen=True, slots=True)
class TierWindow:
    """One tier over one window, from token counters. Of all engines, or of one."""

    query_tokens: int | None = None
    hit_tokens: int | None = None

    @property
    def hit_rate(self) -> float | None:
        """Hits over queries, 0 to 1; unknown without queries."""
        if not self.query_tokens or self.hit_tokens is None:
            return None
        return self.hit_tokens / self.query_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentPicture:
    """The part of the pool that one rank brings. ``node``, ``unit``: whose it is, where that is known."""

    name: str
    medium: str
    rank: int | None
    total_bytes: int
    used_bytes: int
    node: str = ""
    unit: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class PoolWindow:
    """The pool over one window, from the MetaService's counters.

    Attributes:
        evicted_keys_per_second: From ``evict_operations_total``, which counts keys.
        evicted_bytes_per_second: The same by the mean size of stored keys.
        turnovers_per_hour: Evicted bytes over capacity.
        failed_allocations: Allocations that found no room.
        allocations: All that were asked for.
        query_keys: Keys looked up.
        hit_keys: Of these, found.
    """

    evicted_keys_per_second: float | None = None
    evicted_bytes_per_second: float | None = None
    turnovers_per_hour: float | None = None
    failed_allocations: int | None = None
    allocations: int | None = None
    query_keys: int | None = None
    hit_keys: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PoolPicture:
    """The pool as its MetaService describes it; only the master has one.

    Attributes:
        at_seconds: When it was seen.
        instance: The MetaService's run.
        capacity_bytes: DRAM of all segments.
        used_bytes: Of these, taken.
        segments: By name.
        stored_keys: Keys at present.
        mean_value_bytes: Used bytes over stored keys.
        evict_high_percent: The threshold in force, by the files; eviction begins above.
        evict_low_percent: Eviction ends below.
        windows: Window in seconds -> figures. A window that is not full yet is not there.
        hung_seconds: For how long it has run without answering; 0 when it answers.
        totals: What its counters counted since the first look (lifted), by ``meta_metrics.COUNTERS``.
        log_errors: Lines of the level error in its log, by ``meta_log.ERROR_KINDS``; empty when the log is not followed.
        told_thresholds: High and low as it took them over last while it ran, by its log; ``None``: it has not said so.
        log_evictions: Lines in its log that tell of an eviction; ``None`` when the log is not followed.
        metrics_at_seconds: When its metrics were read last; ``None``: never in this run.
        problem: Why they cannot be read; "" when they can.
        flagged: Values that could not be what it says they are; they were left out.
    """

    at_seconds: float
    instance: str
    capacity_bytes: int | None = None
    used_bytes: int | None = None
    segments: tuple[SegmentPicture, ...] = ()
    stored_keys: int | None = None
    mean_value_bytes: float | None = None
    evict_high_percent: int | None = None
    evict_low_percent: int | None = None
    windows: Mapping[int, PoolWindow] = dataclasses.field(default_factory=dict)
    hung_seconds: float = 0.0
    totals: Mapping[str, int] = dataclasses.field(default_factory=dict)
    log_errors: Mapping[str, int] = dataclasses.field(default_factory=dict)
    log_evictions: int | None = None
    told_thresholds: tuple[int, int] | None = None
    metrics_at_seconds: float | None = None
    problem: str = ""
    flagged: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class EnginePicture:
    """One engine.

    Attributes:
        unit: Its unit's id.
        group: Engines of one group take each other's load; "" for none.
        instance: Its present run; ``None``: it does not run.
        ready: The supervisor says so.
        at_seconds: When its metrics were read last; ``None``: never in this run.
        problem: Why they cannot be read; "" when they can.
        uses_pool: The plan has it use L3.
        registered: It has its links with the MetaService (through the endpoint); ``None``: cannot be seen.
        can_switch_l3: L3 can be attached and detached while it runs.
        l3_detached: It is, by an operator or by us.
        hash_seed: PYTHONHASHSEED of its process, where it matters and is known; "" when it is known not to be set.
        model: The identity of the model in its keys, where it is known.
        block_tokens: Tokens of one block, where it is known.
        windows: Window in seconds -> tier -> figures.
        failed_loads: KV loads from L3 that failed, since the first look at it (lifted).
        failed_loads_windows: Window in seconds -> the same in that window.
        ttft_p50_seconds: Time to the first token, of the last 5 minutes, from the engine's histogram.
        ttft_p95_seconds: Likewise.
        since_hit_seconds: Tier -> since when it has had no hit; absent: never had one.
        l2_capacity_bytes: Host memory that its L2 takes, where the plan knows it.
        waiting: Requests that wait.
        running: Requests that are worked on.
        l1_used_ratio: Share of L1 in use, 0 to 1.
        l1_capacity_tokens: Room of L1.
        totals: Tier -> figures since the first look (lifted).
        flagged: Values that could not be what it says they are; they were left out.
    """

    unit: str
    group: str = ""
    instance: str | None = None
    ready: bool = False
    at_seconds: float | None = None
    problem: str = ""
    uses_pool: bool = True
    registered: bool | None = None
    can_switch_l3: bool = False
    l3_detached: bool = False
    hash_seed: str | None = None
    model: str = ""
    block_tokens: int | None = None
    windows: Mapping[int, Mapping[Tier, TierWindow]] = dataclasses.field(default_factory=dict)
    failed_loads: int | None = None
    failed_loads_windows: Mapping[int, int] = dataclasses.field(default_factory=dict)
    ttft_p50_seconds: float | None = None
    ttft_p95_seconds: float | None = None
    since_hit_seconds: Mapping[Tier, float] = dataclasses.field(default_factory=dict)
    l2_capacity_bytes: int | None = None
    waiting: int | None = None
    running: int | None = None
    l1_used_ratio: float | None = None
    l1_capacity_tokens: int | None = None
    totals: Mapping[Tier, TierWindow] = dataclasses.field(default_factory=dict)
    flagged: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class EngineIdentity:
    """What an engine of another node makes its keys from; as in ``EnginePicture``."""

    node: str
    unit: str
    group: str = ""
    hash_seed: str | None = None
    model: str = ""
    block_tokens: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class NumaPicture:
    """Hugepages of one NUMA node, in bytes."""

    numa: int
    total_bytes: int
    free_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class NpuPicture:
    """One die. ``health`` is npu-smi's word ("OK", "Warning", "Alarm", ...); ``None``: unknown."""

    device: int
    card: int
    name: str = ""
    health: str | None = None
    hbm_total_bytes: int | None = None
    hbm_used_bytes: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class HostPicture:
    """A host's memory.

    Attributes:
        node: Whose it is.
        at_seconds: When it was seen; of another node: when its word came.
        available_bytes: ``MemAvailable``.
        total_bytes: ``MemTotal``.
        headroom_bytes: What the settings keep free.
        hugepages: By NUMA node; empty where none are used.
        shm_free_bytes: Room in /dev/shm.
        holders: Pool holders that were added beside the plan, by unit id.
        room_bytes: What one more pool holder could take there; ``None``: unknown.
        npus: Its dies, as npu-smi listed them; empty where there are none, and while they are unknown.
        npus_at_seconds: When that was; ``None``: never.
        npu_problem: What was wrong with npu-smi's last answer; "" for nothing.
    """

    node: str
    at_seconds: float
    available_bytes: int | None = None
    total_bytes: int | None = None
    headroom_bytes: int = 0
    hugepages: tuple[NumaPicture, ...] = ()
    shm_free_bytes: int | None = None
    holders: tuple[str, ...] = ()
    room_bytes: int | None = None
    npus: tuple[NpuPicture, ...] = ()
    npus_at_seconds: float | None = None
    npu_problem: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Picture:
    """One look at a node.

    Attributes:
        now_seconds: When the picture was put together.
        node: This node.
        master: Who is the master; "" when nobody is known to be.
        is_master: This node is.
        pool: As the master sees it; ``None`` on other nodes, and while the MetaService has never answered.
        engines: Of this node.
        host: This node's memory.
        peers: Other nodes' memory, as they said; on the master only.
        tiers: Window in seconds -> tier -> figures of all engines of the node together.
        saved_tokens: Tokens that tiers spared the engines to compute, since the first look (lifted).
        engines_elsewhere: What other nodes' engines make their keys from, as far as it is known here.
        problems: What sources said that cannot be, newest last, as ``source: what``; bounded.
    """

    now_seconds: float
    node: str
    master: str = ""
    is_master: bool = False
    pool: PoolPicture | None = None
    engines: tuple[EnginePicture, ...] = ()
    host: HostPicture | None = None
    peers: tuple[HostPicture, ...] = ()
    tiers: Mapping[int, Mapping[Tier, TierWindow]] = dataclasses.field(default_factory=dict)
    saved_tokens: int | None = None
    engines_elsewhere: tuple[EngineIdentity, ...] = ()
    problems: tuple[str, ...] = ()


WINDOWS_SECONDS = (60, 300, 3600)
"""The windows of rates: a minute to see what happens now, five to decide by, an hour to compare with."""
