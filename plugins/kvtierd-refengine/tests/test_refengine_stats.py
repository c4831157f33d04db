"""The log line is vLLM's, to the character."""

from __future__ import annotations

from kvtierd_refengine.stats import EngineStats, HitRate, Load, PromptTokens
from prometheus_client import generate_latest


def make(load: Load | None = None) -> EngineStats:
    return EngineStats("m", load=lambda: load or Load())


def test_the_line_without_and_with_an_external_tier() -> None:
    stats = make(Load(running=1, waiting=2, used_ratio=0.1234))
    stats.prompt_started(PromptTokens(total=1000, l1=412, l3=0, external_queried=None))
    stats.first_token(1000, 0.5)
    stats.token()
    assert stats.log_line(10) == (
        "Engine 000: Avg prompt throughput: 100.0 tokens/s, Avg generation throughput: 0.1 tokens/s, "
        "Running: 1 reqs, Waiting: 2 reqs, CPU KV cache usage: 12.3%, Prefix cache hit rate: 41.2%"
    )
    stats.prompt_started(PromptTokens(total=1000, l1=0, l3=120, external_queried=1000))
    line = stats.log_line(10)
    assert line is not None
    assert line.endswith("Prefix cache hit rate: 20.6%, External prefix cache hit rate: 12.0%")
    assert "Avg prompt throughput: 0.0 tokens/s" in line  # counted anew for each line


def test_an_idle_engine_falls_silent_after_one_more_line() -> None:
    stats = make()
    assert stats.log_line(10) is None
    stats.token()
    assert "generation throughput: 0.1" in str(stats.log_line(10))
    assert "generation throughput: 0.0" in str(stats.log_line(10))
    assert stats.log_line(10) is None


def test_hit_rates_forget_what_is_long_ago() -> None:
    rate = HitRate()
    assert (rate.percent, bool(rate)) == (0.0, False)
    for _ in range(1000):
        rate.add(10, 10)
    assert rate.percent == 100.0
    for _ in range(1000):
        rate.add(10, 0)
    assert rate.percent == 0.0


def test_metrics_carry_vllms_names_and_labels() -> None:
    stats = make(Load(running=3, waiting=4, used_ratio=0.5))
    stats.describe_cache(block_size=64, blocks=10)
    stats.watch_l3(attached=lambda: True, skipping=lambda: False)
    stats.failed_load("wrong-bytes", 2)
    text = generate_latest(stats.registry).decode()
    for line in (
        'vllm:num_requests_running{engine="0",model_name="m"} 3.0',
        'vllm:num_requests_waiting{engine="0",model_name="m"} 4.0',
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5',
        'vllm:external_prefix_cache_queries_total{engine="0",model_name="m"} 0.0',
        'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="m"} 0.0',
        'refengine:l3_failed_loads_total{engine="0",model_name="m",reason="wrong-bytes"} 2.0',
        'refengine:l3_attached{engine="0",model_name="m"} 1.0',
    ):
        assert f"\n{line}\n" in text
    (info,) = [line for line in text.splitlines() if line.startswith("vllm:cache_config_info{")]
    assert 'block_size="64"' in info
    assert 'kv_cache_size_tokens="640"' in info
    assert "process_resident_memory_bytes" in text
