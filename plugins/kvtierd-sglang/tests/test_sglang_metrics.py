"""Metrics: the recorded scrapes, absent sources, other releases' labels, several ranks."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtierd_sglang.metrics import observe
from sglang_contexts import RECORDED

RANK = 'engine_type="unified",model_name="m",tp_rank="{}"'


def scrape(*lines: str) -> str:
    return "\n".join(("# HELP sglang:x y", *lines, ""))


def test_hits_by_tier_in_the_recorded_scrape() -> None:
    found = observe((RECORDED / "metrics-storage-hit.txt").read_text())
    assert (found.l1_query_tokens, found.l1_hit_tokens) == (7529, 2496)
    assert (found.l2_query_tokens, found.l2_hit_tokens) == (7529 - 2496, 0)
    assert (found.l3_query_tokens, found.l3_hit_tokens) == (7529 - 2496, 4992)
    assert found.l1_capacity_tokens == 65536
    assert (found.running, found.waiting) == (0, 0)
    assert found.l1_used_ratio == 0.04
    assert found.l1_window_rate is None  # it counts all tiers
    assert found.kv_memory_bytes == 65600 * 1024
    assert found.ttft_buckets is not None
    assert (found.ttft_buckets[0.1], found.ttft_buckets[math.inf]) == (3, 4)


def test_a_source_without_a_hit_yet_is_zero_only_where_its_tier_is_there() -> None:
    found = observe((RECORDED / "metrics-backup.txt").read_text())
    assert (found.l1_hit_tokens, found.l2_hit_tokens, found.l3_hit_tokens) == (4992, 0, 0)
    assert found.l3_written_tokens == 8448
    plain = observe(
        scrape(
            'sglang:prompt_tokens_total{model_name="m"} 100',
            'sglang:cached_tokens_total{cache_source="device"} 40',
        )
    )
    assert (plain.l1_query_tokens, plain.l1_hit_tokens) == (100, 40)
    assert plain.l2_hit_tokens is None
    assert plain.l3_hit_tokens is None
    assert plain.l3_query_tokens is None
    assert plain.l3_written_tokens is None


def test_before_the_first_hit_the_schedulers_zeros_stand_in() -> None:
    text = (RECORDED / "metrics-storage-hit.txt").read_text()
    without = "\n".join(line for line in text.splitlines() if "cached_tokens_total" not in line) + "\n"
    found, whole = observe(without), observe(text)
    for name in ("l1_hit_tokens", "l2_hit_tokens", "l3_hit_tokens", "l3_query_tokens"):
        assert getattr(found, name) == getattr(whole, name)
    neither = observe(
        "\n".join(line for line in without.splitlines() if "prefill_effective" not in line) + "\n"
    )
    assert (neither.l1_hit_tokens, neither.l2_hit_tokens, neither.l3_hit_tokens) == (None, None, None)


def test_nothing_counted_yet_is_unknown() -> None:
    found = observe(scrape("sglang:max_total_num_tokens 64", "sglang:num_running_reqs 0"))
    assert (found.l1_query_tokens, found.l1_hit_tokens) == (None, None)
    lone = observe(scrape("sglang:prompt_tokens_total 5"))
    assert (lone.l1_query_tokens, lone.l1_hit_tokens) == (5, None)
    assert (found.running, found.waiting) == (0, None)


@pytest.mark.parametrize("source", ["storage", "storage_NpuMemcacheStore", "storage_ascend_memcache"])
def test_the_storage_source_has_several_names(source: str) -> None:
    found = observe(
        scrape(
            "sglang:prompt_tokens_total 100",
            f'sglang:cached_tokens_total{{cache_source="{source}"}} 60',
            'sglang:cached_tokens_total{cache_source="host"} 10',
        )
    )
    assert (found.l1_hit_tokens, found.l2_hit_tokens, found.l3_hit_tokens) == (0, 10, 60)
    assert (found.l2_query_tokens, found.l3_query_tokens) == (100, 90)


def test_hits_of_no_named_tier_are_not_given_to_one() -> None:
    found = observe(
        scrape(
            "sglang:prompt_tokens_total 100",
            "sglang:token_usage 0",
            'sglang:cached_tokens_total{cache_source="total"} 60',
        )
    )
    assert (found.l1_query_tokens, found.l1_hit_tokens, found.l3_hit_tokens) == (100, None, None)


def test_ranks_and_replicas() -> None:
    def of(name: str, *values: tuple[int, int, float]) -> list[str]:
        return [f'sglang:{name}{{dp_rank="{dp}",tp_rank="{tp}"}} {value}' for dp, tp, value in values]

    found = observe(
        scrape(
            *of("num_running_reqs", (0, 0, 3), (0, 1, 3), (1, 2, 4), (1, 3, 4)),
            *of("max_total_num_tokens", (0, 0, 1000), (0, 1, 900), (1, 2, 1000)),
            *of("token_usage", (0, 0, 0.1), (1, 2, 0.9)),
            'sglang:prompt_tokens_total{is_streaming="true"} 5',
            'sglang:prompt_tokens_total{is_streaming="false"} 6',
        )
    )
    assert found.running == 7
    assert found.l1_capacity_tokens == 900
    assert found.l1_used_ratio == 0.9
    assert found.l1_query_tokens == 11


@pytest.mark.parametrize(
    "text", ["", "vllm:num_requests_running 1\n", "<html>502</html>", "sglang:token_usage\n"]
)
def test_what_is_not_sglang_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"sglang|Prometheus"):
        observe(text)


def test_nan_is_unknown() -> None:
    found = observe(scrape("sglang:token_usage NaN", "sglang:num_running_reqs 1"))
    assert found.l1_used_ratio is None


@given(
    st.lists(st.sampled_from((RECORDED / "metrics-storage-hit.txt").read_text().splitlines()), max_size=90)
)
def test_any_part_of_a_scrape_gives_the_same_or_nothing(lines: list[str]) -> None:
    unique = list(dict.fromkeys(lines))
    whole = observe((RECORDED / "metrics-storage-hit.txt").read_text())
    try:
        part = observe("\n".join(unique) + "\n")
    except ValueError:
        return
    for name in ("l1_query_tokens", "l1_capacity_tokens", "running", "waiting", "l1_used_ratio"):
        assert getattr(part, name) in (None, getattr(whole, name))
