import dataclasses
import math

import pytest

from kvtierd.memcache.answers import Capacity, ClusterStatus, MediumUsage, Segment
from kvtierd.memcache.health import PoolState
from kvtierd.observe.derive import Derivation, EngineLook, Look, PoolLook
from kvtierd.observe.meta_log import MetaLogCounts
from kvtierd.observe.meta_metrics import MetaMetrics, Room
from kvtierd.plan.engine import EngineObservation

MIB = 1024**2


def pool_state(total=1000, used=400, ranks=(0,)):
    usage = MediumUsage(total_bytes=total, used_bytes=used, free_bytes=total - used)
    none = MediumUsage(total_bytes=0, used_bytes=0, free_bytes=0)
    segments = tuple(
        Segment(
            segment_name=f"rank-{rank}-dram", medium="dram", total_bytes=total, used_bytes=used,
            remaining_bytes=total - used,
        )
        for rank in ranks
    )  # fmt: skip
    return PoolState(Capacity(cpu=usage, npu=none), segments, ClusterStatus())


def metrics(stored=10, allocated=400, capacity=1000, **counters):
    return MetaMetrics(counters, stored, {}, {"dram": Room(capacity, allocated)})


def engine(at, instance="run-1", unit="e", group="", **figures):
    return EngineLook(
        unit,
        group=group,
        instance=instance,
        ready=True,
        observation=EngineObservation(**figures),
        at_seconds=at,
    )


def look(now, *engines, pool=None):
    return Look(now, "host-a", "host-a", is_master=True, engines=engines, pool=pool)


def run(derivation, seconds, make, pool=None, start=0):
    """One look a second; ``make(second)`` gives the engines' figures."""
    picture = None
    for second in range(start, start + seconds):
        at = float(second)
        made = make(second)
        engines = made if isinstance(made, tuple) else (engine(at, **made),)
        picture = derivation.take(look(at, *engines, pool=pool(second) if pool else None))
    return picture


def steady(second):
    return {
        "l1_query_tokens": 1000 * second, "l1_hit_tokens": 250 * second,
        "l3_query_tokens": 750 * second, "l3_hit_tokens": 600 * second,
    }  # fmt: skip


def test_hit_rates_by_window_tier_and_over_the_node():
    picture = run(Derivation(), 400, steady)
    (one,) = picture.engines
    assert set(one.windows) == {60, 300}
    assert one.windows[60]["L1"].hit_rate == pytest.approx(0.25)
    assert one.windows[300]["L3"].hit_rate == pytest.approx(0.8)
    assert "L2" not in one.windows[60]
    assert picture.tiers[60]["L3"].hit_tokens == 60 * 600
    assert picture.saved_tokens == 399 * 850
    assert one.totals["L3"].query_tokens == 399 * 750


def test_the_window_and_not_the_past_decides():
    def fading(second):
        hits = min(second, 100) * 600
        return {"l3_query_tokens": 750 * second, "l3_hit_tokens": hits}

    picture = run(Derivation(), 400, fading)
    assert picture.engines[0].windows[60]["L3"].hit_rate == 0.0
    assert picture.engines[0].since_hit_seconds["L3"] == 299


def test_nothing_known_is_nothing_and_never_zero():
    picture = run(Derivation(), 100, lambda _: {})
    (one,) = picture.engines
    assert one.windows == {}
    assert one.ttft_p50_seconds is None
    assert one.failed_loads is None
    assert one.since_hit_seconds == {}
    assert picture.saved_tokens is None
    assert picture.tiers == {}
    assert picture.pool is None


def test_a_restart_of_an_engine_goes_on():
    derivation = Derivation()
    run(derivation, 100, steady)

    def again(second):
        return (engine(float(second), instance="run-2", **steady(second - 100)),)

    picture = run(derivation, 100, again, start=100)
    assert picture.engines[0].windows[60]["L3"].hit_rate == pytest.approx(0.8)
    assert picture.saved_tokens == 99 * 850 + 99 * 850
    assert picture.engines[0].instance == "run-2"


def test_an_old_observation_given_again_is_not_counted_and_ages():
    derivation = Derivation()
    run(derivation, 100, steady)
    stale = engine(99.0, **steady(99))
    for second in range(100, 140):
        picture = derivation.take(look(float(second), stale))
    assert picture.engines[0].at_seconds == 99.0
    assert 60 not in picture.engines[0].windows


def test_a_new_run_that_was_not_read_yet_has_no_gauges():
    derivation = Derivation()
    run(derivation, 5, lambda s: {"waiting": 3, "running": 1, "l1_used_ratio": 0.5})
    old = engine(4.0, instance="run-2", waiting=3)
    picture = derivation.take(look(5.0, old))
    assert picture.engines[0].at_seconds is None
    assert picture.engines[0].waiting is None


def test_several_engines_are_added_and_one_that_knows_half_is_left_out():
    def make(second):
        at = float(second)
        return (
            engine(at, unit="a", **steady(second)),
            engine(at, unit="b", l3_query_tokens=1000 * second, l3_hit_tokens=0),
            engine(at, unit="c", l3_query_tokens=5000 * second),
        )

    picture = run(Derivation(), 70, make)
    assert picture.tiers[60]["L3"].query_tokens == 60 * 1750
    assert picture.tiers[60]["L3"].hit_tokens == 60 * 600
    assert picture.engines[2].windows[60]["L3"].hit_rate is None


def test_more_hits_than_lookups_are_a_lie():
    picture = run(Derivation(), 70, lambda s: {"l3_query_tokens": 10 * s, "l3_hit_tokens": 50 * s})
    assert picture.engines[0].windows[60]["L3"].hit_rate is None
    assert any("looked up: left out" in p for p in picture.problems)
    close = run(Derivation(), 70, lambda s: {"l3_query_tokens": 100 * s, "l3_hit_tokens": 101 * s})
    assert close.engines[0].windows[60]["L3"].hit_rate == 1.0


def test_time_to_first_token_of_the_last_five_minutes():
    def make(second):
        slow = max(0, second - 400)
        return {"ttft_buckets": {0.1: second, 1.0: second + slow, math.inf: second + slow}}

    derivation = Derivation()
    assert run(derivation, 200, make).engines[0].ttft_p50_seconds is None, "not five minutes yet"
    picture = run(derivation, 201, make, start=200)
    assert picture.engines[0].ttft_p95_seconds == pytest.approx(0.095)
    picture = run(derivation, 300, make, start=401)
    assert picture.engines[0].ttft_p50_seconds == pytest.approx(0.1)
    assert picture.engines[0].ttft_p95_seconds == pytest.approx(0.91)


def test_the_first_failed_load_is_seen_although_its_counter_is_born_with_it():
    def make(second):
        return steady(second) | ({"failed_loads": 1} if second >= 80 else {})

    picture = run(Derivation(), 100, make)
    assert picture.engines[0].failed_loads == 1
    assert picture.engines[0].failed_loads_windows[60] == 1


def test_engines_that_are_gone_are_forgotten_and_their_savings_are_not():
    derivation = Derivation()
    run(derivation, 10, steady)
    picture = derivation.take(look(10.0))
    assert picture.engines == ()
    assert picture.saved_tokens == 9 * 850
    assert derivation._engines == {}


def pool_look(second, instance="meta-1", **counters):
    at = float(second)
    return PoolLook(
        instance, pool_state(used=500), at, metrics(stored=10, allocated=500, **counters), at,
        evict_high_percent=90, evict_low_percent=80, owners={0: ("host-b", "kvtier-pool-0")},
    )  # fmt: skip


def test_eviction_in_keys_bytes_and_turnovers():
    def pool(second):
        return pool_look(
            second, evicted_keys=2 * second, allocations=10 * second, failed_allocations=second,
            looked_up_keys=40 * second, found_keys=30 * second,
        )  # fmt: skip

    picture = run(Derivation(), 70, steady, pool)
    seen = picture.pool
    assert (seen.capacity_bytes, seen.used_bytes, seen.stored_keys) == (1000, 500, 10)
    assert seen.mean_value_bytes == 50
    minute = seen.windows[60]
    assert minute.evicted_keys_per_second == pytest.approx(2)
    assert minute.evicted_bytes_per_second == pytest.approx(100)
    assert minute.turnovers_per_hour == pytest.approx(360)
    assert (minute.failed_allocations, minute.allocations) == (60, 600)
    assert (minute.query_keys, minute.hit_keys) == (2400, 1800)
    assert seen.segments[0].node == "host-b"
    assert seen.totals["evicted_keys"] == 138
    assert seen.hung_seconds == 0
    assert (seen.evict_high_percent, seen.evict_low_percent) == (90, 80)


def test_an_empty_pool_that_evicts_nothing_turns_over_zero_times():
    def pool(second):
        return dataclasses.replace(pool_look(second), metrics=metrics(stored=0, allocated=0, evicted_keys=0))

    minute = run(Derivation(), 70, steady, pool).pool.windows[60]
    assert minute.turnovers_per_hour == 0
    assert minute.query_keys is None


def test_a_restarted_metaservice_goes_on():
    derivation = Derivation()
    run(derivation, 50, steady, lambda s: pool_look(s, evicted_keys=10 * s))
    picture = run(
        derivation, 50, steady, lambda s: pool_look(s, "meta-2", evicted_keys=10 * (s - 50)), start=50
    )
    assert picture.pool.windows[60].evicted_keys_per_second == pytest.approx(10, rel=0.05)
    assert picture.pool.instance == "meta-2"


def test_a_hung_metaservice_keeps_its_last_figures_and_their_age():
    derivation = Derivation()
    run(derivation, 70, steady, lambda s: pool_look(s, evicted_keys=s))
    picture = run(derivation, 20, steady, lambda _: PoolLook("meta-1"), start=70)
    assert picture.pool.hung_seconds == 20
    assert picture.pool.at_seconds == 69
    assert picture.pool.capacity_bytes == 1000


def test_a_metaservice_that_never_answers_is_hung_from_its_start():
    picture = run(Derivation(), 30, steady, lambda _: PoolLook("meta-1"))
    assert picture.pool.hung_seconds == 29
    assert picture.pool.capacity_bytes is None
    assert picture.pool.windows == {}


def test_none_that_runs_is_no_pool():
    assert run(Derivation(), 3, steady, lambda _: PoolLook(None)).pool is None


def test_a_lying_metaservice_is_flagged_and_not_believed():
    derivation = Derivation()
    run(derivation, 70, steady, lambda s: pool_look(s, evicted_keys=s))
    picture = run(derivation, 5, steady, lambda s: pool_look(s, evicted_keys=math.nan), start=70)
    assert picture.pool.flagged == 5
    assert any("evicted_keys: is NaN" in p for p in picture.problems)
    assert picture.pool.windows[60].evicted_keys_per_second is None
    assert picture.pool.totals["evicted_keys"] == 69


def test_without_metrics_the_log_tells_of_evictions():
    log = MetaLogCounts()

    def pool(second):
        log.evicted_keys, log.evictions = 3 * second, second
        return PoolLook("meta-1", pool_state(), float(second), metrics_problem="a web page", log=log)

    picture = run(Derivation(), 70, steady, pool)
    assert picture.pool.windows[60].evicted_keys_per_second == pytest.approx(3)
    assert picture.pool.windows[60].failed_allocations is None
    assert picture.pool.problem == "a web page"
    assert picture.pool.log_evictions == 69


def test_problems_are_bounded():
    def make(second):
        return tuple(engine(float(second), unit=f"e{n}", l1_query_tokens=-5) for n in range(100))

    assert len(run(Derivation(), 3, make).problems) == 32
