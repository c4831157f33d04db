"""A fault and its account: everything that has to hold after every one of them, asserted in one place."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from cluster_lab import Cluster, wait_until
from fault_table import FAULTS, Fault
from watch import Watch


class FaultRun:
    """Watches a cluster that is well, while the test does something to it; ``settle`` says what it has cost.

    Args:
        what: For the table.
        victim: The node whose engine goes down with it, if one does.
    """

    def __init__(self, cluster: Cluster, what: str, *, victim: str = "") -> None:
        self.cluster, self.what, self.victim = cluster, what, victim
        self.master = cluster.wait_well()
        self.epoch = cluster.epoch()
        self.watch = Watch(cluster)
        self._engines = {n.name: n.pid("engine-ref") for n in cluster.nodes.values() if n.name != victim}
        self._pools = {n.name: n.pid("pool-0") for n in cluster.nodes.values() if n.name != victim}
        self.meta_pid = cluster[self.master].pid("meta-main")
        self.at = 0.0

    def __enter__(self) -> Self:
        self.watch.__enter__()
        everyone = set(self.cluster.nodes)
        self.watch.wait_hits(0.0, everyone)  # the pool is warm and every engine reads from it
        if self.victim:
            self.watch.leave(self.victim)
        self.at = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.watch.end()

    def now(self) -> None:
        """The fault begins at this moment."""
        self.at = time.monotonic()

    def last(self, seconds: float) -> None:
        """The fault goes on for so long."""
        time.sleep(seconds)

    def settle(
        self,
        *,
        moved: bool | None,
        gone: set[str] | None = None,
        serves_on: bool = False,
        planned: bool = False,
        heal: Callable[[], None] | None = None,
    ) -> Fault:
        """Waits until the tier answers again everywhere, checks what must hold and writes the line.

        Args:
            moved: Another node must have become the master; ``None``: it may have.
            gone: These nodes are down or cannot be reached.
            serves_on: Nothing has interrupted the MetaService: no new one is waited for.
            planned: A switchover: the next MetaService is up before the one before has ended, and nobody uses it until then.
            heal: Ends the fault; everybody has to be back after it.
        """
        cluster, watch, gone = self.cluster, self.watch, gone or set()
        cut_off = gone
        if moved:
            master = cluster.master(60, but=gone)
            assert master != self.master, cluster.told()
        elif moved is None:
            master = cluster.master(60, but=gone)
        else:
            master = self.master
        interrupted = not serves_on or master != self.master
        if planned:
            serving = self._joinable(master)
        else:
            serving = self._serving(master) if interrupted else self.at
        nodes = set(cluster.nodes) - gone - {self.victim}
        hits = watch.wait_hits(serving, nodes, 60)
        cluster.wait_well(60, but=gone)
        rejoined = None
        if heal is not None:
            healed = time.monotonic()
            heal()
            gone = set()
            master = cluster.wait_well(90)
            rejoined = watch.wait_hits(time.monotonic(), set(cluster.nodes) - {self.victim}, 60) - healed
        watch.end()
        fault = Fault(
            self.what,
            (self.epoch, cluster.epoch()),
            serving - self.at if interrupted else None,
            hits - self.at if interrupted else None,
            rejoined,
            watch.overlap_seconds(),
            len(watch.failed),
            len(watch.wrong),
            watch.longest_seconds(self.at),
            planned,
        )
        FAULTS.append(fault)
        print(fault)
        assert planned or fault.overlap == 0, watch.spans
        assert not planned or fault.overlap > 0, "the next one was not up first"
        assert not watch.failed, watch.failed
        assert not watch.wrong, watch.wrong
        assert moved is not False or cluster.master(but=gone) == self.master, cluster.told()
        assert self._same("engine-ref", self._engines), cluster.told()
        # Memory that the others have let go of comes back with a new process only.
        pools = {n: pid for n, pid in self._pools.items() if heal is None or n not in cut_off}
        assert self._same("pool-0", pools), cluster.told()
        self._all_tell_the_same(cluster.master(but=gone), gone)
        return fault

    def _joinable(self, master: str) -> float:
        """When the tier of this master was open to everybody."""
        deadline = time.monotonic() + 30
        while self.cluster[master].status().tier_state != "joinable":
            assert time.monotonic() < deadline, self.cluster.told()
            time.sleep(0.02)
        return time.monotonic()

    def _serving(self, master: str) -> float:
        """When the MetaService of this master began to accept after the fault."""
        deadline = time.monotonic() + 30
        while True:
            for span in list(self.watch.spans[master]):
                if span.first > self.at:
                    return span.first
            assert time.monotonic() < deadline, f"{self.watch.spans}\n{self.cluster.told()}"
            time.sleep(0.05)

    def _same(self, unit: str, before: dict[str, int]) -> bool:
        """It is the process that it was, wherever there is a daemon that can say so."""
        return all(self.cluster[n].pid(unit) == pid for n, pid in before.items() if self.cluster[n].alive)

    def _all_tell_the_same(self, master: str, gone: set[str]) -> None:
        living, epoch = self.cluster.living(but=gone), self.cluster.epoch()
        assert {(p["master"], p["epoch"]) for p in (n.peers_json() for n in living)} == {(master, epoch)}
        assert {(s.master, s.epoch) for s in (n.status() for n in living)} == {(master, epoch)}


# -- faults that more than one way of naming a master has to get over


def lose_the_masters_host(lab: Cluster, what: str) -> None:
    """Everything on it at once; another node has to become the master."""
    victim = lab.master()
    with FaultRun(lab, what, victim=victim) as run:
        run.now()
        lab[victim].kill_host()
        run.settle(moved=True, gone={victim})


def freeze_the_masters_daemon(lab: Cluster, what: str) -> None:
    """Nobody in the process can end its MetaService; the guard has to, before another node is the master."""
    with FaultRun(lab, what) as run:
        pid = lab[run.master].daemon_pid
        assert pid is not None
        run.now()
        os.kill(pid, signal.SIGSTOP)
        try:
            lab.master(60, but={run.master})
        finally:
            os.kill(pid, signal.SIGCONT)
        run.settle(moved=True)


def switch_over(lab: Cluster, what: str) -> tuple[FaultRun, str]:
    """To another node, by kvtierctl; the run, and the new master."""
    with FaultRun(lab, what) as run:
        target = lab.others(run.master)[0].name
        run.now()
        done = lab[run.master].kvtierctl("switchover", target)
        assert done.returncode == 0, (done.stdout, done.stderr)
        run.settle(moved=True, planned=True)
        assert lab.master() == target
    return run, target


def restart_the_masters_daemon_in_time(lab: Cluster, what: str) -> None:
    """kill -9, and the next one goes on with the lease, and with the MetaService."""
    with FaultRun(lab, what) as run:
        node = lab[run.master]
        run.now()
        node.stop_daemon(signal.SIGKILL)
        node.start_daemon()
        wait_until(lambda: node.status().role == "master", 30, lab.told)
        run.settle(moved=False, serves_on=True)
        assert node.pid("meta-main") == run.meta_pid, "the lease goes on, and so does its MetaService"
        assert lab.epoch() == run.epoch
