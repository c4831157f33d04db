import dataclasses

import pytest

from kvtierd.decide.finding import Memory
from kvtierd.decide.proposals import Advise, RestartUnit, SetThresholds
from kvtierd.observe.picture import SegmentPicture
from kvtierd.plan.units import META_ID

from .scenes import GIB, MIB, PRESSED, QUIET, findings, picture, policy, pool

replace = dataclasses.replace
FAILING = replace(PRESSED, allocations=1000, failed_allocations=300)
ONE = (SegmentPicture("rank-0-dram", "cpu", 0, GIB, GIB * 98 // 100, "a"),)


def full(window=FAILING, *, hour=None, value=20 * MIB, high=99, low=90, **changes):
    values = {
        "capacity_bytes": GIB,
        "used_bytes": GIB * 98 // 100,
        "segments": ONE,
        "mean_value_bytes": float(value),
        "evict_high_percent": high,
        "evict_low_percent": low,
    }
    return pool(window, hour=hour, **{**values, **changes})


def of(direction, a_pool, a_policy=None):
    found = {f.key: f for f in findings("thresholds", picture(pool=a_pool), a_policy)}
    return found[direction]


@pytest.mark.parametrize(
    ("why", "a_pool", "state", "action"),
    [
        # 4 x 20 MiB of 1 GiB are 7.8 %
        ("values of 2 % fail at 99 %", full(), "holds", SetThresholds(92, 83)),
        ("small values that fail all the same: a step", full(value=4096), "holds", SetThresholds(94, 85)),
        ("values of 10 %: as far as the policy allows", full(value=100 * MIB), "holds", SetThresholds(70, 61)),
        ("already there: for a person", full(value=100 * MIB, high=70, low=61), "holds", Advise),
        ("one of thousands: as before", full(replace(FAILING, failed_allocations=1)), "between", None),
        ("none fails", full(replace(FAILING, failed_allocations=0)), "clear", None),
        ("hardly any puts", full(replace(FAILING, allocations=10, failed_allocations=9)), "clear", None),
        ("they fail in a pool that is half empty", full(used_bytes=GIB // 2), "clear", None),
        ("failures unknown", full(replace(FAILING, failed_allocations=None)), "unknown", None),
        ("puts unknown", full(replace(FAILING, allocations=None)), "unknown", None),
        ("use unknown", full(used_bytes=None), "unknown", None),
    ],
)  # fmt: skip
def test_thresholds_go_down_when_values_find_no_room_above(why, a_pool, state, action):
    found = of("lower", a_pool)
    assert found.state == state, why
    got = found.proposal and found.proposal.action
    assert got == action or (isinstance(action, type) and isinstance(got, action)), why


@pytest.mark.parametrize("changes", [{"value": -1}, {"high": None}, {"high": 100}, {"high": 80, "low": 85}])
def test_thresholds_that_cannot_be_are_left_alone(changes):
    for found in findings("thresholds", picture(pool=full(**changes))):
        assert found.state == "unknown"


BUSY = replace(PRESSED, turnovers_per_hour=2.0, failed_allocations=0)


@pytest.mark.parametrize(
    ("why", "a_pool", "state", "action"),
    [
        ("small values, 20 % free for nothing", full(BUSY, value=4096, high=80, low=70), "holds", SetThresholds(85, 75)),
        ("not above the most", full(BUSY, value=4096, high=93, low=83), "holds", SetThresholds(95, 85)),
        ("at the most", full(BUSY, value=4096, high=95, low=85), "clear", None),
        ("large values need it", full(BUSY, value=30 * MIB, high=85, low=70), "clear", None),
        ("nothing is evicted", full(replace(BUSY, turnovers_per_hour=0.1), value=4096, high=80, low=70), "between", None),
        ("a failure within the hour", full(BUSY, hour=replace(BUSY, failed_allocations=1), value=4096, high=80, low=70),
         "clear", None),
        ("no whole hour yet", full(BUSY, value=4096, windows={300: BUSY}), "unknown", None),
    ],
)  # fmt: skip
def test_thresholds_go_up_when_much_is_free_for_nothing(why, a_pool, state, action):
    found = of("raise", a_pool, policy(evict_high_most=95))
    assert (found.state, found.proposal and found.proposal.action) == (state, action), why
    if action:
        assert found.proposal.direction == "raise"


def test_thresholds_do_not_go_back_to_where_values_failed():
    scene = picture(pool=full(BUSY, value=4096, high=80, low=70))
    for refused, action in ((85, SetThresholds(84, 74)), (80, None), (95, SetThresholds(85, 75))):
        found = {
            f.key: f for f in findings("thresholds", scene, memory=Memory(refused_high_percent=refused))
        }["raise"]
        assert (found.proposal and found.proposal.action) == action


def test_thresholds_are_always_what_memcache_takes():
    for high in (*range(2, 100, 7), 97, 98, 99):
        for low in {1, 2, high // 2, high - 2, high - 1} - {-1, 0, high}:
            for window in (FAILING, BUSY):
                for value in (4096, 10 * MIB, 200 * MIB):
                    for found in findings(
                        "thresholds", picture(pool=full(window, value=value, high=high, low=low))
                    ):
                        action = found.proposal and found.proposal.action
                        if isinstance(action, SetThresholds):
                            assert 1 <= action.low_percent < action.high_percent <= 99, (high, low)
                            assert action.low_percent <= 98


@pytest.mark.parametrize(
    ("hung", "state"),
    [
        (0.0, "clear"),
        (5.0, "between"),
        (30.0, "holds"),
        (500.0, "holds"),
        (float("nan"), "unknown"),
        (-1.0, "unknown"),
    ],
)
def test_meta_hung(hung, state):
    (found,) = findings("meta-hung", picture(pool=pool(hung_seconds=hung, at_seconds=0.0)))
    assert found.state == state
    if state == "holds":
        assert found.proposal.action == RestartUnit(META_ID)
        assert found.proposal.urgent
        assert found.proposal.disruptive


@pytest.mark.parametrize("scene", [{"pool": None}, {"is_master": False, "pool": pool(hung_seconds=99.0)}])
def test_a_metaservice_that_is_not_here_is_not_restarted(scene):
    (found,) = findings("meta-hung", picture(**scene))
    assert found.state == "unknown"


@pytest.mark.parametrize(
    ("why", "failed", "changes", "state", "action"),
    [
        ("most fail though there is room", 800, {"used_bytes": 20 * GIB}, "holds", RestartUnit(META_ID)),
        ("some fail: as before", 400, {"used_bytes": 20 * GIB}, "between", None),
        ("few fail", 10, {"used_bytes": 20 * GIB}, "clear", None),
        ("most fail for lack of room", 800, {"used_bytes": 60 * GIB}, "clear", None),
        ("no segment at all", 1000, {"capacity_bytes": 0, "used_bytes": 0}, "holds", Advise),
        ("use unknown", 800, {"used_bytes": None}, "unknown", None),
        ("capacity unknown", 800, {"capacity_bytes": None}, "unknown", None),
        ("failures unknown", None, {}, "unknown", None),
    ],
)  # fmt: skip
def test_alloc_failing(why, failed, changes, state, action):
    window = replace(QUIET, allocations=1000, failed_allocations=failed)
    (found,) = findings("alloc-failing", picture(pool=pool(window, **changes)))
    got = found.proposal and found.proposal.action
    assert found.state == state, why
    assert got == action or (isinstance(action, type) and isinstance(got, action)), why


def test_few_allocations_say_nothing():
    window = replace(QUIET, allocations=19, failed_allocations=19)
    (found,) = findings("alloc-failing", picture(pool=pool(window, used_bytes=0)), policy())
    assert found.state == "clear"
