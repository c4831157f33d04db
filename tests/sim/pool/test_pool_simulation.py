"""The decider in the loop with a modelled pool: it converges, does not flap, and beats doing nothing."""

from __future__ import annotations

import pytest

from .mutants import MUTANTS, hunt
from .run import play
from .scenarios import SCENARIOS
from .world import GIB, MIB, Pool, World


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_what_is_promised_holds(scenario):
    result = play(scenario, seed=1)
    assert result.problems == [], result.told


@pytest.mark.parametrize("name", MUTANTS)
def test_the_simulation_catches(name):
    assert hunt(name), "nothing was noticed"


def test_the_same_seed_plays_the_same_run():
    scenario = next(s for s in SCENARIOS if s.name == "memory gets short")
    first, second = (World(scenario, 5).run() for _ in range(2))
    assert first.pool.counts == second.pool.counts
    assert [a.proposal for a in first.acts] == [a.proposal for a in second.acts]


def test_traffic_is_the_same_with_and_without_actions():
    scenario = next(s for s in SCENARIOS if s.name == "too small")
    runs = [World(scenario, 3, decider=d).run() for d in (True, False)]
    assert runs[0].pool.counts["queries"] == runs[1].pool.counts["queries"]
    assert runs[0].rng.random() == runs[1].rng.random()


def test_the_modelled_pool_evicts_between_its_thresholds_and_fails_values_that_find_no_room():
    pool = Pool(90, 80, rng=None)
    pool.join("a", "p", 100 * MIB)
    for i in range(90):
        pool.put(i, MIB, "a")
    assert (len(pool.keys), pool.counts["evicted_keys"]) == (90, 0)
    pool.look_up(0)
    pool.put("one more", MIB, "a")
    assert (len(pool.keys), pool.counts["evicted_keys"]) == (80, 11)
    assert 0 in pool.keys
    assert 1 not in pool.keys
    stuck = Pool(99, 90, rng=None)
    stuck.join("a", "p", GIB)
    for i in range(200):
        stuck.put(i, 21 * MIB, "a")
    assert stuck.counts["evicted_keys"] == 0
    assert stuck.counts["failed"] == 200 - GIB // (21 * MIB)
    stuck.leave("a", "p")
    assert stuck.keys == {}
