"""PURE: the candidate's side of the election: how a node becomes the master, stays it and stops being it.

What makes it safe: the lease is counted from when the request was *sent*, answers count only for the request whose
number they carry, and a lease that has run out has run out, whatever comes in later. Probing first and waiting as the
refusals say only make it quick.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from kvtierd.cluster.election_config import ElectorConfig
from kvtierd.cluster.election_messages import (
    AnyMessage,
    Effect,
    EpochRaised,
    Grant,
    HeldLease,
    LeaseGained,
    LeaseLost,
    LeaseRenewed,
    Persist,
    Probe,
    Refusal,
    Release,
    Request,
    Send,
    Willing,
)
from kvtierd.cluster.election_view import Role, in_words
from kvtierd.cluster.voter import Voter

MOST_ROUNDS = 8  # a master remembers so many requests that are still without a majority
LONGEST_BACKOFF = 4  # failed attempts after which waiting gets no longer
PROBING = -1  # instead of the epoch of a round that asks for no lease


class Round:
    """One question to all voters, and who has said what."""

    __slots__ = ("epoch", "idle_seconds", "no", "sent_at_seconds", "yes")

    def __init__(self, epoch: int, sent_at_seconds: float, node: str, idle_seconds: float) -> None:
        self.epoch = epoch
        self.sent_at_seconds = sent_at_seconds
        self.yes = {node}
        self.no: dict[str, Refusal] = {}
        self.idle_seconds = idle_seconds


class Candidate:
    """One node's way to the lease and with it.

    Attributes:
        epoch: The term of the lease that is held or asked for; 0 when neither.
        number: Of the latest request.
        campaign_at_seconds: A follower begins to campaign then.
        refusals: By voter, the last refusal.
    """

    def __init__(
        self, config: ElectorConfig, voter: Voter, draws: Iterator[float], booted_at_seconds: float
    ) -> None:
        self.config = config
        self.voter = voter
        self.role: Role = "follower"
        self.epoch = 0
        # An answer to a request of an earlier process must not pass for one to a request of this one: its lease would
        # be counted from too late. So the numbers start somewhere else each time.
        self.number = int(next(draws) * 2**31) << 32
        self.until_seconds = 0.0
        self.refusals: dict[str, Refusal] = {}
        self._draws = draws
        self._asking_epoch = 0
        self._highest = 0  # the highest epoch any voter has spoken of
        # Something may run, or may still have to be killed, under epochs up to this one: they are never given back.
        self._may_run = voter.state.epoch if voter.state is not None else 0
        self._rounds: dict[int, Round] = {}
        self._due_at_seconds = 0.0  # the next renewal, or when a candidate stops waiting
        self._attempts = 0
        self._jitter = next(draws)
        self.campaign_at_seconds = booted_at_seconds + self._jitter * config.spread_seconds
        self._chosen_until_seconds = booted_at_seconds
        self._deferred = False
        self._waits_for: set[str] = set()  # to whom promises stood in the way of the last attempt

    def resume(self, held: HeldLease, now_seconds: float) -> bool:
        """Goes on with the lease of the process before this one, so that a restarted daemon costs no failover.

        It is safe since the file says that this node got the epoch that the lease is for, and nobody a later one.
        """
        state = self.voter.state
        if state is None or now_seconds >= held.until_seconds:
            return False
        granted = (state.epoch, state.granted_to, state.granted_incarnation)
        if granted != (held.epoch, self.config.node, state.incarnation):
            return False
        self.role = "master"
        self.epoch = self._asking_epoch = held.epoch
        self.until_seconds = held.until_seconds
        self._due_at_seconds = now_seconds
        return True

    # -- time

    def next_wake_seconds(self) -> float:
        """When ``tick`` has something to do; a follower's campaign is the elector's business."""
        return (
            min(self.until_seconds, self._due_at_seconds) if self.role == "master" else self._due_at_seconds
        )

    def expire(self, now_seconds: float, effects: list[Effect]) -> None:
        """Comes before everything else: a process that was frozen finds mail that its lease has not lived to see."""
        if self.role != "master" or now_seconds < self.until_seconds:
            return
        effects.append(LeaseLost(self.epoch, self._why_lost(now_seconds)))
        self._may_run = max(self._may_run, self._asking_epoch)
        self.become_follower()
        self.voter.own_lease_ended(self.until_seconds)
        self._campaign_soon(now_seconds)

    def tick(self, now_seconds: float, effects: list[Effect]) -> None:
        """A master renews; a candidate that has waited long enough gives up."""
        if now_seconds < self._due_at_seconds:
            return
        if self.role == "master":
            self._ask_for_lease(now_seconds, effects)
            while len(self._rounds) > MOST_ROUNDS:
                del self._rounds[next(iter(self._rounds))]
            self._due_at_seconds = now_seconds + self.config.retry_seconds
        else:
            self._give_up(now_seconds, effects)

    # -- what others do

    def stand_back(self, *, new_term: bool) -> None:
        """This node's voter has granted a lease to somebody else."""
        if new_term:
            self.become_follower()
            self._jitter = next(self._draws)
            self._attempts = 0
            self._deferred = False
            self.refusals.clear()
        self.campaign_at_seconds = (
            self.voter.promise_until_seconds + self._jitter * self.config.spread_seconds
        )

    def let_pass(self, sender: str, now_seconds: float) -> None:
        """Somebody else probes: it may try first, but only once, or one that can never win would keep us waiting.

        Of two that probe at the same time the one whose name sorts first goes on: with the third voter gone both would
        otherwise get their own vote only.
        """
        if self._deferred or self.role not in {"follower", "probing"}:
            return
        if self.role == "probing":
            if sender > self.config.node:
                return
            self.become_follower()
        self._deferred = True
        first_seconds = now_seconds + 2 * self.config.round_seconds
        self.campaign_at_seconds = max(self.campaign_at_seconds, first_seconds)

    def vacancy(self, successor: str, now_seconds: float) -> None:
        """This node's voter has been given a promise back."""
        if self.role == "probing":
            self.become_follower()
        if self.role != "follower":
            return
        self._campaign_soon(now_seconds)
        if successor == self.config.node:
            self.campaign_at_seconds = now_seconds
            self._chosen_until_seconds = now_seconds + self.config.head_start_seconds
        elif successor:
            self.campaign_at_seconds += self.config.head_start_seconds

    def rival_gave_up(self, rival: str, now_seconds: float) -> None:
        """Another candidate gives its promises back: there is no point in waiting until they would have ended."""
        if self.role == "follower" and rival in self._waits_for:
            self._campaign_soon(now_seconds)

    # -- becoming the master

    def campaign(self, now_seconds: float, effects: list[Effect]) -> None:
        """Asks first whether asking has a point, so that a candidate without a chance costs nobody an epoch."""
        config, state = self.config, self.voter.state
        assert state is not None
        free_at_seconds = self.voter.free_at_seconds()
        if now_seconds < free_at_seconds:
            self.campaign_at_seconds = free_at_seconds + self._jitter * config.spread_seconds
            return
        self.role = "probing"
        self._highest = state.epoch
        self._start_round(PROBING, now_seconds, math.inf)
        self._send_all(
            Probe(
                config.cluster,
                config.digest,
                config.node,
                state.epoch + 1,
                self.number,
                state.incarnation,
                config.lease_seconds,
            ),
            effects,
        )

    def on_willing(self, answer: Willing, now_seconds: float, effects: list[Effect]) -> None:
        """With a majority that would say yes the real request follows at once."""
        asked = self._rounds.get(answer.number)
        if self.role != "probing" or asked is None or answer.sender not in self.config.others:
            return
        asked.yes.add(answer.sender)
        self._highest = max(self._highest, answer.epoch)
        if len(asked.yes) < self.config.quorum:
            return
        state = self.voter.state
        assert state is not None
        self.role = "requesting"
        self.epoch = self._asking_epoch = max(self._highest, state.epoch) + 1
        self._rounds.clear()
        self._ask_for_lease(now_seconds, effects)

    def _ask_for_lease(self, now_seconds: float, effects: list[Effect]) -> None:
        """A new term or a renewal. The node's own vote comes first, and is written down like any other."""
        config, state = self.config, self.voter.state
        assert state is not None
        request = Request(
            config.cluster,
            config.digest,
            config.node,
            self._asking_epoch,
            self.number + 1,
            state.incarnation,
            config.lease_seconds,
        )
        own, changed = self.voter.grant(request, now_seconds)
        if changed is not None:
            effects.append(Persist(changed))
        self._start_round(self._asking_epoch, now_seconds, own.idle_seconds)
        self._send_all(request, effects)

    def _start_round(self, epoch: int, now_seconds: float, idle_seconds: float) -> None:
        self.number += 1
        self._rounds[self.number] = Round(epoch, now_seconds, self.config.node, idle_seconds)
        patience = 1 + min(self._attempts, LONGEST_BACKOFF)
        self._due_at_seconds = now_seconds + self.config.round_seconds * patience

    def on_grant(self, grant: Grant, now_seconds: float, effects: list[Effect]) -> None:
        """Counts it for the request that it answers; a majority makes or keeps the master."""
        config = self.config
        asked = self._rounds.get(grant.number)
        if asked is None or asked.epoch != grant.epoch:
            if grant.epoch > self._may_run and grant.epoch not in {self.epoch, self._asking_epoch}:
                # Of an attempt that was given up: the voter need not keep a promise that nobody relies on.
                effects += self._release_to((grant.sender,), grant.epoch, "")
            return
        if grant.sender not in config.others:
            return
        self.refusals.pop(grant.sender, None)
        asked.yes.add(grant.sender)
        asked.idle_seconds = min(asked.idle_seconds, grant.idle_seconds)
        if len(asked.yes) != config.quorum:
            return
        until_seconds = asked.sent_at_seconds + config.lease_seconds
        if self.role == "master":
            self._renewed(grant.number, asked, until_seconds, effects)
        elif now_seconds < until_seconds:
            self._gained(asked, until_seconds, now_seconds, effects)

    def _gained(self, asked: Round, until_seconds: float, now_seconds: float, effects: list[Effect]) -> None:
        """A majority has promised, so every earlier lease has ended; its MetaService may live for the kill margin.

        The margin runs by the clock of the one that is killed, which may be slow while this one is fast. Some voter of
        this majority had promised its vote to the last holder too, and knows for how long that has been over.
        """
        config = self.config
        self.role = "master"
        self._attempts = 0
        self._may_run = self.epoch
        self.until_seconds = until_seconds
        self._due_at_seconds = asked.sent_at_seconds + config.renew_seconds
        wait_seconds = max(0.0, config.kill_margin_seconds * config.stretch - asked.idle_seconds)
        effects.append(LeaseGained(self.epoch, until_seconds, now_seconds + wait_seconds))

    def on_refusal(self, refusal: Refusal, now_seconds: float, effects: list[Effect]) -> None:
        """Remembers why; gives up when a majority is out of reach."""
        asked = self._rounds.get(refusal.number)
        if asked is None or refusal.sender not in self.config.others:
            return
        self.refusals[refusal.sender] = refusal
        self._highest = max(self._highest, refusal.epoch)
        asked.no[refusal.sender] = refusal
        if self.role != "master":
            if len(asked.no) > len(self.config.voters) - self.config.quorum:
                self._give_up(now_seconds, effects)
        elif refusal.reason == "stale-epoch" and refusal.epoch >= self._asking_epoch:
            # It took part in an attempt that came to nothing. Asking under a later epoch wins its vote back.
            self._asking_epoch = refusal.epoch + 1

    def _give_up(self, now_seconds: float, effects: list[Effect]) -> None:
        """No majority: gives back what was promised, and waits until one may say yes, a little longer each time."""
        config, epoch, role = self.config, self.epoch, self.role
        (asked,) = self._rounds.values()
        self.become_follower()
        if role == "requesting":
            self._release(epoch, "", now_seconds, effects)
        self._attempts += 1
        if now_seconds < self._chosen_until_seconds:
            # The target of a switchover: the others may just not have heard of it yet.
            self.campaign_at_seconds = now_seconds + next(self._draws) * config.spread_seconds / 4
            return
        self._waits_for = {refusal.holder for refusal in asked.no.values()}
        hints = sorted(refusal.remaining_seconds for refusal in asked.no.values())
        missing = config.quorum - len(asked.yes)
        wait_seconds = 0.0
        if 0 < missing <= len(hints):
            wait_seconds = min(max(0.0, hints[missing - 1]), config.promise_seconds)
        spread_seconds = config.spread_seconds * (1 + min(self._attempts, LONGEST_BACKOFF))
        self.campaign_at_seconds = now_seconds + wait_seconds + next(self._draws) * spread_seconds

    # -- being the master, and no longer

    def _renewed(self, number: int, asked: Round, until_seconds: float, effects: list[Effect]) -> None:
        """A majority promised anew, to the same node: a later epoch than before goes on without a gap."""
        for earlier in [n for n in self._rounds if n < number]:
            del self._rounds[earlier]
        self.until_seconds = max(self.until_seconds, until_seconds)
        if number == self.number:
            self._due_at_seconds = asked.sent_at_seconds + self.config.renew_seconds
        if asked.epoch > self.epoch:
            self.epoch = self._may_run = asked.epoch
            effects.append(EpochRaised(self.epoch, self.until_seconds))
        else:
            effects.append(LeaseRenewed(self.epoch, self.until_seconds))

    def resign(self, successor: str, now_seconds: float, effects: list[Effect]) -> None:
        """Gives the lease back; this node stays away until everybody else has had a chance."""
        epoch, asking_epoch = self.epoch, self._asking_epoch
        self.become_follower()
        effects.append(LeaseLost(epoch, f"handed over to {successor}" if successor else "given up"))
        for released in sorted({epoch, asking_epoch}):  # a voter may already have the later one
            self._release(released, successor, now_seconds, effects)
        self.campaign_at_seconds = now_seconds + self.config.head_start_seconds + self.config.lease_seconds

    def become_follower(self) -> None:
        """Whatever was asked before, answers to it no longer count."""
        self.role = "follower"
        self.epoch = self._asking_epoch = 0
        self._rounds.clear()

    def learned(self, epoch: int, now_seconds: float) -> None:
        """The voter without a memory has one again."""
        self._may_run = max(self._may_run, epoch)
        self._campaign_soon(now_seconds)

    def _campaign_soon(self, now_seconds: float) -> None:
        self._waits_for.clear()
        self.campaign_at_seconds = now_seconds + next(self._draws) * self.config.spread_seconds

    def _release(self, epoch: int, successor: str, now_seconds: float, effects: list[Effect]) -> None:
        sends = self._release_to(self.config.others, epoch, successor)
        for send in sends[:1]:
            assert isinstance(send.message, Release)
            self.voter.release(send.message, now_seconds)
        effects += sends

    def _release_to(self, voters: tuple[str, ...], epoch: int, successor: str) -> list[Send]:
        config, state = self.config, self.voter.state
        if state is None:
            return []
        release = Release(
            config.cluster, config.digest, config.node, epoch, self.number, state.incarnation, successor
        )
        return [Send(voter, release) for voter in voters]

    def _send_all(self, message: AnyMessage, effects: list[Effect]) -> None:
        effects += [Send(voter, message) for voter in self.config.others]

    def _why_lost(self, now_seconds: float) -> str:
        newest = self._rounds[max(self._rounds)] if self._rounds else None
        late_seconds = now_seconds - self.until_seconds
        if (
            newest is None
            or len(newest.yes) >= self.config.quorum
            or late_seconds > self.config.retry_seconds
        ):
            return f"kvtierd on this node was held up and came back {late_seconds:.1f} s after the end of the lease"
        parts = []
        for voter in self.config.others:
            if voter in newest.no:
                parts.append(f"{voter} refuses: {in_words(newest.no[voter])}")
            elif voter not in newest.yes:
                parts.append(f"{voter} does not answer")
        return f"no majority of the {len(self.config.voters)} voters renewed it: " + "; ".join(parts)
