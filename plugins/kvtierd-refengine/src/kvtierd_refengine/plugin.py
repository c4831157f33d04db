"""The plugin: how kvtierd launches and reads this engine. The example for writers of engine plugins.

A plugin is this much: an entry point in the group ``kvtierd.plugins`` that names a module, a hook that returns drivers,
and a driver that turns a context into a launch and a scrape into an observation. Both are pure: no I/O, no clock.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from kvtierd.hookspecs import hookimpl
from kvtierd.plan.engine import (
    API_VERSION,
    ENGINE_BASE_ENV,
    EngineContext,
    EngineDriver,
    EngineLaunch,
    EngineObservation,
    HttpCall,
    Tier,
    TierTokens,
    only_samples,
    read_buckets,
    read_samples,
)
from kvtierd.plan.model import HttpProbe, Note, Readiness, Refusal, RestartPolicy, StopPolicy
from kvtierd_refengine import NOTICE
from kvtierd_refengine.options import FATAL_PREFIX, arguments_from

# L3 may take its whole init deadline (10 s by default) before the engine serves without it.
_READY_DEADLINE_SECONDS: Final = 60.0
# Drain (10 s by default), the MemCache client's goodbye (5 s at most), and some air.
_STOP_TIMEOUT_SECONDS: Final = 20.0
_LIBRARY_PATH: Final = "LD_LIBRARY_PATH"
_FAILED_LOADS: Final = "refengine:l3_failed_loads_total"
_SAVED: Final = "refengine:l3_saved_blocks_total"
_TTFT: Final = "vllm:time_to_first_token_seconds_bucket"


class RefengineDriver:
    """Drives ``python -m kvtierd_refengine.server``."""

    name = "refengine"
    api_version = API_VERSION
    default_port = 8100
    package: str | None = "kvtierd-refengine"
    versions = ""

    def launch(self, context: EngineContext) -> EngineLaunch:
        """See :class:`kvtierd.plan.engine.EngineDriver`. Unknown and wrong ``args`` are refusals."""
        args = _with_l3(context)
        argv, problems = arguments_from(args)
        uses_l3 = _uses_l3(argv)
        env = dict(ENGINE_BASE_ENV)
        if uses_l3:
            env |= context.memcache_env | {"MMC_LOCAL_CONFIG_PATH": context.local_conf_path}
        env |= context.env
        if uses_l3 and _LIBRARY_PATH in context.env and _LIBRARY_PATH in context.memcache_env:
            # The operator's own libraries must not hide MemCache's.
            env[_LIBRARY_PATH] = f"{context.memcache_env[_LIBRARY_PATH]}:{context.env[_LIBRARY_PATH]}"
        notes = [Note(code="engine.reference", message=NOTICE)]
        if context.devices:
            text = "the reference engine computes on the CPU and leaves its devices alone"
            notes.append(Note(code="engine.devices-unused", message=text))
        return EngineLaunch(
            argv=(
                context.python,
                "-m",
                "kvtierd_refengine.server",
                "--host",
                context.host,
                "--port",
                str(context.port),
                "--served-model-name",
                context.model or self.name,
                *argv,
                *(("--l3-switch", "on") if uses_l3 and context.l3_switch else ()),
            ),
            env=env,
            clients=1 if uses_l3 else 0,
            follows_conf=True,
            readiness=Readiness(
                probes=(HttpProbe(url=f"{context.url}/health", body_contains='"status": "ok"'),),
                deadline_seconds=_READY_DEADLINE_SECONDS,
            ),
            restart=RestartPolicy(fatal_patterns=(FATAL_PREFIX,)),
            stop=StopPolicy(timeout_seconds=_STOP_TIMEOUT_SECONDS),
            notes=tuple(notes),
            refusals=tuple(Refusal(code=p.code, message=p.message, hint=p.hint) for p in problems),
        )

    def metrics_url(self, context: EngineContext) -> str | None:
        """See :class:`kvtierd.plan.engine.EngineDriver`."""
        return f"{context.url}/metrics"

    def observe(self, metrics_text: str) -> EngineObservation:
        """Reads vLLM's names, summed over labels. What is missing stays None.

        Raises:
            ValueError: The text is not in Prometheus' format, or has no vLLM metric at all.
        """
        sums, capacity_tokens, block_tokens = _read(metrics_text)
        if not any(name.startswith("vllm:") for name in sums):
            raise ValueError("no vllm: metrics in the answer: is this the engine's /metrics?")
        saved = _count(sums, _SAVED)
        l3_queried = _count(sums, "vllm:external_prefix_cache_queries_total")
        return EngineObservation(
            l1_query_tokens=_count(sums, "vllm:prefix_cache_queries_total"),
            l1_hit_tokens=_count(sums, "vllm:prefix_cache_hits_total"),
            l3_query_tokens=l3_queried,
            l3_hit_tokens=_count(sums, "vllm:external_prefix_cache_hits_total"),
            l3_written_tokens=saved * block_tokens if saved is not None and block_tokens else None,
            l1_capacity_tokens=capacity_tokens,
            l1_used_ratio=sums.get("vllm:kv_cache_usage_perc"),
            running=_count(sums, "vllm:num_requests_running"),
            waiting=_count(sums, "vllm:num_requests_waiting"),
            failed_loads=_count(sums, _FAILED_LOADS),
            ttft_buckets=read_buckets(read_samples(metrics_text, (_TTFT,)), _TTFT),
        )

    def read_line(self, line: str) -> EngineObservation | None:
        """The hit-rate line in vLLM's form, and the engine's own last words."""
        if FATAL_PREFIX in line:
            return EngineObservation(fatal=line[line.index(FATAL_PREFIX) :].strip())
        if "Prefix cache hit rate:" not in line:
            return None
        rates = dict(_RATES.findall(line))
        return EngineObservation(
            l1_window_rate=_share(rates.get("Prefix cache hit rate")),
            l3_window_rate=_share(rates.get("External prefix cache hit rate")),
        )

    def generation(self, context: EngineContext) -> HttpCall:
        """One token of a short prompt."""
        body = {"model": context.model or "refengine", "prompt": "kvtierd", "max_tokens": 1, "temperature": 0}
        return HttpCall(path="/v1/completions", body=body)

    def generated(self, body: bytes) -> str:
        """The completion's text."""
        try:
            text = json.loads(body)["choices"][0]["text"]
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"not a completion: {body[:80]!r}") from error
        if not isinstance(text, str) or not text:
            raise ValueError("the completion has no text")
        return text

    def tokens(self, body: bytes) -> TierTokens:
        """From the engine's own field in ``usage``."""
        answer = json.loads(body)
        usage = answer.get("usage") or {} if isinstance(answer, dict) else None
        own = usage.get("kvtier") or {} if isinstance(usage, dict) else None
        if not isinstance(usage, dict) or not isinstance(own, dict):
            raise ValueError(f"not a completion with its usage: {body[:80]!r}")
        return TierTokens(
            prompt=usage.get("prompt_tokens"),
            l1=own.get("l1_tokens"),
            l3=own.get("l3_tokens"),
            computed=own.get("computed_tokens"),
        )

    def flush(self, context: EngineContext, tiers: frozenset[Tier]) -> tuple[HttpCall, ...]:
        """L1 only: MemCache cannot list one model's keys, and there is no L2."""
        others = sorted(tiers - {"L1"})
        if others:
            raise ValueError(
                f"the reference engine cannot flush {', '.join(others)}; kvtierctl purge empties the pool"
            )
        return (HttpCall(path="/reset_prefix_cache"),) if tiers else ()

    def l3_switch(self, context: EngineContext, *, on: bool) -> tuple[HttpCall, ...]:
        """At any time, also under requests: those under way are computed."""
        if not _uses_l3(arguments_from(_with_l3(context))[0]):
            raise ValueError("it has no L3")
        if not context.l3_switch:
            raise ValueError("it was not asked for: l3_switch = true in [[engine]], at the next start")
        return (HttpCall(method="PUT" if on else "DELETE", path="/l3"),)


@hookimpl
def kvtierd_engine_drivers() -> Sequence[EngineDriver]:
    """The driver ``refengine``."""
    return [RefengineDriver()]


def _with_l3(context: EngineContext) -> dict[str, Any]:
    """``args`` with L3 on where there is a pool and the operator has not chosen."""
    args = dict(context.args)
    if "l3" not in args and context.local_conf_path:
        args["l3"] = "on"
    return args


def _uses_l3(argv: Sequence[str]) -> bool:
    return "--l3" in argv and argv[argv.index("--l3") + 1] == "on"


_RATES = re.compile(r"(External prefix cache hit rate|Prefix cache hit rate): (\d+(?:\.\d+)?)%")


def _share(percent: str | None) -> float | None:
    return None if percent is None else float(percent) / 100


_READ = frozenset(
    {
        _FAILED_LOADS,
        _SAVED,
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:external_prefix_cache_queries_total",
        "vllm:external_prefix_cache_hits_total",
        "vllm:kv_cache_usage_perc",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:cache_config_info",
    }
)


def _read(text: str) -> tuple[dict[str, float], int | None, int | None]:
    """Sample name -> sum over its labels; the cache's size and a block's in tokens, from vLLM's info metric."""
    # Here, since every kvtierctl loads the plugins, and this library brings an HTTP server with it.
    from prometheus_client.parser import text_string_to_metric_families

    sums: dict[str, float] = {}
    capacities: list[int] = []
    blocks: list[int] = []
    try:
        for family in text_string_to_metric_families(only_samples(text, _READ)):
            for sample in family.samples:
                if not math.isfinite(sample.value):
                    raise ValueError(f"{sample.name} is {sample.value}")
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
                if sample.name == "vllm:cache_config_info":
                    capacities += _whole_numbers([sample.labels.get("kv_cache_size_tokens", "")])
                    blocks += _whole_numbers([sample.labels.get("block_size", "")])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"not a Prometheus text: {error}") from error
    return sums, sum(capacities) if capacities else None, min(blocks, default=None)


def _whole_numbers(texts: Iterable[str]) -> list[int]:
    return [int(text) for text in texts if text.isascii() and text.isdigit()]


def _count(sums: dict[str, float], name: str) -> int | None:
    return int(sums[name]) if name in sums else None
