"""From a demand to a pool: the planner must make of the settings exactly what was printed."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.errors import WorkloadError
from kvtierd.plan.model import Series
from kvtierd.settings import Settings
from kvtierd.workload.sizing.demand import PoolSize, demand_bytes, size_pool

from ...plan.plan_lab import host, plan

GB = 1000**3
GIB = 1024**3


def planned(size: PoolSize, inventory: str, cards: int):
    settings = Settings(
        **tomllib.loads(size.settings),
        node={"series": size.series},
        engine=[{"name": "e", "plugin": "fake", "devices": list(range(cards)), "port": 8113}],
    )
    return plan(settings, host(inventory, memory_total_bytes=4096 * GIB, memory_available_bytes=4000 * GIB))


def test_a_hundred_requests_of_five_thousand_tokens() -> None:
    wanted = demand_bytes(
        requests=100, input_tokens=4000, output_tokens=1000, bytes_per_token=0.25 * GB / 1000
    )
    assert wanted == 125 * GB
    size = size_pool(wanted, cards=2)
    assert size.kv_bytes == 125 * GB
    assert size.dram_bytes * size.evict_high / 100 >= wanted
    assert (size.dram_bytes_per_card, size.dram_bytes) == (65 * GIB, 130 * GIB)
    assert (size.evict_high, size.evict_low) == (90, 80)
    assert size.hugepages.pages == (130 + 4) * 512
    assert 'evict_high = 99 and evict_low = 90 dram = "118GiB"' in size.notes[0]


@pytest.mark.parametrize(
    ("series", "inventory", "cards"),
    [
        ("800I-A2", "a2-2cards", 2),
        ("800I-A2", "a2-8cards", 8),
        ("300I-A2", "a2-2cards", 2),
        ("A3", "a3-16dies", 16),
        ("A5", "a5-8", 8),
    ],
)
@pytest.mark.parametrize("gigabytes", [1, 125, 1500])
def test_the_planner_makes_the_same_of_the_settings(
    series: Series, inventory: str, cards: int, gigabytes: int
) -> None:
    size = size_pool(gigabytes * GB, cards=cards, series=series)
    made = planned(size, inventory, cards)
    assert {r.code for r in made.refusals} <= {"memcache.missing"}
    assert made.pool.capacity_bytes == size.dram_bytes
    assert made.pool.dram_bytes_per_provider == size.plan.dram_bytes_per_provider
    assert made.hugepages.pages == size.hugepages.pages
    assert "pool.aligned-down" not in {note.code for note in made.notes}
    assert made.pool.capacity_bytes * size.evict_high / 100 >= gigabytes * GB


@given(
    kv_bytes=st.integers(1, 4000 * GB),
    cards=st.integers(1, 16),
    nodes=st.integers(1, 4),
    high=st.integers(2, 99),
    series=st.sampled_from(["800I-A2", "A3", "A5", "emulated"]),
)
def test_the_demand_always_lies_below_the_threshold_and_little_is_wasted(
    kv_bytes: int, cards: int, nodes: int, high: int, series: Series
) -> None:
    try:
        size = size_pool(kv_bytes, cards=cards, nodes=nodes, series=series, evict_high=high)
    except WorkloadError as error:
        if error.stable_code != "sizing.pool":
            raise
        return
    assert size.capacity_bytes * high >= 100 * kv_bytes
    pool = tomllib.loads(size.settings)["pool"]
    assert (pool["evict_high"], pool["evict_low"]) == (size.evict_high, size.evict_low)
    assert size.evict_low < size.evict_high == high
    least = size.plan.alignment_bytes * size.plan.providers * nodes
    assert size.capacity_bytes - -(-kv_bytes * 100 // high) < least + nodes


def test_hosts_share_the_demand() -> None:
    one, two = size_pool(125 * GB, cards=2), size_pool(125 * GB, cards=2, nodes=2)
    assert two.dram_bytes == 66 * GIB
    assert two.capacity_bytes == 132 * GIB > one.dram_bytes


def test_values_that_need_more_room_above_the_threshold_lower_it() -> None:
    size = size_pool(1 * GB, cards=8, value_bytes=32_000_000)
    assert size.evict_high == 88
    assert "evict_high is 88" in size.notes[0]
    kept = size_pool(1 * GB, cards=8, value_bytes=32_000_000, evict_high=95)
    assert (kept.evict_high, kept.evict_low) == (95, 85)
    assert "some writes will fail" in kept.notes[0]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"evict_high": 100, "evict_low": 90}, "sizing.thresholds"),
        ({"evict_high": 80, "evict_low": 80}, "sizing.thresholds"),
        ({"evict_high": 0}, "sizing.thresholds"),
        ({"evict_low": 95}, "sizing.thresholds"),
        ({"kv_bytes": 0}, "sizing.demand"),
        ({"kv_bytes": 1 << 70}, "sizing.demand"),
        ({"kv_bytes": 2000 * GB, "cards": 1}, "sizing.pool"),  # more than MemCache takes for one rank
    ],
)
def test_pools_that_cannot_be(options: dict[str, int], code: str) -> None:
    with pytest.raises(WorkloadError) as error:
        size_pool(**{"kv_bytes": GB, "cards": 2, **options})
    assert error.value.stable_code == code
    assert error.value.hint


@pytest.mark.parametrize(
    "wrong", [{"requests": 0}, {"requests": -5}, {"input_tokens": 0}, {"output_tokens": -1}]
)
def test_demands_that_are_none(wrong: dict[str, int]) -> None:
    with pytest.raises(WorkloadError) as error:
        demand_bytes(
            **{"requests": 1, "input_tokens": 1, "output_tokens": 0, "bytes_per_token": 1.0, **wrong}
        )
    assert error.value.stable_code == "sizing.demand"
