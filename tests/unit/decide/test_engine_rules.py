import dataclasses

import pytest

from kvtierd.decide.finding import Detached, Memory
from kvtierd.decide.proposals import Advise, AttachL3, DetachL3, Purge, RestartUnit
from kvtierd.observe.picture import EngineIdentity, TierWindow

from .scenes import GIB, HITS, NOW, engine, findings, picture, policy, pool

replace = dataclasses.replace
ONE, TWO = "kvtier-engine-one", "kvtier-engine-two"


def of(rule, scene, a_policy=None, memory=None, key=ONE):
    return next(f for f in findings(rule, scene, a_policy, memory) if (f.key or f.target) == key)


def with_one(**changes):
    return picture(engines=(engine("one", **changes), engine("two")))


NOT_TO_BE_SEEN = [
    {"instance": None},
    {"ready": False},
    {"problem": "no answer in time"},
    {"at_seconds": None},
    {"at_seconds": NOW - 31},
    {"at_seconds": NOW + 31},
]


@pytest.mark.parametrize("changes", NOT_TO_BE_SEEN)
@pytest.mark.parametrize("rule", ["engine-unregistered", "failed-loads", "zero-hits", "l2-costs"])
def test_an_engine_that_cannot_be_seen_is_left_alone(rule, changes):
    scene = with_one(
        **{"registered": False, "failed": 99, "hour": ZERO, "l2_capacity_bytes": 64 * GIB, **changes}
    )
    assert of(rule, scene).state == "unknown"


@pytest.mark.parametrize("rule", ["engine-unregistered", "failed-loads", "zero-hits"])
@pytest.mark.parametrize("changes", [{"uses_pool": False}, {"l3_detached": True}])
def test_an_engine_without_l3_is_left_alone(rule, changes):
    scene = with_one(registered=False, failed=99, hour=ZERO, **changes)
    assert of(rule, scene).state == "clear"


@pytest.mark.parametrize(
    ("why", "scene", "how", "state", "action"),
    [
        ("registered", with_one(), "restart", "clear", None),
        ("cannot be seen", with_one(registered=None), "restart", "unknown", None),
        ("lost", with_one(registered=False), "restart", "holds", RestartUnit(ONE, drained=True, rolling=True)),
        ("lost", with_one(registered=False), "detach", "holds", DetachL3(ONE)),
        ("lost, no switch", with_one(registered=False, can_switch_l3=False), "detach", "holds",
         RestartUnit(ONE, drained=True, rolling=True)),
        ("lost", with_one(registered=False), "advise", "holds", Advise),
        ("all lost theirs", picture(engines=(engine("one", registered=False), engine("two", registered=False))),
         "restart", "holds", Advise),
        ("no master", replace(with_one(registered=False), master="", is_master=False), "restart", "unknown", None),
        ("no pool", replace(with_one(registered=False), pool=None), "restart", "unknown", None),
        ("it hangs", replace(with_one(registered=False), pool=pool(hung_seconds=5.0)), "restart", "unknown", None),
    ],
)  # fmt: skip
def test_engine_unregistered(why, scene, how, state, action):
    found = of("engine-unregistered", scene, policy(unregistered=how))
    got = found.proposal and found.proposal.action
    assert found.state == state, why
    assert got == action or (isinstance(action, type) and isinstance(got, action)), why


def test_its_group_is_the_engines():
    found = of("engine-unregistered", with_one(registered=False))
    assert found.proposal.group == "chat"
    alone = of("engine-unregistered", with_one(registered=False, group=""))
    assert alone.proposal.group == ONE


@pytest.mark.parametrize(
    ("failed", "first", "state"),
    [(0, "clear", "clear"), (1, "holds", "clear"), (5, "holds", "between"), (10, "holds", "holds")],
)
def test_failed_loads_are_said_at_the_first_and_acted_on_at_many(failed, first, state):
    scene = with_one(failed=failed)
    assert of("failed-loads", scene, key=f"{ONE} first").state == first
    found = of("failed-loads", scene)
    assert found.state == state
    if state == "holds":
        assert found.proposal.action == DetachL3(ONE)
    if first == "holds":
        assert isinstance(of("failed-loads", scene, key=f"{ONE} first").proposal.action, Advise)


def test_failed_loads_that_are_not_counted_are_unknown():
    scene = with_one(failed_loads_windows={})
    assert of("failed-loads", scene).state == "unknown"
    assert of("failed-loads", scene, key=f"{ONE} first").state == "unknown"


@pytest.mark.parametrize(
    ("how", "switch", "action"),
    [
        ("detach", True, DetachL3),
        ("detach", False, RestartUnit),
        ("restart", True, RestartUnit),
        ("advise", True, Advise),
    ],
)
def test_what_is_done_about_failed_loads_is_the_policys(how, switch, action):
    found = of("failed-loads", with_one(failed=50, can_switch_l3=switch), policy(failed_loads=how))
    assert isinstance(found.proposal.action, action)
    assert found.proposal.urgent


ALL_FAIL = picture(engines=(engine("one", failed=50), engine("two", failed=50)))


@pytest.mark.parametrize(
    ("why", "scene", "how", "state", "action"),
    [
        ("all fail", ALL_FAIL, "purge", "holds", Purge()),
        ("all fail", ALL_FAIL, "advise", "holds", Advise),
        ("all fail, but the master is elsewhere", replace(ALL_FAIL, is_master=False, master="b"), "purge", "holds", Advise),
        ("one fails", with_one(failed=50), "purge", "between", None),
        ("none fails", picture(), "purge", "clear", None),
        ("there is one engine only", picture(engines=(engine("one", failed=50),)), "purge", "clear", None),
        ("the other cannot be seen", picture(engines=(engine("one", failed=50), engine("two", ready=False))), "purge",
         "clear", None),
        ("the pool is not seen", replace(ALL_FAIL, pool=None), "purge", "unknown", None),
        ("the MetaService hangs", replace(ALL_FAIL, pool=pool(hung_seconds=20.0)), "purge", "unknown", None),
        ("none can be seen", picture(engines=(engine("two", ready=False),)), "purge", "unknown", None),
    ],
)  # fmt: skip
def test_failed_loads_everywhere(why, scene, how, state, action):
    (found,) = findings("failed-loads-everywhere", scene, policy(failed_loads_everywhere=how))
    got = found.proposal and found.proposal.action
    assert found.state == state, why
    assert got == action or (isinstance(action, type) and isinstance(got, action)), why


def test_with_purge_the_engines_are_not_blamed_one_by_one():
    assert of("failed-loads", ALL_FAIL, policy(failed_loads_everywhere="purge")).state == "clear"
    assert of("failed-loads", ALL_FAIL, policy(failed_loads_everywhere="advise")).state == "holds"


@pytest.mark.parametrize(
    ("why", "gone", "times", "changes", "state"),
    [
        ("long enough", 1801.0, 1, {}, "holds"),
        ("not yet", 1700.0, 1, {}, "between"),
        ("the second time it takes twice as long", 1801.0, 2, {}, "between"),
        ("and then it is long enough", 3601.0, 2, {}, "holds"),
        ("never longer than a day", 86_401.0, 40, {}, "holds"),
        ("loads still fail", 1801.0, 1, {"failed": 1}, "between"),
        ("it is back already", 1801.0, 1, {"l3_detached": False}, "clear"),
        ("it does not run", 1801.0, 1, {"instance": None}, "unknown"),
        ("it cannot be switched", 1801.0, 1, {"can_switch_l3": False}, "unknown"),
    ],
)
def test_l3_attach(why, gone, times, changes, state):
    memory = Memory(detached={ONE: Detached(NOW - gone, times)})
    found = of("l3-attach", with_one(**{"l3_detached": True, **changes}), memory=memory)
    assert found.state == state, why
    assert (found.proposal and found.proposal.action) == (AttachL3(ONE) if state == "holds" else None)


def test_what_an_operator_detached_stays_so():
    assert of("l3-attach", with_one(l3_detached=True)).state == "clear"
    memory = Memory(detached={ONE: Detached(0.0, 1, attached=True)})
    assert of("l3-attach", with_one(l3_detached=True), memory=memory).state == "clear"


ZERO = {**HITS, "L3": TierWindow(600_000, 0)}


@pytest.mark.parametrize(
    ("why", "hour", "state"),
    [
        ("never, though L1 hits", ZERO, "holds"),
        ("hits", HITS, "clear"),
        ("one token", {**HITS, "L3": TierWindow(600_000, 1)}, "clear"),
        ("hardly asked", {**HITS, "L3": TierWindow(10_000, 0)}, "clear"),
        ("asked less than the level", {**HITS, "L3": TierWindow(60_000, 0)}, "between"),
        (
            "prefixes do not repeat",
            {"L1": TierWindow(1_000_000, 10), "L3": TierWindow(600_000, 0)},
            "between",
        ),
        ("whether they repeat is not known", {"L3": TierWindow(600_000, 0)}, "between"),
        ("hits not known", {**HITS, "L3": TierWindow(600_000, None)}, "unknown"),
        ("no counters", {}, "unknown"),
    ],
)
def test_zero_hits(why, hour, state):
    found = of("zero-hits", with_one(hour=hour))
    assert found.state == state, why


def other(**changes):
    return (EngineIdentity(**{"node": "b", "unit": ONE, "group": "chat", "hash_seed": "0", "model": "qwen",
                              "block_tokens": 128, **changes}),)  # fmt: skip


@pytest.mark.parametrize(
    ("scene", "words"),
    [
        (with_one(hour=ZERO, hash_seed=""), "PYTHONHASHSEED is not set"),
        (with_one(hour=ZERO, hash_seed="random"), "PYTHONHASHSEED is not set"),
        (with_one(hour=ZERO, hash_seed="1"), f"PYTHONHASHSEED is 1 here and 0 on {TWO}"),
        (replace(with_one(hour=ZERO), engines_elsewhere=other(hash_seed="7")), f"is 0 here and 7 on {ONE} on b"),
        (replace(with_one(hour=ZERO), engines_elsewhere=other(hash_seed="")), f"and not set on {ONE} on b"),
        (with_one(hour=ZERO, model="/mnt/qwen"), f"of model /mnt/qwen, those of {TWO} of qwen"),
        (replace(with_one(hour=ZERO), engines_elsewhere=other(block_tokens=64)), "128 tokens, those of"),
        (replace(with_one(hour=ZERO), pool=pool(capacity_bytes=0)), "the pool has no memory"),
        (replace(with_one(hour=ZERO), pool=pool(stored_keys=0)), "nothing is stored"),
        (replace(with_one(hour=ZERO), engines_elsewhere=other(model="llama", hash_seed="7", group="")), "no cause"),
        (replace(with_one(hour=ZERO), pool=None), "no cause can be seen"),
        (with_one(hour=ZERO, hash_seed=None), "no cause can be seen"),
    ],
)  # fmt: skip
def test_the_cause_of_zero_hits_is_named(scene, words):
    found = of("zero-hits", scene)
    assert isinstance(found.proposal.action, Advise)
    assert words in found.proposal.action.text


USELESS = {**HITS, "L2": TierWindow(700_000, 700)}


@pytest.mark.parametrize(
    ("why", "scene", "state"),
    [
        ("0.1 % hits", with_one(hour=USELESS, l2_capacity_bytes=64 * GIB), "holds"),
        ("14 % hits", with_one(hour=HITS, l2_capacity_bytes=64 * GIB), "clear"),
        ("3 % hits: as before", with_one(hour={**HITS, "L2": TierWindow(700_000, 21_000)}, l2_capacity_bytes=64 * GIB),
         "between"),
        ("so small that it gives more for its size", with_one(hour=USELESS, l2_capacity_bytes=GIB // 100), "clear"),
        ("there is none", with_one(hour=USELESS), "clear"),
        ("it is hardly asked", with_one(hour={**HITS, "L2": TierWindow(700, 0)}, l2_capacity_bytes=64 * GIB), "clear"),
        ("the pool is not known", replace(with_one(hour=USELESS, l2_capacity_bytes=GIB), pool=None), "unknown"),
        ("the pool gives nothing either", replace(
            with_one(hour={**HITS, "L2": TierWindow(700_000, 0)}, l2_capacity_bytes=GIB),
            tiers={3600: {"L3": TierWindow(600_000, 0)}}), "between"),
    ],
)  # fmt: skip
def test_l2_costs(why, scene, state):
    found = of("l2-costs", scene)
    assert found.state == state, why
    if state == "holds":
        assert isinstance(found.proposal.action, Advise)
