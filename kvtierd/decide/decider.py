"""PURE: the decider: pictures in, proposals out. No I/O, no clock: the picture's time is the time.

In every step each rule says what it finds. A finding leads to its proposal when it has held long enough (it ends at
another level than it began at), and when the limits allow it: cool-downs, budgets, one thing at a time on a target, one
disturbance at a time in a group. What was proposed counts as under way until ``outcome`` tells how it ended or the
deadline has passed. For everything that does not fire there is a sentence that says why: ``explain``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from kvtierd.decide.finding import HOUR_SECONDS, Detached, Finding, Memory, State, hit_rate, pool_of
from kvtierd.decide.limits import Advised, Blocked, Circumstances, Limits
from kvtierd.decide.policy import RULES, Policy
from kvtierd.decide.proposals import (
    AddHolder,
    AttachL3,
    DetachL3,
    Proposal,
    Rebalance,
    RemoveHolder,
    RestartUnit,
    SetThresholds,
    proposal_from_json,
    proposal_to_json,
)
from kvtierd.decide.rules import REGISTRY
from kvtierd.errors import StateError
from kvtierd.observe.picture import Picture
from kvtierd.quantities import format_duration

VERSION = 1
FUTILE_IN_A_ROW = 2
FORGET_DETACHED_SECONDS = 86400.0
FORGET_REFUSED_SECONDS = 86400.0
FILL_MARGIN = 1.25
_TRIAL_PATIENCE = 4  # so many times the wait, then a growth that cannot be measured is not judged


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """Why a rule acts or does not, now.

    Attributes:
        rule: Which.
        key: About what.
        state: Of its condition; "off" when the policy says so.
        text: What it sees.
        verdict: What follows from it: "fires", or why not.
        next_seconds: The earliest that it could fire if all stays as it is; ``None``: no clock says.
        proposal: What it would do.
    """

    rule: str
    key: str
    state: State | str
    text: str
    verdict: str
    next_seconds: float | None = None
    proposal: Proposal | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """A decision and what came of it: ``under way``, ``done``, ``failed``, ``said``, ``dry run``."""

    at_seconds: float
    proposal: Proposal
    outcome: str
    text: str = ""


@dataclasses.dataclass(slots=True)
class _Trial:
    """A growth whose use is not known yet."""

    at_seconds: float
    hit_rate_before: float
    wait_seconds: float


class Decider:
    """Feed it with ``step``; carry out what it returns; tell it with ``outcome`` how that ended."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.limits = Limits(policy)
        self.last: Decision | None = None
        self._now = -math.inf
        self._since: dict[tuple[str, str], float] = {}  # a finding's name -> since when it has held
        self._detached: dict[str, Detached] = {}
        self._trial: _Trial | None = None
        self._futile_in_a_row = 0
        self._futile_until_seconds = 0.0
        self._refused: tuple[int, float] | None = None  # the evict_high at which values failed, and when
        self._short: dict[str, float] = {}  # node -> when it was relieved of a holder
        self._explained: tuple[Explanation, ...] = ()

    # -- in

    def step(self, picture: Picture, around: Circumstances | None = None) -> tuple[Proposal, ...]:
        """What is to be done now, advice included; the most urgent first."""
        around = around or Circumstances()
        now = picture.now_seconds
        if not math.isfinite(now):
            self._since.clear()
            return ()
        self._take_time(now)
        for late in self.limits.overdue(now):
            if late.id in around.under_way:
                continue  # to begin something else beside it would be worse than to wait
            waited = format_duration(self.policy.deadline_seconds)
            self.outcome(late.id, ok=False, text=f"no word of it within {waited}", now_seconds=now)
        self._judge_growth(picture)
        self._forget(now)
        fired: list[Proposal] = []
        told: list[Explanation] = []
        seen: set[tuple[str, str]] = set()
        trial = self._trial
        memory = Memory(
            detached=dict(self._detached),
            futile_until_seconds=self._futile_until_seconds,
            refused_high_percent=self._refused[0] if self._refused else None,
            trial_until_seconds=None if trial is None else trial.at_seconds + trial.wait_seconds,
            short_nodes=frozenset(self._short),
        )
        for rule in RULES:
            if rule in self.policy.off:
                told.append(Explanation(rule, "", "off", "switched off by [policy] off", "off"))
                continue
            for finding in REGISTRY[rule](picture, self.policy, memory):
                seen.add(finding.name)
                explanation = self._weigh(finding, picture, around)
                told.append(explanation)
                if explanation.verdict == "fires" and explanation.proposal is not None:
                    fired.append(self._fire(finding, explanation.proposal, now))
        self._since = {name: at for name, at in self._since.items() if name in seen}
        self._explained = tuple(told)
        return tuple(fired)

    def outcome(self, proposal_id: int, *, ok: bool, text: str, now_seconds: float) -> None:
        """How an action ended, ``ok`` meaning: done and verified. One that is not known any more changes nothing."""
        proposal = self.limits.ended(proposal_id, ok=ok)
        if proposal is None:
            return
        if self.last is not None and self.last.proposal.id == proposal_id:
            self.last = dataclasses.replace(self.last, outcome="done" if ok else "failed", text=text)
        if not ok:
            return
        action = proposal.action
        if isinstance(action, DetachL3):
            before = self._detached.get(action.engine)
            self._detached[action.engine] = Detached(now_seconds, (before.times if before else 0) + 1)
        elif isinstance(action, AttachL3) and action.engine in self._detached:
            kept = self._detached[action.engine]
            self._detached[action.engine] = Detached(now_seconds, kept.times, attached=True)
        elif isinstance(action, SetThresholds) and proposal.direction == "lower":
            self._refused = (int(proposal.numbers["high_percent"]), now_seconds)
        elif isinstance(action, AddHolder) and (rate := proposal.numbers.get("hit_rate")) is not None:
            self._trial = _Trial(now_seconds, float(rate), self._time_to_show(proposal, action))
        elif isinstance(action, RemoveHolder | Rebalance) and proposal.rule == "host-short":
            removed = action.remove if isinstance(action, Rebalance) else action
            self._short[removed.node] = now_seconds

    # -- out

    def explain(self) -> tuple[Explanation, ...]:
        """As of the last step, the most urgent rule first."""
        return self._explained

    def next_possible(self) -> Explanation | None:
        """What could be done next, and when, if all stays as it is; what has just been decided is the last, not the next."""
        waiting = [
            e
            for e in self._explained
            if e.next_seconds is not None and e.state == "holds" and e.verdict != "fires"
        ]
        return min(waiting, key=lambda e: e.next_seconds or 0.0, default=None)

    # -- inside

    def _take_time(self, now: float) -> None:
        if now < self._now:
            # Another clock: nothing that was counted by the old one counts.
            self._since.clear()
            self._not_after(now)
        elif now - self._now > self.policy.stale_seconds:
            self._since.clear()  # nobody looked: what held before may have been over in between
        self._now = now

    def _not_after(self, now: float, *, all_of_it: bool = False) -> None:
        self.limits.not_after(now, all_of_it=all_of_it)
        for unit, kept in self._detached.items():
            if all_of_it or kept.at_seconds > now:
                self._detached[unit] = dataclasses.replace(kept, at_seconds=now)
        if self._trial is not None and (all_of_it or self._trial.at_seconds > now):
            self._trial = None
        self._short = {n: now if all_of_it or at > now else at for n, at in self._short.items()}
        if self._refused is not None and (all_of_it or self._refused[1] > now):
            self._refused = (self._refused[0], now)
        self._futile_until_seconds = (
            min(self._futile_until_seconds, now + self.policy.futile_seconds)
            if not all_of_it
            else (now + self.policy.futile_seconds if self._futile_until_seconds else 0.0)
        )

    def _forget(self, now: float) -> None:
        self.limits.prune(now)
        if self._refused is not None and now - self._refused[1] >= FORGET_REFUSED_SECONDS:
            self._refused = None
        self._short = {node: at for node, at in self._short.items() if now - at < self.policy.futile_seconds}
        self._detached = {
            unit: kept
            for unit, kept in self._detached.items()
            if not kept.attached or now - kept.at_seconds < FORGET_DETACHED_SECONDS
        }

    def _judge_growth(self, picture: Picture) -> None:
        """Whether the last growth was of use. Two in a row that were not end the growing for a while."""
        trial = self._trial
        if trial is None:
            return
        wait = trial.wait_seconds
        age = picture.now_seconds - trial.at_seconds
        if age < wait:
            return
        pool = pool_of(picture, self.policy)
        rate = None if isinstance(pool, str) else hit_rate(pool.windows.get(self.policy.window))
        if rate is None:
            if age > wait * _TRIAL_PATIENCE:
                self._trial = None
            return
        self._trial = None
        if rate - trial.hit_rate_before >= self.policy.grow_gain:
            self._futile_in_a_row = 0
            return
        self._futile_in_a_row += 1
        if self._futile_in_a_row >= FUTILE_IN_A_ROW:
            self._futile_in_a_row = 0
            self._futile_until_seconds = picture.now_seconds + self.policy.futile_seconds

    def _time_to_show(self, proposal: Proposal, action: AddHolder) -> float:
        """New memory is of use when it has been filled, and that takes as long as the pool's turnover says."""
        policy = self.policy
        turnovers = float(proposal.numbers.get("turnovers_per_hour", 0.0))
        capacity = float(proposal.numbers.get("capacity_bytes", 0))
        fill = action.bytes / capacity / turnovers * HOUR_SECONDS if capacity and turnovers else 0.0
        return max(policy.settle_seconds, min(FILL_MARGIN * fill, HOUR_SECONDS)) + policy.window_seconds

    def _weigh(self, finding: Finding, picture: Picture, around: Circumstances) -> Explanation:
        now, name = picture.now_seconds, finding.name
        if finding.state in {"unknown", "clear"}:
            self._since.pop(name, None)
            if finding.state == "clear" and name in self.limits.advice:
                given = self.limits.advice[name]
                self.limits.advice[name] = Advised(given.at_seconds, over=True)
            verdict = "not known" if finding.state == "unknown" else "no reason to act"
            return self._told(finding, verdict)
        if finding.state == "between":
            since = self._since.get(name)
            told = f"was so for {format_duration(now - since)} and may come back" if since is not None else ""
            return self._told(finding, told or "not bad enough to act")
        since = self._since.setdefault(name, now)
        if finding.proposal is None:
            return self._told(finding, finding.waiting or "nothing can be done", finding.until_seconds)
        hold = self.policy.hold_seconds(finding.rule)
        blocked = self._blocked(finding, finding.proposal, picture, around)
        due = since + hold
        if now < due:
            told = f"holds for {format_duration(now - since)} of {format_duration(hold)}"
            later = due if blocked is None else _later(due, blocked.until_seconds)
            return self._told(finding, told, later)
        if blocked is not None:
            return self._told(finding, blocked.why, blocked.until_seconds)
        return self._told(finding, "fires", now)

    def _blocked(
        self, finding: Finding, proposal: Proposal, picture: Picture, around: Circumstances
    ) -> Blocked | None:
        now = picture.now_seconds
        if proposal.is_advice:
            return self.limits.why_no_advice(finding.name, now)
        return self.limits.why_not(proposal, now, around, picture.master) or _leaves_nobody(proposal, picture)

    @staticmethod
    def _told(finding: Finding, verdict: str, next_seconds: float | None = None) -> Explanation:
        return Explanation(
            finding.rule, finding.key or finding.target, finding.state, finding.text, verdict, next_seconds,
            finding.proposal,
        )  # fmt: skip

    def _fire(self, finding: Finding, proposal: Proposal, now: float) -> Proposal:
        dry = self.policy.dry_run and not proposal.is_advice
        proposal = dataclasses.replace(proposal, id=self.limits.next_id, dry_run=dry)
        self.limits.next_id += 1
        self._since.pop(finding.name, None)
        if proposal.is_advice:
            self.limits.advice[finding.name] = Advised(now)
            self.last = Decision(now, proposal, "said")
        else:
            self.limits.begun(proposal, now)
            self.last = Decision(now, proposal, "dry run" if dry else "under way")
        return proposal

    # -- over a restart of the daemon

    def remember(self, boot: str) -> dict[str, Any]:
        """The state as JSON values. ``boot``: which boot of the host its times are of."""
        last = self.last
        return {
            "version": VERSION,
            "boot": boot,
            "limits": self.limits.remember(),
            "detached": {unit: dataclasses.asdict(kept) for unit, kept in self._detached.items()},
            "trial": None if self._trial is None else dataclasses.astuple(self._trial),
            "short": dict(self._short),
            "refused": None if self._refused is None else list(self._refused),
            "futile": [self._futile_in_a_row, self._futile_until_seconds],
            "last": None
            if last is None
            else [last.at_seconds, proposal_to_json(last.proposal), last.outcome, last.text],
        }

    def recall(self, kept: Mapping[str, Any], boot: str, now_seconds: float) -> str:
        """Takes up what ``remember`` gave; how long conditions have held is counted anew.

        Returns:
            "" or why it cannot be read; then nothing is done for the length of a cool-down.
        """
        fresh = Decider(self.policy)
        try:
            if kept.get("unreadable"):
                raise ValueError(kept["unreadable"])
            if kept["version"] != VERSION:
                raise ValueError(f"it is of version {kept['version']!r}")
            fresh.limits.recall(kept["limits"])
            fresh._detached = {unit: Detached(**d) for unit, d in kept["detached"].items()}
            if kept["trial"] is not None:
                fresh._trial = _Trial(*map(float, kept["trial"]))
            fresh._short = {str(node): float(at) for node, at in kept["short"].items()}
            if kept["refused"] is not None:
                high, at = kept["refused"]
                fresh._refused = (int(high), float(at))
            in_a_row, until = kept["futile"]
            fresh._futile_in_a_row, fresh._futile_until_seconds = int(in_a_row), float(until)
            if kept["last"] is not None:
                at, proposal, outcome, text = kept["last"]
                fresh.last = Decision(float(at), proposal_from_json(proposal), outcome, text)
            fresh._not_after(now_seconds, all_of_it=kept["boot"] != boot)
        except (KeyError, TypeError, ValueError, AttributeError, StateError) as error:
            self.limits.quiet_until_seconds = now_seconds + self.policy.cooldown_seconds
            return f"what was decided before cannot be read, so nothing is done for a while: {error}"
        for name in (
            "limits",
            "last",
            "_detached",
            "_trial",
            "_refused",
            "_short",
            "_futile_in_a_row",
            "_futile_until_seconds",
        ):
            setattr(self, name, getattr(fresh, name))
        return ""


def _later(due: float, until: float | None) -> float | None:
    return None if until is None else max(due, until)


def _leaves_nobody(proposal: Proposal, picture: Picture) -> Blocked | None:
    """The restart of an engine waits until another one of its group is there to take its load."""
    if not isinstance(proposal.action, RestartUnit):
        return None
    unit = proposal.action.unit
    group = next((e.group for e in picture.engines if e.unit == unit), "")
    others = [e for e in picture.engines if group and e.group == group and e.unit != unit]
    if others and not any(e.ready and e.instance is not None for e in others):
        return Blocked(f"no other engine of group {group} is ready")
    return None
