"""What the other nodes learn of a master that its coordinator tells only here."""

import asyncio

from fake_network import FakeNetwork

from kvtierd.cluster.announcer import Announcer
from kvtierd.cluster.clock import boottime_seconds
from kvtierd.cluster.standing import ClusterView, Standing


def master(epoch=7, left=5.0):
    return Standing("master", epoch, "a", "elected", until_seconds=boottime_seconds() + left)


async def test_a_new_master_is_told_at_once_and_once():
    network = FakeNetwork()
    announcer = Announcer(network)
    announcer.hear(master())
    view = network.board.newest
    assert (view.epoch, view.master, view.tier_state, view.why) == (7, "a", "down", "elected")
    assert network.board.mine
    await asyncio.sleep(0)
    assert network.greeted == [{"b", "c"}]
    network.board.publish(ClusterView(7, "a", tier_state="joinable"))  # the daemon
    announcer.hear(master(left=6.0))  # renewed
    await asyncio.sleep(0)
    assert network.board.newest.tier_state == "joinable"
    assert len(network.greeted) == 1
    assert network.standing.role == "master"


async def test_its_word_counts_no_longer_than_its_lease():
    """A process that was stopped finds that out without doing anything."""
    network = FakeNetwork()
    Announcer(network).hear(master(left=0.05))
    assert network.board.mine
    await asyncio.sleep(0.1)
    assert not network.board.mine


async def test_the_end_of_a_term_takes_it_down_and_the_next_one_is_told_again():
    network = FakeNetwork()
    announcer = Announcer(network)
    announcer.hear(master())
    announcer.hear(Standing("follower", 7, why="its lease was not renewed"))
    assert not network.board.mine
    announcer.hear(Standing("follower", 8, "b"))
    assert network.hint == "b"
    announcer.hear(master(9))
    assert network.board.mine
    await asyncio.sleep(0)
    assert len(network.greeted) == 2


async def test_a_later_epoch_that_is_known_is_not_overwritten():
    network = FakeNetwork()
    network.board.offer(ClusterView(20, "b"), 1, 0.0, "b")
    Announcer(network).hear(master(7))
    assert network.board.newest.epoch == 20
    assert not network.board.mine
