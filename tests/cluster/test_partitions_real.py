"""Real daemons in network namespaces that lose sight of each other. Root; each is skipped with a reason otherwise."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from cluster_lab import Cluster
from faults import FaultRun
from netns_lab import NetLab, why_no_filter, why_not

pytestmark = [
    pytest.mark.real,
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]
needs_filter = pytest.mark.skipif(why_no_filter() is not None, reason=why_no_filter() or "")


@pytest.fixture(scope="module")
def net() -> Iterator[NetLab]:
    with NetLab(3) as running:
        yield running


@pytest.fixture(scope="module")
def started(net: NetLab) -> Iterator[Cluster]:
    with Cluster(3, hosts=net) as running:
        running.wait_well(120)
        yield running


@pytest.fixture
def lab(started: Cluster, net: NetLab) -> Cluster:
    for number in net.hosts:
        net.heal(number)
    for node in started.nodes.values():
        if not node.alive:
            node.start_daemon()
    started.wait_well(120)
    return started


def test_the_master_is_cut_off_and_comes_back(lab: Cluster, net: NetLab) -> None:
    with FaultRun(lab, "the master's cable pulled, put back") as run:
        number = lab[run.master].number
        run.now()
        net.cut(number)
        run.settle(moved=True, gone={run.master}, heal=lambda: net.heal(number))


def test_the_master_falls_into_a_black_hole(lab: Cluster, net: NetLab) -> None:
    with FaultRun(lab, "the master in a black hole, out again") as run:
        number = lab[run.master].number
        run.now()
        net.blackhole(number)
        run.settle(moved=True, gone={run.master}, heal=lambda: net.heal(number))


def test_a_follower_falls_into_a_black_hole(lab: Cluster, net: NetLab) -> None:
    with FaultRun(lab, "a follower in a black hole, out again") as run:
        victim = lab.others(run.master)[0]
        run.now()
        net.blackhole(victim.number)
        run.last(12)
        run.settle(moved=None, gone={victim.name}, serves_on=True, heal=lambda: net.heal(victim.number))


@needs_filter
def test_the_master_is_deaf_to_one_follower(lab: Cluster, net: NetLab) -> None:
    """The other follower is still a majority with it."""
    with FaultRun(lab, "the master deaf to one follower") as run:
        number, other = lab[run.master].number, lab.others(run.master)[0]
        run.now()
        net.deafen(number, other.number)
        run.last(12)
        run.settle(moved=None, gone={other.name}, serves_on=True, heal=lambda: net.heal(number))


@needs_filter
def test_the_master_is_deaf_to_both(lab: Cluster, net: NetLab) -> None:
    with FaultRun(lab, "the master deaf to both, one way") as run:
        number = lab[run.master].number
        run.now()
        for other in lab.others(run.master):
            net.deafen(number, other.number)
        run.settle(moved=True, gone={run.master}, heal=lambda: net.heal(number))


@needs_filter
def test_three_packets_in_ten_are_lost_at_the_master(lab: Cluster, net: NetLab) -> None:
    with FaultRun(lab, "30 % of packets lost at the master for 20 s") as run:
        number = lab[run.master].number
        run.now()
        net.lose(number, 30)
        run.last(20)
        net.heal(number)
        run.settle(moved=None, serves_on=True)


def test_the_master_in_a_black_hole_with_a_frozen_daemon(lab: Cluster, net: NetLab) -> None:
    """Nobody can tell it that it is not the master any more, and it would not hear: the guard has to do it."""
    with FaultRun(lab, "the master in a black hole, its daemon frozen") as run:
        node = lab[run.master]
        pid = node.daemon_pid
        assert pid is not None
        run.now()
        net.blackhole(node.number)
        os.kill(pid, signal.SIGSTOP)

        def heal() -> None:
            net.heal(node.number)
            os.kill(pid, signal.SIGCONT)

        try:
            run.settle(moved=True, gone={run.master}, heal=heal)
        finally:
            os.kill(pid, signal.SIGCONT)


def test_halves_of_five_nodes() -> None:
    """The master is in the smaller half."""
    with NetLab(5) as net, Cluster(5, hosts=net) as lab:
        lab.wait_well(180)
        with FaultRun(lab, "five nodes cut into two and three, the master with the two") as run:
            minority = {run.master, lab.others(run.master)[0].name}
            small = [lab[n].number for n in minority]
            large = [n.number for n in lab.nodes.values() if n.name not in minority]
            run.now()
            for number in small:
                for other in large:
                    net.deafen(number, other)
                    net.deafen(other, number)
            run.settle(moved=True, gone=minority, heal=lambda: [net.heal(n) for n in (*small, *large)])
