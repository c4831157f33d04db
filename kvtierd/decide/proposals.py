"""PURE: what may be proposed, typed. Whoever carries a proposal out needs nothing but what stands in it.

Every action has an opposite or is harmless to repeat; what has neither is advice, for a person. An action is *disruptive*
when it takes an engine or the MetaService away for a while or throws keys away.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from kvtierd.errors import StateError
from kvtierd.quantities import format_size

Severity = Literal["info", "warning", "error"]

POOL = "pool"
"""The target of everything that changes the pool or its MetaService: one thing at a time there."""

EVERYTHING = "*"
"""The group of an action that touches every engine's tier: nothing else disruptive goes on beside it."""


@dataclasses.dataclass(frozen=True, slots=True)
class SetThresholds:
    """Eviction begins above ``high_percent`` of use and ends below ``low_percent``; live within 5 seconds."""

    high_percent: int
    low_percent: int

    @property
    def text(self) -> str:
        """In words, for people."""
        return f"set the eviction thresholds to {self.high_percent}/{self.low_percent} %"


@dataclasses.dataclass(frozen=True, slots=True)
class AddHolder:
    """One more pool holder of this size on this node."""

    node: str
    bytes: int

    @property
    def text(self) -> str:
        """In words, for people."""
        return f"add a pool holder of {format_size(self.bytes)} on {self.node}"


@dataclasses.dataclass(frozen=True, slots=True)
class RemoveHolder:
    """Take an added pool holder away. Its keys are lost. ``bytes``: what it holds; 0 where that is not known."""

    node: str
    unit: str
    bytes: int

    @property
    def text(self) -> str:
        """In words, for people."""
        size = f" ({format_size(self.bytes)})" if self.bytes else ""
        return f"remove pool holder {self.unit}{size} on {self.node}"


@dataclasses.dataclass(frozen=True, slots=True)
class Rebalance:
    """First the new holder, and when it is there and verified the old one goes."""

    add: AddHolder
    remove: RemoveHolder

    @property
    def text(self) -> str:
        """In words, for people."""
        return f"{self.add.text}, then {self.remove.text}"


@dataclasses.dataclass(frozen=True, slots=True)
class RestartUnit:
    """Restart a unit in place. ``drained``: first it gets no requests; ``rolling``: one of its group at a time."""

    unit: str
    drained: bool = False
    rolling: bool = False

    @property
    def text(self) -> str:
        """In words, for people."""
        how = [word for word, on in (("drained", self.drained), ("rolling", self.rolling)) if on]
        return f"restart {self.unit}" + (f" ({', '.join(how)})" if how else " in place")


@dataclasses.dataclass(frozen=True, slots=True)
class DetachL3:
    """The engine goes on without the pool. ``engine``: its unit's id."""

    engine: str

    @property
    def text(self) -> str:
        """In words, for people."""
        return f"detach L3 from {self.engine}"


@dataclasses.dataclass(frozen=True, slots=True)
class AttachL3:
    """The engine uses the pool again. ``engine``: its unit's id."""

    engine: str

    @property
    def text(self) -> str:
        """In words, for people."""
        return f"attach L3 to {self.engine}"


@dataclasses.dataclass(frozen=True, slots=True)
class Purge:
    """Empty the pool: the cost is a cold cache."""

    @property
    def text(self) -> str:
        """In words, for people."""
        return "purge the pool"


@dataclasses.dataclass(frozen=True, slots=True)
class Advise:
    """What only a person can do."""

    text: str


Action = (
    SetThresholds | AddHolder | RemoveHolder | Rebalance | RestartUnit | DetachL3 | AttachL3 | Purge | Advise
)

DISRUPTIVE = (RemoveHolder, Rebalance, RestartUnit, Purge)

_DIRECTIONS: dict[type, str] = {
    AddHolder: "grow",
    RemoveHolder: "shrink",
}
_OPPOSITES = {
    "grow": "shrink",
    "shrink": "grow",
    "lower": "raise",
    "raise": "lower",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Proposal:
    """An action with its reasons.

    Attributes:
        rule: Which rule wants it.
        target: What it changes: ``pool``, or an engine's unit id. One thing at a time per target.
        action: What to do.
        reason: Why, in one or two sentences with the numbers.
        severity: How bad it is as it stands.
        group: Engines that take each other's load, or ``EVERYTHING``.
        urgent: It does not wait for earlier actions on the target to show their effect.
        numbers: What the reason rests on, by name with unit.
        expected: What is better afterwards.
        verified_by: How to see, from observation, that it worked.
        direction: What it undoes when its opposite comes: ``grow``, ``lower``, ...; "" for none.
        id: Given by the decider; 0 before.
        dry_run: Only to be said, not to be done.
    """

    rule: str
    target: str
    action: Action
    reason: str
    severity: Severity = "warning"
    group: str = EVERYTHING
    urgent: bool = False
    numbers: Mapping[str, float | int | str] = dataclasses.field(default_factory=dict)
    expected: str = ""
    verified_by: str = ""
    direction: str = ""
    id: int = 0
    dry_run: bool = False

    @property
    def disruptive(self) -> bool:
        """Whether somebody notices it."""
        return isinstance(self.action, DISRUPTIVE)

    @property
    def is_advice(self) -> bool:
        """Whether there is nothing to carry out."""
        return isinstance(self.action, Advise)


def direction_of(action: Action, *, high_now_percent: int | None = None) -> str:
    """Which way an action goes; "" where there is no way back to speak of."""
    if isinstance(action, SetThresholds):
        return "lower" if high_now_percent is None or action.high_percent < high_now_percent else "raise"
    return _DIRECTIONS.get(type(action), "")


def opposite_of(direction: str) -> str:
    """The direction that takes this one back; "" for none."""
    return _OPPOSITES.get(direction, "")


# -- as JSON, for the journal and for what the daemon remembers

_BY_NAME: dict[str, type[Any]] = {
    c.__name__: c
    for c in (
        SetThresholds, AddHolder, RemoveHolder, RestartUnit, DetachL3, AttachL3, Purge, Advise,
    )
}  # fmt: skip


def action_to_json(action: Action) -> dict[str, Any]:
    """``{"kind": "AddHolder", "node": ..., "bytes": ...}``."""
    if isinstance(action, Rebalance):
        return {
            "kind": "Rebalance",
            "add": action_to_json(action.add),
            "remove": action_to_json(action.remove),
        }
    return {"kind": type(action).__name__, **dataclasses.asdict(action)}


def action_from_json(kept: Mapping[str, Any]) -> Action:
    """The action again.

    Raises:
        StateError: ``state.action-unknown``: it was written by another version.
    """
    try:
        fields = {name: value for name, value in kept.items() if name != "kind"}
        if kept["kind"] == "Rebalance":
            add, remove = action_from_json(fields["add"]), action_from_json(fields["remove"])
            if isinstance(add, AddHolder) and isinstance(remove, RemoveHolder):
                return Rebalance(add, remove)
            raise TypeError("not a holder to add and one to remove")
        action: Action = _BY_NAME[kept["kind"]](**fields)
    except (KeyError, TypeError, AttributeError) as error:
        raise StateError(
            f"an action cannot be read: {dict(kept)!r}", why=str(error), code="state.action-unknown"
        ) from error
    return action


def proposal_to_json(proposal: Proposal) -> dict[str, Any]:
    """All of it as JSON values."""
    fields = {f.name: getattr(proposal, f.name) for f in dataclasses.fields(proposal)}
    return {**fields, "numbers": dict(proposal.numbers), "action": action_to_json(proposal.action)}


def proposal_from_json(kept: Mapping[str, Any]) -> Proposal:
    """The proposal again.

    Raises:
        StateError: ``state.action-unknown``.
    """
    known = {f.name for f in dataclasses.fields(Proposal)}
    try:
        fields = {name: value for name, value in kept.items() if name in known and name != "action"}
        return Proposal(action=action_from_json(kept["action"]), **fields)
    except (KeyError, TypeError) as error:
        raise StateError("a proposal cannot be read", why=repr(error), code="state.action-unknown") from error
