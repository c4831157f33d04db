"""vLLM's /metrics as one observation. Pure; unknown is ``None``.

Names as in vLLM 0.11 to 0.32. With data parallelism every engine has its own series: counters are added, the share of
the cache in use is that of the fullest.

vLLM exports about 700 lines and eight metrics of them are read, every second, for every engine. A general parser takes
more than a millisecond for that, so the samples are found by name instead and only they are looked at.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Final

from kvtierd.plan.engine import EngineObservation

_L1_QUERIES: Final = "vllm:prefix_cache_queries_total"
_L1_HITS: Final = "vllm:prefix_cache_hits_total"
_L3_QUERIES: Final = "vllm:external_prefix_cache_queries_total"
_L3_HITS: Final = "vllm:external_prefix_cache_hits_total"
_USED: Final = "vllm:kv_cache_usage_perc"
_RUNNING: Final = "vllm:num_requests_running"
_WAITING: Final = "vllm:num_requests_waiting"
_INFO: Final = "vllm:cache_config_info"

# What follows a sample's name: labels (a quoted value may hold braces and escapes), the value, perhaps a time stamp.
_SAMPLE: Final = re.compile(
    r'(?:\{(?P<labels>(?:[^"}\n]++|"(?:[^"\\\n]++|\\.)*+")*+)\})?[ \t]+(?P<value>[^\s]+)(?:[ \t]+-?\d+)?[ \t]*\r?(?:\n|\Z)'
)
_LABEL: Final = re.compile(r'(?:^|,)\s*(kv_cache_size_tokens|num_gpu_blocks|block_size)="(\d+)"')


def read_metrics(text: str) -> EngineObservation:
    """One scrape.

    Args:
        text: the body, in Prometheus' text format.

    Raises:
        ValueError: a sample of those read here is not in that format, or there is no vLLM metric at all.
    """
    if "vllm:" not in text:
        raise ValueError("no vllm: metrics in the answer: is this the engine's /metrics?")
    text = "\n" + text
    used = [value for _, value in _samples(text, _USED) if math.isfinite(value)]
    capacities = [_capacity_tokens(labels) for labels, _ in _samples(text, _INFO)]
    known = [c for c in capacities if c is not None]
    return EngineObservation(
        l1_query_tokens=_total(text, _L1_QUERIES),
        l1_hit_tokens=_total(text, _L1_HITS),
        l3_query_tokens=_total(text, _L3_QUERIES),
        l3_hit_tokens=_total(text, _L3_HITS),
        l1_capacity_tokens=sum(known) if known and len(known) == len(capacities) else None,
        l1_used_ratio=max(used, default=None),
        running=_total(text, _RUNNING),
        waiting=_total(text, _WAITING),
    )


def _samples(text: str, name: str) -> Iterator[tuple[str, float]]:
    """Labels and value of every sample of exactly this name. ``text`` starts with a line's end."""
    start = f"\n{name}"
    at = text.find(start)
    while at >= 0:
        after = at + len(start)
        if text[after : after + 1] in {"{", " ", "\t", "\n", ""}:  # else it is a longer name
            found = _SAMPLE.match(text, after)
            if found is None:
                raise ValueError(f"not a Prometheus sample: {text[at + 1 : at + 200].splitlines()[0]!r}")
            try:
                value = float(found["value"])
            except ValueError:
                raise ValueError(f"{name} is {found['value']!r}, not a number") from None
            yield found["labels"] or "", value
        at = text.find(start, after)


def _total(text: str, name: str) -> int | None:
    values = [value for _, value in _samples(text, name)]
    finite = [value for value in values if math.isfinite(value)]
    return int(sum(finite)) if finite else None


def _capacity_tokens(labels: str) -> int | None:
    """Room of one engine's cache: its own figure, else (older versions) blocks times block size."""
    figures = {name: int(digits) for name, digits in _LABEL.findall(labels)}
    if "kv_cache_size_tokens" in figures:
        return figures["kv_cache_size_tokens"]
    if {"num_gpu_blocks", "block_size"} <= figures.keys():
        return figures["num_gpu_blocks"] * figures["block_size"]
    return None
