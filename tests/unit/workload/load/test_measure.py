"""Figures of a run: from all values, and never from failed requests."""

import random

import numpy
import pytest

from kvtierd.workload.load.measure import (
    RequestRecord,
    distribution,
    quantile,
    summarize,
    time_per_output_token,
)


def record(number, *, ttft=0.1, e2e=0.5, tokens=5, error="", prompt=100, **more):
    tpot = time_per_output_token(ttft, e2e, tokens)
    values = {
        "number": number, "conversation": "c", "turn": 1, "started_seconds": 0.0, "lag_seconds": 0.0, "ttft_seconds": ttft,
        "e2e_seconds": e2e, "tpot_seconds": tpot, "prompt_tokens": prompt, "output_tokens": tokens, "tokens_from": "usage",
        "cached_tokens": None, "prompt_chars": 400, "error": error, "error_text": f"{error} text" if error else "",
    }  # fmt: skip
    return RequestRecord(**values | more)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 999])
def test_quantiles_are_numpys(count):
    values = [random.Random(count).expovariate(1) for _ in range(count)]
    for percent in (0, 1, 50, 75, 90, 99, 100):
        assert quantile(sorted(values), percent) == pytest.approx(float(numpy.percentile(values, percent)))


def test_a_distribution():
    found = distribution([3.0, 1.0, None, 2.0])
    assert found["count"] == 3
    assert (found["mean"], found["min"], found["max"], found["p50"]) == (2.0, 1.0, 3.0, 2.0)
    assert found["std"] == pytest.approx(float(numpy.std([1, 2, 3])))


def test_nothing_measured_is_not_zero():
    assert distribution([]) is None
    assert distribution([None]) is None
    summary = summarize([], [], seconds=0.0)
    assert summary["ttft_seconds"] is None
    assert summary["requests_per_second"] == 0


def test_time_for_each_token_after_the_first():
    assert time_per_output_token(0.1, 0.5, 5) == pytest.approx(0.1)
    assert time_per_output_token(0.1, 0.1, 1) is None
    assert time_per_output_token(None, 0.5, 5) is None


def test_failed_requests_are_in_no_latency_and_in_no_throughput():
    records = [record(1), record(2), record(3, ttft=0.0001, e2e=0.0002, error="cut", tokens=1)]
    summary = summarize(records, [0.1] * 8, seconds=2.0)
    assert (summary["requests"], summary["succeeded"], summary["failed"]) == (3, 2, 1)
    assert summary["ttft_seconds"]["min"] == 0.1
    assert summary["output_tokens"] == 10
    assert summary["output_tokens_per_second"] == 5
    assert summary["total_tokens_per_second"] == 105
    assert summary["errors"] == [{"kind": "cut", "count": 1, "example": "cut text"}]


def test_errors_are_grouped_the_most_frequent_first():
    records = [record(1, error="timeout"), record(2, error="rate-limited"), record(3, error="rate-limited")]
    kinds = [(e["kind"], e["count"]) for e in summarize(records, [], seconds=1)["errors"]]
    assert kinds == [("rate-limited", 2), ("timeout", 1)]


def test_prompt_tokens_of_some_are_not_those_of_all():
    summary = summarize([record(1), record(2, prompt=None)], [], seconds=1)
    assert summary["prompt_tokens"] is None
    assert summary["total_tokens_per_second"] is None


def test_a_record_reads_back():
    one = record(1, error="cut")
    assert RequestRecord.from_dict(one.as_dict() | {"of a later version": 1}) == one
    with pytest.raises(TypeError):
        RequestRecord.from_dict({"number": 1})
