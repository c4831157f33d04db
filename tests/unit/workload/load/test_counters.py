"""Hits by tier out of counters: what is unknown stays unknown."""

import pytest

from kvtierd.errors import WorkloadError
from kvtierd.plan.engine import EngineObservation
from kvtierd.workload.load.counters import Counts, EngineCounters, driver_for, growth, tier_account, timeline


def counts(l1q=None, l1h=None, l2q=None, l2h=None, l3q=None, l3h=None):
    return Counts(((l1q, l1h), (l2q, l2h), (l3q, l3h)))


def test_an_observation():
    seen = EngineObservation(l1_query_tokens=9, l1_hit_tokens=4, l3_query_tokens=5, l3_hit_tokens=2)
    assert Counts.of(seen) == counts(9, 4, None, None, 5, 2)


def test_shares_of_the_tiers_add_up_to_the_rate_of_all():
    account = tier_account(counts(1000, 100, None, None, 900, 0), counts(2000, 400, None, None, 1600, 350))
    assert account["looked_up_tokens"] == 1000
    assert account["l1"] == {"query_tokens": 1000, "hit_tokens": 300, "hit_rate": 0.3, "share": 0.3}
    assert account["l3"]["hit_rate"] == 0.5
    assert account["l3"]["share"] == 0.35
    assert account["l2"] == {"query_tokens": None, "hit_tokens": None, "hit_rate": None, "share": None}
    assert account["hit_tokens"] == 650
    assert account["hit_rate"] == 0.65


def test_no_counters_are_not_a_hit_rate_of_zero():
    account = tier_account(counts(), counts())
    assert account["hit_rate"] is None
    assert account["hit_tokens"] is None


def test_a_counter_that_appears_has_grown_from_zero():
    assert growth(counts(5, 1), counts(9, 1, None, None, 3, 2))[2] == {"query_tokens": 3, "hit_tokens": 2}


def test_a_counter_that_went_back_is_unknown():
    assert growth(counts(50, 9), counts(7, 1))[0] == {"query_tokens": None, "hit_tokens": None}


def test_the_timeline():
    samples = [(0.0, counts(0, 0)), (1.0, counts(10, 0)), (2.0, counts(30, 15))]
    assert timeline(samples) == [
        {"seconds": 1.0, "looked_up": 10, "l1": 0, "l2": None, "l3": None},
        {"seconds": 2.0, "looked_up": 20, "l1": 15, "l2": None, "l3": None},
    ]


async def test_metrics_that_are_none(unused_tcp_port):
    counters = EngineCounters(f"http://127.0.0.1:{unused_tcp_port}/metrics", driver_for("vllm"))
    with pytest.raises(WorkloadError) as caught:
        await counters.read()
    assert caught.value.stable_code == "load.metrics"


@pytest.mark.parametrize("kind", ["vllm", "sglang", "refengine", "vllm-cpu"])
def test_kinds(kind):
    assert driver_for(kind).name
