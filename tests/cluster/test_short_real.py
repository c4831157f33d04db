"""What every run of the tests looks at: three real daemons elect a master, which loses its MetaService, then its host."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from cluster_lab import Cluster
from faults import FaultRun, lose_the_masters_host

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("cluster"),
]


@pytest.fixture(scope="module")
def lab() -> Iterator[Cluster]:
    with Cluster(3, net=10) as running:
        running.wait_well(150)
        yield running


def test_one_is_elected_and_all_tell_the_same(lab: Cluster) -> None:
    master = lab.master()
    assert {(p["master"], p["epoch"]) for p in (n.peers_json() for n in lab.nodes.values())} == {
        (master, lab.epoch())
    }
    assert [n.name for n in lab.nodes.values() if n.pid("meta-main")] == [master]
    for node in lab.others(master):
        unit = node.unit("meta-main")
        assert unit is not None
        assert unit.state == "stopped"
        assert master in unit.reason


def test_kill_9_of_the_meta_service_is_mended_in_place(lab: Cluster) -> None:
    with FaultRun(lab, "kill -9 of the MetaService") as run:
        run.now()
        os.kill(run.meta_pid, signal.SIGKILL)
        fault = run.settle(moved=False)
    assert fault.epochs[0] == fault.epochs[1], "no election for what its own node can mend"


def test_the_masters_host_is_lost(lab: Cluster) -> None:
    lose_the_masters_host(lab, "the master's host lost")
