"""The rules of mode etcd, each in a scene of its own, over an etcd in memory and in virtual time."""

import asyncio
import contextlib

import pytest
from certificates_lab import cluster_settings
from fake_etcd import FakeClient, FakeEtcd
from virtual_time import run_virtually

from kvtierd.cluster.etcd import EtcdCoordinator, etcd_coordinator
from kvtierd.cluster.etcd_client import EtcdError
from kvtierd.cluster.etcd_config import EtcdConfig
from kvtierd.cluster.etcd_keys import Keys
from kvtierd.cluster.standing import FOREVER
from kvtierd.errors import ClusterError

NAMES = ("a", "b", "c")
CONFIG = EtcdConfig("x", "a", NAMES, ("etcd:2379",))
TTL = 7
TERM = 7 * 0.9 / 1.1
KILL_WAIT = 1.1 / 0.9
ROOT = b"/kvtierd/x/"


class Stage:
    """A cluster whose clocks are all the loop's."""

    def __init__(self):
        self.etcd = FakeEtcd()
        self.nodes, self.clients, self.tasks, self.said = {}, {}, {}, {}
        self._etcd_alive = asyncio.create_task(self.etcd.run())

    def now(self):
        return asyncio.get_running_loop().time()

    def start(self, name, *, fit=True, boot="", **more):
        client = self.clients.setdefault(name, FakeClient(self.etcd))
        config = EtcdConfig("x", name, NAMES, ("etcd:2379",))
        node = EtcdCoordinator(config, boot=boot or f"boot-{name}", client=client, clock=self.now, **more)
        node.set_fit(fit, "" if fit else "paused")
        self.nodes[name] = node
        said = self.said.setdefault(name, [])
        self.tasks[name] = asyncio.create_task(node.run(lambda s: said.append((self.now(), s))))
        return node

    async def stop(self, name):
        self.tasks[name].cancel()
        await asyncio.gather(self.tasks[name], return_exceptions=True)
        await self.nodes[name].close()
        del self.nodes[name], self.tasks[name]

    def standing(self, name):
        return self.nodes[name].standing

    def master(self):
        return next((n for n in self.nodes if self.standing(n).role == "master"), None)

    async def until(self, holds, seconds=60.0):
        """The time at which it holds."""
        end = self.now() + seconds
        while not holds():
            assert self.now() < end, [(n, self.standing(n)) for n in self.nodes]
            await asyncio.sleep(0.01)
        return self.now()

    async def serving(self, *names):
        """The master, when it may serve."""
        for name in names or NAMES:
            self.start(name)
            await asyncio.sleep(0.2)
        await self.until(
            lambda: self.master() and self.standing(self.master()).serve_after_seconds <= self.now()
        )
        await asyncio.sleep(2.5)  # a renewal, with which it says so in etcd
        return self.master()

    def value(self, key):
        return self.etcd.keys[ROOT + key].value

    async def close(self):
        for name in tuple(self.nodes):
            await self.stop(name)
        self._etcd_alive.cancel()


def scene(act):
    """Makes a test of an async function that is given a stage."""

    def test():
        async def main():
            stage = Stage()
            try:
                await act(stage)
            finally:
                await stage.close()

        run_virtually(main())

    test.__doc__ = act.__doc__
    return test


@scene
async def test_one_of_three(stage):
    await stage.serving()
    master = stage.master()
    assert master == "a"  # it asked first
    epoch = stage.standing("a").epoch
    assert stage.etcd.keys[ROOT + b"leader"].create_revision == epoch
    assert stage.value(b"leader") == b"a"
    for name in ("b", "c"):
        seen = stage.standing(name)
        assert (seen.role, seen.master, seen.epoch) == ("follower", "a", epoch)
        assert seen.until_seconds == FOREVER
    assert all(contact.voter and contact.name == "etcd:2379" for contact in stage.nodes["b"].peers())


@scene
async def test_the_end_moves_with_every_renewal_and_costs_etcd_no_space(stage):
    await stage.serving()
    revision = stage.etcd.revision
    before = stage.standing("a").until_seconds
    await asyncio.sleep(600)
    assert stage.standing("a").until_seconds > before + 590
    assert stage.etcd.revision == revision  # nothing was written
    assert len(stage.etcd.leases) == 1


@scene
async def test_the_first_master_waits_for_one_that_etcd_may_have_forgotten(stage):
    stage.start("a")
    gained = await stage.until(stage.master)
    assert stage.standing("a").serve_after_seconds - gained == pytest.approx(
        6 * 1.1 / 0.9 + KILL_WAIT, abs=0.1
    )
    assert stage.value(b"last") == b"unsure"
    await asyncio.sleep(12)
    assert stage.value(b"last") == b"held"


@scene
async def test_a_master_that_is_lost(stage):
    await stage.serving()
    epoch = stage.standing("a").epoch
    lost = stage.now()
    await stage.stop("a")
    gained = await stage.until(stage.master)
    master = stage.standing(stage.master())
    assert TTL - 2.1 < gained - lost < TTL + 1
    assert master.serve_after_seconds - gained == pytest.approx(KILL_WAIT, abs=0.1)
    assert master.epoch > epoch
    assert master.serve_after_seconds - lost < 6 + 3  # the lease and three seconds


@scene
async def test_a_frozen_etcd_ends_the_term_by_the_node_s_own_clock(stage):
    """Nothing is heard of an etcd that is frozen; the term ends when it was to end, not when somebody says so."""
    await stage.serving("a")
    until = stage.standing("a").until_seconds
    stage.etcd.freeze()
    await asyncio.sleep(20)
    ended, said = next((at, s) for at, s in stage.said["a"] if at > until - 0.001 and s.role != "master")
    assert ended == pytest.approx(until, abs=0.001)
    assert said.role == "follower"
    assert said.master == ""
    assert "not renewed" in said.why
    assert "does not answer" in said.why


@scene
async def test_the_standing_ends_even_when_the_loop_is_late(stage):
    await stage.serving("a")
    stage.etcd.freeze()
    node, until = stage.nodes["a"], stage.standing("a").until_seconds
    node._alarm.cancel()  # a loop that was busy, a host that slept
    asyncio.get_running_loop().now = until + 0.001
    assert node.standing.role == "follower"


@scene
async def test_the_term_counts_from_when_the_request_was_sent(stage):
    await stage.serving("a")
    keep_alive = stage.clients["a"].keep_alive

    async def slow(lease):
        kept = await keep_alive(lease)
        await asyncio.sleep(2)
        return kept

    stage.clients["a"].keep_alive = slow
    await asyncio.sleep(20)
    for at, standing in stage.said["a"][-2:]:
        assert standing.until_seconds - at == pytest.approx(TERM - 2, abs=0.1)


@scene
async def test_an_answer_that_comes_after_the_end_revives_nothing(stage):
    await stage.serving("a")
    epoch = stage.standing("a").epoch
    keep_alive = stage.clients["a"].keep_alive

    async def too_slow(lease):
        kept = await keep_alive(lease)
        await asyncio.sleep(8)
        stage.clients["a"].keep_alive = keep_alive
        return kept

    stage.clients["a"].keep_alive = too_slow
    before = len(stage.said["a"])
    await stage.until(lambda: stage.master() is None)
    ended = stage.now()
    await stage.until(stage.master)
    assert stage.now() > ended + 1
    assert stage.standing("a").epoch > epoch  # etcd had ended the lease: a new term
    assert [s.role for _, s in stage.said["a"][before : before + 1]] == ["follower"]


@scene
async def test_a_renewal_by_a_leader_that_was_replaced_does_not_count(stage):
    """etcd issue 15247. It says that it has renewed, and a read shows the key unchanged; the raft terms differ."""
    await stage.serving("a")
    before = stage.standing("a").until_seconds
    stage.etcd.new_leader(old_is_stuck=True)

    async def by_the_old_one(lease):
        return stage.etcd.stuck_keep_alive(lease)

    stage.clients["a"].keep_alive = by_the_old_one
    await stage.until(lambda: stage.master() is None)
    assert stage.now() == pytest.approx(before, abs=0.1)
    assert "raft terms 2 and 3" in stage.standing("a").why


@scene
async def test_a_new_leader_of_etcd_means_a_new_lease(stage):
    """What the old one ends when it is back are leases of before its time was over."""
    await stage.serving("a")
    epoch, old = stage.standing("a").epoch, stage.etcd.keys[ROOT + b"leader"].lease
    stage.etcd.new_leader(old_is_stuck=True)
    await asyncio.sleep(3)
    assert stage.etcd.keys[ROOT + b"leader"].lease != old
    assert stage.etcd.keys[ROOT + b"boot"].lease != old
    await asyncio.sleep(10)
    stage.etcd.old_leader_is_back()
    assert old not in stage.etcd.leases
    await asyncio.sleep(5)
    assert {s.epoch for _, s in stage.said["a"] if s.role == "master"} == {epoch}
    assert stage.standing("a").role == "master"


@scene
async def test_an_etcd_that_is_full_keeps_its_master(stage):
    """Without space it grants no lease and takes no change, but renews and reads; even when its leader changes."""
    await stage.serving("a")

    async def full(*_):
        raise EtcdError("etcd etcd:2379: mvcc: database space exceeded", refused=True)

    client = stage.clients["a"]
    client.grant = client.change = full
    stage.etcd.new_leader(old_is_stuck=False)
    await asyncio.sleep(60)
    assert stage.standing("a").role == "master"
    del client.grant, client.change
    await asyncio.sleep(5)
    assert stage.etcd.leases.keys() >= {stage.etcd.keys[ROOT + b"leader"].lease}


@scene
async def test_a_key_that_somebody_deletes_ends_the_term_at_once(stage):
    await stage.serving("a")
    stage.clients["b"] = FakeClient(stage.etcd)
    for key in list(stage.etcd.keys):
        del stage.etcd.keys[key]
    stage.etcd.revision += 1
    stage.etcd.notify()
    before = stage.now()
    await stage.until(lambda: any(s.role == "follower" for at, s in stage.said["a"] if at >= before), 1.0)


# -- who may


@scene
async def test_a_node_that_is_not_fit_never_becomes_the_master(stage):
    stage.start("a", fit=False)
    stage.start("b", fit=False)
    await asyncio.sleep(60)
    assert stage.master() is None
    assert stage.standing("a").why == "paused"
    stage.nodes["b"].set_fit(True)
    before = stage.now()
    assert await stage.until(lambda: stage.master() == "b") - before < 0.2


@scene
async def test_a_master_that_is_not_fit_any_more_stays_until_it_is_lost(stage):
    await stage.serving("a")
    stage.nodes["a"].set_fit(False, "paused")
    await asyncio.sleep(60)
    assert stage.master() == "a"
    stage.etcd.freeze()
    await stage.until(lambda: stage.master() is None)
    stage.etcd.thaw()
    await asyncio.sleep(60)
    assert stage.master() is None


@scene
async def test_a_restarted_kvtierd_goes_on_with_its_term(stage):
    await stage.serving("a", "b")
    epoch = stage.standing("a").epoch
    await stage.stop("a")
    await asyncio.sleep(2)
    stage.start("a", fit=False, held_epoch=epoch)  # its MetaService runs on, so it need not be fit
    await stage.until(lambda: stage.master() == "a", 1.0)
    assert (stage.standing("a").epoch, stage.standing("a").serve_after_seconds) == (epoch, 0.0)
    assert stage.standing("b").master == "a"
    assert [s.epoch for _, s in stage.said["b"] if s.epoch > epoch] == []


@scene
async def test_a_restarted_kvtierd_whose_metaservice_is_gone_waits_as_the_one_before_may_have(stage):
    await stage.serving("a")
    epoch = stage.standing("a").epoch
    await stage.stop("a")
    stage.start("a")
    gained = await stage.until(lambda: stage.master() == "a", 1.0)
    assert stage.standing("a").epoch == epoch
    assert stage.standing("a").serve_after_seconds - gained == pytest.approx(KILL_WAIT, abs=0.1)


@scene
async def test_a_restart_in_the_long_first_wait_does_not_shorten_it(stage):
    stage.start("a")
    await stage.until(stage.master)
    await stage.stop("a")
    stage.start("a")
    gained = await stage.until(stage.master)
    assert stage.standing("a").serve_after_seconds - gained > 8


@scene
async def test_a_host_that_was_booted_does_not_go_on(stage):
    await stage.serving("a")
    epoch = stage.standing("a").epoch
    await stage.stop("a")
    stage.start("a", boot="another-boot")
    await asyncio.sleep(1)
    assert stage.standing("a").role == "follower"
    assert "before its last boot" in stage.standing("a").why
    await stage.until(stage.master)
    assert stage.standing("a").epoch > epoch


@scene
async def test_two_hosts_that_were_given_one_name(stage):
    await stage.serving("a")
    twin = EtcdCoordinator(CONFIG, boot="other-host", client=FakeClient(stage.etcd), clock=stage.now)
    twin_runs = asyncio.create_task(twin.run(lambda s: None))
    await asyncio.sleep(60)
    assert twin.standing.role == "follower"
    assert "another host of its name" in twin.standing.why
    assert stage.master() == "a"
    twin_runs.cancel()


@scene
async def test_out_of_touch_a_follower_keeps_what_it_knew(stage):
    await stage.serving()
    epoch = stage.standing("b").epoch
    stage.clients["b"].cut = True
    before = len(stage.said["b"])
    await asyncio.sleep(4)
    assert stage.standing("b").role == "follower"
    await asyncio.sleep(60)
    seen = stage.standing("b")
    assert (seen.role, seen.master, seen.epoch) == ("unknown", "a", epoch)
    assert "does not answer" in seen.why
    assert len(stage.said["b"]) == before + 1  # said once
    stage.clients["b"].cut = False
    await stage.until(lambda: stage.standing("b").role == "follower", 5.0)


@scene
async def test_a_node_that_never_reached_etcd_knows_nothing(stage):
    stage.clients["a"] = FakeClient(stage.etcd)
    stage.clients["a"].cut = True
    node = stage.start("a", highest_epoch=5)
    assert node.standing.role == "unknown"
    await asyncio.sleep(10)
    assert (node.standing.role, node.standing.epoch, node.standing.master) == ("unknown", 5, "")


# -- switchover


@scene
async def test_hand_over_goes_to_the_named_node_at_once(stage):
    await stage.serving()
    for to in ("c", "b", "a"):
        former = stage.master()
        epoch = stage.standing(former).epoch
        await stage.nodes[former].hand_over(to)
        assert stage.standing(former).role == "follower"
        before = stage.now()
        assert await stage.until(lambda: stage.master() is not None) - before < 0.2
        assert stage.master() == to
        assert stage.standing(to).epoch > epoch
        assert stage.standing(to).serve_after_seconds == 0.0
        await asyncio.sleep(0.5)
        assert {stage.standing(name).master for name in NAMES} == {to}


@scene
async def test_the_others_hold_back_for_a_target_that_does_not_come(stage):
    await stage.serving()
    stage.clients["c"].cut = True
    before = stage.now()
    await stage.nodes["a"].hand_over("c")
    await asyncio.sleep(1)
    assert stage.standing("b").why == "a switchover to c is under way"
    gained = await stage.until(stage.master)
    assert 3.0 <= gained - before < 4.0
    assert stage.standing(stage.master()).serve_after_seconds == 0.0  # nothing runs anywhere


@scene
async def test_a_target_that_is_not_fit_is_waited_for_no_longer_than_that(stage):
    await stage.serving()
    stage.nodes["b"].set_fit(False, "paused")
    await stage.nodes["a"].hand_over("b")
    await stage.until(stage.master)
    assert stage.master() in {"a", "c"}


@scene
async def test_hand_over_before_the_first_wait_is_over_makes_the_next_one_wait(stage):
    stage.start("a")
    stage.start("b")
    await stage.until(stage.master)
    former = stage.master()
    to = "b" if former == "a" else "a"
    await stage.nodes[former].hand_over(to)
    gained = await stage.until(stage.master)
    assert stage.standing(to).serve_after_seconds - gained > 8


@scene
async def test_hand_over_that_is_refused(stage):
    await stage.serving()
    for node, to, code in (
        ("a", "a", "cluster.no-such-node"),
        ("a", "x", "cluster.no-such-node"),
        ("b", "c", "cluster.not-master"),
    ):
        with pytest.raises(ClusterError) as refused:
            await stage.nodes[node].hand_over(to)
        assert refused.value.stable_code == code
    assert stage.master() == "a"


@scene
async def test_hand_over_without_etcd_changes_nothing(stage):
    await stage.serving()
    stage.etcd.freeze()
    with pytest.raises(ClusterError) as refused:
        await stage.nodes["a"].hand_over("b")
    assert refused.value.stable_code == "cluster.unreachable"
    assert stage.master() == "a"


@scene
async def test_hand_over_over_a_connection_of_before_etcd_was_restarted(stage):
    """The MetaService has been stopped for it, so it does not fail for that."""
    await stage.serving()
    client = stage.clients["a"]

    async def stale(ttl):
        del client.grant
        raise EtcdError("etcd etcd:2379: Socket closed")

    client.grant = stale
    await stage.nodes["a"].hand_over("b")
    await stage.until(lambda: stage.master() == "b", 1.0)


@pytest.mark.parametrize("happened", [True, False])
def test_hand_over_that_nobody_hears_of(happened):
    """It may have happened; so this node is not the master until etcd says that it still is."""

    @scene
    async def act(stage):
        await stage.serving()
        epoch = stage.standing("a").epoch
        client = stage.clients["a"]

        async def unheard(request):
            del client.change
            if happened:
                stage.etcd.change(request)
            await asyncio.sleep(1)
            raise EtcdError("etcd etcd:2379: does not answer")

        client.change = unheard
        stage.nodes["a"].set_fit(False, "paused")
        handing_over = asyncio.create_task(stage.nodes["a"].hand_over("b"))
        await asyncio.sleep(0.5)
        assert stage.standing("a").role == "follower"  # already
        with pytest.raises(ClusterError) as refused:
            await handing_over
        assert refused.value.stable_code == "cluster.unreachable"
        assert "may have happened" in refused.value.why
        await stage.until(stage.master, 3.0)
        if happened:
            assert stage.master() == "b"
        else:  # it goes on, though it is not fit to become the master
            assert (stage.master(), stage.standing("a").epoch) == ("a", epoch)
            assert stage.standing("a").serve_after_seconds <= stage.now()

    act()


@scene
async def test_a_change_that_comes_late_is_refused(stage):
    """A release that was taken for lost arrives after the node went on; its condition no longer holds."""
    await stage.serving()
    client, sent = stage.clients["a"], []

    async def lost(request):
        del client.change
        sent.append(request)
        raise EtcdError("etcd etcd:2379: does not answer")

    client.change = lost
    with pytest.raises(ClusterError):
        await stage.nodes["a"].hand_over("b")
    await stage.until(lambda: stage.master() == "a", 3.0)
    stage.etcd.leases.setdefault(sent[0].success[2].request_put.lease, next(iter(stage.etcd.leases.values())))
    assert not stage.etcd.change(sent[0]).succeeded
    await asyncio.sleep(3)
    assert stage.master() == "a"


@scene
async def test_promote_is_refused(stage):
    await stage.serving("a", "b")
    for name in ("a", "b"):
        with pytest.raises(ClusterError) as refused:
            await stage.nodes[name].promote()
        assert refused.value.stable_code == "cluster.elects"


# -- an etcd that forgets


@scene
async def test_an_etcd_that_was_emptied(stage):
    await stage.serving()
    epoch = stage.standing("a").epoch
    stage.etcd.wipe()
    before = stage.now()
    await stage.until(lambda: stage.master() and stage.standing(stage.master()).epoch > epoch)
    master = stage.standing(stage.master())
    assert master.serve_after_seconds - before > 8  # the one before it may not know yet
    assert int(stage.value(b"epoch-base")) == epoch
    await asyncio.sleep(3)
    assert {stage.standing(name).epoch for name in NAMES} == {master.epoch}


@scene
async def test_a_cluster_that_had_another_mode_before(stage):
    stage.start("a", highest_epoch=1000)
    await stage.until(stage.master)
    assert stage.standing("a").epoch > 1000
    stage.start("b")
    await stage.until(lambda: stage.standing("b").master == "a")
    assert stage.standing("b").epoch == stage.standing("a").epoch


@scene
async def test_a_master_of_an_older_epoch_is_not_followed_but_replaced(stage):
    await stage.serving("a")
    stage.start("b", highest_epoch=1000, highest_master="c")
    await stage.until(lambda: stage.master() == "b" or stage.standing("a").epoch > 1000)
    newer = stage.master()
    assert stage.standing(newer).epoch > 1000
    assert stage.standing(newer).serve_after_seconds - stage.now() > 8
    assert all(s.master != "a" or s.epoch > 1000 for _, s in stage.said["b"])


@scene
async def test_one_epoch_has_one_master(stage):
    """An emptied etcd gives out a number again, to a node that did not know of it."""
    await stage.serving("a")
    epoch = stage.standing("a").epoch
    node = stage.start("b", highest_epoch=epoch, highest_master="c", fit=False)
    await asyncio.sleep(5)
    assert node.standing.master == ""
    assert "followed already" in node.standing.why
    assert stage.master() == "a"  # not for a node that could not take its place


@scene
async def test_keys_that_somebody_else_wrote(stage):
    await stage.serving("a")
    stage.start("b")
    await asyncio.sleep(1)
    stage.etcd.keys[ROOT + b"epoch-base"] = type(stage.etcd.keys[ROOT + b"leader"])(
        key=ROOT + b"epoch-base", value=b"many"
    )
    await asyncio.sleep(20)
    assert stage.standing("b").role == "unknown"
    assert "not a number" in stage.standing("b").why
    assert stage.master() is None


@scene
async def test_a_master_that_hears_of_a_later_epoch_takes_one_above_it(stage):
    """The other nodes may know better than an etcd that was restored from a backup."""
    known = (0, "")
    stage.start("a", fence=lambda: known)
    await stage.until(stage.master)
    await asyncio.sleep(15)
    known = (500, "c")
    before = stage.now()
    await stage.until(lambda: stage.master() == "a" and stage.standing("a").epoch > 500)
    roles = [(s.role, s.epoch) for at, s in stage.said["a"] if at >= before]
    assert roles[0] == ("follower", 500)
    assert stage.standing("a").serve_after_seconds - stage.now() > 8  # whoever that is may still serve


@scene
async def test_a_new_leader_of_etcd_that_gives_no_new_lease_in_time_ends_the_term(stage):
    """The old lease is renewed and proved, but a leader that was replaced may still end it."""
    await stage.serving("a")
    until = stage.standing("a").until_seconds
    client = stage.clients["a"]

    async def silent(*_):
        await asyncio.sleep(1)
        raise EtcdError("etcd etcd:2379: does not answer")

    client.grant = silent
    stage.etcd.new_leader(old_is_stuck=True)
    ended = await stage.until(lambda: stage.master() is None)
    assert ended == pytest.approx(until, abs=0.1)


@pytest.mark.parametrize("rounds", range(6))
def test_a_cancelled_run_ends_whatever_rings_at_that_moment(rounds):
    @scene
    async def act(stage):
        node = stage.start("a")
        await asyncio.sleep(1.0)
        node._bell.set()
        for _ in range(rounds):
            await asyncio.sleep(0)
        stage.tasks["a"].cancel()
        await asyncio.wait([stage.tasks["a"]], timeout=1.0)
        assert stage.tasks["a"].cancelled()

    act()


@scene
async def test_who_hears_of_a_standing_first(stage):
    """The network of peers has it before the daemon acts on it."""
    told = []
    node = stage.start("a", heard=lambda s: told.append(("heard", s.role, s.epoch)))
    stage.tasks["a"].cancel()
    running = asyncio.create_task(node.run(lambda s: told.append(("changed", s.role, s.epoch))))
    await stage.until(stage.master)
    running.cancel()
    assert [who for who, role, _ in told if role == "master"][:2] == ["heard", "changed"]


# -- numbers and settings


@pytest.mark.parametrize("lease", [1.0, 1.5, 2.0, 6.0, 7.5, 60.0])
@pytest.mark.parametrize("granted", [0, 1, 5])
def test_the_key_outlives_the_term_whatever_the_clocks_do(lease, granted):
    config = EtcdConfig("x", "a", ("a",), ("e:1",), lease_seconds=lease)
    ttl = config.ttl_seconds + granted  # etcd may give more
    slow, fast = 1 - config.drift, 1 + config.drift
    assert config.term_seconds(ttl) / slow <= ttl / fast + 1e-9
    assert config.term_seconds(ttl) <= lease
    assert config.term_seconds(ttl) >= min(0.8 * lease, lease - 0.5)
    assert config.attempt_seconds < config.term_seconds(ttl) / 2
    assert ttl >= 2


def test_keys_of_clusters_do_not_overlap():
    mine, other, longer = Keys("/kvtierd", "x"), Keys("/kvtierd/", "y"), Keys("/kvtierd", "x2")
    assert mine.first == b"/kvtierd/x/"
    for keys in (other, longer):
        assert not mine.first <= keys.leader < mine.end
    assert mine.first <= mine.leader < mine.end


def test_a_node_that_is_not_a_peer():
    settings = cluster_settings(mode="etcd", insecure=True, etcd={"endpoints": ["127.0.0.1:2379"]})
    with pytest.raises(ClusterError) as refused:
        etcd_coordinator(settings, "host-x")
    assert refused.value.stable_code == "cluster.no-such-node"


async def test_from_settings():
    settings = cluster_settings(
        mode="etcd",
        lease="3s",
        insecure=True,
        etcd={"endpoints": ["127.0.0.1:1", "127.0.0.1:2"], "prefix": "/p"},
    )
    made = etcd_coordinator(settings, "host-b", highest_epoch=4)
    assert made.config == EtcdConfig(
        "prod", "host-b", ("host-a", "host-b", "host-c"), ("127.0.0.1:1", "127.0.0.1:2"), "/p", 3.0
    )
    assert made.standing.epoch == 4
    assert [contact.name for contact in made.peers()] == ["127.0.0.1:1", "127.0.0.1:2"]
    with contextlib.suppress(asyncio.CancelledError):
        await made.close()
