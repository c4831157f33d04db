"""vLLM's /metrics: the real ones, several engines, older versions, broken answers."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtierd_vllm.metrics import read_metrics
from prometheus_client.parser import text_string_to_metric_families

REAL = (Path(__file__).parents[3] / "tests/fixtures/engines/vllm/metrics.txt").read_text(encoding="utf-8")


def test_a_real_scrape() -> None:
    made = read_metrics(REAL)
    assert made.model_dump(exclude_none=True) == {
        "l1_query_tokens": 25_000,
        "l1_hit_tokens": 7296,
        "l3_query_tokens": 17_704,
        "l3_hit_tokens": 7296,
        "l1_capacity_tokens": 1_048_576,
        "l1_used_ratio": 0.0,
        "running": 0,
        "waiting": 0,
        "kv_memory_bytes": 1024**3,
    }


def test_it_agrees_with_a_general_parser() -> None:
    samples = {s.name: s.value for f in text_string_to_metric_families(REAL) for s in f.samples}
    made = read_metrics(REAL)
    assert made.l1_hit_tokens == samples["vllm:prefix_cache_hits_total"]
    assert made.l3_query_tokens == samples["vllm:external_prefix_cache_queries_total"]


def test_the_histogram_of_the_time_to_the_first_token() -> None:
    name = "vllm:time_to_first_token_seconds"
    made = read_metrics(
        f'{name}_bucket{{engine="0",le="0.01",model_name="tiny"}} 0.0\n'
        f'{name}_bucket{{engine="0",le="0.02",model_name="tiny"}} 2.0\n'
        f'{name}_bucket{{engine="0",le="0.25",model_name="tiny"}} 4.0\n'
        f'{name}_bucket{{engine="0",le="+Inf",model_name="tiny"}} 4.0\n'
        f'{name}_count{{engine="0",model_name="tiny"}} 4.0\n{name}_sum{{engine="0",model_name="tiny"}} 0.29\n'
    )
    assert made.ttft_buckets == {0.01: 0, 0.02: 2, 0.25: 4, math.inf: 4}


def test_data_parallel_engines_are_added_and_the_fullest_cache_counts() -> None:
    made = read_metrics(
        'vllm:num_requests_running{engine="0",model_name="m"} 2.0\n'
        'vllm:num_requests_running{engine="1",model_name="m"} 3.0\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.25\n'
        'vllm:kv_cache_usage_perc{engine="1"} 0.75\n'
        'vllm:cache_config_info{engine="0",kv_cache_size_tokens="100"} 1.0\n'
        'vllm:cache_config_info{engine="1",kv_cache_size_tokens="200"} 1.0\n'
    )
    assert (made.running, made.l1_used_ratio, made.l1_capacity_tokens) == (5, 0.75, 300)
    assert made.waiting is None
    assert made.l3_hit_tokens is None


@pytest.mark.parametrize(
    ("labels", "capacity"),
    [
        ('block_size="128",num_gpu_blocks="10"', 1280),
        ('block_size="128",num_gpu_blocks="None"', None),
        ('hash_block_size="128",num_gpu_blocks="10"', None),
        ('kv_cache_size_tokens="None",block_size="16",num_gpu_blocks="2"', 32),
    ],
)
def test_capacity_of_older_versions(labels: str, capacity: int | None) -> None:
    assert read_metrics(f"vllm:cache_config_info{{{labels}}} 1.0\n").l1_capacity_tokens == capacity


def test_an_engine_whose_room_is_unknown_makes_the_sum_unknown() -> None:
    text = 'vllm:cache_config_info{kv_cache_size_tokens="100"} 1\nvllm:cache_config_info{engine="1"} 1\n'
    assert read_metrics(text).l1_capacity_tokens is None


def test_longer_names_not_a_number_and_comments_are_left_out() -> None:
    made = read_metrics(
        "# HELP vllm:num_requests_waiting Number of requests\n"
        'vllm:num_requests_waiting_by_reason{reason="capacity"} 9.0\n'
        "vllm:num_requests_running NaN\n"
        "vllm:prefix_cache_hits_total 4.0 1700000000\r\n"
    )
    assert made.waiting is None
    assert made.running is None
    assert made.l1_hit_tokens == 4


def test_braces_and_quotes_in_a_label() -> None:
    assert read_metrics('vllm:num_requests_running{model_name="a\\"} b{"} 2').running == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<html>no such page</html>",
        "vllm:num_requests_running",
        'vllm:num_requests_running{model="a} 1.0\n',
        "vllm:num_requests_running one\n",
        "vllm:num_requests_running 1.0 2 3\n",
    ],
)
def test_what_is_no_scrape_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"vllm:|not a"):
        read_metrics(text)


@settings(deadline=None)
@given(st.text(alphabet='{}",\\= \n1.0aN', max_size=200))
def test_garbage_ends_in_an_answer_or_a_value_error(tail: str) -> None:
    with contextlib.suppress(ValueError):
        read_metrics("vllm:num_requests_running" + tail)


def test_a_label_text_without_an_end_costs_no_time() -> None:
    with pytest.raises(ValueError, match="not a Prometheus sample"):
        read_metrics("vllm:num_requests_running{" + 'a="b",' * 50_000)
