"""Whole clusters in one process: real servers, real TLS, real elections with a lease of one second."""

import asyncio
import itertools

import pytest
from peer_lab import Lab, running
from structlog.testing import capture_logs

from kvtierd.cluster.standing import ClusterView
from kvtierd.errors import ClusterError

LEASE_SECONDS = 1.0


def terms(lab):
    """(epoch, from, until, name) of every term that a node believed in, by its own standing."""
    found = []
    for node in lab.nodes.values():
        spans = itertools.pairwise([*node.told, (float("inf"), None)])
        for (at, standing), (next_at, _) in spans:
            if standing is not None and standing.role == "master":
                found.append((standing.epoch, at, min(standing.until_seconds, next_at), node.name))
    return sorted(found)


def assert_one_at_a_time(lab):
    found = terms(lab)
    assert found
    for (_, _, until, name), (_, start, _, other) in itertools.pairwise(found):
        assert name == other or until <= start


async def test_three_voters_elect_one_master_and_everybody_follows_over_tls(tmp_path):
    lab = Lab(tmp_path, "abcd", observers="d", secure=True)
    async with running(lab):
        master = await lab.master(seconds=LEASE_SECONDS + 5.0)
        assert master.name in "abc"
        view = ClusterView(master.standing.epoch, master.name, "127.0.0.1", "tcp://x:5000", why="serves")
        assert master.network.board.publish(view)
        await lab.until(lambda: all(n.network.board.newest == view for n in lab.nodes.values()))
        assert {p.name for p in lab["d"].coordinator.peers()} == set("abc")
        assert all(p.last_contact_seconds is not None for p in master.coordinator.peers())
        assert all(p.problem == "" for n in lab.nodes.values() for p in n.coordinator.peers())
        first = next(s for _, s in master.told if s.role == "master")
        await lab.until(lambda: master.told[-1][1].until_seconds > first.until_seconds + LEASE_SECONDS)
        # Nobody turned anybody away. A call that was late on a busy machine is no refusal.
        causes = {cause for n in lab.nodes.values() for _, cause in n.refused}
        assert causes <= {"call-timeout"}


async def test_another_one_takes_over_from_a_master_that_is_gone_and_it_comes_back_as_a_follower(tmp_path):
    lab = Lab(tmp_path, "abcd", observers="d")
    async with running(lab):
        old = await lab.master()
        epoch = old.standing.epoch
        await old.stop()
        new = await lab.master(seconds=LEASE_SECONDS + 4.0)
        assert new is not old
        assert new.standing.epoch > epoch
        await old.start()
        await lab.until(lambda: old.standing.master == new.name)
        assert lab.masters() == [new]
        assert_one_at_a_time(lab)


async def test_mastership_moves_to_the_node_that_was_asked_for(tmp_path):
    lab = Lab(tmp_path, "abc")
    async with running(lab):
        old = await lab.master()
        target = next(n for n in lab.nodes.values() if n is not old)
        await lab.until(
            lambda: old.network.uptime_seconds(target.name) > 1.3, what="the target's first silence"
        )
        await old.coordinator.hand_over(target.name)
        await lab.until(lambda: lab.masters() == [target], seconds=1.0)
        assert target.standing.serve_after_seconds - target.told[-1][0] < 0.2  # nothing has to be killed
        await lab.until(lambda: old.standing.master == target.name)
        assert_one_at_a_time(lab)


async def test_a_witness_votes_and_never_becomes_the_master(tmp_path):
    lab = Lab(tmp_path, "abw", witnesses="w")
    async with running(lab):
        first = await lab.master()
        await first.stop()
        second = await lab.master()
        assert {first.name, second.name} == {"a", "b"}
        with pytest.raises(ClusterError, match="w cannot become the master"):
            await second.coordinator.hand_over("w")


async def test_without_a_majority_there_is_no_master_and_status_says_who_is_missing(tmp_path):
    lab = Lab(tmp_path, "abc")
    async with running(lab):
        await lab.master()
        await lab["b"].stop()
        await lab["c"].stop()
        await lab.until(lambda: not lab.masters(), seconds=LEASE_SECONDS + 1.0)
        peers = lab["a"].coordinator.peers
        await lab.until(lambda: all("nothing listens there" in p.problem for p in peers()))
        await lab["b"].start()
        master = await lab.master()
        assert master.name in "ab"
        assert_one_at_a_time(lab)


async def test_a_voter_with_another_list_of_voters_does_not_count_and_that_is_said_once(tmp_path):
    lab = Lab(tmp_path, "abcd", observers="d")
    await lab.start("a", "b")
    lab.observers = {"a"}  # in c's file only
    try:
        with capture_logs() as logs:
            await lab["c"].start()
            await lab.until(lambda: lab["b"].refused.get(("c", "digest-differs"), 0) > 2)
        told = [(line["peer"], line["cause"]) for line in logs if line["event"] == "refused"]
        assert ("c", "digest-differs") in told
        assert len(told) == len(set(told))
        problems = {p.name: p.problem for p in lab["c"].coordinator.peers()}
        assert "is not the same as here" in problems["b"]
        assert not lab.masters()  # a new cluster waits for all of its voters
    finally:
        await lab.stop()


async def test_a_voter_that_lost_its_file_learns_the_epoch_from_the_others(tmp_path):
    lab = Lab(tmp_path, "abc")
    async with running(lab):
        master = await lab.master()
        epoch = master.standing.epoch
        lost = next(n for n in lab.nodes.values() if n is not master)
        await lost.stop()
        (tmp_path / lost.name / "epoch").unlink()
        await lost.start()
        await lab.until(lambda: (tmp_path / lost.name / "epoch").exists())
        await master.stop()
        new = await lab.master()
        assert new.standing.epoch > epoch
        assert_one_at_a_time(lab)


async def test_a_voter_with_a_damaged_file_does_not_vote_and_says_why_the_others_elect(tmp_path):
    lab = Lab(tmp_path, "abc")
    async with running(lab):
        master = await lab.master()
        broken = next(n for n in lab.nodes.values() if n is not master)
        await broken.stop()
        (tmp_path / broken.name / "epoch").write_text("not what was written")
        await broken.start()
        await lab.until(lambda: "damaged" in broken.standing.why)
        assert broken.standing.role == "unknown"
        await lab.until(
            lambda: "damaged" in {p.name: p for p in master.coordinator.peers()}[broken.name].problem
        )
        assert lab.masters() == [master]
        await master.stop()  # two left, of which one does not vote
        await asyncio.sleep(2 * LEASE_SECONDS)
        assert not lab.masters()


async def test_an_observer_that_cannot_reach_the_master_learns_of_it_from_the_others(tmp_path):
    lab = Lab(tmp_path, "abcd", observers="d")
    async with running(lab):
        master = await lab.master()
        observer = lab["d"]

        async def cut(*args, **kwargs):
            raise ClusterError("no route", code="cluster.unreachable")
            yield

        observer.network.links[master.name].watch = cut
        observer.network.links[master.name].hello = cut
        await observer.stop()
        await observer.start()
        observer.network.links[master.name].watch = cut
        await lab.until(lambda: observer.standing.master == master.name)
        await lab.until(lambda: observer.network.stream.source not in {"", master.name})
        master.network.board.publish(ClusterView(master.standing.epoch, master.name, why="news"))
        await lab.until(lambda: observer.network.board.newest.why == "news")
        assert observer.network.board.age_seconds() < 30.0


async def test_an_observer_remembers_the_epoch_and_refuses_a_lower_one_after_its_restart(tmp_path):
    lab = Lab(tmp_path, "abcd", observers="d")
    async with running(lab):
        first = await lab.master()
        await first.stop()
        second = await lab.master()
        epoch = second.standing.epoch
        for node in lab.nodes.values():
            await node.stop()
        observer = lab["d"]
        await observer.start()
        with capture_logs() as logs:
            observer.network.board.offer(ClusterView(epoch - 1, first.name), 9, 0.0, "a")
            await lab.until(lambda: (first.name, "fenced") in observer.refused)
        assert observer.standing.role == "unknown"
        assert f"in epoch {epoch}" in next(line for line in logs if line["event"] == "refused")["why"]


async def test_nodes_that_do_not_fit_together_are_found_by_their_greetings(tmp_path):
    lab = Lab(tmp_path, "abc", mode="static")
    lab.facts = {"a": {"hash_seed": "0"}, "b": {"hash_seed": "0"}, "c": {"hash_seed": "1"}}
    async with running(lab):
        await lab.until(lambda: len(lab["a"].network.differences()) == 1)
        ((name, texts),) = lab["a"].network.differences().items()
        assert name == "c"
        assert "hash_seed is 1 there and 0 here" in texts[0]


async def test_a_renewed_certificate_is_taken_up_without_a_restart(tmp_path, monkeypatch):
    monkeypatch.setattr("kvtierd.cluster.tls.LOOK_EVERY_SECONDS", 0.0)
    lab = Lab(tmp_path, "abc", mode="static", secure=True)
    async with running(lab):
        await lab.master()
        link = lab["a"].network.links["b"]
        before = link._channel
        lab.renew("a")
        await lab.until(lambda: link._channel is not before)
        await lab["b"].coordinator.promote()
        await lab.until(lambda: lab["a"].standing.master == "b")


# -- the named master


async def test_a_static_cluster_promoted_and_handed_over_over_tls(tmp_path):
    lab = Lab(tmp_path, "abc", mode="static", secure=True)
    async with running(lab):
        assert (await lab.master()).name == "a"
        await lab["b"].coordinator.promote()
        assert (await lab.master()).name == "b"
        await lab["b"].coordinator.hand_over("c")
        master = await lab.master()
        assert (master.name, master.standing.epoch) == ("c", 3)


async def test_of_two_hosts_one_is_dead_the_other_is_promoted_and_the_dead_one_comes_back(tmp_path):
    lab = Lab(tmp_path, "ab", mode="static")
    async with running(lab):
        await lab.master()
        await lab["a"].stop()
        await lab.until(lambda: "nothing listens" in lab["b"].coordinator.peers()[0].problem)
        assert lab["b"].standing.role == "follower"  # nobody but an operator can know that a is dead
        await lab["b"].coordinator.promote()
        assert lab["b"].standing.epoch == 2
        lab["a"].told.clear()
        await lab["a"].start()
        await lab.master()
        assert lab["b"].standing.role == "master"
        assert all(standing.role != "master" for _, standing in lab["a"].told)
        for node in lab.nodes.values():
            await node.stop()
        await lab["b"].start()
        assert (await lab.master()).name == "b"
        assert "no other node could be asked" in lab["b"].standing.why


async def test_a_master_that_was_cut_off_follows_when_the_network_is_back(tmp_path, monkeypatch):
    lab = Lab(tmp_path, "abc", mode="static")
    async with running(lab):
        await lab.master()
        cut = lab["a"]
        # Its server is gone and its calls fail: cut off, but running.
        await cut.network.server.close()
        links = list(cut.network.links.values())
        for link in links:
            monkeypatch.setattr(link, "hello", _cut, raising=True)
        await lab["b"].coordinator.promote()
        await asyncio.sleep(0.5)
        assert cut.standing.role == "master"  # two of them: what --force risks
        monkeypatch.undo()
        await lab.until(lambda: cut.standing.role == "follower", seconds=5.0)
        assert cut.standing.master == "b"


async def _cut(*args, **kwargs):
    raise ClusterError("no route", code="cluster.unreachable")


async def test_two_that_were_promoted_while_they_could_not_see_each_other_agree_on_one(tmp_path):
    lab = Lab(tmp_path, "abc", mode="static")
    await lab.start("a", "b")
    try:
        await lab.master()
        await lab["b"].stop()
        await lab["a"].stop()
        for name in "ab":  # each of them alone
            await lab[name].start()
            await lab[name].coordinator_is_ready()
            if lab[name].standing.role != "master":
                await lab[name].coordinator.promote()
            lab[name].epoch_then = lab[name].standing.epoch
            await lab[name].stop()
        await lab.start("a", "b", "c")
        master = await lab.master()
        assert master.standing.epoch >= max(lab[name].epoch_then for name in "ab")
        await asyncio.sleep(0.5)
        assert lab.masters() == [master]
    finally:
        await lab.stop()
