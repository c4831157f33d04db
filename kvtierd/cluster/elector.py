"""PURE: one voter's part in electing the master. Values in, effects out; no I/O, no clock, no random numbers of its own.

The lease in short. A candidate asks every voter for a promise; with the promises of a majority it is the master for
one lease, counted from when it *sent* the request, and it renews well before the end (``candidate``). Voters promise
for longer than the lease, by what clocks may be apart (``voter``). A guard outside this process kills the MetaService
when the lease is not renewed, within the kill margin, and a new master starts its own only after that margin.

The driver calls ``step`` with every message, ``tick`` when ``next_wake_seconds`` has come, and carries out the effects
in order before it calls again. All times are seconds of ``CLOCK_BOOTTIME``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from kvtierd.cluster.candidate import Candidate
from kvtierd.cluster.election_config import ElectorConfig
from kvtierd.cluster.election_messages import (
    AnyMessage,
    Effect,
    EpochAnswer,
    EpochQuery,
    EpochState,
    Grant,
    HeldLease,
    LeaseLost,
    Persist,
    Probe,
    Refusal,
    Release,
    Request,
    Send,
    Willing,
)
from kvtierd.cluster.election_view import ElectorView, in_words
from kvtierd.cluster.recollection import Recollection
from kvtierd.cluster.voter import Voter
from kvtierd.errors import ClusterError

QUERY_SECONDS = 1.0  # a voter without a memory asks the others this often


class Elector:
    """One voter of a cluster; it may become the master if it is fit."""

    def __init__(
        self,
        config: ElectorConfig,
        persisted: EpochState | None,
        *,
        booted_at_seconds: float,
        draws: Iterator[float],
        held: HeldLease | None = None,
    ) -> None:
        """A voter that starts.

        Args:
            config: The same on every voter but for ``node`` and the lease.
            persisted: What the epoch file holds; ``None`` when there is none. A damaged file is no reason for ``None``.
            booted_at_seconds: Now. What the process before this one promised is not known.
            draws: Endless numbers from 0 to 1 (1 excluded) that differ from process to process.
            held: The lease that the guard of this boot still enforces for a MetaService of this node that runs on.
        """
        self.config = config
        self.voter = Voter(config, persisted, booted_at_seconds)
        self.candidate = Candidate(config, self.voter, draws, booted_at_seconds)
        self._draws = draws
        self._fit = True
        self._why_unfit = ""
        self._recollection = Recollection(config)
        self._booted_at_seconds = booted_at_seconds
        self._first_number = self.candidate.number
        self._query_at_seconds = booted_at_seconds
        if persisted is None:  # what was under way before this moment must have ended before it asks
            self._query_at_seconds = self.voter.promise_until_seconds
        self._first_effects: list[Effect] = []
        if held is not None and not self.candidate.resume(held, booted_at_seconds):
            why = (
                "the restarted kvtierd cannot go on with it: it has run out, or the epoch file says otherwise"
            )
            self._first_effects.append(LeaseLost(held.epoch, why))

    # -- what the driver calls

    def next_wake_seconds(self) -> float:
        """When ``tick`` has something to do, if no message comes before; infinity for never."""
        if self._first_effects:
            return -math.inf
        if self.candidate.role != "follower":
            return self.candidate.next_wake_seconds()
        if self._must_ask():
            return self._query_at_seconds
        return self.candidate.campaign_at_seconds if self._fit else math.inf

    def tick(self, now_seconds: float) -> list[Effect]:
        """Does what is due."""
        effects = self._begin(now_seconds)
        if self.candidate.role != "follower":
            self.candidate.tick(now_seconds, effects)
        elif self._must_ask():
            self._ask_for_epoch(now_seconds, effects)
        elif self._fit and now_seconds >= self.candidate.campaign_at_seconds:
            self.candidate.campaign(now_seconds, effects)
        return effects

    def step(self, message: AnyMessage, now_seconds: float) -> list[Effect]:
        """Takes a message into account, which may be late, doubled or not meant for this cluster at all."""
        effects = self._begin(now_seconds)
        config = self.config
        if message.sender == config.node:
            pass
        elif message.digest != config.digest or message.cluster != config.cluster:
            self._mismatch(message, effects)
        elif isinstance(message, Request):
            self._on_request(message, now_seconds, effects)
        elif isinstance(message, Grant):
            self.candidate.on_grant(message, now_seconds, effects)
        elif isinstance(message, Probe):
            self._on_probe(message, now_seconds, effects)
        elif isinstance(message, Willing):
            self.candidate.on_willing(message, now_seconds, effects)
        elif isinstance(message, Refusal):
            self.candidate.on_refusal(message, now_seconds, effects)
        elif isinstance(message, Release):
            if self.voter.release(message, now_seconds):
                self.candidate.vacancy(message.successor, now_seconds)
            else:
                self.candidate.rival_gave_up(message.sender, now_seconds)
        elif isinstance(message, EpochQuery):
            effects.append(Send(message.sender, self.voter.remembered(message)))
        else:
            self._on_epoch_answer(message, now_seconds, effects)
        return effects

    def resign(self, now_seconds: float, to: str | None = None) -> list[Effect]:
        """Gives the lease up for a planned switchover, to ``to`` if it is named.

        Call it when the MetaService *has been stopped*; until then keep renewing. The voters are told that nothing
        runs any more, so the next master does not wait for a guard.

        Raises:
            ClusterError: ``cluster.not-master``, ``cluster.switchover-target``; nothing was given up.
        """
        config = self.config
        if self.candidate.role != "master" or now_seconds >= self.candidate.until_seconds:
            raise ClusterError(
                f"{config.node} is not the master, so it has nothing to hand over", code="cluster.not-master"
            )
        if to is not None and to not in config.others:
            raise ClusterError(
                f"{to} cannot become the master",
                why="it is not another voter",
                hint=f"choose one of {', '.join(config.others)}",
                code="cluster.switchover-target",
            )
        effects = self._begin(now_seconds)
        self.candidate.resign(to or "", now_seconds, effects)
        return effects

    def set_fit(self, fit: bool, why: str = "") -> None:
        """A node that is not fit votes but never campaigns: a witness, a paused cluster. A lease it holds it keeps."""
        self._fit, self._why_unfit = fit, why

    def view(self, now_seconds: float) -> ElectorView:
        """For ``status``."""
        candidate, state = self.candidate, self.voter.state
        if candidate.role == "master" and now_seconds < candidate.until_seconds:
            epoch, master = candidate.epoch, self.config.node
            remaining_seconds = candidate.until_seconds - now_seconds
        else:
            epoch = state.epoch if state is not None else 0
            master, remaining_seconds = self.voter.master(now_seconds)
            if master == self.config.node:  # its own vote does not make it the master
                master, remaining_seconds = "", 0.0
        words = {voter: in_words(refusal) for voter, refusal in candidate.refusals.items()}
        return ElectorView(
            candidate.role, epoch, master, remaining_seconds, self._why_not(now_seconds), words
        )

    # -- inside

    def _begin(self, now_seconds: float) -> list[Effect]:
        effects: list[Effect] = []
        if self._first_effects:
            effects, self._first_effects = self._first_effects, effects
        self.candidate.expire(now_seconds, effects)
        return effects

    def _on_request(self, request: Request, now_seconds: float, effects: list[Effect]) -> None:
        refusal = self.voter.refusal(request, now_seconds)
        if refusal is not None:
            effects.append(Send(request.sender, refusal))
            return
        grant, changed = self.voter.grant(request, now_seconds)
        if changed is not None:
            # On disk first: a voter that forgets what it answered could give the same epoch to two nodes.
            effects.append(Persist(changed))
        effects.append(Send(request.sender, grant))
        self.candidate.stand_back(new_term=changed is not None)

    def _on_probe(self, probe: Probe, now_seconds: float, effects: list[Effect]) -> None:
        refusal = self.voter.refusal(probe, now_seconds)
        if refusal is not None:
            effects.append(Send(probe.sender, refusal))
            return
        effects.append(Send(probe.sender, self.voter.willing(probe)))
        self.candidate.let_pass(probe.sender, now_seconds)

    def _mismatch(self, message: AnyMessage, effects: list[Effect]) -> None:
        """A voter with other settings may count other voters: its votes do not count here, nor ours there."""
        config = self.config
        reason: Literal["cluster-differs", "digest-differs"] = (
            "digest-differs" if message.cluster == config.cluster else "cluster-differs"
        )
        if isinstance(message, Probe | Request | EpochQuery):
            refusal = Refusal(config.cluster, config.digest, config.node, 0, message.number, reason)
            effects.append(Send(message.sender, refusal))
        elif message.sender in config.others:
            refusal = Refusal(config.cluster, config.digest, message.sender, 0, message.number, reason)
            self.candidate.refusals[message.sender] = refusal

    # -- without a memory

    def _must_ask(self) -> bool:
        """The file is missing; or nothing was ever granted, and then all voters must have their files first."""
        state = self.voter.state
        return state is None or (state.epoch == 0 and not self._recollection.everybody_has_a_file())

    def _ask_for_epoch(self, now_seconds: float, effects: list[Effect]) -> None:
        if now_seconds < self._query_at_seconds:
            return
        config = self.config
        self._query_at_seconds = now_seconds + QUERY_SECONDS
        self.candidate.number += 1
        query = EpochQuery(config.cluster, config.digest, config.node, 0, self.candidate.number)
        effects += [Send(voter, query) for voter in config.others]

    def _on_epoch_answer(self, answer: EpochAnswer, now_seconds: float, effects: list[Effect]) -> None:
        # Only this process's questions count: those of an earlier one were asked before the silence.
        if not self._first_number < answer.number <= self.candidate.number:
            return
        self._recollection.note(answer)
        if self.voter.state is not None:
            return
        silent_until_seconds = self._booted_at_seconds + self._recollection.promise_seconds
        if now_seconds < silent_until_seconds:  # the lease was longer once: the silence must be too
            self._recollection.forget()
            self._first_number = self.candidate.number
            self._query_at_seconds = self.voter.promise_until_seconds = silent_until_seconds
            return
        epoch = self._recollection.epoch()
        if epoch is None:
            return
        effects.append(Persist(self.voter.learn(epoch, int(next(self._draws) * 2**53), now_seconds)))
        self.candidate.learned(epoch, now_seconds)

    def _why_not(self, now_seconds: float) -> str:
        if self.candidate.role == "master":
            return ""
        state = self.voter.state
        missing = ", ".join(self._recollection.waits_for())
        if state is None and now_seconds < self.voter.promise_until_seconds:
            return "the epoch file is missing: silent after the start, then it asks the other voters"
        if state is None:
            return (
                f"the epoch file is missing: waiting to learn the epoch; no answer that helps from {missing}"
            )
        if self._must_ask():
            return (
                f"a new cluster elects its first master when all voters have been up; not yet seen: {missing}"
            )
        return self._why_unfit if not self._fit else ""
