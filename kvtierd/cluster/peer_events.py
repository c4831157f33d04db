"""Events on their way between nodes: bounded, and checked like everything else that another node says."""

from __future__ import annotations

from collections.abc import Sequence

from kvtierd.cluster.peer_wire import MAX_MESSAGE_BYTES, MAX_TEXT_CHARS, malformed, seconds, text
from kvtierd.cluster.v1 import peers_pb2 as pb
from kvtierd.events import Event, Severity

MOST_EVENTS = 200  # of one node in one answer
_ROOM_BYTES = MAX_MESSAGE_BYTES - 1024
_SEVERITIES: dict[str, Severity] = {"info": "info", "warning": "warning", "error": "error"}


def events_to_wire(events: Sequence[Event], last: int, after_id: int) -> pb.PeerEventsReply:
    """The newest of them that fit into one message."""
    most = min(last or MOST_EVENTS, MOST_EVENTS)
    taken: list[pb.PeerEvent] = []
    room = _ROOM_BYTES
    for event in reversed([e for e in events if e.id > after_id][-most:]):
        wire = pb.PeerEvent(
            id=event.id, at_unix_seconds=event.at_unix_seconds, severity=event.severity, kind=event.kind,
            unit=event.unit, message=_one_line(event.message),
        )  # fmt: skip
        room -= wire.ByteSize() + 8
        if room < 0:
            break
        taken.append(wire)
    return pb.PeerEventsReply(events=reversed(taken))


def events_from_wire(reply: pb.PeerEventsReply) -> list[Event]:
    """Oldest first. Raises ``ClusterError`` ``cluster.malformed``."""
    if len(reply.events) > MOST_EVENTS:
        raise malformed(f"{len(reply.events)} events")
    found = []
    for wire in reply.events:
        if (severity := _SEVERITIES.get(wire.severity)) is None:
            raise malformed(f"a severity {wire.severity[:40]!r}")
        found.append(
            Event(
                wire.id, seconds("at", wire.at_unix_seconds), severity, text("kind", wire.kind),
                text("unit", wire.unit), text("message", wire.message),
            )
        )  # fmt: skip
    return found


def _one_line(message: str) -> str:
    """As the other side takes it: no control characters, not without end."""
    shown = "".join(c if c.isprintable() else " " for c in message)
    return shown if len(shown) <= MAX_TEXT_CHARS else shown[: MAX_TEXT_CHARS - 1] + "…"
