"""PURE: the policy: every number that rules and budgets go by.

It is the settings' section [policy] with units in the names: a duration ``x`` is ``x_seconds`` here, a size ``x_bytes``.
What each means, and its default, stands there and in docs/observability.md.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from kvtierd.settings.policy import PolicySettings, RuleName

RULES: tuple[RuleName, ...] = get_args(RuleName)
"""All rules, the most urgent first."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """One key each of [policy]; without defaults, which are the settings'."""

    dry_run: bool
    off: tuple[RuleName, ...]
    window_seconds: float
    stale_seconds: float
    actions_per_hour: int
    disruptive_per_hour: int
    engine_actions_per_hour: int
    cooldown_seconds: float
    settle_seconds: float
    reversal_seconds: float
    deadline_seconds: float
    advise_every_seconds: float
    grow_turnovers: float
    grow_hit_rate: float
    grow_hit_rate_drop: float
    grow_hold_seconds: float
    grow_step_bytes: int
    grow_holders: int
    grow_gain: float
    futile_seconds: float
    min_queries: int
    idle_use: float
    idle_hold_seconds: float
    short_hold_seconds: float
    unbalanced: float
    idle_room: float
    value_headroom: float
    failed_allocations: float
    evict_high_least: int
    evict_high_most: int
    meta_hung_seconds: float
    alloc_failing: float
    alloc_hold_seconds: float
    unregistered: Literal["restart", "detach", "advise"]
    unregistered_hold_seconds: float
    failed_loads: Literal["detach", "restart", "advise"]
    failed_loads_most: int
    failed_loads_everywhere: Literal["purge", "advise"]
    attach_after_seconds: float
    zero_hits_tokens: int
    repeat_hit_rate: float
    l2_hit_rate: float
    l2_ratio: float

    @property
    def window(self) -> int:
        """The window of rates, as pictures are keyed."""
        return int(self.window_seconds)

    def hold_seconds(self, rule: str) -> float:
        """For how long a rule's condition must have held before anything is done."""
        holds: dict[str, float] = {
            "meta-hung": 0.0,  # hung_seconds has counted already
            "failed-loads": 0.0,  # one is enough to say so
            "failed-loads-everywhere": 0.0,
            "host-short": self.short_hold_seconds,
            "engine-unregistered": self.unregistered_hold_seconds,
            "alloc-failing": self.alloc_hold_seconds,
            "thresholds": self.alloc_hold_seconds,
            "pool-unbalanced": self.grow_hold_seconds,
            "pool-small": self.grow_hold_seconds,
            "pool-idle": self.idle_hold_seconds,
            "l3-attach": 0.0,
            "idle-memory": self.idle_hold_seconds,
            "zero-hits": self.grow_hold_seconds,
            "l2-costs": self.idle_hold_seconds,
        }
        return holds[rule]


def policy_from(settings: PolicySettings) -> Policy:
    """The policy that the settings say."""
    names = {field.name for field in dataclasses.fields(Policy)}
    values = {}
    for key in PolicySettings.model_fields:
        name = next(n for n in (key, f"{key}_seconds", f"{key}_bytes") if n in names)
        values[name] = getattr(settings, key)
    return Policy(**values)


def default_policy() -> Policy:
    """What holds when the settings say nothing."""
    return policy_from(PolicySettings())
