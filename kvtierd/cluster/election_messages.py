"""PURE: what voters say to each other, and what an elector wants done.

Every message carries the cluster, the digest of what voters must agree on, and its sender. A message is
also valid when it comes late, twice or out of order: what must not be believed then is said where it is read.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

Reason = Literal[
    "promised",  # to the holder, for the remaining seconds
    "reserved",  # for the target of a switchover, for the remaining seconds
    "silent-after-boot",  # it cannot know what it promised before; for the remaining seconds
    "stale-epoch",  # it has already taken part in a later term
    "no-memory",  # its epoch file is missing and it has not yet learned the epoch from the others
    "digest-differs",  # its voters, drift or kill margin are others
    "cluster-differs",
    "not-a-voter",
    "lease",  # the length asked for is out of range
]


@dataclasses.dataclass(frozen=True, slots=True)
class EpochState:
    """What a voter must never forget. Written and synced before the answer that it stands for.

    Attributes:
        epoch: The highest epoch it has granted. 0: it has never granted any.
        granted_to: Who got that epoch; "" when unknown (an epoch learned from other voters) or 0.
        granted_incarnation: Which incarnation of it.
        promise_seconds: The longest promise given in that epoch: a restarted voter keeps its peace for that long even
            if the lease in the settings has become shorter.
        incarnation: This voter's own: a number drawn when the file came into being. A voter that lost its file is
            somebody else to the others, so that nothing it said before, however late it comes, is taken for its word.
    """

    epoch: int = 0
    granted_to: str = ""
    granted_incarnation: int = 0
    promise_seconds: float = 0.0
    incarnation: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease that the guard of this boot still enforces, for an elector that starts in the middle of it."""

    epoch: int
    until_seconds: float


# -- messages


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """What all messages have.

    Attributes:
        epoch: What it means differs by message.
        number: Of the round it belongs to; an answer repeats it. Never used twice, not even after a restart.
    """

    cluster: str
    digest: str
    sender: str
    epoch: int
    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class Probe(Message):
    """Would you grant me a lease? Changes nothing, so that a candidate without a chance disturbs nobody."""

    incarnation: int
    lease_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Willing(Message):
    """Yes, as things are. ``epoch`` is the voter's highest."""


@dataclasses.dataclass(frozen=True, slots=True)
class Request(Message):
    """Promise not to grant a lease to anybody else: a new term, or a renewal when ``epoch`` is the one held."""

    incarnation: int
    lease_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Grant(Message):
    """Promised. ``idle_seconds``: how long before this term nobody can have held a lease by this voter's promises."""

    idle_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal(Message):
    """No, and why. ``epoch`` is the voter's highest; ``remaining_seconds`` says when asking again makes sense."""

    reason: Reason
    holder: str = ""
    remaining_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Release(Message):
    """I never used this epoch, or nothing of mine runs under it any more; I will not use it again.

    ``successor`` gets a head start; "" leaves it to whoever comes first.
    """

    incarnation: int
    successor: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class EpochQuery(Message):
    """Which is the highest epoch you have granted?"""


@dataclasses.dataclass(frozen=True, slots=True)
class EpochAnswer(Message):
    """The highest epoch granted and how long it was promised for, or with ``remembers`` false: I do not know either."""

    remembers: bool
    promise_seconds: float


AnyMessage: TypeAlias = Probe | Willing | Request | Grant | Refusal | Release | EpochQuery | EpochAnswer


# -- effects: carried out in the order of the list


@dataclasses.dataclass(frozen=True, slots=True)
class Send:
    """Send it to that voter; it may get lost."""

    to: str
    message: AnyMessage


@dataclasses.dataclass(frozen=True, slots=True)
class Persist:
    """Write and sync this before anything that follows in the list.

    If that fails, nothing that follows may be done and the elector must be thrown away: it already counts on it.
    """

    state: EpochState


@dataclasses.dataclass(frozen=True, slots=True)
class LeaseGained:
    """This node is the master.

    Arm the guard for ``until_seconds`` first; the MetaService may start at ``serve_after_seconds``, when whatever the
    one before ran has certainly been killed.
    """

    epoch: int
    until_seconds: float
    serve_after_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class LeaseRenewed:
    """The guard may be set to this later end. It is a point in time, so that carrying it out late is harmless."""

    epoch: int
    until_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class EpochRaised:
    """Still the master, without a gap, now under a later epoch: the guard's end as with ``LeaseRenewed``.

    It happens when some voter has a later epoch from a candidate that did not make it: such a voter cannot grant the
    earlier one any more, and its vote may be needed one day.
    """

    epoch: int
    until_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class LeaseLost:
    """Kill the MetaService now; if this comes late, the guard has done it."""

    epoch: int
    why: str


Effect: TypeAlias = Send | Persist | LeaseGained | LeaseRenewed | EpochRaised | LeaseLost
