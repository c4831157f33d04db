"""The decider: when a finding becomes an action, and everything that keeps it from becoming one."""

import dataclasses
import itertools
import json

import pytest

from kvtierd.decide.decider import Decider
from kvtierd.decide.limits import Circumstances
from kvtierd.decide.policy import RULES
from kvtierd.decide.proposals import (
    AddHolder,
    Advise,
    AttachL3,
    DetachL3,
    Purge,
    Rebalance,
    RemoveHolder,
    RestartUnit,
    SetThresholds,
    action_from_json,
    action_to_json,
    proposal_from_json,
    proposal_to_json,
)
from kvtierd.decide.rules import REGISTRY
from kvtierd.errors import StateError

from .scenes import GIB, NOW, PRESSED, at, engine, host, picture, play, policy, pool, verdict
from .test_pool_rules import SHORT, idle_pool

replace = dataclasses.replace
SMALL = picture(pool=pool(PRESSED))
HOUR = 3600.0


def actions(fired):
    return [(t, p.action) for t, p in fired if not p.is_advice]


def test_every_rule_of_the_policy_exists_and_is_in_order():
    assert list(REGISTRY) == list(RULES)


def test_a_condition_acts_when_it_has_held_long_enough_and_not_again_within_the_cool_down():
    fired = actions(play(Decider(policy()), SMALL, 2 * HOUR))
    assert [t for t, _ in fired] == [300.0, 1200.0, 2100.0, 3000.0][: len(fired)]
    assert fired[0][1] == AddHolder("b", 16 * GIB)


def test_it_is_explained_all_the_way():
    decider = Decider(policy())
    play(decider, SMALL, 100)
    told = verdict(decider, "pool-small")
    assert (told.state, told.verdict) == ("holds", "holds for 1m40s of 5m00s")
    assert told.next_seconds == NOW + 300
    assert decider.next_possible().rule == "pool-small"
    assert decider.last is None
    play(decider, at(NOW + 105, SMALL), 200)
    assert decider.last.outcome == "done"
    assert decider.last.proposal.rule == "pool-small"
    play(decider, at(NOW + 310, SMALL), 310)
    told = verdict(decider, "pool-small")
    assert "still being measured" in told.verdict
    assert told.next_seconds == NOW + 300 + 900
    decider = Decider(policy())
    play(decider, SMALL, 610, succeed=False)
    told = verdict(decider, "pool-small")
    assert told.verdict == "cool-down after 1 that did not help: 24m50s more"
    assert told.next_seconds == NOW + 300 + 1800
    assert {e.rule for e in decider.explain()} == set(RULES)
    assert all(e.text and e.verdict for e in decider.explain())


def test_a_condition_that_hovers_between_the_levels_keeps_its_time_and_one_that_clears_loses_it():
    def shaken(other):
        decider, fired = Decider(policy()), []
        for i in range(70):
            scene = SMALL if i % 2 == 0 else picture(pool=pool(replace(PRESSED, **other)))
            fired += decider.step(at(NOW + 5.0 * i, scene))
        return [p for p in fired if not p.is_advice]

    assert len(shaken({"turnovers_per_hour": 0.7})) == 1
    assert shaken({"turnovers_per_hour": 0.1}) == []
    assert shaken({"turnovers_per_hour": None}) == []


def test_a_condition_that_is_between_now_does_not_act_however_long_it_has_held():
    decider = Decider(policy())
    play(decider, SMALL, 200)
    between = at(NOW + 205, picture(pool=pool(replace(PRESSED, turnovers_per_hour=0.7))))
    assert actions(play(decider, between, 600)) == []
    assert "may come back" in verdict(decider, "pool-small").verdict


def test_time_in_which_nobody_looked_does_not_count():
    decider = Decider(policy())
    play(decider, SMALL, 200)
    assert actions(play(decider, at(NOW + 240, SMALL), 295)) == []
    assert len(actions(play(decider, at(NOW + 540, SMALL), 0))) == 1


def test_a_clock_that_goes_back_or_is_no_number_leads_to_nothing():
    decider = Decider(policy())
    play(decider, SMALL, 400)
    assert decider.step(at(NOW + 5000, replace(SMALL, now_seconds=NOW))) or True
    for now in (float("nan"), float("inf")):
        assert decider.step(replace(SMALL, now_seconds=now)) == ()
    # a boot: everything that was done counts as done now
    early = at(10.0, SMALL)
    fired = actions(play(decider, early, 1800))
    assert fired[0][0] >= 890


@pytest.mark.parametrize(
    ("around", "words"),
    [
        (Circumstances(paused=True), "paused"),
        (Circumstances(no_master=True), "no master"),
    ],
)
def test_nothing_is_done_while_paused_or_without_a_master(around, words):
    decider = Decider(policy())
    scene = replace(SMALL, engines=(engine("one", registered=False), engine("two")))
    assert actions(play(decider, scene, HOUR, around=around)) == []
    assert words in verdict(decider, "pool-small").verdict


def test_nor_when_the_picture_knows_no_master():
    decider = Decider(policy())
    hung = picture(pool=pool(hung_seconds=100.0), master="")
    assert actions(play(decider, hung, HOUR)) == []
    assert verdict(decider, "meta-hung").verdict == "the cluster has no master"


def test_l3_is_taken_from_a_failing_engine_even_without_a_master_but_not_while_paused():
    failing = picture(engines=(engine("one", failed=50),), master="", is_master=False, pool=None)
    assert actions(play(Decider(policy()), failing, 10)) == [(0.0, DetachL3("kvtier-engine-one"))]
    assert actions(play(Decider(policy()), failing, 10, around=Circumstances(paused=True))) == []


def test_advice_is_given_even_while_paused_and_repeated_seldom():
    scene = picture(engines=(engine("one", failed=1),))
    fired = play(Decider(policy()), scene, 7 * HOUR, step=20.0, around=Circumstances(paused=True))
    assert [t for t, p in fired if p.rule == "failed-loads"] == [0.0, 6 * HOUR]


def test_advice_that_was_over_in_between_is_given_again_sooner():
    decider, told = Decider(policy()), []
    for minute in range(40):
        scene = picture(engines=(engine("one", failed=minute % 10 == 0),))
        told += [minute for p in decider.step(at(NOW + 60.0 * minute, scene)) if p.rule == "failed-loads"]
    assert told == [0, 20]


def test_only_one_thing_at_a_time_on_a_target():
    decider = Decider(policy())
    fired = actions(play(decider, SMALL, 850, succeed=None))
    assert len(fired) == 1
    assert "not done yet" in verdict(decider, "pool-small").verdict
    assert decider.last.outcome == "under way"


def test_an_action_of_which_nothing_is_heard_has_failed_and_the_cool_down_is_longer():
    decider = Decider(policy())
    play(decider, SMALL, 400, succeed=None)
    play(decider, at(NOW + 405, SMALL), 900, succeed=None)
    assert decider.last.outcome == "failed"
    assert "no word" in decider.last.text
    assert "cool-down after 1 that did not help" in verdict(decider, "pool-small").verdict


def test_each_failure_doubles_the_cool_down_up_to_eight_times():
    decider = Decider(policy(actions_per_hour=100))
    fired = [t for t, _ in actions(play(decider, SMALL, 12 * HOUR, step=30.0, succeed=False))]
    gaps = [round((b - a) / 900) for a, b in itertools.pairwise(fired)]
    assert gaps[:5] == [2, 4, 8, 8, 8][: len(gaps)]
    assert len(gaps) >= 4


def two_engines(**changes):
    return (*tuple(engine(n, registered=False, **changes) for n in ("one", "two")), engine("three"))


def test_two_engines_of_a_group_are_not_restarted_at_once():
    decider = Decider(policy())
    scene = picture(engines=two_engines())
    fired = actions(play(decider, scene, 300, succeed=None))
    assert [a for _, a in fired] == [RestartUnit("kvtier-engine-one", drained=True, rolling=True)]
    assert "both disturb" in verdict(decider, "engine-unregistered", "kvtier-engine-two").verdict
    decider.outcome(fired[0][1] and 1, ok=True, text="", now_seconds=NOW + 300)
    assert [p.target for p in decider.step(at(NOW + 305, scene))] == ["kvtier-engine-two"]


def test_engines_of_other_groups_may_be():
    scene = picture(engines=(*(replace(e, group="") for e in two_engines()[:2]), engine("three")))
    assert len(actions(play(Decider(policy()), scene, 100, succeed=None))) == 2


def test_the_pool_and_an_engine_are_not_disturbed_at_once():
    decider = Decider(policy(failed_loads_everywhere="purge"))
    scene = picture(engines=(engine("one", failed=50), engine("two", failed=50)))
    fired = actions(play(decider, scene, 5, succeed=None))
    assert [a for _, a in fired] == [Purge()]
    lost = replace(scene, engines=(engine("one", registered=False), engine("two")))
    assert actions(play(decider, at(NOW + 10, lost), 300, succeed=None)) == []


def test_another_nodes_disturbance_of_the_group_is_waited_for():
    decider = Decider(policy())
    scene = picture(engines=(engine("one", registered=False), engine("two")))
    for groups in ({"chat"}, {"*"}):
        assert actions(play(decider, scene, 100, around=Circumstances(busy_groups=frozenset(groups)))) == []
    assert "another node" in verdict(decider, "engine-unregistered").verdict
    assert (
        len(actions(play(decider, at(NOW + 105, scene), 0, around=Circumstances(busy_groups={"code"})))) == 1
    )


def test_the_last_engine_of_a_group_that_is_ready_is_not_restarted():
    decider = Decider(policy())
    scene = picture(engines=(engine("one", registered=False), engine("two", ready=False)))
    assert actions(play(decider, scene, 300)) == []
    assert verdict(decider, "engine-unregistered").verdict == "no other engine of group chat is ready"
    alone = picture(engines=(engine("one", registered=False),))
    assert len(actions(play(Decider(policy()), alone, 100))) == 1


def test_budgets():
    lost = (*tuple(engine(str(i), registered=False, group=f"g{i}") for i in range(9)), engine("fine"))
    decider = Decider(policy(disruptive_per_hour=2))
    assert len(actions(play(decider, picture(engines=lost), 1800))) == 2
    assert (
        "budget: 2 of 2 disruptive actions"
        in verdict(decider, "engine-unregistered", "kvtier-engine-5").verdict
    )
    decider = Decider(policy(actions_per_hour=3, disruptive_per_hour=9))
    assert len(actions(play(decider, picture(engines=lost), 1800))) == 3
    decider = Decider(policy(engine_actions_per_hour=1, cooldown_seconds=0.0, settle_seconds=0.0))
    assert len(actions(play(decider, picture(engines=(lost[0], lost[-1])), 3500))) == 1
    decider = Decider(policy(actions_per_hour=0))
    assert actions(play(decider, picture(engines=lost), 1800)) == []
    assert verdict(decider, "engine-unregistered").next_seconds is None


def test_a_growth_is_not_taken_back_at_once_unless_the_host_is_short():
    decider = Decider(policy())
    play(decider, SMALL, 300)
    idle = picture(pool=idle_pool(), peers=(host("b", holders=("kvtier-pool-9",)),))
    fired = actions(play(decider, at(NOW + 305, idle), 3 * HOUR))
    assert fired[0][1] == RemoveHolder("b", "kvtier-pool-9", 32 * GIB)
    assert fired[0][0] + 305 >= 300 + 7200
    decider = Decider(policy())
    play(decider, SMALL, 300)
    short = picture(pool=idle_pool(), peers=(SHORT,))
    fired = actions(play(decider, at(NOW + 305, short), 60))
    assert [t for t, _ in fired] == [30.0]


def test_growing_that_twice_did_not_help_ends_for_a_while_and_is_said():
    decider = Decider(policy())
    fired = play(decider, SMALL, 5 * HOUR)
    assert len(actions(fired)) <= 3
    assert any("did not raise the hit rate" in p.action.text for _, p in fired if p.is_advice)
    assert actions(play(decider, at(NOW + 5 * HOUR + 5, SMALL), 2 * HOUR, step=20.0))  # after futile


def test_growing_that_helps_goes_on():
    decider, fired = Decider(policy()), []
    for i in range(3 * 720):
        done = len([p for p in fired if not p.is_advice])
        window = replace(PRESSED, hit_keys=2_000 + 1_000 * done)
        for proposal in decider.step(at(NOW + 5.0 * i, picture(pool=pool(window)))):
            fired.append(proposal)
            decider.outcome(proposal.id, ok=True, text="", now_seconds=NOW + 5.0 * i)
    assert len([p for p in fired if not p.is_advice]) == 5
    assert not any("did not raise" in p.action.text for p in fired if p.is_advice)


def test_l3_comes_back_after_a_while_and_later_the_next_time():
    decider, at_seconds, detached, log = Decider(policy()), NOW, False, []
    for i in range(3600):  # 5 hours; loads fail for a minute after every attach
        now = NOW + 5.0 * i
        failing = 0 if detached or now - at_seconds > 400 else 50
        scene = picture(engines=(engine("one", failed=failing, l3_detached=detached), engine("two")))
        for proposal in decider.step(at(now, scene)):
            if isinstance(proposal.action, DetachL3 | AttachL3):
                detached, at_seconds = isinstance(proposal.action, DetachL3), now
                log.append((type(proposal.action).__name__, now - NOW))
                decider.outcome(proposal.id, ok=True, text="", now_seconds=now)
    assert [name for name, _ in log[:4]] == ["DetachL3", "AttachL3", "DetachL3", "AttachL3"]
    assert log[1][1] - log[0][1] == pytest.approx(1800, abs=10)
    assert log[3][1] - log[2][1] == pytest.approx(3600, abs=10)


def test_l3_does_not_come_back_when_no_budget_is_left_to_take_it_away_again():
    decider = Decider(policy(engine_actions_per_hour=2))
    play(decider, picture(engines=(engine("one", failed=50), engine("two"))), 0)
    gone = picture(engines=(engine("one", l3_detached=True), engine("two")))
    assert actions(play(decider, at(NOW + 5, gone), HOUR - 10)) == []
    assert "budget" in verdict(decider, "l3-attach").verdict


def test_dry_run_says_what_it_would_do_as_seldom_as_it_would_do_it():
    fired = play(Decider(policy(dry_run=True)), SMALL, HOUR, succeed=None)
    wet = play(Decider(policy()), SMALL, HOUR)
    done = [(t, p) for t, p in fired if not p.is_advice]
    assert [t for t, _ in done][:2] == [t for t, _ in actions(wet)][:2]
    assert all(p.dry_run for _, p in done)
    assert not any(p.dry_run for _, p in fired if p.is_advice)


def test_a_rule_that_is_off_does_nothing_and_says_so():
    decider = Decider(policy(off=("pool-small",)))
    assert actions(play(decider, SMALL, HOUR)) == []
    assert verdict(decider, "pool-small").state == "off"


def test_a_word_about_an_action_that_is_not_known_changes_nothing():
    decider = Decider(policy())
    decider.outcome(99, ok=True, text="", now_seconds=NOW)
    assert decider.last is None


# -- what a restarted daemon knows


def restarted(decider, now, boot="b1", a_policy=None):
    kept = json.loads(json.dumps(decider.remember("b1")))
    other = Decider(a_policy or decider.policy)
    assert other.recall(kept, boot, now) == ""
    return other


def test_a_restart_forgets_no_cool_down_and_no_budget():
    decider = Decider(policy())
    play(decider, SMALL, 300)
    for n in range(1, 6):  # restarted all the time
        decider = restarted(decider, NOW + 300 + 100 * n)
        assert actions(play(decider, at(NOW + 300 + 100 * n, SMALL), 95)) == []
    assert decider.last.proposal.rule == "pool-small"
    assert verdict(decider, "pool-small")


def test_a_restart_remembers_what_is_under_way_and_what_was_detached():
    decider = Decider(policy())
    failing = picture(engines=(engine("one", failed=50), engine("two")))
    (proposal,) = [p for p in decider.step(failing) if not p.is_advice]
    decider = restarted(decider, NOW + 5)
    assert [p for p in decider.step(at(NOW + 10, failing)) if not p.is_advice] == []
    decider.outcome(proposal.id, ok=True, text="", now_seconds=NOW + 20)
    decider = restarted(decider, NOW + 30)
    gone = picture(engines=(engine("one", l3_detached=True), engine("two")))
    assert actions(play(decider, at(NOW + 30, gone), 1900))[0][1] == AttachL3("kvtier-engine-one")


def test_ids_go_on_after_a_restart():
    decider = Decider(policy())
    play(decider, SMALL, 300)
    before = decider.last.proposal.id
    decider = restarted(decider, NOW + 305)
    play(decider, at(NOW + 310, SMALL), 1500)
    assert decider.last.proposal.id > before


def test_after_a_boot_everything_was_done_just_now():
    decider = Decider(policy())
    play(decider, SMALL, 300)
    later = NOW * 2  # this boot's clock is ahead of the old one's
    decider = restarted(decider, later, boot="b2")
    fired = actions(play(decider, at(later, SMALL), 1000))
    assert fired[0][0] >= 890


def test_futility_is_remembered():
    decider = Decider(policy())
    play(decider, SMALL, HOUR)
    play(decider, at(NOW + HOUR + 5, SMALL), HOUR)
    again = restarted(decider, NOW + 2 * HOUR + 10)
    assert actions(play(again, at(NOW + 2 * HOUR + 10, SMALL), HOUR)) == []


@pytest.mark.parametrize(
    "kept",
    [{}, {"version": 0}, {"version": 1}, {"version": 1, "limits": 5}, [], None],
)
def test_a_memory_that_cannot_be_read_is_said_and_nothing_is_done_for_a_cool_down(kept):
    decider = Decider(policy())
    assert "cannot be read" in decider.recall(kept, "b1", NOW)
    fired = actions(play(decider, SMALL, 2000))
    assert fired[0][0] == 900


def test_a_half_damaged_memory_changes_nothing_else():
    decider = Decider(policy())
    play(decider, SMALL, 400)
    kept = json.loads(json.dumps(decider.remember("b1")))
    kept["limits"]["flights"] = [[1.0, {"rule": "x"}]]
    other = Decider(policy())
    assert other.recall(kept, "b1", NOW + 400) != ""
    assert other.last is None
    assert other.limits.done == []


@pytest.mark.parametrize(
    "action",
    [
        SetThresholds(90, 80), AddHolder("a", 5), RemoveHolder("a", "u", 5), RestartUnit("u", drained=True), Purge(),
        Rebalance(AddHolder("a", 5), RemoveHolder("b", "u", 5)), DetachL3("u"), AttachL3("u"), Advise("sleep"),
    ],
)  # fmt: skip
def test_actions_as_json_and_back(action):
    assert action_from_json(json.loads(json.dumps(action_to_json(action)))) == action
    assert action.text
    fired = play(Decider(policy()), SMALL, 300)[0][1]
    proposal = replace(fired, action=action)
    assert proposal_from_json(json.loads(json.dumps(proposal_to_json(proposal)))) == proposal


@pytest.mark.parametrize(
    "kept", [{}, {"kind": "Boom"}, {"kind": "AddHolder"}, {"kind": "Purge", "x": 1}, {"kind": "Rebalance"}]
)
def test_an_unknown_action_is_refused(kept):
    with pytest.raises(StateError) as told:
        action_from_json(kept)
    assert told.value.stable_code == "state.action-unknown"
