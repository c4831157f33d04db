"""Whatever the pictures say, the decider keeps to what it promises."""

import dataclasses
import json
import math
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtierd.decide import finding, limits
from kvtierd.decide.decider import Decider
from kvtierd.decide.limits import Blocked, Circumstances, Limits
from kvtierd.decide.policy import default_policy
from kvtierd.decide.proposals import EVERYTHING, POOL, DetachL3, SetThresholds
from kvtierd.decide.recorded import picture_from_json, picture_line
from kvtierd.observe.picture import SegmentPicture, TierWindow

from .scenes import GIB, NOW, PRESSED, engine, host, picture, pool

replace = dataclasses.replace
BROKEN = [None, math.nan, math.inf, -1.0, 0.0, 1e30]
AGES = [0.0, 1.0, 5.0, 29.0, 31.0, 1e6, -100.0, math.nan]

# Short, so that a run of some hundred steps sees many actions.
HASTY = replace(
    default_policy(),
    cooldown_seconds=60.0, settle_seconds=30.0, reversal_seconds=120.0, deadline_seconds=200.0,
    grow_hold_seconds=20.0, idle_hold_seconds=20.0, short_hold_seconds=10.0, alloc_hold_seconds=10.0,
    unregistered_hold_seconds=10.0, attach_after_seconds=60.0, futile_seconds=300.0, failed_loads_everywhere="purge",
    actions_per_hour=12, disruptive_per_hour=5, engine_actions_per_hour=4,
)  # fmt: skip


def windows(rng):
    bad = rng.randint(0, 9) == 0
    return replace(
        PRESSED,
        turnovers_per_hour=rng.choice(BROKEN if bad else [0.0, 0.7, 5.0]),
        hit_keys=rng.choice([None, -1, 10**30] if bad else [0, 5_000, 9_900]),
        allocations=rng.choice([0, 1000, 1000, 1000, None]),
        failed_allocations=rng.choice([0, 5, 900, 900, None]),
        evicted_keys_per_second=rng.choice([0.0, 10.0, None]),
    )


def scenes(rng, now):
    window, age = windows(rng), rng.choice(AGES) if rng.randint(0, 5) == 0 else 1.0
    used = rng.choice([1, 30, 60])
    a_pool = pool(
        window,
        hour=windows(rng),
        at_seconds=now - age,
        used_bytes=rng.choice([used * GIB, None]) if used == 1 else used * GIB,
        mean_value_bytes=rng.choice([4096.0, 1e9, None]),
        hung_seconds=rng.choice([0.0] * 6 + [5.0, 100.0, math.nan]),
        evict_high_percent=rng.choice([90, 99, 70]),
        evict_low_percent=rng.choice([60, 98]),
        segments=(
            SegmentPicture("rank-0-dram", "cpu", 0, 32 * GIB, used * GIB // 2, "a", "kvtier-pool-1"),
            SegmentPicture("rank-1-dram", "cpu", 1, 32 * GIB, 1 * GIB, "b", "kvtier-pool-9"),
        ),
    )
    engines = tuple(
        engine(
            name,
            group=group,
            at_seconds=now - (rng.choice(AGES) if rng.randint(0, 9) == 0 else 1.0),
            registered=rng.choice([True, True, False, None]),
            failed=rng.choice([0, 0, 1, 50]),
            ready=rng.choice([True, True, True, False]),
            l3_detached=rng.choice([False, False, True]),
            can_switch_l3=rng.choice([True, False]),
            l2_capacity_bytes=rng.choice([None, GIB]),
            hour={
                "L1": TierWindow(900_000, 400_000),
                "L3": TierWindow(900_000, rng.choice([0, 5])),
            },
        )
        for name, group in (("one", "chat"), ("two", "chat"), ("three", ""), ("four", ""))
    )
    return picture(
        now_seconds=now,
        is_master=rng.choice([True, True, True, False]),
        master=rng.choice(["a", "a", "a", ""]),
        pool=rng.choice([a_pool] * 8 + [None]),
        engines=engines,
        host=host("a", at_seconds=now - 1, available_bytes=rng.choice([99 * GIB, 99 * GIB, GIB, 17 * GIB, None]),
                  holders=("kvtier-pool-1",)),
        peers=(host("b", at_seconds=now - rng.choice([1.0, 1.0, 99.0]), holders=("kvtier-pool-9",),
                    available_bytes=rng.choice([99 * GIB, 99 * GIB, 99 * GIB, GIB])),),
    )  # fmt: skip


def one_run(rng):
    """Pictures with what goes on around them; conditions stay for a while, so that something happens."""
    now, steps = NOW, []
    for _ in range(rng.randint(1, 6)):
        scene = scenes(rng, NOW)
        around = Circumstances(
            paused=rng.choice([False, False, False, True]),
            no_master=rng.choice([False, False, False, True]),
            busy_groups=rng.choice([frozenset(), frozenset(), frozenset({"chat"}), frozenset({EVERYTHING})]),
        )
        for _ in range(rng.randint(1, 16)):
            now += rng.choice([5.0, 10.0, 10.0, 25.0])
            steps.append((shifted(scene, now), around, rng.choice([True, True, False, None])))
    return steps


def runs():
    """By seeds: what hypothesis draws piece by piece is too tame for much to happen."""
    return st.integers(0, 2**32).map(lambda seed: one_run(random.Random(seed)))


def shifted(scene, now):
    by = now - scene.now_seconds

    def moved(part):
        return replace(part, at_seconds=part.at_seconds + by)

    return replace(
        scene, now_seconds=now, pool=scene.pool and moved(scene.pool), host=moved(scene.host),
        peers=tuple(map(moved, scene.peers)), engines=tuple(map(moved, scene.engines)),
    )  # fmt: skip


def drive(steps, policy=HASTY, restart_every=0):
    """Every proposal with its time and surroundings; outcomes come at once or never."""
    decider, log = Decider(policy), []
    for index, (scene, around, ok) in enumerate(steps):
        if restart_every and index % restart_every == restart_every - 1:
            kept = json.loads(json.dumps(decider.remember("b")))
            decider = Decider(policy)
            assert decider.recall(kept, "b", scene.now_seconds) == ""
        for proposal in decider.step(scene, around):
            log.append((scene, around, proposal, dict(decider.limits.flights)))
            if ok is not None:
                decider.outcome(proposal.id, ok=ok, text="", now_seconds=scene.now_seconds)
        assert all(e.verdict for e in decider.explain())
    return log


COMMON = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


@COMMON
@given(runs(), st.sampled_from([0, 7]))
def test_promises(steps, restart_every):
    check(drive(steps, restart_every=restart_every))


def check(log):
    acts = [(s.now_seconds, a, p, f, s) for s, a, p, f in log if not p.is_advice]
    for now, around, proposal, flights, scene in acts:
        # nothing while paused; without a master only what takes L3 away
        assert not around.paused
        if around.no_master or not scene.master:
            assert isinstance(proposal.action, DetachL3)
        # never two disruptive ones at once in a group
        others = [f.proposal for i, f in flights.items() if i != proposal.id]
        assert all(o.target != proposal.target for o in others)
        if proposal.disruptive:
            groups = {o.group for o in others if o.disruptive} | set(around.busy_groups)
            assert proposal.group not in groups
            assert EVERYTHING not in groups
            assert proposal.group != EVERYTHING or not groups
        # budgets
        hour = [p for t, _, p, _, _ in acts if now - 3600 < t <= now]
        assert len(hour) <= HASTY.actions_per_hour
        assert len([p for p in hour if p.disruptive]) <= HASTY.disruptive_per_hour
        if proposal.target != POOL:
            assert len([p for p in hour if p.target == proposal.target]) <= HASTY.engine_actions_per_hour
        # the pool's rules rest on a fresh pool and on its master
        if proposal.target == POOL:
            assert scene.is_master
            assert scene.pool is not None
            if proposal.rule != "meta-hung" and proposal.rule != "failed-loads-everywhere":
                assert 0 <= now - scene.pool.at_seconds <= HASTY.stale_seconds
        else:
            engine_seen = next(e for e in scene.engines if e.unit == proposal.target)
            assert 0 <= now - engine_seen.at_seconds <= HASTY.stale_seconds
            assert engine_seen.ready
        if isinstance(proposal.action, SetThresholds):
            assert 1 <= proposal.action.low_percent < proposal.action.high_percent <= 99
        assert proposal.reason
        assert "nan" not in proposal.reason
        assert "inf" not in proposal.reason
    # cool-downs
    for t1, _, p1, _, _ in acts:
        for t2, _, p2, _, _ in acts:
            if p1.id < p2.id and (p1.rule, p1.target) == (p2.rule, p2.target):
                assert t2 - t1 >= HASTY.cooldown_seconds * (0.2 if p1.rule == "host-short" else 1.0)
    ids = [p.id for _, _, p, _ in log]
    assert ids == sorted(set(ids))


@COMMON
@given(runs())
def test_the_same_pictures_give_the_same_proposals(steps):
    assert [p for _, _, p, _ in drive(steps)] == [p for _, _, p, _ in drive(steps)]


@COMMON
@given(st.integers(0, 2**32))
def test_a_picture_comes_back_from_json_as_it_was(seed):
    scene = scenes(random.Random(seed), NOW)
    line = picture_line(scene)
    assert picture_line(picture_from_json(json.loads(line))) == line
    if "NaN" not in line:
        assert picture_from_json(json.loads(line)) == scene


def test_the_runs_are_not_empty():
    """What is tested above must happen in the runs that are drawn."""
    seen = {
        p.rule for seed in range(30) for _, _, p, _ in drive(one_run(random.Random(seed))) if not p.is_advice
    }
    assert len(seen) >= 7, seen


@pytest.mark.parametrize(
    ("owner", "name", "instead"),
    [
        (Limits, "_over_budget", lambda *_: None),
        (Limits, "_beside", lambda *_: None),
        (Limits, "_too_soon", lambda *_: None),
        (finding, "age_problem", lambda *_: ""),
        (limits, "Blocked", lambda why, until=None: None if "paused" in why else Blocked(why, until)),
        (limits, "Blocked", lambda why, until=None: None if "master" in why else Blocked(why, until)),
        (Limits, "remember", lambda self: Limits(self._policy)._remember()),
    ],
    ids=["budget", "beside", "too soon", "stale", "paused", "no master", "forgetful"],
)
def test_a_decider_without_one_of_its_limits_breaks_a_promise(monkeypatch, owner, name, instead):
    if name == "remember":
        monkeypatch.setattr(Limits, "_remember", Limits.remember, raising=False)
    if name == "Blocked":
        monkeypatch.setattr(limits.Limits, "why_not", leaky(Limits.why_not, instead))
    else:
        monkeypatch.setattr(owner, name, instead)
    with pytest.raises(AssertionError):
        for seed in range(60):
            check(drive(one_run(random.Random(seed)), restart_every=7))


def leaky(real, pass_on):
    """``why_not`` that overlooks one reason and asks again without it."""

    def why_not(self, proposal, now, around, master):
        blocked = real(self, proposal, now, around, master)
        if blocked is not None and pass_on(blocked.why) is None:
            return real(self, proposal, now, Circumstances(busy_groups=around.busy_groups), "a")
        return blocked

    return why_not
