"""Many elections over an etcd with every fault that ``fake_etcd`` has, in virtual time: never two MetaServices at once.

A run is told by its seed: ``KVTIERD_SIM_SEED=123`` runs that one, ``KVTIERD_SIM_RUNS=5000`` so many.
"""

import asyncio
import collections
import contextlib
import itertools
import os
import random

import pytest
from fake_etcd import FakeClient, FakeEtcd
from virtual_time import run_virtually

from kvtierd.cluster import etcd_keys, etcd_terms
from kvtierd.cluster.etcd import EtcdCoordinator
from kvtierd.cluster.etcd_config import EtcdConfig
from kvtierd.errors import ClusterError

NAMES = ("a", "b", "c")
SECONDS = 120.0
RUNS = int(os.environ.get("KVTIERD_SIM_RUNS", "100"))
SEEDS = [int(os.environ["KVTIERD_SIM_SEED"])] if "KVTIERD_SIM_SEED" in os.environ else range(RUNS)
Service = collections.namedtuple("Service", "node epoch begins ends")


class TwoMasters(AssertionError):
    pass


def some_rate(rng):
    """Of a clock; half of them are as far off as they may be."""
    return rng.choice([0.9, 1.1, rng.uniform(0.9, 1.1), rng.uniform(0.9, 1.1)])


class Node:
    """A node: its clock, its coordinator, and the MetaService that the coordinator's standing allows it to have.

    ``host`` tells two machines apart that were given one name.
    """

    def __init__(self, name, lab, host=""):
        self.name, self.host, self.lab, rng = name, host or name, lab, lab.rng
        self.rate = some_rate(rng)
        self.offset = rng.uniform(0, 1000)
        self.boot = f"boot-{self.host}-0"
        self.highest, self.highest_master = 0, ""
        self.fit = True
        faults = {f: rng.choice([0.0, 0.0, 0.02, 0.1]) for f in lab.faults.split()}
        self.client = FakeClient(lab.etcd, **faults)
        self.until = self.serves_from = None  # of the MetaService, by this node's clock
        self.epoch = 0
        self.handing_over = False
        self.start(held_epoch=0)

    def clock(self):
        return self.offset + asyncio.get_running_loop().time() * self.rate

    def true_time(self, by_clock):
        return (by_clock - self.offset) / self.rate

    def start(self, held_epoch):
        self.coordinator = EtcdCoordinator(
            EtcdConfig("x", self.name, NAMES, ("etcd:2379",)), highest_epoch=self.highest,
            highest_master=self.highest_master, held_epoch=held_epoch, boot=self.boot, client=self.client, clock=self.clock,
        )  # fmt: skip
        self.coordinator.set_fit(self.fit, "" if self.fit else "paused")
        self.task = asyncio.create_task(self.coordinator.run(self.changed))

    async def stop(self):
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.coordinator.close()
        if not self.serves() and self.serves_from is not None and self.clock() < self.serves_from:
            self.until = self.serves_from = None  # what was still waited for is forgotten with the process

    def changed(self, standing):
        assert standing.epoch >= self.highest, f"{self.name} goes back to epoch {standing.epoch}"
        if standing.master:
            known = self.highest_master if standing.epoch == self.highest else ""
            assert known in {"", standing.master}, f"{self.name} follows two masters of epoch {self.highest}"
            self.highest_master = standing.master
        self.highest = standing.epoch
        if standing.role != "master":
            return
        assert standing.master == self.name
        holder = self.lab.epochs.setdefault(standing.epoch, self.host)
        if holder != self.host and not self.lab.wiped:
            self.lab.epoch_faults.append(f"epoch {standing.epoch} is of {holder} and {self.host}")
        if self.epoch != standing.epoch:
            self.end_service()
            self.epoch = standing.epoch
        if self.handing_over:
            return
        now = self.clock()
        alive = self.until is not None and now < self.until + self.lab.kill_margin
        if not alive:
            self.end_service()
        if self.serves_from is None:
            self.serves_from = max(now, standing.serve_after_seconds)
        self.until = standing.until_seconds

    def end_service(self, at=None):
        """The guard kills at the latest a margin after the end of the lease; ``at``: it was stopped then."""
        if self.serves_from is not None:
            last = self.until + self.lab.kill_margin
            ends = last if at is None else min(at, last)
            if self.serves_from < min(ends, self.until):
                begins = self.true_time(self.serves_from)
                self.lab.services.append(Service(self.host, self.epoch, begins, self.true_time(ends)))
        self.until = self.serves_from = None

    def serves(self):
        return self.serves_from is not None and self.serves_from <= self.clock() < self.until


class Lab:
    def __init__(self, seed, happenings, faults):
        self.rng = random.Random(seed)
        self.happenings = happenings.split()
        self.faults = faults
        self.kill_margin = 1.0
        self.wiped = False  # then a node that was out of touch may use an epoch again; the others refuse it
        self.may_wipe = self.rng.random() < 0.3
        self.etcd = FakeEtcd(self.rng, rate=some_rate(self.rng))
        self.services = []
        self.epoch_faults = []
        self.epochs = {}
        self.log = []

    async def run(self):
        loop = asyncio.get_running_loop()
        etcd_alive = asyncio.create_task(self.etcd.run())
        self.nodes = {name: Node(name, self) for name in NAMES}
        if "twin" in self.happenings and self.rng.random() < 0.3:
            self.nodes["twin"] = Node("a", self, host="twin of a")
        while loop.time() < SECONDS:
            await asyncio.sleep(self.rng.expovariate(0.5))
            await self.something_happens()
        if "twin" in self.nodes:  # an operator has noticed
            twin = self.nodes.pop("twin")
            twin.end_service(at=twin.clock())
            await twin.stop()
        try:
            await self.everything_is_well_again()
        finally:
            for node in self.nodes.values():
                node.end_service()
                await node.stop()
            etcd_alive.cancel()
            self.check()

    async def something_happens(self):
        rng, etcd = self.rng, self.etcd
        node = rng.choice(list(self.nodes.values()))
        what = rng.choice(self.happenings)
        self.log.append((round(asyncio.get_running_loop().time(), 2), what, node.name))
        if what in {"cut", "mend"}:
            node.client.cut = what == "cut"
        elif what == "freeze":
            etcd.freeze()
        elif what == "thaw":
            etcd.thaw()
        elif what == "leader" and not etcd.frozen:
            etcd.new_leader(old_is_stuck=False)
        elif what == "stuck" and not etcd.frozen and not etcd.stuck_term:
            for other in self.nodes.values():
                other.client.to_stuck = rng.random() < 0.6
                other.client.hangs_until = asyncio.get_running_loop().time() + rng.uniform(0, 6)
            etcd.new_leader(old_is_stuck=True)
        elif what == "back" and not etcd.frozen:
            etcd.old_leader_is_back()
        elif what == "hand-over":
            await self.hand_over()
        elif what == "fit":
            node.fit = not node.fit
            node.coordinator.set_fit(node.fit, "paused")
        elif what == "restart":
            held = node.epoch if node.serves() else 0
            await node.stop()
            await asyncio.sleep(rng.uniform(0, 6))
            node.start(held_epoch=held if node.serves() else 0)
        elif what == "reboot":
            await node.stop()
            node.end_service(at=node.clock())
            await asyncio.sleep(rng.uniform(0, 6))
            node.boot = f"{node.boot[:-1]}{rng.randrange(10)}x"
            node.start(held_epoch=0)
        elif what == "wipe" and self.may_wipe:
            etcd.wipe()
            self.wiped = True

    async def hand_over(self):
        master = next((n for n in self.nodes.values() if n.coordinator.standing.role == "master"), None)
        if master is None:
            return
        master.end_service(at=master.clock())  # stopped first, and not started again meanwhile
        master.handing_over = True
        with contextlib.suppress(ClusterError):
            await master.coordinator.hand_over(self.rng.choice([n for n in NAMES if n != master.name]))
        master.handing_over = False
        if master.coordinator.standing.role == "master":  # it has failed, so the MetaService is started again
            master.changed(master.coordinator.standing)

    async def everything_is_well_again(self):
        """Then there is one master after a while, and everybody knows it."""
        self.etcd.thaw()
        self.etcd.old_leader_is_back()
        for node in self.nodes.values():
            node.fit = True
            node.coordinator.set_fit(True)
            client = node.client
            client.cut = client.to_stuck = False
            client.lost = client.unheard = client.late = client.stall = 0.0
        await asyncio.sleep(60)
        for node in self.nodes.values():
            assert not node.task.done(), node.task.exception()
        standings = [node.coordinator.standing for node in self.nodes.values()]
        assert sorted(s.role for s in standings) == ["follower", "follower", "master"], standings
        assert len({(s.master, s.epoch) for s in standings}) == 1, standings

    def check(self):
        services = sorted(self.services, key=lambda s: s.begins)
        for former, latter in itertools.pairwise(services):
            if former.node != latter.node and latter.begins < former.ends:
                raise TwoMasters(f"{former}\n{latter}\n{self.log}")
        if self.epoch_faults:
            raise TwoMasters(f"{self.epoch_faults}\n{self.log}")
        epochs = [] if self.wiped else [s.epoch for s in services]
        assert epochs == sorted(epochs), services


EVERYTHING = "cut mend freeze thaw leader stuck back hand-over hand-over fit restart restart reboot wipe twin"
FAULTS = "lost unheard late stall"


def simulate(seed, happenings=EVERYTHING, faults=FAULTS):
    random.seed(seed)  # of the coordinators' own pauses

    async def main():
        lab = Lab(seed, happenings, faults)
        await lab.run()
        return lab

    return run_virtually(main())


@pytest.mark.parametrize("part", range(5))
def test_never_two_masters(part):
    terms = 0
    for seed in SEEDS[part::5] if len(SEEDS) > 1 else SEEDS:
        try:
            terms += len(simulate(seed).services)
        except AssertionError as error:
            raise AssertionError(f"KVTIERD_SIM_SEED={seed}: {error}") from error
    if len(SEEDS) > 1:
        assert terms > 2 * len(SEEDS) / 5  # otherwise nothing was tried


# -- the rules, one by one: without any of them there are two masters


def from_the_answer(monkeypatch):
    """The term is counted from when the answer came."""
    original = etcd_terms.Terms.prove

    async def prove(self, term, sent):
        await original(self, term, sent)
        return await original(self, term, self._clock() + 1.0)

    monkeypatch.setattr(etcd_terms.Terms, "prove", prove)


def no_drift(monkeypatch):
    monkeypatch.setattr(EtcdConfig, "term_seconds", lambda self, ttl: float(ttl))


def no_kill_wait(monkeypatch):
    monkeypatch.setattr(EtcdConfig, "kill_wait_seconds", 0.0)


def no_blind_wait(monkeypatch):
    monkeypatch.setattr(EtcdConfig, "blind_wait_seconds", property(lambda self: self.kill_wait_seconds))


def the_lease_stays_when_the_leader_changes(monkeypatch):
    original = etcd_terms.Terms._attach

    async def attach(self, term):
        if term.raft_term:  # 0: it is resumed
            term.raft_term = (await self.read()).raft_term
            return True
        return await original(self, term)

    monkeypatch.setattr(etcd_terms.Terms, "_attach", attach)


def a_failed_hand_over_leaves_the_master(monkeypatch):
    original = EtcdCoordinator._lose

    def lose(self, why):
        if not why.startswith("handing over"):
            original(self, why)

    monkeypatch.setattr(EtcdCoordinator, "_lose", lose)


def a_restart_forgets_to_wait(monkeypatch):
    original = etcd_terms.Terms.resume

    async def resume(self, holder, last, serve_after):
        return await original(self, holder, last, 0.0)

    monkeypatch.setattr(etcd_terms.Terms, "resume", resume)


def anybody_of_the_name(monkeypatch):
    """Of two hosts of one name each goes on with the other's term."""
    monkeypatch.setattr(etcd_terms.Terms, "is_own", lambda self, holder: holder.node == self._config.node)


def released_before_it_served(monkeypatch):
    original = etcd_keys.Keys.release

    def release(self, holder, to, lease, *, served):
        return original(self, holder, to, lease, served=True)

    monkeypatch.setattr(etcd_keys.Keys, "release", release)


# Mutant -> what must happen for it to show, and the faults of requests. All of it shows in EVERYTHING too, only later.
MUTANTS = {
    from_the_answer: ("cut mend", "lost"),
    no_drift: ("cut mend", ""),
    no_kill_wait: ("cut mend", ""),
    no_blind_wait: ("cut mend wipe", ""),
    the_lease_stays_when_the_leader_changes: ("stuck back cut mend", ""),
    a_failed_hand_over_leaves_the_master: ("hand-over", "unheard"),
    a_restart_forgets_to_wait: ("restart cut mend wipe", ""),
    anybody_of_the_name: ("twin cut mend", ""),
    released_before_it_served: ("hand-over hand-over cut mend wipe", ""),
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_each_rule_is_needed(mutant, monkeypatch):
    mutant(monkeypatch)
    for seed in range(300):
        try:
            simulate(seed, *MUTANTS[mutant])
        except TwoMasters:
            return
        except AssertionError:
            continue
    pytest.fail("the simulation does not notice")
