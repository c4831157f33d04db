"""PURE: everything that the exporter says, as Prometheus metric families.

``DECLARED`` is the whole list: name, type, labels, meaning. Nothing else is exported, and docs/observability.md has a line
for each. Labels take values from the plan and the pool only (units, engines, segments, NUMA nodes, dies, peers), never from
keys, requests or error texts; how many there can be is bounded here, and what is left out is counted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeVar

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvtierd.events import Event
from kvtierd.observe.declared import DECLARED, WINDOW_NAMES
from kvtierd.observe.picture import EnginePicture, HostPicture, Picture, PoolPicture, Tier, TierWindow
from kvtierd.tier.machine import TierView
from kvtierd.units.unit_state import UnitState
from kvtierd.units.views import UnitView

MOST: Final[Mapping[str, int]] = {
    "units": 128, "engines": 64, "segments": 1024, "peers": 256, "npus": 128, "numa": 64,
}  # fmt: skip
MOST_LABEL_CHARS: Final = 128
_Thing = TypeVar("_Thing")
TIER_STATES: Final = ("down", "meta_up", "pool_ready", "joinable")


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterFacts:
    """This node's part in its cluster; without one ``role`` is "" and the rest says nothing."""

    role: Literal["", "master", "follower", "unknown"] = ""
    master: str = ""
    epoch: int = 0
    view_age_seconds: float | None = None
    paused: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Exported:
    """All that is shown, at one moment.

    Attributes:
        now_seconds: By the clock of the picture.
        now_unix_seconds: By the wall clock, for people.
        version: kvtierd's.
        picture: The newest; ``None``: there was none yet.
        units: Of the plan.
        tier: As last judged.
        cluster: This node's part in it.
        problems: What keeps this node from being as it should be, as sentences.
        events: The newest events, newest last; for the status page only.
        actions: Rule and state -> how many actions (and pieces of advice) of the policy since kvtierd's start.
    """

    now_seconds: float
    now_unix_seconds: float
    version: str = ""
    picture: Picture | None = None
    units: Sequence[UnitView] = ()
    tier: TierView = dataclasses.field(default_factory=TierView)
    cluster: ClusterFacts = dataclasses.field(default_factory=ClusterFacts)
    problems: Sequence[str] = ()
    events: Sequence[Event] = ()
    actions: Mapping[tuple[str, str], int] = dataclasses.field(default_factory=dict)


class _Sample(NamedTuple):
    name: str
    value: float | None
    labels: tuple[str, ...] = ()


@dataclasses.dataclass(slots=True)
class _Left:
    """How many things were left out because there are too many."""

    out: int = 0

    def first(self, what: str, things: Sequence[_Thing]) -> Sequence[_Thing]:
        most = MOST[what]
        self.out += max(0, len(things) - most)
        return things[:most]


def metric_families(state: Exported) -> list[Metric]:
    """The families that have a value now, in the order of ``DECLARED``."""
    found: dict[str, list[_Sample]] = {}
    left = _Left()
    for sample in _samples(state, left):
        if sample.value is not None and math.isfinite(sample.value):
            found.setdefault(sample.name, []).append(sample)
    found["kvtierd_exporter_left_out"] = [_Sample("kvtierd_exporter_left_out", float(left.out))]
    families: list[Metric] = []
    for name, declared in DECLARED.items():
        if name not in found:
            continue
        kind = CounterMetricFamily if declared.kind == "counter" else GaugeMetricFamily
        family = kind(name, declared.meaning, labels=declared.labels)
        seen: set[tuple[str, ...]] = set()
        for sample in found[name]:
            labels = tuple(_label(text) for text in sample.labels)
            if labels not in seen and sample.value is not None:  # a series twice would fail the whole scrape
                seen.add(labels)
                family.add_metric(labels, float(sample.value))
        families.append(family)
    return families


def _samples(state: Exported, left: _Left) -> Iterator[_Sample]:
    picture = state.picture
    node = picture.node if picture is not None else ""
    yield _Sample("kvtierd_build_info", 1.0, (state.version, node))
    yield _Sample("kvtierd_problems", float(len(state.problems)))
    for (rule, how), count in state.actions.items():
        yield _Sample("kvtierd_policy_actions_total", float(count), (rule, how))
    yield from _units(left.first("units", state.units))
    for name in TIER_STATES:
        yield _Sample("kvtierd_tier_state", float(state.tier.state == name), (name,))
    yield from _cluster(state.cluster)
    if picture is None:
        return
    now = state.now_seconds
    yield _Sample("kvtierd_picture_age_seconds", max(0.0, now - picture.now_seconds))
    yield _Sample("kvtierd_saved_tokens_total", picture.saved_tokens)
    for window, tiers in picture.tiers.items():
        for tier, figures in tiers.items():
            labels = (tier, WINDOW_NAMES[window])
            yield _Sample("kvtierd_tier_hit_ratio", figures.hit_rate, labels)
    for engine in left.first("engines", picture.engines):
        yield from _engine(engine, now)
    if picture.pool is not None:
        yield from _pool(picture.pool, now, left)
    if picture.host is not None:
        yield from _host(picture.host, now, left)
    for peer in left.first("peers", picture.peers):
        yield _Sample("kvtierd_peer_memory_available_bytes", peer.available_bytes, (peer.node,))
        yield _Sample("kvtierd_peer_room_bytes", peer.room_bytes, (peer.node,))
        yield _Sample("kvtierd_peer_age_seconds", max(0.0, now - peer.at_seconds), (peer.node,))


def _units(units: Sequence[UnitView]) -> Iterator[_Sample]:
    for unit in units:
        labels = (unit.id, unit.kind)
        for state in UnitState:
            yield _Sample("kvtierd_unit_state", float(unit.state == state), (*labels, state.value))
        yield _Sample("kvtierd_unit_restarts_total", unit.restarts, labels)


def _cluster(cluster: ClusterFacts) -> Iterator[_Sample]:
    yield _Sample("kvtierd_paused", float(cluster.paused))
    if not cluster.role:
        return
    yield _Sample("kvtierd_cluster_master_known", float(bool(cluster.master)))
    yield _Sample("kvtierd_cluster_is_master", float(cluster.role == "master"))
    yield _Sample("kvtierd_cluster_epoch", cluster.epoch)
    yield _Sample("kvtierd_cluster_view_age_seconds", cluster.view_age_seconds)


def _engine(engine: EnginePicture, now: float) -> Iterator[_Sample]:
    name = (engine.unit,)
    read = engine.at_seconds is not None
    yield _Sample("kvtierd_engine_up", float(read and not engine.problem), name)
    if engine.at_seconds is not None:
        yield _Sample("kvtierd_engine_metrics_age_seconds", max(0.0, now - engine.at_seconds), name)
    yield _Sample("kvtierd_engine_ready", float(engine.ready), name)
    yield _Sample("kvtierd_engine_uses_pool", float(engine.uses_pool), name)
    if engine.registered is not None:
        yield _Sample("kvtierd_engine_registered", float(engine.registered), name)
    yield _Sample("kvtierd_engine_l3_detached", float(engine.l3_detached), name)
    for tier, total in engine.totals.items():
        yield _Sample("kvtierd_engine_query_tokens_total", total.query_tokens, (*name, tier))
        yield _Sample("kvtierd_engine_hit_tokens_total", total.hit_tokens, (*name, tier))
    yield from _hit_ratios(engine.unit, engine.windows)
    for tier, since in engine.since_hit_seconds.items():
        yield _Sample("kvtierd_engine_since_hit_seconds", since, (*name, tier))
    yield _Sample("kvtierd_engine_failed_loads_total", engine.failed_loads, name)
    yield _Sample("kvtierd_engine_ttft_p50_seconds", engine.ttft_p50_seconds, name)
    yield _Sample("kvtierd_engine_ttft_p95_seconds", engine.ttft_p95_seconds, name)
    yield _Sample("kvtierd_engine_waiting_requests", engine.waiting, name)
    yield _Sample("kvtierd_engine_running_requests", engine.running, name)
    yield _Sample("kvtierd_engine_l1_used_ratio", engine.l1_used_ratio, name)
    yield _Sample("kvtierd_engine_l1_capacity_tokens", engine.l1_capacity_tokens, name)
    yield _Sample("kvtierd_engine_l2_capacity_bytes", engine.l2_capacity_bytes, name)
    yield _Sample("kvtierd_engine_flagged_values_total", engine.flagged, name)


def _hit_ratios(unit: str, windows: Mapping[int, Mapping[Tier, TierWindow]]) -> Iterator[_Sample]:
    for window, tiers in windows.items():
        for tier, figures in tiers.items():
            yield _Sample("kvtierd_engine_hit_ratio", figures.hit_rate, (unit, tier, WINDOW_NAMES[window]))


def _pool(pool: PoolPicture, now: float, left: _Left) -> Iterator[_Sample]:
    yield _Sample("kvtierd_pool_age_seconds", max(0.0, now - pool.at_seconds))
    yield _Sample("kvtierd_pool_hung_seconds", pool.hung_seconds)
    yield _Sample("kvtierd_pool_metrics_up", float(pool.metrics_at_seconds is not None and not pool.problem))
    yield _Sample("kvtierd_pool_capacity_bytes", pool.capacity_bytes)
    yield _Sample("kvtierd_pool_used_bytes", pool.used_bytes)
    yield _Sample("kvtierd_pool_stored_keys", pool.stored_keys)
    yield _Sample("kvtierd_pool_mean_value_bytes", pool.mean_value_bytes)
    for which, percent in (("high", pool.evict_high_percent), ("low", pool.evict_low_percent)):
        if percent is not None:
            yield _Sample("kvtierd_pool_evict_threshold_ratio", percent / 100, (which,))
    for name, total in pool.totals.items():
        yield _Sample(f"kvtierd_pool_{name}_total", total)
    for window, figures in pool.windows.items():
        label = (WINDOW_NAMES[window],)
        yield _Sample("kvtierd_pool_evicted_keys_per_second", figures.evicted_keys_per_second, label)
        yield _Sample("kvtierd_pool_evicted_bytes_per_second", figures.evicted_bytes_per_second, label)
        yield _Sample("kvtierd_pool_turnovers_per_hour", figures.turnovers_per_hour, label)
    for kind, lines in pool.log_errors.items():
        yield _Sample("kvtierd_pool_log_errors_total", lines, (kind,))
    yield _Sample("kvtierd_pool_log_evictions_total", pool.log_evictions)
    yield _Sample("kvtierd_pool_flagged_values_total", pool.flagged)
    for segment in left.first("segments", pool.segments):
        labels = (segment.name, segment.medium, segment.node)
        yield _Sample("kvtierd_pool_segment_capacity_bytes", segment.total_bytes, labels)
        yield _Sample("kvtierd_pool_segment_used_bytes", segment.used_bytes, labels)


def _host(host: HostPicture, now: float, left: _Left) -> Iterator[_Sample]:
    yield _Sample("kvtierd_host_memory_available_bytes", host.available_bytes)
    yield _Sample("kvtierd_host_memory_capacity_bytes", host.total_bytes)
    yield _Sample("kvtierd_host_headroom_bytes", host.headroom_bytes)
    yield _Sample("kvtierd_host_room_bytes", host.room_bytes)
    yield _Sample("kvtierd_host_shm_free_bytes", host.shm_free_bytes)
    yield _Sample("kvtierd_host_added_holders", len(host.holders))
    for numa in left.first("numa", host.hugepages):
        yield _Sample("kvtierd_host_hugepages_capacity_bytes", numa.total_bytes, (str(numa.numa),))
        yield _Sample("kvtierd_host_hugepages_free_bytes", numa.free_bytes, (str(numa.numa),))
    if host.npus_at_seconds is not None or host.npu_problem:
        yield _Sample("kvtierd_npu_smi_up", float(not host.npu_problem))
    if host.npus_at_seconds is not None:
        yield _Sample("kvtierd_npu_age_seconds", max(0.0, now - host.npus_at_seconds))
    for npu in left.first("npus", host.npus):
        labels = (str(npu.device), str(npu.card))
        if npu.health is not None:
            yield _Sample("kvtierd_npu_healthy", float(npu.health.upper() == "OK"), labels)
        yield _Sample("kvtierd_npu_hbm_capacity_bytes", npu.hbm_total_bytes, labels)
        yield _Sample("kvtierd_npu_hbm_used_bytes", npu.hbm_used_bytes, labels)


def _label(text: str) -> str:
    """A label's value: bounded, and something that can be encoded whatever it came from."""
    return text[:MOST_LABEL_CHARS].encode("utf-8", "replace").decode()
