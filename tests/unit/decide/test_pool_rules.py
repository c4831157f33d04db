"""The rules about the pool's size and place, one scenario a line."""

import dataclasses
import math

import pytest

from kvtierd.decide.finding import Memory
from kvtierd.decide.proposals import AddHolder, Advise, Rebalance, RemoveHolder
from kvtierd.observe.picture import SegmentPicture

from .scenes import GIB, NOW, PRESSED, QUIET, findings, host, picture, policy, pool

replace = dataclasses.replace


def window(**changes):
    return replace(PRESSED, **changes)


@pytest.mark.parametrize(
    ("why", "changes", "state"),
    [
        ("turnover and misses", {}, "holds"),
        ("a scan's turnover, but hits are fine", {"hit_keys": 9_000}, "clear"),
        ("hits a little above the level: as before", {"hit_keys": 7_200}, "between"),
        ("misses, but nothing is evicted", {"turnovers_per_hour": 0.0}, "clear"),
        ("less turnover than the level, more than half of it", {"turnovers_per_hour": 0.7}, "between"),
        ("too few lookups to say", {"query_keys": 100, "hit_keys": 10}, "clear"),
        ("no lookups", {"query_keys": 0, "hit_keys": 0}, "clear"),
        ("turnover unknown", {"turnovers_per_hour": None}, "unknown"),
        ("turnover is no number", {"turnovers_per_hour": math.nan}, "unknown"),
        ("a negative turnover", {"turnovers_per_hour": -3.0}, "unknown"),
        ("lookups unknown", {"query_keys": None}, "unknown"),
    ],
)
def test_pool_small(why, changes, state):
    (found,) = findings("pool-small", picture(pool=pool(window(**changes))))
    assert found.state == state, why
    assert (found.proposal is not None) == (state == "holds")


def test_pool_small_grows_where_most_room_is_by_a_quarter():
    (found,) = findings("pool-small", picture(pool=pool(PRESSED)))
    assert found.proposal.action == AddHolder("b", 16 * GIB)
    assert "3.00 times an hour" in found.proposal.reason
    assert found.proposal.numbers["hit_rate"] == 0.4
    assert not found.proposal.disruptive


def test_a_high_hit_rate_that_falls_is_a_reason_too():
    now, before = window(hit_keys=7_800), window(hit_keys=9_500)
    (found,) = findings("pool-small", picture(pool=pool(now, hour=before)))
    assert found.state == "holds"
    assert "95% over the last hour" in found.text


@pytest.mark.parametrize(
    ("why", "scene", "action"),
    [
        ("this node has most", {"peers": (host("b", room_bytes=GIB),)}, AddHolder("a", 16 * GIB)),
        ("less room than a step", {"peers": (), "host": host(room_bytes=9 * GIB)}, AddHolder("a", 9 * GIB)),
        ("too little room", {"peers": (), "host": host(room_bytes=7 * GIB)}, Advise),
        ("holders enough", {"peers": (), "host": host(holders=("1", "2", "3", "4"))}, Advise),
        (
            "a peer whose word is old does not count",
            {"peers": (host("b", at_seconds=NOW - 31, room_bytes=99 * GIB),)},
            AddHolder("a", 16 * GIB),
        ),
        (
            "a peer from the future neither",
            {"peers": (host("b", at_seconds=NOW + 60),)},
            AddHolder("a", 16 * GIB),
        ),
        ("nobody's room is known", {"peers": (), "host": host(room_bytes=None)}, None),
        ("no host is known", {"peers": (), "host": None}, None),
    ],
)
def test_where_the_pool_grows(why, scene, action):
    (found,) = findings("pool-small", picture(pool=pool(PRESSED), **scene))
    got = found.proposal and found.proposal.action
    assert got == action or isinstance(got, action if isinstance(action, type) else ()), why
    assert found.state == ("unknown" if action is None else "holds")


def test_a_pool_that_grew_in_vain_is_told_of_and_does_not_grow():
    (found,) = findings(
        "pool-small", picture(pool=pool(PRESSED)), memory=Memory(futile_until_seconds=NOW + 1)
    )
    assert isinstance(found.proposal.action, Advise)


def test_the_step_is_the_policys():
    (found,) = findings("pool-small", picture(pool=pool(PRESSED)), policy(grow_step_bytes=3 * GIB + 5))
    assert found.proposal.action == AddHolder("b", 3 * GIB)


POOL_RULES = [
    "pool-small",
    "pool-idle",
    "host-short",
    "pool-unbalanced",
    "idle-memory",
    "thresholds",
    "alloc-failing",
]


@pytest.mark.parametrize("rule", POOL_RULES)
@pytest.mark.parametrize(
    ("why", "scene"),
    [
        ("never answered", {"pool": None}),
        ("seen too long ago", {"pool": pool(PRESSED, at_seconds=NOW - 31)}),
        ("seen in the future", {"pool": pool(PRESSED, at_seconds=NOW + 100)}),
        ("its time is no number", {"pool": pool(PRESSED, at_seconds=math.nan)}),
        ("it hangs", {"pool": pool(PRESSED, hung_seconds=3.0)}),
        ("another node is the master", {"is_master": False, "master": "b", "pool": pool(PRESSED)}),
    ],
)
def test_nothing_is_done_about_a_pool_that_is_not_known_as_it_is(rule, why, scene):
    found = findings(rule, picture(**scene))
    assert found, why
    assert {f.state for f in found} == {"unknown"}, why
    assert all(f.text for f in found)


@pytest.mark.parametrize("rule", [r for r in POOL_RULES if r != "host-short"])
def test_a_window_that_is_not_full_says_nothing(rule):
    for found in findings(rule, picture(pool=pool(windows={}))):
        assert found.state == "unknown"
        assert "not been watched" in found.text


IDLE_HOST = host("b", holders=("kvtier-pool-9",))


def idle_pool(**changes):
    values = {
        "used_bytes": 10 * GIB,
        "segments": (
            SegmentPicture("rank-0-dram", "cpu", 0, 32 * GIB, 8 * GIB, "a", "kvtier-pool-0"),
            SegmentPicture("rank-1-dram", "cpu", 1, 32 * GIB, 2 * GIB, "b", "kvtier-pool-9"),
        ),
    }
    return pool(QUIET, **{**values, **changes})


@pytest.mark.parametrize(
    ("why", "changes", "state", "action"),
    [
        ("hardly used", {}, "holds", RemoveHolder("b", "kvtier-pool-9", 32 * GIB)),
        ("used by half: as before", {"used_bytes": 28 * GIB}, "between", None),
        ("used well", {"used_bytes": 40 * GIB}, "clear", None),
        ("hardly used and yet evicting", {"hour": replace(QUIET, turnovers_per_hour=0.5)}, "clear", None),
        ("use unknown", {"used_bytes": None}, "unknown", None),
        ("no capacity", {"capacity_bytes": 0}, "unknown", None),
        ("the rest would be too full", {"used_bytes": 25 * GIB}, "holds", None),
    ],
)
def test_pool_idle(why, changes, state, action):
    hour = changes.pop("hour", QUIET)
    scene = picture(pool=replace(idle_pool(**changes), windows={300: QUIET, 3600: hour}), peers=(IDLE_HOST,))
    (found,) = findings("pool-idle", scene)
    assert found.state == state, why
    assert (found.proposal and found.proposal.action) == action, why


def test_only_added_holders_are_taken_away():
    (found,) = findings("pool-idle", picture(pool=idle_pool()))
    assert isinstance(found.proposal.action, Advise)


SHORT = host("b", available_bytes=15 * GIB, holders=("kvtier-pool-9",))


@pytest.mark.parametrize(
    ("why", "hosts", "state", "action"),
    [
        ("short, and the pool does without", SHORT, "holds", RemoveHolder("b", "kvtier-pool-9", 32 * GIB)),
        ("short, nothing was added", replace(SHORT, holders=()), "holds", Advise),
        ("just enough", replace(SHORT, available_bytes=17 * GIB), "between", None),
        ("enough", replace(SHORT, available_bytes=21 * GIB), "clear", None),
        ("memory unknown", replace(SHORT, available_bytes=None), "unknown", None),
        (
            "its segment is not known",
            replace(SHORT, holders=("other",)),
            "holds",
            RemoveHolder("b", "other", 0),
        ),
    ],
)
def test_host_short(why, hosts, state, action):
    scene = picture(pool=idle_pool(), peers=(hosts,))
    found = {f.key: f for f in findings("host-short", scene)}
    assert found["a"].state == "clear"
    assert found["b"].state == state, why
    got = found["b"].proposal and found["b"].proposal.action
    assert got == action or (isinstance(action, type) and isinstance(got, action)), why
    if got is not None:
        assert found["b"].proposal.urgent


def test_a_short_host_whose_old_word_says_so_is_left_alone():
    scene = picture(pool=idle_pool(), peers=(replace(SHORT, at_seconds=NOW - 100),))
    assert [f.key for f in findings("host-short", scene)] == ["a"]


def test_a_short_host_of_a_pool_in_need_hands_its_holder_to_one_with_room():
    busy = replace(idle_pool(), windows={300: PRESSED, 3600: PRESSED})
    scene = picture(pool=busy, host=host("a", room_bytes=40 * GIB), peers=(SHORT,))
    found = {f.key: f for f in findings("host-short", scene)}
    assert found["b"].proposal.action == Rebalance(
        AddHolder("a", 32 * GIB), RemoveHolder("b", "kvtier-pool-9", 32 * GIB)
    )
    assert found["b"].proposal.disruptive


def uneven(a_used, b_used, **changes):
    return pool(
        PRESSED,
        segments=(
            SegmentPicture("rank-0-dram", "cpu", 0, 32 * GIB, int(a_used * 32 * GIB), "a", "kvtier-pool-0"),
            SegmentPicture("rank-1-dram", "cpu", 1, 8 * GIB, int(b_used * 8 * GIB), "b", "kvtier-pool-9"),
        ),
        **changes,
    )


@pytest.mark.parametrize(
    ("why", "a_pool", "b", "state", "action"),
    [
        ("even", uneven(0.9, 0.8), IDLE_HOST, "clear", None),
        ("somewhat uneven: as before", uneven(0.9, 0.6), IDLE_HOST, "between", None),
        (
            "uneven, and the spare one was added", uneven(0.9, 0.3), IDLE_HOST, "holds",
            Rebalance(AddHolder("a", 8 * GIB), RemoveHolder("b", "kvtier-pool-9", 8 * GIB)),
        ),
        ("uneven, only more can help", uneven(0.9, 0.3), host("b"), "holds", AddHolder("a", 16 * GIB)),
        ("uneven but nothing is evicted", replace(uneven(0.9, 0.3), windows={300: QUIET}), IDLE_HOST, "clear", None),
        ("whose they are is not known", replace(uneven(0.9, 0.3), segments=(
            SegmentPicture("rank-0-dram", "cpu", 0, GIB, GIB), )), IDLE_HOST, "unknown", None),
        ("of one node", replace(uneven(0.9, 0.3), segments=uneven(0.9, 0.3).segments[:1]), IDLE_HOST, "clear", None),
    ],
)  # fmt: skip
def test_pool_unbalanced(why, a_pool, b, state, action):
    (found,) = findings("pool-unbalanced", picture(pool=a_pool, peers=(b,)))
    assert (found.state, found.proposal and found.proposal.action) == (state, action), why


def test_an_unbalanced_pool_whose_full_node_has_no_room_is_for_a_person():
    scene = picture(pool=uneven(0.9, 0.3), host=host("a", room_bytes=0), peers=(IDLE_HOST,))
    (found,) = findings("pool-unbalanced", scene)
    assert isinstance(found.proposal.action, Advise)


@pytest.mark.parametrize(
    ("why", "turnovers", "room", "state"),
    [
        ("much room and eviction", 0.5, 200 * GIB, "holds"),
        ("much room, no eviction", 0.0, 200 * GIB, "clear"),
        ("little room", 0.5, 10 * GIB, "clear"),
        ("some of both: as before", 0.2, 100 * GIB, "between"),
        ("room unknown", 0.5, None, "unknown"),
    ],
)
def test_idle_memory(why, turnovers, room, state):
    scene = picture(
        pool=pool(QUIET, hour=window(turnovers_per_hour=turnovers)), host=host("a", room_bytes=room), peers=()
    )
    (found,) = findings("idle-memory", scene)
    assert found.state == state, why
    assert (found.proposal is not None) == (state == "holds")
