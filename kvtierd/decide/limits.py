"""PURE: what was done lately and what may be done now: cool-downs, budgets, one thing at a time.

Kept over a restart of the daemon. Times are of the pictures' clock; after a boot that clock begins anew, and everything
that was remembered then counts as done just now: rather too late than too often.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set
from typing import Any

from kvtierd.decide.policy import Policy
from kvtierd.decide.proposals import (
    EVERYTHING,
    POOL,
    AttachL3,
    DetachL3,
    Proposal,
    RestartUnit,
    opposite_of,
    proposal_from_json,
    proposal_to_json,
)
from kvtierd.errors import StateError
from kvtierd.quantities import format_duration

HOUR_SECONDS = 3600.0
MOST_DOUBLINGS = 3
HASTE = {"host-short": 0.2}
"""Rules that may come again sooner, as a share of the cool-down: a host that is short of memory cannot wait."""


@dataclasses.dataclass(frozen=True, slots=True)
class Circumstances:
    """What the picture does not say.

    Attributes:
        paused: An operator said so: nothing is done, only advice is given.
        no_master: The cluster has none, whatever the picture believes.
        busy_groups: Groups in which another node does something disruptive.
        under_way: Numbers of the proposals that are being carried out for certain, however long they take.
    """

    paused: bool = False
    no_master: bool = False
    busy_groups: Set[str] = frozenset()
    under_way: Set[int] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """An action that was begun."""

    at_seconds: float
    rule: str
    target: str
    disruptive: bool
    direction: str


@dataclasses.dataclass(frozen=True, slots=True)
class Flight:
    """An action that has not ended as far as we know."""

    at_seconds: float
    proposal: Proposal


@dataclasses.dataclass(frozen=True, slots=True)
class Advised:
    """Advice that was given. ``over``: what it was about has passed since."""

    at_seconds: float
    over: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Blocked:
    """Why not now; ``until_seconds``: when it may be asked again, ``None`` when no clock says."""

    why: str
    until_seconds: float | None = None


class Limits:
    """Ask with ``why_not``; tell with ``begun``, ``ended``, ``advised``."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.done: list[Done] = []
        self.flights: dict[int, Flight] = {}
        self.failures: dict[tuple[str, str], int] = {}  # (rule, target) -> failed in a row
        self.advice: dict[tuple[str, str], Advised] = {}  # a finding's name -> when
        self.next_id = 1
        self.quiet_until_seconds = 0.0  # nothing before: what was done before is not known

    # -- what happened

    def begun(self, proposal: Proposal, now: float) -> None:
        """It is on its way now; in a dry run it has ended too."""
        self.done.append(Done(now, proposal.rule, proposal.target, proposal.disruptive, proposal.direction))
        if not proposal.dry_run:
            self.flights[proposal.id] = Flight(now, proposal)

    def ended(self, proposal_id: int, *, ok: bool) -> Proposal | None:
        """What ended, or ``None`` when it is not known to have been on its way."""
        flight = self.flights.pop(proposal_id, None)
        if flight is None:
            return None
        name = (flight.proposal.rule, flight.proposal.target)
        if ok:
            self.failures.pop(name, None)
        else:
            self.failures[name] = self.failures.get(name, 0) + 1
        return flight.proposal

    def overdue(self, now: float) -> list[Proposal]:
        """Actions of which nothing was heard within the deadline."""
        late = self._policy.deadline_seconds
        return [f.proposal for f in self.flights.values() if now - f.at_seconds >= late]

    def prune(self, now: float) -> None:
        """Forgets what limits nothing any more."""
        policy = self._policy
        longest = max(
            HOUR_SECONDS,
            policy.reversal_seconds,
            policy.settle_seconds,
            policy.cooldown_seconds * 2 ** (MOST_DOUBLINGS + 1),
        )
        self.done = [d for d in self.done if now - d.at_seconds < longest]
        live = {(d.rule, d.target) for d in self.done}
        self.failures = {name: n for name, n in self.failures.items() if name in live}
        keep = max(policy.advise_every_seconds, policy.cooldown_seconds)
        self.advice = {name: a for name, a in self.advice.items() if now - a.at_seconds < keep}

    # -- what may be done

    def why_no_advice(self, name: tuple[str, str], now: float) -> Blocked | None:
        """Advice is repeated seldom while it holds, and sooner when it was over in between."""
        given = self.advice.get(name)
        if given is None:
            return None
        wait = self._policy.cooldown_seconds if given.over else self._policy.advise_every_seconds
        until = given.at_seconds + wait
        if now >= until:
            return None
        return Blocked(f"said {format_duration(now - given.at_seconds)} ago", until)

    def why_not(self, proposal: Proposal, now: float, around: Circumstances, master: str) -> Blocked | None:
        """Why this is not done now; ``None`` when it may be."""
        if around.paused:
            return Blocked("paused by the operator")
        if now < self.quiet_until_seconds:
            return Blocked("what was done before is not known", self.quiet_until_seconds)
        # To take L3 away from an engine of this node needs nobody's pool.
        if (around.no_master or not master) and not isinstance(proposal.action, DetachL3):
            return Blocked("the cluster has no master")
        return (
            self._beside(proposal, around)
            or self._too_soon(proposal, now)
            or self._over_budget(proposal, now)
        )

    def _beside(self, proposal: Proposal, around: Circumstances) -> Blocked | None:
        for flight in self.flights.values():
            other = flight.proposal
            until = flight.at_seconds + self._policy.deadline_seconds
            if other.target == proposal.target:
                return Blocked(f"{other.action.text} is not done yet", until)
            if other.disruptive and proposal.disruptive and _meet(other.group, proposal.group):
                return Blocked(f"{other.action.text} is not done yet, and both disturb", until)
        if proposal.disruptive:
            for group in sorted(around.busy_groups):
                if _meet(group, proposal.group):
                    return Blocked(f"another node does something disruptive in {group}")
        return None

    def _too_soon(self, proposal: Proposal, now: float) -> Blocked | None:
        policy = self._policy
        failures = self.failures.get((proposal.rule, proposal.target), 0)
        if isinstance(proposal.action, RestartUnit):
            # A restart that has to be repeated did not help; it is not the same thing as a second holder.
            before = [d for d in self.done if (d.rule, d.target) == (proposal.rule, proposal.target)]
            failures = max(failures, len(before))
        cooldown = (
            policy.cooldown_seconds * HASTE.get(proposal.rule, 1.0) * 2 ** min(failures, MOST_DOUBLINGS)
        )
        waits: list[tuple[float, str]] = []
        for done in self.done:
            if done.target != proposal.target:
                continue
            if done.rule == proposal.rule:
                told = f" after {failures} that did not help" if failures else ""
                waits.append((done.at_seconds + cooldown, f"cool-down{told}"))
            if not proposal.urgent:
                waits.append((done.at_seconds + policy.settle_seconds, f"{done.rule} acted on it lately"))
                if done.direction and done.direction == opposite_of(proposal.direction):
                    waits.append(
                        (done.at_seconds + policy.reversal_seconds, f"it would take {done.rule} back")
                    )
        until, why = max(waits, default=(now, ""))
        return Blocked(f"{why}: {format_duration(until - now)} more", until) if until > now else None

    def _over_budget(self, proposal: Proposal, now: float) -> Blocked | None:
        policy = self._policy
        hour = [d for d in self.done if now - d.at_seconds < HOUR_SECONDS]
        budgets = [(hour, policy.actions_per_hour, "actions")]
        if proposal.disruptive:
            budgets.append(
                ([d for d in hour if d.disruptive], policy.disruptive_per_hour, "disruptive actions")
            )
        if proposal.target != POOL:
            of_engine = [d for d in hour if d.target == proposal.target]
            budgets.append((of_engine, policy.engine_actions_per_hour, f"actions on {proposal.target}"))
        # L3 comes back only when the budget allows to take it away again.
        spare = 1 if isinstance(proposal.action, AttachL3) else 0
        for spent, of, what in budgets:
            most = max(0, of - spare)
            if len(spent) >= most:
                until = (
                    sorted(d.at_seconds for d in spent)[len(spent) - most] + HOUR_SECONDS if most else None
                )
                return Blocked(f"budget: {len(spent)} of {of} {what} within the hour", until)
        return None

    # -- over a restart

    def remember(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "done": [dataclasses.asdict(d) for d in self.done],
            "flights": [[f.at_seconds, proposal_to_json(f.proposal)] for f in self.flights.values()],
            "failures": [[*name, n] for name, n in self.failures.items()],
            "advice": [[*name, a.at_seconds, a.over] for name, a in self.advice.items()],
            "next_id": self.next_id,
            "quiet_until_seconds": self.quiet_until_seconds,
        }

    def recall(self, kept: Mapping[str, Any]) -> None:
        """What ``remember`` gave.

        Raises:
            StateError: ``state.decisions-damaged``.
        """
        try:
            self.done = [Done(**d) for d in kept["done"]]
            self.flights = {
                proposal.id: Flight(float(at), proposal)
                for at, proposal in ((at, proposal_from_json(p)) for at, p in kept["flights"])
            }
            self.failures = {(rule, target): int(n) for rule, target, n in kept["failures"]}
            self.advice = {
                (rule, key): Advised(float(at), bool(over)) for rule, key, at, over in kept["advice"]
            }
            self.next_id = int(kept["next_id"])
            self.quiet_until_seconds = float(kept["quiet_until_seconds"])
        except (KeyError, TypeError, ValueError, StateError) as error:
            raise StateError(
                "what was decided before cannot be read",
                why=repr(error),
                hint="nothing to do: kvtierd waits for one cool-down and goes on",
                code="state.decisions-damaged",
            ) from error

    def not_after(self, now: float, *, all_of_it: bool = False) -> None:
        """What is remembered from another boot, or from a clock that went back, happened now."""

        def moved(at: float) -> float:
            return now if all_of_it or at > now else at

        if all_of_it or self.quiet_until_seconds > now + self._policy.cooldown_seconds:
            self.quiet_until_seconds = 0.0
        self.done = [dataclasses.replace(d, at_seconds=moved(d.at_seconds)) for d in self.done]
        self.flights = {
            i: dataclasses.replace(f, at_seconds=moved(f.at_seconds)) for i, f in self.flights.items()
        }
        self.advice = {
            n: dataclasses.replace(a, at_seconds=moved(a.at_seconds)) for n, a in self.advice.items()
        }


def _meet(one: str, other: str) -> bool:
    return one == other or EVERYTHING in {one, other}
