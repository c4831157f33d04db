"""PURE: all rules, the most urgent first."""

from __future__ import annotations

from collections.abc import Mapping

from kvtierd.decide import engine_rules, hit_rules, meta_rules, pool_rules, threshold_rules
from kvtierd.decide.finding import Rule
from kvtierd.settings.policy import RuleName

REGISTRY: Mapping[RuleName, Rule] = {
    "meta-hung": meta_rules.meta_hung,
    "failed-loads": engine_rules.failed_loads,
    "failed-loads-everywhere": engine_rules.failed_loads_everywhere,
    "host-short": pool_rules.host_short,
    "engine-unregistered": engine_rules.engine_unregistered,
    "alloc-failing": meta_rules.alloc_failing,
    "thresholds": threshold_rules.thresholds,
    "pool-unbalanced": pool_rules.pool_unbalanced,
    "pool-small": pool_rules.pool_small,
    "pool-idle": pool_rules.pool_idle,
    "l3-attach": engine_rules.l3_attach,
    "idle-memory": pool_rules.idle_memory,
    "zero-hits": hit_rules.zero_hits,
    "l2-costs": hit_rules.l2_costs,
}
