"""What a ``Link`` is told, is, and asks for: modes, states, actions, durations. Pure."""

from __future__ import annotations

import dataclasses
import enum


class Mode(enum.StrEnum):
    """What the whole endpoint does with requests on data. Registration traffic always passes."""

    SERVE = "serve"
    QUIESCE = "quiesce"  # requests are held for a moment, then answered as misses
    RECOVER = "recover"  # requests are answered at once as misses


class LinkState(enum.Enum):
    """See the module's diagram."""

    RELAY = enum.auto()
    ORPHAN = enum.auto()
    LEAVING = enum.auto()
    HOLDING = enum.auto()
    LEFT = enum.auto()
    PLAIN = enum.auto()
    CLOSED = enum.auto()


@dataclasses.dataclass(slots=True)
class SendClient:
    """Bytes for the client."""

    data: bytes


@dataclasses.dataclass(slots=True)
class SendServer:
    """Bytes for the MetaService."""

    data: bytes


@dataclasses.dataclass(slots=True)
class FinishClient:
    """Send FIN to the client behind everything written, and go on reading."""


@dataclasses.dataclass(slots=True)
class DropServer:
    """Close the MetaService side at once."""


@dataclasses.dataclass(slots=True)
class RetireServer:
    """The client is gone: answer the MetaService for it for a moment, then close; see ``retirement``.

    ``rest`` is of a frame that has not arrived in full. ``unanswered`` are requests, as (sequence, opcode), that the
    MetaService made of the client; ``awaited`` those the client made: what comes for them is dropped.
    """

    rest: bytes
    unanswered: frozenset[tuple[int, int]]
    awaited: frozenset[tuple[int, int]]


@dataclasses.dataclass(slots=True)
class CloseClient:
    """Close the client side; ``abort`` throws unsent bytes away."""

    abort: bool = False


Action = SendClient | SendServer | FinishClient | DropServer | RetireServer | CloseClient


@dataclasses.dataclass(frozen=True, slots=True)
class LinkTimes:
    """Durations in seconds; the defaults are what worked with real clients."""

    silence: float = 0.9  # calls on data in flight and not a byte from the server
    registration_silence: float = 10.0  # then the connection is given up; registration may take seconds
    hold: float = 0.8  # longest time a request is held in quiesce
    settle: float = 0.005  # between the handshake and the first carried answer
    quiet_gap: float = 0.010  # nothing in flight and nothing heard: a good moment for FIN
    force_after: float = 0.3  # no quiet moment came: withhold answers
    withhold: float = 0.015  # until every thread of the client waits
    missing: float = 0.15  # a number given out and not seen for so long will not come
    linger: float = 0.5  # after FIN: listen for requests that crossed it
