"""What every vLLM has in common: its HTTP API, its metrics, its log, the ways it fails."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from kvtierd.plan.engine import (
    API_VERSION,
    EngineContext,
    EngineObservation,
    HttpCall,
    Tier,
    TierTokens,
)
from kvtierd.plan.model import HttpProbe, Readiness, RestartPolicy
from kvtierd_vllm import lines
from kvtierd_vllm.arguments import by_name
from kvtierd_vllm.metrics import read_metrics

DEV_MODE: Final = "VLLM_SERVER_DEV_MODE"

# Texts in the last lines of an engine that ended, after which a new start ends the same way. Not among them: a port
# in use, too little memory on the card, a head that does not answer. Those pass.
FATAL_PATTERNS: Final = (
    "error: argument ",
    "error: unrecognized arguments",
    "Unsupported connector type: ",
    "validation error for ",  # of ModelConfig, VllmConfig, KVTransferConfig: a setting that does not fit
    "LocalEntryNotFoundError",
    "RepositoryNotFoundError",
    "Invalid repository ID or local directory specified",
    "is not a valid model identifier",
    "does not appear to have a file named config.json",
    "ModuleNotFoundError: No module named",
    "cannot open shared object file",
)
FATAL_EXIT_CODES: Final = (2, 126, 127)  # argparse: wrong usage; the program cannot be run; it is not there

# vLLM logs requests with their prompts when asked to, and a prompt may quote anything.
_QUOTES_A_PROMPT: Final = "Received request "


class VllmServer:
    """The part of :class:`kvtierd.plan.engine.EngineDriver` that is the same for every vLLM."""

    api_version = API_VERSION
    default_port = 8000
    ready_seconds: float = 300.0

    def metrics_url(self, context: EngineContext) -> str | None:
        """See :class:`kvtierd.plan.engine.EngineDriver`."""
        return f"{context.url}/metrics"

    def observe(self, metrics_text: str) -> EngineObservation:
        """See :func:`kvtierd_vllm.metrics.read_metrics`."""
        return read_metrics(metrics_text)

    def read_line(self, line: str) -> EngineObservation | None:
        """One line of the log. ``failed_loads`` is how many this line tells of, not a total.

        Memory of zero or less for the cache is a fatal sign: the card is occupied, or the share for vLLM too small.
        """
        if not lines.may_say_something(line):
            return None
        line = line.partition(_QUOTES_A_PROMPT)[0]
        return read_text(lines.cleaned(line))

    def generation(self, context: EngineContext) -> HttpCall:
        """One token after a short prompt."""
        body = {
            "model": served_name(context),
            "prompt": "kvtierd",
            "max_tokens": 1,
            "temperature": 0,
        }
        return HttpCall(path="/v1/completions", body=body)

    def generated(self, body: bytes) -> str:
        """The completion's text. It may be empty: a token need not be printable, but one must have been counted.

        Raises:
            ValueError: it is not a completion, or no token was generated.
        """
        answer = _object(body)
        try:
            text = answer["choices"][0]["text"]
            count = (answer.get("usage") or {}).get("completion_tokens")
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"not a completion: {body[:80]!r}") from error
        if not isinstance(text, str) or not (text or count):
            raise ValueError("the completion has no token")
        return text

    def tokens(self, body: bytes) -> TierTokens:
        """From ``usage.prompt_tokens_details``, which vLLM fills under ``--enable-prompt-tokens-details``.

        Its ``cached_tokens`` are those of L1 and L3 together: which is which is unknown unless there are none. vLLM has
        no L2.

        Raises:
            ValueError: it is not JSON.
        """
        usage = _object(body).get("usage")
        usage = usage if isinstance(usage, dict) else {}
        details = usage.get("prompt_tokens_details")
        prompt = _whole(usage.get("prompt_tokens"))
        cached = _whole(details.get("cached_tokens")) if isinstance(details, dict) else None
        split = 0 if cached == 0 else None
        computed = None if prompt is None or cached is None else prompt - cached
        return TierTokens(prompt=prompt, l1=split, l3=split, computed=computed)

    def l3_switch(self, context: EngineContext, *, on: bool) -> tuple[HttpCall, ...]:
        """Never: vLLM makes its KV connector at the start and has no request that ends it.

        Raises:
            ValueError: always.
        """
        raise ValueError("vLLM's KV connector is there from start to end; change the settings and restart it")

    def readiness(self, context: EngineContext) -> Readiness:
        """/health answers 200 once the model is loaded and the engine's processes live."""
        return Readiness(
            probes=(HttpProbe(url=f"{context.url}/health"),),
            deadline_seconds=self.ready_seconds,
            interval_seconds=1.0,
            timeout_seconds=5.0,
        )


def restart_policy(*, first_seconds: float, longest_seconds: float) -> RestartPolicy:
    """When an engine comes back by itself, and what makes that useless."""
    return RestartPolicy(
        first_seconds=first_seconds,
        longest_seconds=longest_seconds,
        fatal_patterns=FATAL_PATTERNS,
        fatal_exit_codes=FATAL_EXIT_CODES,
    )


def read_text(text: str) -> EngineObservation | None:
    """A cleaned line as an observation; ``None`` when it says nothing.

    A plain search comes before every regular expression: it is what a long log costs.
    """
    size = memory_bytes = record = failed = fatal = None
    if "KV cache size: " in text or "Maximum concurrency for " in text or " blocks: " in text:
        size = lines.kv_size(text)
    if "vailable " in text or "for KV " in text:
        memory_bytes = lines.kv_memory_bytes(text)
    if "cache hit rate" in text or "KV cache usage: " in text:
        record = lines.stats(text)
    if "KV load failure" in text or "Failed to get " in text:
        failed = lines.failed_loads(text)
    if "ERROR" in text or "Error: " in text:
        fatal = lines.fatal_sign(text)
    if fatal is None and memory_bytes is not None and memory_bytes <= 0:
        fatal = (
            f"no memory for the KV cache ({memory_bytes} bytes):"
            " another process holds the card, or gpu-memory-utilization is too low"
        )
    if size is None and memory_bytes is None and record is None and failed is None and fatal is None:
        return None
    return EngineObservation(
        kv_tokens=size.tokens if size else None,
        kv_tokens_by_concurrency=size.by_concurrency if size else None,
        kv_memory_bytes=memory_bytes,
        kv_blocks=size.blocks if size else None,
        l1_used_ratio=record.used_ratio if record else None,
        l1_window_rate=record.prefix_rate if record else None,
        l3_window_rate=record.external_rate if record else None,
        running=record.running if record else None,
        waiting=record.waiting if record else None,
        failed_loads=failed,
        fatal=fatal,
    )


def flush_calls(tiers: frozenset[Tier], *, can_reset_pool: bool) -> tuple[HttpCall, ...]:
    """vLLM's requests for these tiers, for an engine whose developer endpoints are on.

    Raises:
        ValueError: a tier cannot be emptied, or not alone.
    """
    if "L2" in tiers:
        raise ValueError("vLLM has no L2")
    if "L3" not in tiers:
        return (HttpCall(path="/reset_prefix_cache"),) if tiers else ()
    if not can_reset_pool:
        raise ValueError("this engine cannot empty L3; kvtierctl purge empties the pool")
    if "L1" not in tiers:
        raise ValueError("vLLM empties L3 only together with L1")
    return (HttpCall(path="/reset_prefix_cache?reset_external=true"),)


def served_name(context: EngineContext) -> str:
    """The name under which the engine knows its model."""
    name = by_name(context.args).get("served-model-name")
    if isinstance(name, list | tuple):
        name = name[0] if name else None
    return str(name) if name else context.model


def program_beside(python: str, name: str) -> str:
    """A program of the interpreter's own environment: ``/venv/bin/python`` -> ``/venv/bin/vllm``."""
    directory, slash, _ = python.rpartition("/")
    return f"{directory}{slash}{name}"


def _object(body: bytes) -> Mapping[str, Any]:
    answer = json.loads(body)  # JSONDecodeError and UnicodeDecodeError are ValueErrors
    if not isinstance(answer, dict):
        raise ValueError(f"not an object: {body[:80]!r}")
    return answer


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
