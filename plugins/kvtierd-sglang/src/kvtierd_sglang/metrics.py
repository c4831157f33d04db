"""SGLang's Prometheus metrics as one observation.

SGLang counts a request's tokens when it ends: the prompt in ``prompt_tokens_total``, what was found in
``cached_tokens_total`` by source: ``device`` (L1), ``host`` (L2), ``storage`` or ``storage_<backend>`` (L3). A source
appears with its first hit: beside another source it is 0. Before the first hit of all, the scheduler's own count
(``prefill_effective_tokens_total`` by ``mode``, with its zeros) stands in; without that, hits are unknown. A tier
below is asked for what the tiers above did not have. Gauges come once for each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from kvtierd.plan.engine import EngineObservation, Sample, read_buckets, read_samples

_PROMPT: Final = "sglang:prompt_tokens_total"
_CACHED: Final = "sglang:cached_tokens_total"
_SCHEDULED: Final = "sglang:prefill_effective_tokens_total"
_ROOM: Final = "sglang:max_total_num_tokens"
_USED: Final = "sglang:token_usage"
_RUNNING: Final = "sglang:num_running_reqs"
_WAITING: Final = "sglang:num_queue_reqs"
_HIT_RATE: Final = "sglang:cache_hit_rate"
_HOST_ROOM: Final = "sglang:hicache_host_total_tokens"
_KV_MEMORY: Final = "sglang:kv_cache_memory_usage_gb"
_WRITTEN: Final = "sglang:backuped_tokens_total"  # to storage; hicache_backup_tokens_total is to L2
_TTFT: Final = "sglang:time_to_first_token_seconds_bucket"
# Exported from the start by a scheduler that has a storage backend, and by no other.
_STORAGE: Final = ("sglang:storage_prefetch_unfulfilled_tokens_total", "sglang:prefetched_tokens_total")
NAMES: Final = frozenset(
    {
        _PROMPT,
        _CACHED,
        _SCHEDULED,
        _ROOM,
        _USED,
        _RUNNING,
        _WAITING,
        _HIT_RATE,
        _HOST_ROOM,
        _KV_MEMORY,
        _WRITTEN,
        _TTFT,
        *_STORAGE,
    }
)


def observe(text: str) -> EngineObservation:
    """Reads one scrape.

    Raises:
        ValueError: A value is no number, or there is no metric of SGLang's.
    """
    samples = read_samples(text, NAMES)
    if not samples:
        raise ValueError(
            "no sglang: metrics in the answer: is this the engine's /metrics, with --enable-metrics?"
        )
    has_l2 = _HOST_ROOM in samples  # exported only with --enable-hierarchical-cache
    hits = _hits(samples)
    has_l3 = any(samples.get(name) for name in _STORAGE) or hits.get("storage", 0) > 0
    prompt = _total(samples, _PROMPT)
    l1, l2, l3 = (None if prompt is None else hits.get(source) for source in ("device", "host", "storage"))
    if not has_l2 and not l2:
        l2 = None
    if not has_l3:
        l3 = None
    room = _smallest(samples, _ROOM)
    memory_gib = min((s.value for s in samples.get(_KV_MEMORY, ())), default=None)
    return EngineObservation(
        l1_query_tokens=prompt,
        l1_hit_tokens=l1,
        l2_query_tokens=_rest(prompt, l1) if l2 is not None else None,
        l2_hit_tokens=l2,
        l3_query_tokens=_rest(prompt, l1, l2 or 0) if l3 is not None else None,
        l3_hit_tokens=l3,
        l3_written_tokens=_over_replicas(samples.get(_WRITTEN, ())),
        l1_capacity_tokens=room,
        l2_capacity_tokens=_smallest(samples, _HOST_ROOM),
        l1_used_ratio=max((s.value for s in samples.get(_USED, ())), default=None),
        running=_over_replicas(samples.get(_RUNNING, ())),
        waiting=_over_replicas(samples.get(_WAITING, ())),
        # Over all tiers: L1's own only where there is no other.
        l1_window_rate=None
        if has_l2 or has_l3
        else max((s.value for s in samples.get(_HIT_RATE, ())), default=None),
        kv_tokens=room,
        ttft_buckets=read_buckets(samples, _TTFT),
        kv_memory_bytes=None if memory_gib is None else round(memory_gib * 1024**3),
    )


def _hits(samples: Mapping[str, list[Sample]]) -> dict[str, int]:
    """Tokens found, by ``device``, ``host`` and ``storage``; empty when it is unknown."""
    hits = {"device": 0, "host": 0, "storage": 0}
    if _CACHED in samples:
        for sample in samples[_CACHED]:
            source = sample.labels.get("cache_source", "total").partition("_")[0]
            if source not in hits:  # "total": hits that no tier was named for
                return {}
            hits[source] += int(sample.value)
        return hits
    found = {
        source: _over_replicas(
            s for s in samples.get(_SCHEDULED, ()) if s.labels.get("mode") == f"{source}_hit"
        )
        for source in hits
    }
    return {source: count for source, count in found.items() if count is not None}


def _total(samples: Mapping[str, list[Sample]], name: str) -> int | None:
    return int(sum(s.value for s in samples[name])) if name in samples else None


def _smallest(samples: Mapping[str, list[Sample]], name: str) -> int | None:
    found = [int(s.value) for s in samples.get(name, ()) if s.value > 0]
    return min(found) if found else None


def _over_replicas(samples: Iterable[Sample]) -> int | None:
    """Ranks of one replica share its requests; replicas (dp_rank) have their own."""
    largest: dict[str, float] = {}
    for sample in samples:
        replica = sample.labels.get("dp_rank", "")
        largest[replica] = max(largest.get(replica, 0.0), sample.value)
    return int(sum(largest.values())) if largest else None


def _rest(prompt: int | None, *found: int | None) -> int | None:
    """What the tiers above did not have. A prompt counted a moment after its hits must not give less than nothing."""
    return None if prompt is None else max(0, prompt - sum(f or 0 for f in found))
