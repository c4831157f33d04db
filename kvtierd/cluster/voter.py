"""PURE: the voter's side of the election: whom it promises what, and what it refuses.

A promise to one node is: "until then I grant a lease to nobody else". A master needs promises of a majority, two
majorities have a voter in common, and that voter gives the second promise only when the first has ended. All that
makes the election safe on the voters' side is in this module; the candidate's side is in ``elector``.
"""

from __future__ import annotations

import dataclasses

from kvtierd.cluster.election_config import LONGEST_LEASE_SECONDS, ElectorConfig
from kvtierd.cluster.election_messages import (
    EpochAnswer,
    EpochQuery,
    EpochState,
    Grant,
    Probe,
    Reason,
    Refusal,
    Release,
    Request,
    Willing,
)


class Voter:
    """One voter's promises.

    The promise is always to ``state.granted_to``: a later one replaces it only when it has ended.

    Attributes:
        state: What is (about to be) in the epoch file; ``None`` while the file is missing and not made up for.
        promise_until_seconds: Until then nobody but ``state.granted_to`` is granted anything.
        idle_since_seconds: By this voter's promises nobody can have held a lease between then and the present term.
    """

    def __init__(self, config: ElectorConfig, state: EpochState | None, booted_at_seconds: float) -> None:
        self.config = config
        self.state = state
        # What it promised before it started is forgotten, but all promises before the one in the file had ended when
        # that one was given, and that one was given before now. So it acts as if it had given it just now: towards
        # everybody but its holder it is silent for one promise.
        longest = max(config.promise_seconds, state.promise_seconds if state else 0.0)
        self.promise_until_seconds = booted_at_seconds + longest
        self.idle_since_seconds = booted_at_seconds
        self.released = False
        self.reserved_for = ""
        self.reserved_until_seconds = booted_at_seconds
        self._assumed = True  # the promise is, see above

    # -- questions

    def refusal(self, message: Probe | Request, now_seconds: float) -> Refusal | None:
        """Why this cannot be granted, or ``None`` when it can. The caller has compared cluster and digest."""
        state, sender = self.state, message.sender
        if state is None:
            return self._refuse(
                message, "no-memory", remaining=max(0.0, self.promise_until_seconds - now_seconds)
            )
        if sender not in self.config.voters:
            return self._refuse(message, "not-a-voter")
        if not 0.0 < message.lease_seconds <= LONGEST_LEASE_SECONDS:
            return self._refuse(message, "lease")
        is_holder = sender == state.granted_to and message.incarnation == state.granted_incarnation
        if now_seconds < self.promise_until_seconds and not is_holder:
            reason: Reason = "silent-after-boot" if self._assumed else "promised"
            return self._refuse(message, reason, state.granted_to, self.promise_until_seconds - now_seconds)
        if now_seconds < self.reserved_until_seconds and sender != self.reserved_for:
            return self._refuse(
                message, "reserved", self.reserved_for, self.reserved_until_seconds - now_seconds
            )
        if type(message) is Request and (
            message.epoch < state.epoch
            # One epoch goes to one node, and one that was given back is over: a request for it comes late.
            or (message.epoch == state.epoch and (self.released or not is_holder))
        ):
            return self._refuse(message, "stale-epoch", state.granted_to)
        return None

    def free_at_seconds(self) -> float:
        """From when on this node's own candidacy is not refused by its own voter.

        A promise to itself does not bind it, except one from before it started: a lease of that time may still be in
        use, and an attempt that is given back must never cut short what protects an earlier lease.
        """
        state, node = self.state, self.config.node
        own = state is not None and (state.granted_to, state.granted_incarnation) == (node, state.incarnation)
        free = 0.0 if own and not self._assumed else self.promise_until_seconds
        return free if self.reserved_for == node else max(free, self.reserved_until_seconds)

    def master(self, now_seconds: float) -> tuple[str, float]:
        """To whom a promise is known to be running, and for how long; ("", 0) when there is none."""
        remaining = self.promise_until_seconds - now_seconds
        if self.state is None or remaining <= 0 or (self._assumed and not self.state.granted_to):
            return "", 0.0
        return self.state.granted_to, remaining

    # -- answers

    def grant(self, request: Request, now_seconds: float) -> tuple[Grant, EpochState | None]:
        """Promises; ``refusal`` was ``None``. The state, when there is one, must be on disk before the answer leaves."""
        state, config = self.state, self.config
        assert state is not None
        # The master counts its lease from before this moment, and its clock may be slow while this one is fast.
        promise_seconds = request.lease_seconds * config.stretch
        changed: EpochState | None = None
        if request.epoch != state.epoch:
            if not self.released:
                self.idle_since_seconds = self.promise_until_seconds
            changed = EpochState(
                request.epoch, request.sender, request.incarnation, promise_seconds, state.incarnation
            )
            self.released = False
        elif promise_seconds > state.promise_seconds:
            changed = dataclasses.replace(state, promise_seconds=promise_seconds)
        if changed is not None:
            self.state = changed
        self.promise_until_seconds = max(self.promise_until_seconds, now_seconds + promise_seconds)
        self.reserved_until_seconds = now_seconds
        self._assumed = False
        idle_seconds = max(0.0, now_seconds - self.idle_since_seconds)
        return (
            Grant(config.cluster, config.digest, config.node, request.epoch, request.number, idle_seconds),
            changed,
        )

    def willing(self, probe: Probe) -> Willing:
        """The answer to a probe that is not refused."""
        assert self.state is not None
        config = self.config
        return Willing(config.cluster, config.digest, config.node, self.state.epoch, probe.number)

    def remembered(self, query: EpochQuery) -> EpochAnswer:
        """The answer to a voter without a memory; given at any time, a silent voter knows its epoch too."""
        config, state = self.config, self.state
        remembers, known = state is not None, state or EpochState()
        return EpochAnswer(
            config.cluster,
            config.digest,
            config.node,
            known.epoch,
            query.number,
            remembers,
            known.promise_seconds,
        )

    # -- ends

    def release(self, message: Release, now_seconds: float) -> bool:
        """Ends the promise that the sender gives back. False: it is about another epoch, or another incarnation.

        Since the sender says that nothing runs under this epoch, the time without a lease still counts from before it.
        """
        state = self.state
        if (
            state is None
            or self.released
            or message.epoch != state.epoch
            or message.sender != state.granted_to
            or message.incarnation != state.granted_incarnation
        ):
            return False
        self.released = True
        self._assumed = False
        self.promise_until_seconds = now_seconds
        self.reserved_for = message.successor
        self.reserved_until_seconds = now_seconds + (
            self.config.head_start_seconds if message.successor else 0.0
        )
        return True

    def own_lease_ended(self, ended_at_seconds: float) -> None:
        """This node held the lease and it has run out: the promise to itself has no purpose any more.

        It counts as kept until the end of the lease, so that whoever comes next waits for the guard.
        """
        self.promise_until_seconds = ended_at_seconds

    def learn(self, epoch: int, incarnation: int, now_seconds: float) -> EpochState:
        """Takes up the epoch that makes up for a missing file. Its old promises have ended: it was silent until now."""
        self.state = EpochState(epoch, "", 0, self.config.promise_seconds, incarnation)
        self.promise_until_seconds = self.idle_since_seconds = now_seconds
        self._assumed = False
        return self.state

    def _refuse(
        self, message: Probe | Request, reason: Reason, holder: str = "", remaining: float = 0.0
    ) -> Refusal:
        config = self.config
        epoch = self.state.epoch if self.state is not None else 0
        return Refusal(
            config.cluster, config.digest, config.node, epoch, message.number, reason, holder, remaining
        )
