"""Three real daemons that elect their master, and what happens to them. Loopback addresses: no root needed.

The tests share a cluster: each begins when everything is well again, and brings back what it has taken down.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
from cluster_lab import Cluster
from faults import (
    FaultRun,
    freeze_the_masters_daemon,
    lose_the_masters_host,
    restart_the_masters_daemon_in_time,
    switch_over,
)

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def started() -> Iterator[Cluster]:
    with Cluster(3, net=11) as running:
        running.wait_well(120)
        yield running


@pytest.fixture
def lab(started: Cluster) -> Cluster:
    for node in started.nodes.values():
        if not node.alive:
            node.start_daemon()
    started.wait_well(120)
    return started


def test_kill_9_of_the_masters_daemon_that_stays_away_moves_the_master(lab: Cluster) -> None:
    with FaultRun(lab, "kill -9 of the master's daemon, away") as run:
        run.now()
        lab[run.master].stop_daemon(signal.SIGKILL)
        run.settle(moved=True, gone={run.master})


def test_a_frozen_daemon_loses_its_meta_service_in_time_and_follows_when_it_wakes(lab: Cluster) -> None:
    freeze_the_masters_daemon(lab, "SIGSTOP of the master's daemon")


def test_sigstop_of_the_meta_service(lab: Cluster) -> None:
    with FaultRun(lab, "SIGSTOP of the MetaService") as run:
        run.now()
        os.kill(run.meta_pid, signal.SIGSTOP)
        run.settle(moved=False)


def test_a_switchover_under_load(lab: Cluster) -> None:
    run, target = switch_over(lab, "switchover")
    assert not [e for e in lab[target].client.events() if e.kind == "tier.purged" and e.at > _wall(run)]


def test_a_paused_node_does_not_become_the_master(lab: Cluster) -> None:
    master = lab.master()
    paused, other = lab.others(master)
    assert paused.kvtierctl("pause", "--reason", "test").returncode == 0
    try:
        lose_the_masters_host(lab, "host lost, one of the others paused")
        assert lab.master(but={master}) == other.name
    finally:
        assert paused.kvtierctl("resume").returncode == 0


def test_a_followers_host_is_lost(lab: Cluster) -> None:
    victim = lab.others(lab.master())[0].name
    with FaultRun(lab, "a follower's host lost", victim=victim) as run:
        run.now()
        lab[victim].kill_host()
        time.sleep(3)
        run.settle(moved=False, gone={victim}, serves_on=True)
        assert lab.epoch() == run.epoch


def test_kill_9_of_the_masters_daemon_is_no_failover_when_it_is_back_in_time() -> None:
    """A long lease: how long Python takes to start on a busy machine is not what is tested."""
    with Cluster(3, 'mode = "lease"\nlease = "20s"', net=14) as lab:
        lab.wait_well(120)
        restart_the_masters_daemon_in_time(lab, "kill -9 of the master's daemon, back in time (lease 20 s)")


def test_steps_of_the_wall_clock_change_nothing_and_are_shown() -> None:
    lab = Cluster(3, net=15)
    for node in lab.nodes.values():
        node.own_clock = True
    with lab:
        lab.wait_well(120)
        for ahead_seconds in (3600.0, -86400.0):
            with FaultRun(lab, f"the master's wall clock steps by {ahead_seconds / 3600:+.0f} h") as run:
                run.now()
                lab[run.master].set_clock(ahead_seconds)
                run.last(15.0)  # more than two leases, and a round of greetings
                run.settle(moved=False, serves_on=True)
                assert lab.epoch() == run.epoch
                assert lab[run.master].pid("meta-main") == run.meta_pid
                other = lab.others(run.master)[0]
                shown = next(p for p in other.peers_json()["peers"] if p["name"] == run.master)
                assert (
                    f"{abs(ahead_seconds):.1f} s {'ahead' if ahead_seconds > 0 else 'behind'}"[:4]
                    in shown["problem"]
                )


def _wall(run: FaultRun) -> float:
    """The fault's moment as events have it."""
    return time.time() - (time.monotonic() - run.at)
