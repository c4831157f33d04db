"""Real daemons in mode etcd over a real etcd of three members, which are killed and frozen under them.

Every version of etcd that ``etcd_lab`` finds could run this; one is enough, since what differs between them is below
the coordinator, and ``tests/etcd`` runs it over each.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from cluster_lab import Cluster, wait_until
from etcd_lab import Etcd, found
from faults import (
    FaultRun,
    freeze_the_masters_daemon,
    lose_the_masters_host,
    restart_the_masters_daemon_in_time,
    switch_over,
)
from watch import accepts

LEASE_SECONDS = 6.0
KILL_SECONDS = 1.0  # the guard's margin
FOUND = found()
pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not FOUND, reason="no etcd on this machine: python tests/etcd/etcd_lab.py gets Debian's"
    ),
]


def settings(etcd: Etcd, lease_seconds: float = LEASE_SECONDS) -> str:
    members = ", ".join(f'"{endpoint}"' for endpoint in etcd.endpoints)
    return f'mode = "etcd"\nlease = "{lease_seconds:g}s"\netcd = {{ endpoints = [{members}] }}'


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    running = Etcd(next(iter(FOUND.values())), members=3)
    try:
        running.start()
        yield running
    finally:
        running.close()


@pytest.fixture(scope="module")
def started(etcd: Etcd) -> Iterator[Cluster]:
    with Cluster(3, settings(etcd), net=16) as running:
        running.wait_well(120)
        yield running


@pytest.fixture
def lab(started: Cluster, etcd: Etcd) -> Cluster:
    etcd.mend()
    for node in started.nodes.values():
        if not node.alive:
            node.start_daemon()
    started.wait_well(120)
    return started


def test_one_is_elected_and_all_tell_the_same(lab: Cluster) -> None:
    master = lab.master()
    told = [node.peers_json() for node in lab.nodes.values()]
    assert {(p["mode"], p["master"], p["epoch"]) for p in told} == {("etcd", master, lab.epoch())}
    assert [n.name for n in lab.nodes.values() if n.pid("meta-main")] == [master]


def test_the_masters_host_is_lost(lab: Cluster) -> None:
    lose_the_masters_host(lab, "etcd: the master's host lost")


def test_a_frozen_daemon_loses_its_meta_service_in_time_and_follows_when_it_wakes(lab: Cluster) -> None:
    """The guard is quicker than etcd, which lets another node in when its lease has ended."""
    freeze_the_masters_daemon(lab, "etcd: SIGSTOP of the master's daemon")


def test_a_switchover_under_load(lab: Cluster) -> None:
    switch_over(lab, "etcd: switchover")


def test_one_member_of_etcd_after_the_other_is_killed(lab: Cluster, etcd: Etcd) -> None:
    """One of them is etcd's leader."""
    with FaultRun(lab, "etcd: kill -9 of each member in turn") as run:
        run.now()
        for member in etcd.members:
            member.kill()
            time.sleep(LEASE_SECONDS)
            member.start()
            time.sleep(2.0)
        run.settle(moved=False, serves_on=True)
        assert lab.epoch() == run.epoch


@pytest.mark.parametrize("how", ["SIGSTOP", "kill -9"])
def test_all_of_etcd_is_lost_and_comes_back(lab: Cluster, etcd: Etcd, how: str) -> None:
    """The MetaService has ended by the node's own clock; engines compute; with etcd back somebody serves again."""
    with FaultRun(lab, f"etcd: {how} of all members for 20 s") as run:
        port = lab[run.master].ports["backend_port"]
        run.now()
        for member in etcd.members:
            if how == "SIGSTOP":
                member.freeze()
            else:
                member.kill()
        ended = wait_until(lambda: not accepts(port), 2 * LEASE_SECONDS, lab.told)
        assert ended < LEASE_SECONDS + KILL_SECONDS + 1.0, f"ended only after {ended:.1f} s"
        time.sleep(20.0 - ended)
        assert not lab.masters()
        assert not any(accepts(node.ports["backend_port"]) for node in lab.nodes.values())
        answered = [asked for asked in run.watch.asked if asked.at > run.at + 12.0 and not asked.error]
        assert {asked.node for asked in answered} == set(lab.nodes), "engines go on"
        told = lab[run.master].peers()
        assert told is not None
        assert told.role == "unknown"
        assert "etcd" in told.why
        etcd.mend()
        run.settle(moved=None)


def test_two_hosts_and_a_restarted_daemon_goes_on_with_its_term(etcd: Etcd) -> None:
    """A long lease: how long Python takes to start on a busy machine is not what is tested."""
    etcd.mend()
    with Cluster(2, settings(etcd, 20.0).replace("etcd = {", 'etcd = { prefix = "/two",'), net=17) as lab:
        lab.wait_well(150)
        what = "etcd: kill -9 of the master's daemon, back in time (lease 20 s)"
        restart_the_masters_daemon_in_time(lab, what)
