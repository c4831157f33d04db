"""What the engine counts, in vLLM's metric names and labels, and vLLM's ten-second log line.

Names, labels and the line are those of vLLM 0.32, so that whatever reads a vLLM reads this engine too. What vLLM has
no name for starts with ``refengine:``.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

from kvtierd_refengine.l3tier import FailedLoad

# vLLM computes the hit rates of its log line over this many recent requests.
_RECENT_REQUESTS: Final = 1000
_TTFT_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0,
    2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_FINISHED_REASONS: Final = ("stop", "length", "abort", "error")
_FAILED_LOADS: Final[tuple[FailedLoad, ...]] = ("wrong-bytes", "gone", "error", "timeout")


@dataclasses.dataclass(frozen=True, slots=True)
class PromptTokens:
    """Where the tokens of one prompt came from. ``external_queried`` is None when there is no L3."""

    total: int
    l1: int
    l3: int
    external_queried: int | None

    @property
    def computed(self) -> int:
        """What neither tier had."""
        return self.total - self.l1 - self.l3


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """The engine's load at one moment."""

    running: int = 0
    waiting: int = 0
    used_ratio: float = 0.0


class HitRate:
    """Hits over queries, in tokens, of the most recent requests."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, int]] = deque(maxlen=_RECENT_REQUESTS)

    def add(self, queried: int, hit: int) -> None:
        """One request's tokens."""
        self._recent.append((queried, hit))

    @property
    def percent(self) -> float:
        """0 when nothing was asked."""
        queried = sum(q for q, _ in self._recent)
        return 100.0 * sum(h for _, h in self._recent) / queried if queried else 0.0

    def __bool__(self) -> bool:
        return bool(self._recent)


class EngineStats:
    """Counters of one engine. Thread-safe; implements :class:`kvtierd_refengine.l3tier.TierEvents`."""

    def __init__(self, model_name: str, *, load: Callable[[], Load]) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._load = load
        self._lock = threading.Lock()
        self._local, self._external = HitRate(), HitRate()
        self._prompt_tokens = self._generation_tokens = 0  # since the last log line
        self._was_active = False
        labels = {"engine": "0", "model_name": model_name}
        self._labels = labels

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, list(labels), registry=self.registry).labels(**labels)

        def counters(name: str, text: str, label: str, values: tuple[str, ...]) -> dict[str, Counter]:
            family = Counter(name, text, [*labels, label], registry=self.registry)
            return {value: family.labels(**labels, **{label: value}) for value in values}

        def gauge(name: str, text: str, read: Callable[[], float]) -> None:
            Gauge(name, text, list(labels), registry=self.registry).labels(**labels).set_function(read)

        gauge("vllm:num_requests_running", "Requests being computed.", lambda: load().running)
        gauge("vllm:num_requests_waiting", "Requests waiting to be computed.", lambda: load().waiting)
        gauge("vllm:kv_cache_usage_perc", "KV cache in use; 1 is 100 percent.", lambda: load().used_ratio)
        self._l1_queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in L1.")
        self._l1_hits = counter("vllm:prefix_cache_hits", "Prompt tokens found in L1.")
        self._l3_queries = counter("vllm:external_prefix_cache_queries", "Prompt tokens looked up in L3.")
        self._l3_hits = counter("vllm:external_prefix_cache_hits", "Prompt tokens loaded from L3.")
        self._prompts = counter("vllm:prompt_tokens", "Prompt tokens processed.")
        self._generated = counter("vllm:generation_tokens", "Tokens generated.")
        self._sources = counters(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by where their keys and values came from.",
            "source",
            ("local_compute", "local_cache_hit", "external_kv_transfer"),
        )
        self._finished = counters(
            "vllm:request_success", "Requests ended.", "finished_reason", _FINISHED_REASONS
        )
        self._ttft = Histogram(
            "vllm:time_to_first_token_seconds",
            "Time to first token in seconds.",
            list(labels),
            buckets=_TTFT_BUCKETS,
            registry=self.registry,
        ).labels(**labels)
        self._failed_loads = counters(
            "refengine:l3_failed_loads",
            "Blocks that L3 announced and could not deliver intact. They were computed instead.",
            "reason",
            _FAILED_LOADS,
        )
        self._failed_lookups = counter("refengine:l3_failed_lookups", "L3 lookups without an answer.")
        self._saved = counter("refengine:l3_saved_blocks", "Blocks that L3 took.")
        self._not_saved = counter("refengine:l3_unsaved_blocks", "Blocks that did not get to L3.")

    def describe_cache(self, *, block_size: int, blocks: int) -> None:
        """Publishes the cache's shape as vLLM's info metric."""
        info = {
            "block_size": str(block_size),
            "cache_dtype": "float32",
            "enable_prefix_caching": "True",
            "kv_cache_size_tokens": str(block_size * blocks),
            "num_gpu_blocks": str(blocks),
        }
        names = ["engine", *info]
        text = "Information of the cache."
        family = Gauge("vllm:cache_config_info", text, names, registry=self.registry)
        family.labels(engine="0", **info).set(1)

    def watch_l3(self, *, attached: Callable[[], bool], skipping: Callable[[], bool]) -> None:
        """Publishes the state of L3."""
        for name, text, read in (
            ("refengine:l3_attached", "1 when the pool has been joined.", attached),
            ("refengine:l3_skipping", "1 while the breaker keeps requests away from the pool.", skipping),
        ):
            child = Gauge(name, text, list(self._labels), registry=self.registry).labels(**self._labels)
            child.set_function(_as_number(read))

    def prompt_started(self, tokens: PromptTokens) -> None:
        """A prompt's cached part is known."""
        self._l1_queries.inc(tokens.total)
        self._l1_hits.inc(tokens.l1)
        if tokens.external_queried is not None:
            self._l3_queries.inc(tokens.external_queried)
            self._l3_hits.inc(tokens.l3)
        for source, count in (
            ("local_compute", tokens.computed),
            ("local_cache_hit", tokens.l1),
            ("external_kv_transfer", tokens.l3),
        ):
            self._sources[source].inc(count)
        with self._lock:
            self._local.add(tokens.total, tokens.l1)
            if tokens.external_queried is not None:
                self._external.add(tokens.external_queried, tokens.l3)

    def first_token(self, prompt_tokens: int, seconds: float) -> None:
        """A prompt has been processed, so long after the request came."""
        self._prompts.inc(prompt_tokens)
        self._ttft.observe(seconds)
        with self._lock:
            self._prompt_tokens += prompt_tokens

    def token(self) -> None:
        """One token has been generated."""
        self._generated.inc()
        with self._lock:
            self._generation_tokens += 1

    def finished(self, reason: str) -> None:
        """A request has ended: stop, length, abort or error."""
        self._finished[reason].inc()

    def failed_load(self, reason: FailedLoad, blocks: int) -> None:
        """See :class:`~kvtierd_refengine.l3tier.TierEvents`."""
        self._failed_loads[reason].inc(blocks)

    def failed_lookup(self) -> None:
        """See :class:`~kvtierd_refengine.l3tier.TierEvents`."""
        self._failed_lookups.inc()

    def saved(self, blocks: int) -> None:
        """See :class:`~kvtierd_refengine.l3tier.TierEvents`."""
        self._saved.inc(blocks)

    def not_saved(self, blocks: int) -> None:
        """See :class:`~kvtierd_refengine.l3tier.TierEvents`."""
        self._not_saved.inc(blocks)

    def log_line(self, interval_seconds: float) -> str | None:
        """vLLM's line for the time since the last call, or None after an idle interval that follows an idle one."""
        now = self._load()
        with self._lock:
            prompt, generation = self._prompt_tokens, self._generation_tokens
            self._prompt_tokens = self._generation_tokens = 0
            active = bool(prompt or generation or now.running or now.waiting)
            # Like vLLM: one more line after the last activity, so that the rates are seen to fall to zero.
            wanted, self._was_active = active or self._was_active, active
            if not wanted:
                return None
            parts = [
                f"Avg prompt throughput: {prompt / interval_seconds:.1f} tokens/s",
                f"Avg generation throughput: {generation / interval_seconds:.1f} tokens/s",
                f"Running: {now.running} reqs",
                f"Waiting: {now.waiting} reqs",
                f"CPU KV cache usage: {now.used_ratio * 100:.1f}%",
                f"Prefix cache hit rate: {self._local.percent:.1f}%",
            ]
            if self._external:
                parts.append(f"External prefix cache hit rate: {self._external.percent:.1f}%")
        return "Engine 000: " + ", ".join(parts)


def _as_number(read: Callable[[], bool]) -> Callable[[], float]:
    return lambda: float(read())
