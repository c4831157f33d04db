"""Transcripts of the tier's life: one rule, one test."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.memcache.answers import Capacity, ClusterStatus, MediumUsage, Rank, Segment
from kvtierd.memcache.health import ExpectedPool, PoolState
from kvtierd.tier import machine as m

GIB = 1024**3
EXPECTED = ExpectedPool(capacity_bytes=GIB, providers=1, alignment_bytes=2 * 1024**2)


def pool(roles=None, total=GIB):
    roles = {0: "provider", 1: "proxy"} if roles is None else roles
    usage = MediumUsage(total_bytes=total, used_bytes=0, free_bytes=total)
    none = MediumUsage(total_bytes=0, used_bytes=0, free_bytes=0)
    return PoolState(
        capacity=Capacity(cpu=usage, npu=none),
        segments=tuple(
            Segment(
                segment_name=f"rank-{r}-dram",
                medium="dram",
                total_bytes=GIB,
                used_bytes=0,
                remaining_bytes=GIB,
            )
            for r, role in roles.items()
            if role == "provider"
        ),
        cluster=ClusterStatus(
            ranks=tuple(Rank(rank=r, role=role, state="RANK_ACTIVE") for r, role in roles.items()),
            alive=frozenset(roles),
        ),
    )


class Story:
    """Drives a machine through looks; time goes on by half a second a look."""

    def __init__(self, **options):
        self.machine = m.TierMachine(EXPECTED, **{"purge_on_unclean": True, **options})
        self.now = 100.0
        self.seen = m.TierInputs(
            now_seconds=self.now, instance="run-1", meta_up=True, meta_problem="", pool=pool(),
            endpoint_mode="serve", endpoint_admission="all",
        )  # fmt: skip

    def look(self, after=0.5, **changes):
        self.now += after
        self.seen = dataclasses.replace(self.seen, now_seconds=self.now, **changes)
        actions = self.machine.step(self.seen)
        if "serve" in actions:
            self.seen = dataclasses.replace(self.seen, endpoint_mode="serve")
        if "admit-all" in actions:
            self.seen = dataclasses.replace(self.seen, endpoint_admission="all")
        if "recover" in actions:
            self.seen = dataclasses.replace(self.seen, endpoint_mode="recover")
        return actions

    @property
    def state(self):
        return self.machine.view.state

    def killed_and_back(self, **changes):
        """The MetaService dies uncleanly and a new run answers, with nobody back yet."""
        self.look()
        self.look(instance=None, pool=None, endpoint_mode="recover", endpoint_admission="survivors")
        assert self.state == "down"
        return self.look(instance="run-2", pool=pool({}, total=0), **changes)


def test_the_first_run_is_served_at_once():
    story = Story()
    assert story.look() == ()
    assert story.state == "joinable"


def test_a_healthy_meta_service_without_memory_is_not_a_tier():
    story = Story()
    story.look(pool=pool({}, total=0))
    assert story.state == "meta_up"
    assert "no DRAM" in story.machine.view.reasons[0]


def test_not_up_means_down_with_the_reason():
    story = Story()
    story.look(meta_up=False, meta_problem="the MetaService is starting: hold-off")
    assert (story.state, story.machine.view.reasons) == ("down", ("the MetaService is starting: hold-off",))


def test_after_an_unclean_end_the_pool_is_purged_before_anybody_reads():
    story = Story()
    assert story.killed_and_back() == ()
    assert story.state == "meta_up"
    assert story.look(pool=pool()) == ("purge",)
    assert story.machine.view.purge_due
    assert story.state == "meta_up"
    assert story.look() == (), "one purge at a time"
    story.machine.purge_ended(ok=True, now_seconds=story.now)
    assert story.look() == ("serve", "admit-all")
    assert story.state == "joinable"


def test_the_purge_waits_for_every_survivor():
    story = Story()
    story.killed_and_back()
    assert story.look(pool=pool({0: "provider"})) == ()
    assert story.look(pool=pool()) == ("purge",)


def test_clients_without_a_rank_are_waited_for_too():
    story = Story()
    story.killed_and_back()
    assert story.look(pool=pool(), survivors_missing=1) == ()
    assert story.look(survivors_missing=0) == ("purge",)


def test_survivors_that_never_come_are_given_up_and_the_holder_is_restarted():
    story = Story()
    story.killed_and_back()
    assert story.look(after=m.SURVIVORS_SECONDS - 1) == ()
    assert story.look(after=2) == ("restart-providers", "purge")
    story.machine.purge_ended(ok=True, now_seconds=story.now)
    story.look(pool=pool({5: "provider"}))
    assert story.state == "joinable"
    assert "did not come back: 0, 1" in story.machine.view.reasons[0]


def test_a_failed_purge_is_tried_again_after_a_pause_and_nothing_is_served_meanwhile():
    story = Story()
    story.killed_and_back()
    story.look(pool=pool())
    story.machine.purge_ended(ok=False, now_seconds=story.now)
    assert story.look() == ()
    assert story.look(after=m.PURGE_PAUSE_SECONDS) == ("purge",)
    assert story.seen.endpoint_mode == "recover"


def test_a_purge_of_an_earlier_run_does_not_clear_the_next_one_s():
    story = Story()
    story.killed_and_back()
    assert story.look(pool=pool()) == ("purge",)
    story.look(instance=None, pool=None, endpoint_mode="recover", endpoint_admission="survivors")
    story.look(instance="run-3", pool=pool({}, total=0))
    story.machine.purge_ended(ok=True, now_seconds=story.now)  # of run-2, too late
    assert story.look(pool=pool()) == ("purge",)
    assert story.machine.view.purge_due


def test_a_clean_stop_that_the_endpoint_saw_die_is_not_clean():
    story = Story()
    story.look()
    story.look(instance=None, pool=None, endpoint_mode="recover", endpoint_admission="survivors")
    assert "purge" in story.look(instance="run-2", pool=pool(), clean_stop=True)


def test_after_a_restart_of_the_endpoint_survivors_come_before_newcomers():
    story = Story()
    story.look()
    assert story.look(endpoint_admission="survivors", survivors_missing=2, pool=pool({})) == ()
    assert story.look(survivors_missing=0, pool=pool()) == ("admit-all",)
    assert not story.machine.view.purge_due


def test_a_planned_stop_needs_no_purge():
    story = Story()
    story.look()
    story.look(instance=None, pool=None, endpoint_mode="quiesce", endpoint_admission="survivors")
    story.look(instance="run-2", pool=pool({}, total=0), clean_stop=True)
    assert story.look(pool=pool()) == ("serve", "admit-all")
    assert not story.machine.view.purge_due


def test_a_quiesce_under_way_is_not_undone():
    story = Story()
    story.look()
    assert story.look(endpoint_mode="quiesce") == ()


def test_purge_on_unclean_can_be_switched_off():
    story = Story(purge_on_unclean=False)
    story.look()
    story.look(instance=None, pool=None, endpoint_admission="survivors")
    assert story.look(instance="run-2", pool=pool()) == ("admit-all",)


def test_an_endpoint_that_serves_while_a_purge_is_due_is_told_to_recover():
    story = Story()
    story.look()
    story.look(instance=None, pool=None, endpoint_admission="survivors")
    assert "recover" in story.look(instance="run-2", pool=pool({}, total=0))


def test_without_any_client_alive_there_is_nobody_to_wait_for():
    story = Story()
    story.killed_and_back(clients_alive=False)
    story.machine.purge_ended(ok=True, now_seconds=story.now)
    assert story.look() == ("serve", "admit-all")


def test_an_endpoint_that_withholds_while_the_run_is_the_same_is_opened_again():
    story = Story()
    story.look()
    assert story.look(endpoint_mode="recover", endpoint_admission="survivors") == ("serve", "admit-all")


def test_a_lost_role_is_cured_by_cutting_not_too_often_not_for_ever():
    story = Story()
    story.look()
    lost = pool({0: "unknown", 1: "proxy"})
    assert story.look(pool=lost) == ()
    assert story.state == "pool_ready"
    cuts = sum("cut" in story.look() for _ in range(200))
    assert cuts == m.MOST_CUTS
    assert any("did not bring the roles back" in r for r in story.machine.view.reasons)
    story.look(pool=pool())
    assert story.state == "joinable"


def test_a_role_that_comes_by_itself_is_left_alone():
    story = Story()
    story.look()
    for _ in range(20):
        assert "cut" not in story.look(pool=pool({0: "unknown"}))
        assert "cut" not in story.look(pool=pool())


def test_a_restarted_daemon_still_owes_the_purge():
    story = Story()
    story.killed_and_back()
    again = Story()
    again.machine.recall(story.machine.remember())
    assert again.look(instance="run-2", pool=pool(), endpoint_mode="recover") == ("purge",)


def test_a_restarted_daemon_does_not_purge_a_healthy_pool():
    story = Story()
    story.look()
    again = Story()
    again.machine.recall(story.machine.remember())
    assert again.look() == ()
    assert again.state == "joinable"


def test_a_daemon_that_missed_the_death_purges():
    story = Story()
    story.look()
    again = Story()
    again.machine.recall(story.machine.remember())
    assert "purge" in again.look(instance="run-2")


@pytest.mark.parametrize("kept", [{}, {"instance": 1}, {"members": 5, "instance": None, "purge_due": 0}])
def test_a_damaged_memory_counts_as_unclean(kept):
    story = Story()
    story.machine.recall(kept)
    assert "purge" in story.look()


LOOKS = st.fixed_dictionaries(
    {
        "after": st.sampled_from([0.5, 3.0, 20.0]),
        "instance": st.sampled_from([None, "a", "b", "c"]),
        "pool": st.sampled_from(
            [None, pool(), pool({}, total=0), pool({0: "unknown"}), pool({0: "provider"})]
        ),
        "meta_up": st.booleans(),
        "clean_stop": st.booleans(),
        "die": st.booleans(),
        "purge": st.sampled_from([None, True, False]),
    }
)


@given(st.lists(LOOKS, max_size=40))
def test_whatever_happens_nothing_is_served_while_a_purge_is_due(looks):
    story = Story()
    for look in looks:
        purge, die = look.pop("purge"), look.pop("die")
        if die:
            look |= {
                "instance": None,
                "pool": None,
                "endpoint_mode": "recover",
                "endpoint_admission": "survivors",
            }
        actions = story.look(**look)
        assert not ({"serve", "admit-all"} & set(actions) and story.machine.view.purge_due)
        assert not (story.state in {"pool_ready", "joinable"} and story.machine.view.purge_due)
        if purge is not None:
            story.machine.purge_ended(ok=purge, now_seconds=story.now)


def test_founding_a_cluster_purges_nothing_but_a_death_after_it_does():
    story = Story()
    recovering = {"endpoint_mode": "recover", "endpoint_admission": "survivors"}
    assert story.look(founding=True, **recovering) == ("serve", "admit-all")
    assert not story.machine.view.purge_due
    story.look(instance="run-2", pool=None, **recovering)
    assert story.look(pool=pool()) == ("purge",), "the same epoch still, but not the first MetaService"


def test_a_first_look_at_a_recovering_endpoint_purges_when_it_is_not_the_founding():
    story = Story()
    assert story.look(endpoint_mode="recover", endpoint_admission="survivors") == ("purge",)


def test_with_many_nodes_a_lost_host_s_rank_is_not_waited_for_and_costs_nobody_a_restart():
    story = Story()
    story.look(pool=pool({0: "provider", 1: "provider", 2: "proxy"}))
    recovering = {"endpoint_mode": "recover", "endpoint_admission": "survivors", "many_nodes": True}
    left = pool({1: "provider", 2: "proxy"})
    story.look(instance="run-2", pool=None, survivors_missing=1, **recovering)
    assert story.look(pool=left) == (), "those that the endpoints know of are waited for"
    assert story.look(survivors_missing=0) == ("purge",)
    story.machine.purge_ended(ok=True, now_seconds=story.now)
    assert story.look() == ("serve", "admit-all")


def test_what_comes_from_another_master_without_an_endpoint_to_tell_of_it_is_purged():
    machine = m.TierMachine(EXPECTED, purge_on_unclean=True)
    inherited = m.TierInputs(
        now_seconds=0.0, instance="run-1", meta_up=True, meta_problem="", pool=pool(), endpoint_mode=None,
        endpoint_admission=None, many_nodes=True, inherited=True, survivors_missing=1, survivors_seconds=30.0,
    )  # fmt: skip
    assert machine.step(inherited) == ()
    assert machine.view.phase == "recovering", "survivors first"
    assert machine.step(dataclasses.replace(inherited, now_seconds=29.0)) == (), (
        "longer than behind an endpoint"
    )
    assert machine.step(dataclasses.replace(inherited, now_seconds=29.0, survivors_missing=0)) == ("purge",)
    machine.purge_ended(ok=True, now_seconds=30.0)
    machine.step(dataclasses.replace(inherited, now_seconds=30.0, survivors_missing=0))
    assert machine.view.phase == "serving"


def test_a_clean_end_of_long_ago_says_nothing_of_the_masters_since():
    machine = m.TierMachine(EXPECTED, purge_on_unclean=True)
    mine = m.TierInputs(
        now_seconds=0.0, instance="run-1", meta_up=True, meta_problem="", pool=pool(), endpoint_mode=None,
        endpoint_admission=None,
    )  # fmt: skip
    machine.step(mine)
    again = dataclasses.replace(mine, instance="run-2", clean_stop=True, inherited=True, many_nodes=True)
    assert "purge" in machine.step(again)
