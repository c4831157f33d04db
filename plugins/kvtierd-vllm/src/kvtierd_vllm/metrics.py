"""vLLM's /metrics as one observation. Pure; unknown is ``None``.

Names as in vLLM 0.11 to 0.32. With data parallelism every engine has its own series: counters are added, the share of
the cache in use is that of the fullest.

vLLM exports about 700 lines and nine metrics of them are read, every second, for every engine: they are found by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from kvtierd.plan.engine import EngineObservation, Sample, read_buckets, read_samples

_L1_QUERIES: Final = "vllm:prefix_cache_queries_total"
_L1_HITS: Final = "vllm:prefix_cache_hits_total"
_L3_QUERIES: Final = "vllm:external_prefix_cache_queries_total"
_L3_HITS: Final = "vllm:external_prefix_cache_hits_total"
_USED: Final = "vllm:kv_cache_usage_perc"
_RUNNING: Final = "vllm:num_requests_running"
_WAITING: Final = "vllm:num_requests_waiting"
_INFO: Final = "vllm:cache_config_info"
_TTFT: Final = "vllm:time_to_first_token_seconds_bucket"
_NAMES: Final = (_L1_QUERIES, _L1_HITS, _L3_QUERIES, _L3_HITS, _USED, _RUNNING, _WAITING, _INFO, _TTFT)
_ROOM: Final = frozenset({"kv_cache_size_tokens", "num_gpu_blocks", "block_size"})


def read_metrics(text: str) -> EngineObservation:
    """One scrape.

    Args:
        text: the body, in Prometheus' text format.

    Raises:
        ValueError: a sample of those read here is not in that format, or there is no vLLM metric at all.
    """
    if "vllm:" not in text:
        raise ValueError("no vllm: metrics in the answer: is this the engine's /metrics?")
    samples = read_samples(text, _NAMES)
    capacities = [_capacity_tokens(sample.labels) for sample in samples.get(_INFO, ())]
    known = [c for c in capacities if c is not None]
    return EngineObservation(
        l1_query_tokens=_total(samples, _L1_QUERIES),
        l1_hit_tokens=_total(samples, _L1_HITS),
        l3_query_tokens=_total(samples, _L3_QUERIES),
        l3_hit_tokens=_total(samples, _L3_HITS),
        l1_capacity_tokens=sum(known) if known and len(known) == len(capacities) else None,
        l1_used_ratio=max((s.value for s in samples.get(_USED, ())), default=None),
        running=_total(samples, _RUNNING),
        waiting=_total(samples, _WAITING),
        ttft_buckets=read_buckets(samples, _TTFT),
        kv_memory_bytes=_memory_bytes(samples.get(_INFO, ())),
    )


def _total(samples: Mapping[str, list[Sample]], name: str) -> int | None:
    return int(sum(s.value for s in samples[name])) if name in samples else None


def _memory_bytes(infos: Sequence[Sample]) -> int | None:
    """Memory of one card's cache, which is there when the operator has set it (--kv-cache-memory)."""
    written = [sample.labels.get("kv_cache_memory_bytes", "") for sample in infos]
    return min((int(text) for text in written if text.isdecimal() and int(text) > 0), default=None)


def _capacity_tokens(labels: Mapping[str, str]) -> int | None:
    """Room of one engine's cache: its own figure, else (older versions) blocks times block size."""
    figures = {name: int(value) for name, value in labels.items() if name in _ROOM and value.isdecimal()}
    if "kv_cache_size_tokens" in figures:
        return figures["kv_cache_size_tokens"]
    if {"num_gpu_blocks", "block_size"} <= figures.keys():
        return figures["num_gpu_blocks"] * figures["block_size"]
    return None
