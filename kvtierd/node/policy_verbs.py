"""What operators can ask of the policy: why, show, reset, and what was seen; over the running pilot."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Iterator
from typing import Protocol

from kvtierd.act.adjusted import read_adjustments
from kvtierd.act.journal import ActionJournal, Entry
from kvtierd.cluster.clock import boottime_seconds
from kvtierd.control.v1 import control_pb2 as pb
from kvtierd.decide.decider import Decider, Explanation
from kvtierd.decide.proposals import POOL
from kvtierd.decide.recorded import picture_line
from kvtierd.errors import ActionError, UnitError
from kvtierd.node.state import Node
from kvtierd.observe.picture import Picture
from kvtierd.plan.units import META_ID, pool_id

MOST_ENTRIES = 500
MOST_EVENTS = 20
_WORDS = re.compile(r"[\w.-]+")
_OF_POOL = frozenset(
    {
        "host-short",
        "idle-memory",
        "thresholds",
        "pool-small",
        "pool-idle",
        "pool-unbalanced",
        "meta-hung",
        "alloc-failing",
    }
)  # whose keys are hosts and directions
_ORDER = {"holds": 0, "between": 1, "unknown": 2, "clear": 3, "off": 4}


class Flown(Protocol):
    """What is needed of the pilot."""

    decider: Decider
    journal: ActionJournal

    @property
    def pictures(self) -> Iterable[Picture]:
        """Of the last hour."""
        ...

    @property
    def acting(self) -> bool:
        """Something is being carried out."""
        ...

    async def undo_all(self) -> list[str]:
        """Takes back all adjustments; what was taken back."""
        ...


class PolicyVerbs:
    """The policy's verbs. ``fly`` is called when the daemon has begun to look."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._pilot: Flown | None = None

    def fly(self, pilot: Flown) -> None:
        """The daemon looks and decides from now on."""
        self._pilot = pilot

    async def why(self, unit: str, last: int) -> pb.WhyReply:
        """What rules see and do, of a unit or of everything. Raises ``UnitError``, ``ActionError``."""
        pilot, node = self._flying(), self._node
        reply = pb.WhyReply()
        if unit:
            reply.unit = unit_id = node.resolve(unit)
            view = node.view(unit_id)
            if view is None:
                raise UnitError(f"{unit_id} is gone", code="unit.unknown")
            reply.state, reply.reason = view.state, view.reason or ""
            events = [e for e in node.events.last(0) if e.unit == unit_id][-MOST_EVENTS:]
            reply.events.extend(
                pb.Event(
                    id=e.id, at=e.at_unix_seconds, severity=e.severity, kind=e.kind, unit=e.unit, message=e.message
                )
                for e in events
            )  # fmt: skip
        now = boottime_seconds()
        about = _targets(reply.unit)
        told = [e for e in pilot.decider.explain() if not unit or _is_about(e, about)]
        told.sort(key=lambda e: _ORDER.get(e.state, 9))
        reply.rules.extend(_explanation(e, now) for e in told)
        count = min(last or 10, MOST_ENTRIES)
        found = [await asyncio.to_thread(pilot.journal.last, count, target=t) for t in about or ("",)]
        entries = sorted((e for some in found for e in some), key=lambda e: e.id)
        reply.actions.extend(_entry(e) for e in entries[-count:])
        return reply

    async def show(self) -> pb.PolicyReply:
        """The policy in force and what it has changed."""
        adjusted, (_, problem) = (
            self._node.adjusted,
            await asyncio.to_thread(read_adjustments, self._node.state),
        )
        return pb.PolicyReply(
            policy_json=json.dumps(self._node.settings.policy.model_dump(mode="json")),
            adjustments_json=adjusted.model_dump_json(),
            problems=[text for text in (problem, self._pilot.journal.problem if self._pilot else "") if text],
        )

    async def reset(self) -> pb.PolicyReply:
        """Takes everything back. Raises ``ActionError``: something is being carried out."""
        pilot = self._flying()
        if pilot.acting:
            raise ActionError(
                "an action is being carried out", hint="kvtierctl why shows it; try again when it has ended",
                code="act.busy",
            )  # fmt: skip
        undone = await pilot.undo_all()
        reply = await self.show()
        reply.undone.extend(undone)
        return reply

    def pictures(self) -> Iterator[str]:
        """Lines of JSON, oldest first. Raises ``ActionError``."""
        return (picture_line(p) for p in list(self._flying().pictures))

    def decisions(self, reply: pb.StatusReply) -> None:
        """The last decision and the next possible one, into a status."""
        reply.dry_run = self._node.settings.policy.dry_run
        if self._pilot is None:
            return
        now, decider = boottime_seconds(), self._pilot.decider
        if (last := decider.last) is not None:
            reply.last_decision.CopyFrom(
                pb.Decision(
                    rule=last.proposal.rule, what=last.proposal.action.text, why=last.proposal.reason,
                    age_seconds=max(0.0, now - last.at_seconds),
                    outcome=f"{last.outcome}{f': {last.text}' if last.text else ''}",
                )
            )  # fmt: skip
        if (coming := decider.next_possible()) is not None and coming.proposal is not None:
            reply.next_decision.CopyFrom(
                pb.Decision(
                    rule=coming.rule,
                    what=coming.proposal.action.text,
                    why=coming.text,
                    outcome=coming.verdict,
                    in_seconds=max(0.0, (coming.next_seconds or now) - now),
                )
            )

    def _flying(self) -> Flown:
        if self._pilot is None:
            raise ActionError(
                "this kvtierd has not begun to look yet", hint="kvtierctl status says why", code="act.not-yet"
            )
        return self._pilot


def _targets(unit: str) -> tuple[str, ...]:
    """What concerns a unit: it, and the pool for those that are the pool; () for everything."""
    if not unit:
        return ()
    return (unit, POOL) if unit == META_ID or unit.startswith(pool_id("")) else (unit,)


def _is_about(explanation: Explanation, targets: tuple[str, ...]) -> bool:
    proposal = explanation.proposal
    if proposal is not None and proposal.target in targets:
        return True
    # A key names its target, alone or with more: "kvtier-engine-a first", a host for the pool's rules.
    words = set(_WORDS.findall(explanation.key))
    return any(t in words for t in targets) or (POOL in targets and explanation.rule in _OF_POOL)


def _explanation(told: Explanation, now: float) -> pb.Explanation:
    shown = pb.Explanation(
        rule=told.rule,
        about=told.key,
        state=str(told.state),
        sees=told.text,
        verdict=told.verdict,
        would=told.proposal.action.text if told.proposal is not None else "",
    )
    if told.next_seconds is not None:
        shown.next_in_seconds = max(0.0, told.next_seconds - now)
    return shown


def _entry(entry: Entry) -> pb.ActionEntry:
    return pb.ActionEntry(
        id=entry.id,
        at=entry.at_unix_seconds,
        ended=entry.ended_unix_seconds,
        **{
            k: str(getattr(entry, k))
            for k in ("rule", "target", "what", "why", "precondition", "state", "outcome", "undo", "node", "step")
        },
    )  # fmt: skip
