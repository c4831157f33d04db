"""PURE: what a policy would have decided on pictures that were recorded.

The recording does not react: a holder that would have been added is not in the pictures that follow. So this shows when a
policy would have begun to act, and how often its limits would have let it; not what would have come of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from kvtierd.decide.decider import Decider
from kvtierd.decide.limits import Circumstances
from kvtierd.decide.policy import Policy
from kvtierd.decide.proposals import Proposal, action_to_json
from kvtierd.decide.recorded import read_line
from kvtierd.observe.picture import Picture


@dataclasses.dataclass(frozen=True, slots=True)
class Simulated:
    """One thing that would have been done or said, ``at_seconds`` of the recording's clock."""

    at_seconds: float
    proposal: Proposal

    def as_dict(self) -> dict[str, Any]:
        """As documented JSON."""
        proposal = self.proposal
        return {
            "at_seconds": self.at_seconds,
            "rule": proposal.rule,
            "target": proposal.target,
            "severity": proposal.severity,
            "disruptive": proposal.disruptive,
            "action": action_to_json(proposal.action),
            "text": proposal.action.text,
            "reason": proposal.reason,
            "numbers": dict(proposal.numbers),
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Replay:
    """The whole of it.

    Attributes:
        pictures: How many were read.
        first_seconds: The first one's time; ``None`` without any.
        last_seconds: The last one's.
        decided: What would have been done or said, in order.
        kept_back: Rule -> why it did not act though its condition held, -> in how many pictures.
    """

    pictures: int
    first_seconds: float | None
    last_seconds: float | None
    decided: tuple[Simulated, ...]
    kept_back: dict[str, dict[str, int]]


def replay(pictures: Iterable[Picture], policy: Policy, around: Circumstances | None = None) -> Replay:
    """Plays the pictures to a new decider; every action is taken to succeed at once."""
    decider = Decider(policy)
    decided: list[Simulated] = []
    kept_back: dict[str, dict[str, int]] = {}
    count, first, last = 0, None, None
    for picture in pictures:
        count += 1
        first = picture.now_seconds if first is None else first
        last = picture.now_seconds
        for proposal in decider.step(picture, around):
            decided.append(Simulated(picture.now_seconds, proposal))
            decider.outcome(proposal.id, ok=True, text="taken to succeed", now_seconds=picture.now_seconds)
        for told in decider.explain():
            if told.state == "holds" and told.verdict != "fires":
                why = told.verdict.partition(":")[0].partition(" for ")[0]
                counts = kept_back.setdefault(told.rule, {})
                counts[why] = counts.get(why, 0) + 1
    return Replay(count, first, last, tuple(decided), kept_back)


def pictures_of(lines: Iterable[str]) -> Iterator[Picture]:
    """The pictures of a recording; empty lines are passed over.

    Raises:
        StateError: ``state.picture-unreadable``, with the line's number.
    """
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield read_line(line, number)
