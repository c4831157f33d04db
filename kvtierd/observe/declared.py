"""PURE: the list of metrics that kvtierd exports. docs/observability.md has a line for each; a test compares.

Names follow Prometheus' rules: base units, ``_total`` for counters, ratios from 0 to 1. What is unknown is not exported;
zero means zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

WINDOW_NAMES: Final[Mapping[int, str]] = {60: "1m", 300: "5m", 3600: "1h"}


class Declared(NamedTuple):
    """One metric."""

    kind: Literal["gauge", "counter"]
    labels: tuple[str, ...]
    meaning: str


_UNIT: Final = ("unit", "kind")
_ENGINE: Final = ("engine",)
_SEGMENT: Final = ("segment", "medium", "node")
_NPU: Final = ("device", "card")


def _gauge(meaning: str, *labels: str) -> Declared:
    return Declared("gauge", labels, meaning)


def _counter(meaning: str, *labels: str) -> Declared:
    return Declared("counter", labels, meaning)


DECLARED: Final[Mapping[str, Declared]] = {
    # -- kvtierd
    "kvtierd_build_info": _gauge(
        "Always 1: the version of kvtierd and the name of the node.", "version", "node"
    ),
    "kvtierd_problems": _gauge("Things that keep this node from being as it should be."),
    "kvtierd_paused": _gauge("1 while an operator holds this node back."),
    "kvtierd_picture_age_seconds": _gauge("Age of the newest look at all sources together."),
    "kvtierd_unit_state": _gauge("1 for the state a unit is in, 0 for the others.", *_UNIT, "state"),
    "kvtierd_unit_restarts_total": _counter("Restarts of a unit that were not asked for.", *_UNIT),
    "kvtierd_policy_actions_total": _counter(
        "What the policy did or said since kvtierd's start, by rule and how it ended.", "rule", "state"
    ),
    # -- tiers
    "kvtierd_tier_state": _gauge("1 for the state the pool (L3) is in as a tier, 0 for the others.", "state"),
    "kvtierd_tier_hit_ratio": _gauge(
        "Hit tokens over looked-up tokens of all engines of the node, in a window.", "tier", "window"
    ),
    "kvtierd_saved_tokens_total": _counter("Prompt tokens that tiers spared the engines to compute."),
    # -- engines
    "kvtierd_engine_up": _gauge("1 while an engine's metrics can be read.", *_ENGINE),
    "kvtierd_engine_ready": _gauge("1 while an engine is ready.", *_ENGINE),
    "kvtierd_engine_metrics_age_seconds": _gauge("Age of an engine's newest figures.", *_ENGINE),
    "kvtierd_engine_uses_pool": _gauge("1 when the plan has the engine use the pool (L3).", *_ENGINE),
    "kvtierd_engine_registered": _gauge("1 while the engine has its links with the MetaService.", *_ENGINE),
    "kvtierd_engine_l3_detached": _gauge("1 while L3 is taken off the engine.", *_ENGINE),
    "kvtierd_engine_query_tokens_total": _counter("Prompt tokens looked up in a tier.", *_ENGINE, "tier"),
    "kvtierd_engine_hit_tokens_total": _counter("Prompt tokens found in a tier.", *_ENGINE, "tier"),
    "kvtierd_engine_hit_ratio": _gauge(
        "Hit tokens over looked-up tokens of an engine, in a window.", *_ENGINE, "tier", "window"
    ),
    "kvtierd_engine_since_hit_seconds": _gauge("Time since a tier had its last hit.", *_ENGINE, "tier"),
    "kvtierd_engine_failed_loads_total": _counter("Loads of KV from a tier that failed.", *_ENGINE),
    "kvtierd_engine_ttft_p50_seconds": _gauge("Time to first token, median of the last 5 minutes.", *_ENGINE),
    "kvtierd_engine_ttft_p95_seconds": _gauge(
        "Time to first token, 95th percentile of the last 5 minutes.", *_ENGINE
    ),
    "kvtierd_engine_waiting_requests": _gauge("Requests in the engine's queue.", *_ENGINE),
    "kvtierd_engine_running_requests": _gauge("Requests that the engine works on.", *_ENGINE),
    "kvtierd_engine_l1_used_ratio": _gauge("Share of the engine's device cache in use.", *_ENGINE),
    "kvtierd_engine_l1_capacity_tokens": _gauge("Room of the engine's device cache.", *_ENGINE),
    "kvtierd_engine_l2_capacity_bytes": _gauge("Host memory of the engine's own second tier.", *_ENGINE),
    "kvtierd_engine_flagged_values_total": _counter(
        "Values in an engine's metrics that cannot be and were left out.", *_ENGINE
    ),
    # -- the pool; on the node that runs the MetaService
    "kvtierd_pool_age_seconds": _gauge("Age of the MetaService's newest answer."),
    "kvtierd_pool_hung_seconds": _gauge("How long the MetaService has run without answering."),
    "kvtierd_pool_metrics_up": _gauge("1 while the MetaService's metrics can be read."),
    "kvtierd_pool_capacity_bytes": _gauge("DRAM of all segments."),
    "kvtierd_pool_used_bytes": _gauge("DRAM in use."),
    "kvtierd_pool_stored_keys": _gauge("Keys at present."),
    "kvtierd_pool_mean_value_bytes": _gauge("Bytes in use for each key."),
    "kvtierd_pool_evict_threshold_ratio": _gauge(
        "Use at which eviction begins (high) and ends (low).", "bound"
    ),
    "kvtierd_pool_segment_capacity_bytes": _gauge("Memory that a rank brings.", *_SEGMENT),
    "kvtierd_pool_segment_used_bytes": _gauge("Of this, in use.", *_SEGMENT),
    "kvtierd_pool_evicted_keys_total": _counter("Keys evicted."),
    "kvtierd_pool_allocations_total": _counter("Allocations asked for, one a key."),
    "kvtierd_pool_failed_allocations_total": _counter("Allocations that found no room."),
    "kvtierd_pool_looked_up_keys_total": _counter("Keys looked up."),
    "kvtierd_pool_found_keys_total": _counter("Keys looked up and found."),
    "kvtierd_pool_get_keys_total": _counter("Keys asked for with their values."),
    "kvtierd_pool_missed_get_keys_total": _counter("Of these, not there (any more)."),
    "kvtierd_pool_failed_get_keys_total": _counter("Of these, failed."),
    "kvtierd_pool_ssd_hits_total": _counter("Keys served from SSD."),
    "kvtierd_pool_rewarmed_bytes_total": _counter("Bytes brought back from SSD to DRAM."),
    "kvtierd_pool_flushed_bytes_total": _counter("Bytes written to SSD."),
    "kvtierd_pool_evicted_keys_per_second": _gauge("Keys evicted in a window, each second.", "window"),
    "kvtierd_pool_evicted_bytes_per_second": _gauge(
        "The same in bytes, by the mean size of a value.", "window"
    ),
    "kvtierd_pool_turnovers_per_hour": _gauge(
        "How often an hour the pool's whole content is evicted.", "window"
    ),
    "kvtierd_pool_log_errors_total": _counter("Lines of the level error in the MetaService's log.", "kind"),
    "kvtierd_pool_log_evictions_total": _counter("Lines in the MetaService's log that tell of an eviction."),
    "kvtierd_pool_flagged_values_total": _counter(
        "Values in the MetaService's metrics that cannot be and were left out."
    ),
    # -- the host
    "kvtierd_host_memory_available_bytes": _gauge("MemAvailable of the host."),
    "kvtierd_host_memory_capacity_bytes": _gauge("MemTotal of the host."),
    "kvtierd_host_headroom_bytes": _gauge("Memory that the settings keep free."),
    "kvtierd_host_room_bytes": _gauge("What one more pool holder could take here."),
    "kvtierd_host_shm_free_bytes": _gauge("Room in /dev/shm."),
    "kvtierd_host_added_holders": _gauge("Pool holders that were added beside the plan."),
    "kvtierd_host_hugepages_capacity_bytes": _gauge("Hugepages of a NUMA node.", "numa"),
    "kvtierd_host_hugepages_free_bytes": _gauge("Of these, free.", "numa"),
    "kvtierd_npu_smi_up": _gauge("1 while npu-smi answers as it should."),
    "kvtierd_npu_age_seconds": _gauge("Age of what npu-smi said last."),
    "kvtierd_npu_healthy": _gauge("1 when npu-smi calls the die OK.", *_NPU),
    "kvtierd_npu_hbm_capacity_bytes": _gauge("Device memory of the die.", *_NPU),
    "kvtierd_npu_hbm_used_bytes": _gauge("Of this, in use.", *_NPU),
    # -- the cluster
    "kvtierd_cluster_master_known": _gauge("1 while this node knows who is the master."),
    "kvtierd_cluster_is_master": _gauge("1 on the master."),
    "kvtierd_cluster_epoch": _gauge("The term of the master."),
    "kvtierd_cluster_view_age_seconds": _gauge("Age of what the master said last."),
    "kvtierd_peer_memory_available_bytes": _gauge("MemAvailable of another node, on the master.", "node"),
    "kvtierd_peer_room_bytes": _gauge("What one more pool holder could take there.", "node"),
    "kvtierd_peer_age_seconds": _gauge("Age of what that node said last.", "node"),
    # -- the exporter itself
    "kvtierd_exporter_left_out": _gauge("Units, segments and the like left out because there are too many."),
}
