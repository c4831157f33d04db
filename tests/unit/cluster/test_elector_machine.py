"""Whatever comes, in whatever order: what an election must never do."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtierd.cluster.election_config import ElectorConfig
from kvtierd.cluster.election_messages import (
    AnyMessage,
    Effect,
    EpochRaised,
    EpochState,
    Grant,
    HeldLease,
    LeaseGained,
    LeaseLost,
    LeaseRenewed,
    Persist,
    Probe,
    Request,
    Send,
)
from kvtierd.cluster.elector import Elector

NAMES = ("a", "b", "c", "d", "e")
names = st.sampled_from(NAMES)
some_seconds = st.sampled_from([0.0, 0.01, 0.3, 1.0, 2.0, 6.0, 7.4, 20.0])


class ElectionMachine(RuleBasedStateMachine):
    """The world: one clock for all, a bag of messages that any rule may take from, disks, and who holds what until when."""

    @initialize(voters=st.sampled_from([3, 5]), fresh=st.booleans())
    def begin(self, voters: int, fresh: bool) -> None:
        self.now = 1000.0
        self.names = NAMES[:voters]
        self.configs = {n: ElectorConfig("m", n, self.names) for n in self.names}
        self.disks: dict[str, EpochState | None] = {
            n: None if fresh else EpochState(1, "", 0, 0.0, ord(n)) for n in self.names
        }
        self.lives = itertools.count(1)
        self.electors: dict[str, Elector] = {}
        self.held: dict[str, LeaseGained] = {}  # by node: what its guard goes by, with the latest end
        self.used: dict[int, str] = {}
        self.highest = 0
        self.granted: dict[tuple[str, int], tuple[str, int]] = {}  # by voter and epoch
        self.mail: list[tuple[str, AnyMessage]] = []
        for name in self.names:
            self.boot(name)

    def boot(self, name: str, held: HeldLease | None = None) -> None:
        life = next(self.lives)
        draws = ((life * 7919 + i * 104729) % 1000 / 1000 for i in itertools.count())
        self.electors[name] = Elector(
            self.configs[name], self.disks[name], booted_at_seconds=self.now, draws=draws, held=held
        )

    def has(self, name: str) -> bool:
        return name in self.names

    # -- the effects, judged

    def carry_out(self, name: str, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Persist):
                before = self.disks[name]
                assert before is None or effect.state.epoch >= before.epoch
                self.disks[name] = effect.state
            elif isinstance(effect, Send):
                self.judge_message(name, effect)
                self.mail.append((effect.to, effect.message))
            elif isinstance(effect, LeaseGained | EpochRaised):
                self.judge_gain(name, effect)
            elif isinstance(effect, LeaseRenewed):
                lease = self.held[name]
                assert effect.epoch == lease.epoch
                assert effect.until_seconds <= self.now + self.configs[name].lease_seconds
                until = max(lease.until_seconds, effect.until_seconds)
                self.held[name] = dataclasses.replace(lease, until_seconds=until)
            elif isinstance(effect, LeaseLost):
                assert effect.why
                self.held.pop(name, None)

    def judge_message(self, name: str, effect: Send) -> None:
        message = effect.message
        assert effect.to in self.names
        assert effect.to != name
        assert message.sender == name
        disk = self.disks[name]
        if isinstance(message, Grant):
            # On disk before it left, and one epoch to one node.
            assert disk is not None
            assert disk.epoch == message.epoch
            assert disk.granted_to == effect.to
            holder = (disk.granted_to, disk.granted_incarnation)
            assert self.granted.setdefault((name, message.epoch), holder) == holder
        if isinstance(message, Request):
            assert disk is not None
            assert (disk.epoch, disk.granted_to) == (message.epoch, name)
        if isinstance(message, Probe | Request):
            assert disk is not None

    def judge_gain(self, name: str, effect: LeaseGained | EpochRaised) -> None:
        lease_seconds = self.configs[name].lease_seconds
        assert effect.epoch > self.highest, "epochs only rise"
        assert self.now < effect.until_seconds <= self.now + lease_seconds
        self.highest = effect.epoch
        for other, lease in self.held.items():
            assert other == name or lease.until_seconds <= self.now, f"{other} still has a lease"
        if isinstance(effect, EpochRaised):
            # Without a gap: it held the one before.
            assert self.now < self.held[name].until_seconds
            self.held[name] = dataclasses.replace(
                self.held[name], epoch=effect.epoch, until_seconds=effect.until_seconds
            )
            return
        assert effect.serve_after_seconds >= self.now
        margin = self.configs[name].kill_margin_seconds
        for other, lease in self.held.items():
            if other != name and lease.until_seconds + margin > self.now:
                assert effect.serve_after_seconds >= lease.until_seconds + margin
        self.held[name] = effect

    # -- what happens

    @rule(seconds=some_seconds)
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def next_one_wakes(self) -> None:
        name = min(self.electors, key=lambda n: self.electors[n].next_wake_seconds())
        due = self.electors[name].next_wake_seconds()
        if due < math.inf:
            self.now = max(self.now, due)
            self.tick(name)

    @precondition(lambda self: self.names)
    @rule(name=names)
    def tick(self, name: str) -> None:
        if self.has(name):
            elector = self.electors[name]
            for _ in range(3):  # who gives up and draws no delay at all begins anew at the same time
                self.carry_out(name, elector.tick(self.now))
                if elector.next_wake_seconds() > self.now:
                    return
            raise AssertionError("ticks at their time leave something due")

    @rule(data=st.data(), keep=st.booleans())
    def a_message_arrives(self, data: Any, keep: bool) -> None:
        if self.mail:
            place = data.draw(st.integers(0, len(self.mail) - 1))
            to, message = self.mail[place] if keep else self.mail.pop(place)
            self.carry_out(to, self.electors[to].step(message, self.now))

    @rule()
    def all_mail_arrives(self) -> None:
        for _ in range(4):
            mail, self.mail = self.mail, []
            for to, message in mail:
                self.carry_out(to, self.electors[to].step(message, self.now))

    @rule(data=st.data())
    def mail_is_lost(self, data: Any) -> None:
        if self.mail:
            del self.mail[data.draw(st.integers(0, len(self.mail) - 1)) :]

    @rule(name=names, keeps_lease=st.booleans())
    def a_daemon_restarts(self, name: str, keeps_lease: bool) -> None:
        if self.has(name):
            lease = self.held.get(name)
            held = None
            if keeps_lease and lease is not None and self.now < lease.until_seconds:
                held = HeldLease(lease.epoch, lease.until_seconds)
            # Without it the guard goes on until the lease ends; that is what ``held`` keeps on saying.
            self.boot(name, held)

    @precondition(lambda self: all(d is not None for d in self.disks.values()))
    @rule(name=names)
    def a_file_is_lost(self, name: str) -> None:
        if self.has(name) and all((d.epoch > 0) for d in self.disks.values() if d):
            self.disks[name] = None
            self.granted = {key: value for key, value in self.granted.items() if key[0] != name}
            self.boot(name)

    @rule(name=names, data=st.data())
    def a_switchover(self, name: str, data: Any) -> None:
        if self.has(name) and self.electors[name].view(self.now).role == "master":
            if self.now < self.electors[name].candidate.until_seconds:
                to = data.draw(st.sampled_from([None, *self.configs[name].others]))
                self.held.pop(name, None)  # stopped first
                self.carry_out(name, self.electors[name].resign(self.now, to))

    @rule(name=names, fit=st.booleans())
    def fitness(self, name: str, fit: bool) -> None:
        if self.has(name):
            self.electors[name].set_fit(fit, "paused")

    @rule(name=names, data=st.data())
    def a_message_that_is_not_for_us(self, name: str, data: Any) -> None:
        if self.mail and self.has(name):
            _, message = self.mail[data.draw(st.integers(0, len(self.mail) - 1))]
            before = self.disks[name]
            strange = dataclasses.replace(message, digest="0" * 16)
            effects = self.electors[name].step(strange, self.now)
            assert not any(isinstance(e, Persist | LeaseGained | LeaseRenewed | EpochRaised) for e in effects)
            self.carry_out(name, effects)
            assert self.disks[name] == before

    # -- always

    @invariant()
    def one_lease_at_a_time(self) -> None:
        valid = [n for n, lease in self.held.items() if self.now < lease.until_seconds]
        assert len(valid) <= 1, valid

    @invariant()
    def views_can_be_made(self) -> None:
        masters = [n for n in self.names if self._believes(n)]
        assert len(masters) <= 1

    def _believes(self, name: str) -> bool:
        view = self.electors[name].view(self.now)
        return view.master == name and view.remaining_seconds > 0


ElectionMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=100, deadline=None)
TestElection = ElectionMachine.TestCase
