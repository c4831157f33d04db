"""Two hosts with a named master, and an observer of an election: the ways that need an operator, or no vote."""

from __future__ import annotations

import pytest
from cluster_lab import Cluster, wait_until
from faults import FaultRun, lose_the_masters_host

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(300)]


def test_two_hosts_and_an_operator() -> None:
    with Cluster(2, 'mode = "static"\nmaster = "a"', net=12) as lab:
        assert lab.wait_well(120) == "a"
        assert lab["b"].kvtierctl("promote").returncode != 0, "not without --force"
        with FaultRun(lab, "static: switchover") as run:
            done = lab["a"].kvtierctl("switchover", "b")
            assert done.returncode == 0, (done.stdout, done.stderr)
            run.settle(moved=True, planned=True)
        assert lab.master() == "b"
        with FaultRun(lab, "static: host lost, the other promoted", victim="b") as run:
            lab["b"].kill_host()
            wait_until(lambda: lab["a"].alive, 1)
            run.now()
            done = lab["a"].kvtierctl("promote", "--force")
            assert done.returncode == 0, (done.stdout, done.stderr)
            run.settle(moved=True, gone={"b"})
        lab["b"].start_daemon()
        assert lab.wait_well(90) == "a", "who was replaced follows"


def test_an_observer_follows_and_is_never_the_master() -> None:
    with Cluster(3, net=13, observers=1) as lab:
        master = lab.wait_well(150)
        assert master != "d"
        lose_the_masters_host(lab, "three voters and an observer: the master's host lost")
        assert lab.master(but={master}) != "d"
