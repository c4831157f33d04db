"""An engine to test against: an HTTP server with vLLM's addresses and metric names, and scripted trouble."""

from __future__ import annotations

import json
import threading
from collections import deque
from typing import Any

from kvtierd.testing.loopback import Answer, LoopbackServer, Request

_MOST_PROMPTS = 100
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class FakeEngine(LoopbackServer):
    """Answers /health, /v1/completions and /metrics on a free port of the loopback address.

    A word of a prompt is a token. A prompt whose beginning was seen before hits the L1 cache for that beginning;
    :meth:`restart` empties L1 and keeps the newest prompts in L3, so that the next hit comes from there.

    Args:
        model: Served name of the model, the ``model_name`` label.
        latency_seconds: Time before the answer to a completion.
        uses_l3: Keep what L1 held in an L3 that survives :meth:`restart`.
        port: A port, or 0 for a free one; see ``port`` and ``url``.

    Attributes:
        healthy: /health answers 200, else 503.
        metrics_text: Replaces the whole answer of /metrics when it is not ``None`` (for garbage).
        running, waiting: The gauges of the same name.
        requests: What was asked, the newest 1000.
    """

    def __init__(
        self,
        *,
        model: str = "fake-model",
        latency_seconds: float = 0.0,
        uses_l3: bool = True,
        port: int = 0,
    ) -> None:
        self.model = model
        self.latency_seconds = latency_seconds
        self.uses_l3 = uses_l3
        self.healthy = True
        self.metrics_text: str | None = None
        self.running = 0
        self.waiting = 0
        self._lock = threading.Lock()
        self._script: deque[Answer] = deque()
        self._l1: list[tuple[str, ...]] = []
        self._l3: list[tuple[str, ...]] = []
        self._clear_counters()
        super().__init__(port=port)

    def fail_next(
        self, count: int = 1, *, status: int = 500, body: bytes = b"", delay_seconds: float = 0.0
    ) -> None:
        """The next ``count`` completions get this answer instead."""
        text = body or json.dumps({"error": {"message": "scripted failure", "code": status}}).encode()
        with self._lock:
            self._script.extend([Answer(status, text, delay_seconds=delay_seconds)] * count)

    def restart(self) -> None:
        """As after a restart of the process: L1 is empty and all counters are at zero. L3 stays."""
        with self._lock:
            if self.uses_l3:
                self._l3 = (self._l3 + self._l1)[-_MOST_PROMPTS:]
            self._l1 = []
            self._clear_counters()

    def _clear_counters(self) -> None:
        self._l1_queries = self._l1_hits = self._l3_queries = self._l3_hits = 0

    def answer(self, request: Request) -> Answer:
        """Routes one request."""
        match request.method, request.path:
            case "GET", "/health":
                return Answer(200 if self.healthy else 503)
            case "GET", "/metrics":
                text = self._metrics() if self.metrics_text is None else self.metrics_text
                return Answer(body=text.encode(), content_type=_METRICS_TYPE)
            case "POST", "/v1/completions":
                return self._completion(request)
        return Answer(404, b'{"error": {"message": "no such page"}}')

    def _completion(self, request: Request) -> Answer:
        with self._lock:
            if self._script:
                return self._script.popleft()
        try:
            prompt = request.json()["prompt"]
            words = tuple(prompt.split())
        except (ValueError, LookupError, TypeError, AttributeError):
            return Answer(400, b'{"error": {"message": "prompt: a text is expected"}}')
        with self._lock:
            l1, l3 = self._look_up(words)
        text = f" {words[-1]}" if words else " ."
        body: dict[str, Any] = {
            "object": "text_completion",
            "model": self.model,
            "choices": [{"index": 0, "text": text, "finish_reason": "length"}],
            "usage": {
                "prompt_tokens": len(words),
                "completion_tokens": 1,
                "total_tokens": len(words) + 1,
                "prompt_tokens_details": {"cached_tokens": l1 + l3},
            },
        }
        return Answer(body=json.dumps(body).encode(), delay_seconds=self.latency_seconds)

    def _look_up(self, words: tuple[str, ...]) -> tuple[int, int]:
        """Tokens from L1 and from L3, counted as vLLM counts: L3 is asked for what L1 lacks."""
        l1 = max((_common(words, seen) for seen in self._l1), default=0)
        l3 = max(max((_common(words, seen) for seen in self._l3), default=0) - l1, 0)
        self._l1_queries += len(words)
        self._l1_hits += l1
        if self.uses_l3:
            self._l3_queries += len(words) - l1
            self._l3_hits += l3
        self._l1 = [*self._l1[1 - _MOST_PROMPTS :], words]
        return l1, l3

    def _metrics(self) -> str:
        label = f'{{engine="0",model_name="{self.model}"}}'
        samples: list[tuple[str, str, float]] = [
            ("vllm:num_requests_running", "gauge", self.running),
            ("vllm:num_requests_waiting", "gauge", self.waiting),
            ("vllm:prefix_cache_queries_total", "counter", self._l1_queries),
            ("vllm:prefix_cache_hits_total", "counter", self._l1_hits),
        ]
        if self.uses_l3:
            samples += [
                ("vllm:external_prefix_cache_queries_total", "counter", self._l3_queries),
                ("vllm:external_prefix_cache_hits_total", "counter", self._l3_hits),
            ]
        return "".join(
            f"# TYPE {name} {kind}\n{name}{label} {float(value)}\n" for name, kind, value in samples
        )


def _common(left: tuple[str, ...], right: tuple[str, ...]) -> int:
    """How many words both begin with."""
    length = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        length += 1
    return length
