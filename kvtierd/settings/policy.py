"""[policy]: what kvtierd may change by itself, when, and how often."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kvtierd.settings.section import Duration, Section, Size

RuleName = Literal[
    "meta-hung",
    "failed-loads",
    "failed-loads-everywhere",
    "host-short",
    "engine-unregistered",
    "alloc-failing",
    "thresholds",
    "pool-unbalanced",
    "pool-small",
    "pool-idle",
    "l3-attach",
    "idle-memory",
    "zero-hits",
    "l2-costs",
]
"""The rules by which kvtierd decides, in the order of their urgency."""

Percent = Annotated[int, Field(ge=1, le=99)]
Share = Annotated[float, Field(ge=0, le=1)]


class PolicySettings(Section):
    """[policy]: what kvtierd may change by itself, when, and how often. docs/observability.md explains each rule."""

    dry_run: bool = Field(False, description="say what would be done, and do nothing")
    off: tuple[RuleName, ...] = Field(
        (), description="rules that are switched off", examples=[["pool-small", "pool-idle"]]
    )
    window: Duration = Field(
        300.0, description="the window that rules read rates from: 1m, 5m or 1h", examples=["1m"]
    )
    stale: Duration = Field(30.0, ge=1.0, description="figures older than this count as unknown")

    actions_per_hour: int = Field(6, ge=0, le=1000, description="most actions an hour, of all rules together")
    disruptive_per_hour: int = Field(
        4, ge=0, le=1000, description="of these, most that restart something or throw keys away"
    )
    engine_actions_per_hour: int = Field(3, ge=0, le=1000, description="most actions an hour on one engine")
    cooldown: Duration = Field(900.0, description="least time between two actions of one rule on one target")
    settle: Duration = Field(
        600.0, description="after an action its target is left alone that long, except when it is urgent"
    )
    reversal: Duration = Field(
        7200.0, description="an action is not taken back by its opposite earlier, except when it is urgent"
    )
    deadline: Duration = Field(
        900.0,
        description="an action that has not ended by then counts as failed; nothing else is done beside it before",
    )
    advise_every: Duration = Field(21600.0, description="advice that still holds is repeated that often")

    grow_turnovers: float = Field(
        1.0, gt=0, description="pool-small: turnovers of the pool per hour from which it counts as too small"
    )
    grow_hit_rate: Share = Field(
        0.7, description="pool-small: with a hit rate above this one the pool is large enough"
    )
    grow_hit_rate_drop: Share = Field(
        0.1,
        description="pool-small: or with one that fell by so much against the last hour's, however high it is",
    )
    grow_hold: Duration = Field(
        600.0,
        description="pool-small, pool-unbalanced, zero-hits: that long it must have been so",
    )
    grow_step: Size = Field(
        0, description="pool-small, pool-unbalanced: size of an added holder; 0: a quarter of the pool"
    )
    grow_holders: int = Field(
        4, ge=0, le=64, description="pool-small: most holders that are added on one node"
    )
    grow_gain: Share = Field(
        0.02, description="pool-small: a growth that raises the hit rate by less was futile"
    )
    futile: Duration = Field(
        21600.0,
        description="pool-small: no growth for so long after two that were futile, nor on a host that was short",
    )
    min_queries: int = Field(
        200, ge=1, description="rules on hit rates: fewer keys looked up in the window say nothing"
    )

    idle_use: Share = Field(0.4, description="pool-idle: use of the pool below which it counts as too large")
    idle_hold: Duration = Field(3600.0, description="pool-idle, idle-memory: that long it must have been so")
    short_hold: Duration = Field(
        30.0, description="host-short: a host must have had less than its reserve for that long"
    )
    unbalanced: Share = Field(
        0.4, description="pool-unbalanced: difference in use between the fullest and the emptiest node"
    )
    idle_room: Share = Field(
        0.25, description="idle-memory: share of a host's memory that could go into the pool and does not"
    )

    value_headroom: float = Field(
        4.0, gt=0, description="thresholds: values of mean size that must fit above evict_high on a segment"
    )
    failed_allocations: Share = Field(
        0.01, description="thresholds: share of allocations in the window that fail, from which it acts"
    )
    evict_high_least: Percent = Field(70, description="thresholds: evict_high is never set lower")
    evict_high_most: Percent = Field(90, description="thresholds: evict_high is never set higher")

    meta_hung: Duration = Field(
        30.0, description="meta-hung: a MetaService that runs and has not answered for that long is restarted"
    )
    alloc_failing: Share = Field(
        0.5, description="alloc-failing: share of allocations that fail though there is room"
    )
    alloc_hold: Duration = Field(
        120.0, description="alloc-failing, thresholds: that long it must have been so"
    )

    unregistered: Literal["restart", "detach", "advise"] = Field(
        "restart", description="engine-unregistered: what to do with an engine that lost its registration"
    )
    unregistered_hold: Duration = Field(
        60.0, description="engine-unregistered: that long it may take to come back by itself"
    )
    failed_loads: Literal["detach", "restart", "advise"] = Field(
        "detach", description="failed-loads: what to do with an engine whose KV loads go on failing"
    )
    failed_loads_most: int = Field(
        10,
        ge=1,
        description="failed-loads: failed KV loads in the window from which it acts; the first one is said",
    )
    failed_loads_everywhere: Literal["purge", "advise"] = Field(
        "advise", description="failed-loads-everywhere: what to do when all engines' KV loads fail"
    )
    attach_after: Duration = Field(
        1800.0, description="l3-attach: L3 comes back after that long; each time it fails again doubles it"
    )

    zero_hits_tokens: int = Field(
        100_000, ge=1, description="zero-hits: tokens asked of L3 in the last hour without one hit"
    )
    repeat_hit_rate: Share = Field(
        0.05, description="zero-hits: hit rate of L1 or L2 that shows that prefixes do repeat"
    )
    l2_hit_rate: Share = Field(
        0.02, description="l2-costs: hit rate of L2 over the last hour below which it counts as useless"
    )
    l2_ratio: float = Field(
        4.0, gt=1, description="l2-costs: the pool must give so many times more hits for the same memory"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.window not in {60.0, 300.0, 3600.0}:
            raise ValueError(f"window is 1m, 5m or 1h, not {self.window:g}s")
        if self.evict_high_least > self.evict_high_most:
            raise ValueError(
                f"evict_high_least ({self.evict_high_least}) must not be above evict_high_most ({self.evict_high_most})"
            )
        if self.reversal < self.settle:
            raise ValueError("reversal must not be shorter than settle")
        return self
