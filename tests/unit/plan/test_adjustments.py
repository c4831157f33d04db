"""What actions have changed beside the settings, in the plan: thresholds, and pool holders that were added."""

from __future__ import annotations

import pytest
from plan_lab import GIB, MIB, configured, host, plan

from kvtierd.plan.adjustments import NOTHING, AddedHolder, Adjustments

SMALL = configured(node={"series": "emulated"}, pool={"dram": "256MiB", "host_reserve": "1GiB"})


def small(*holders: AddedHolder, **more):
    adjusted = Adjustments(holders=holders, **more)
    return plan(SMALL, host("emulated-small", shm_total_bytes=GIB), adjustments=adjusted)


def text_of(made, ending: str) -> str:
    return next(f.content for f in made.files if f.path.endswith(ending))


def test_thresholds_are_those_of_the_action_and_no_reason_to_restart_the_metaservice() -> None:
    before, after = small(), small(evict_high=80, evict_low=70)
    assert "= 80" in text_of(after, "mmc-meta.conf")
    assert "= 70" in text_of(after, "mmc-meta.conf")
    assert [u.digest for u in before.units] == [u.digest for u in after.units]


@pytest.mark.parametrize("pair", [(80, None), (None, 70), (70, 80)])
def test_half_a_pair_or_an_impossible_one_changes_nothing(pair) -> None:
    assert text_of(small(evict_high=pair[0], evict_low=pair[1]), "mmc-meta.conf") == text_of(
        small(), "mmc-meta.conf"
    )


def test_an_added_holder_is_a_unit_with_a_file_of_its_own_and_leaves_the_others_as_they_are() -> None:
    before, after = small(), small(AddedHolder(index=1, dram_bytes=64 * MIB))
    (added,) = [u for u in after.units if before.unit(u.id) is None]
    assert (added.id, added.kind, added.name) == ("kvtier-pool-added-1", "pool", "added-1")
    assert added.files == tuple(f.path for f in after.files if "added-1" in f.path)
    conf = text_of(after, "mmc-local-added-1.conf")
    assert f"dram.size = {64 * MIB}" in conf or "64MB" in conf, conf
    assert [u.digest for u in before.units] == [u.digest for u in after.units if u.id != added.id]
    assert after.pool.capacity_bytes == before.pool.capacity_bytes, "what the tier needs to be ready stays"
    assert after.pool.added_bytes == 64 * MIB
    assert added.argv != before.unit("kvtier-pool-0").argv, "another die"


def test_an_added_holder_brings_no_more_than_any_rank_may() -> None:
    made = small(AddedHolder(index=0, dram_bytes=GIB))
    assert made.pool.added_bytes == made.pool.dram_bytes_per_provider


def test_memory_of_added_holders_counts_like_any() -> None:
    settings = configured(node={"series": "emulated"}, pool={"dram": "256MiB", "host_reserve": "1GiB"})
    tight = host("emulated-small", shm_total_bytes=300 * MIB)
    assert plan(settings, tight).refusals == ()
    (refusal,) = plan(
        settings, tight, adjustments=Adjustments(holders=(AddedHolder(index=0, dram_bytes=128 * MIB),))
    ).refusals
    assert refusal.code == "memory.shm"


def test_hugepages_are_reserved_for_them_too() -> None:
    pool = {"dram": 64 * GIB, "placement": "standalone", "holders": 2, "protocol": "device_rdma"}
    settings = configured(pool=pool)
    without = plan(settings, host("a3-16dies"))
    adjusted = Adjustments(holders=(AddedHolder(index=0, dram_bytes=8 * GIB),))
    made = plan(settings, host("a3-16dies"), adjustments=adjusted)
    assert (made.hugepages.pages - without.hugepages.pages) * made.hugepages.page_size_bytes == 8 * GIB
    assert made.pool.world_size == without.pool.world_size, "room for it was there before"


def test_a_holder_without_a_die_of_its_own_or_beside_engines_that_hold_the_pool_is_left_out_and_named() -> (
    None
):
    adjusted = Adjustments(holders=(AddedHolder(index=15, dram_bytes=GIB),))
    alone = configured(pool={"dram": 64 * GIB, "placement": "standalone", "holders": 2})
    made = plan(alone, host("a3-16dies"), adjustments=adjusted)
    assert [n.code for n in made.notes if n.code == "pool.added-left-out"] == ["pool.added-left-out"]
    assert made.pool.added_bytes == 0
    within = configured(pool={"dram": 64 * GIB, "placement": "engine"})
    made = plan(
        within, host("a3-16dies"), adjustments=Adjustments(holders=(AddedHolder(index=0, dram_bytes=GIB),))
    )
    assert "the engines hold the pool" in next(n.message for n in made.notes if "added" in n.message)


def test_numbers_are_given_anew_when_they_are_free() -> None:
    adjusted, first = NOTHING.with_holder(GIB)
    adjusted, second = adjusted.with_holder(2 * GIB)
    assert (first.name, second.name, adjusted.added_bytes) == ("added-0", "added-1", 3 * GIB)
    adjusted, third = adjusted.without_holder("added-0").with_holder(GIB)
    assert third.name == "added-0"
    assert adjusted.without_holder("nobody") == adjusted
