"""Events between nodes: what fits goes, the newest first of all, and nothing odd comes through."""

from __future__ import annotations

import pytest

from kvtierd.cluster.peer_events import MOST_EVENTS, events_from_wire, events_to_wire
from kvtierd.cluster.peer_wire import MAX_MESSAGE_BYTES, MAX_TEXT_CHARS
from kvtierd.cluster.v1 import peers_pb2 as pb
from kvtierd.errors import ClusterError
from kvtierd.events import Event


def event(number: int, message: str = "it happened") -> Event:
    return Event(number, 1000.0 + number, "warning", "unit.ended", "kvtier-pool-0", message)


def test_events_come_over_as_they_were() -> None:
    events = [event(1), event(2)]
    assert events_from_wire(events_to_wire(events, 0, 0)) == events


def test_only_later_ones_and_at_most_so_many() -> None:
    events = [event(n) for n in range(1, 2 * MOST_EVENTS)]
    assert [e.id for e in events_from_wire(events_to_wire(events, 3, 0))] == [397, 398, 399]
    assert [e.id for e in events_from_wire(events_to_wire(events, 0, 398))] == [399]
    assert len(events_from_wire(events_to_wire(events, 10_000, 0))) == MOST_EVENTS


def test_long_ones_leave_room_for_the_newest() -> None:
    events = [event(n, "é" * 3000) for n in range(1, MOST_EVENTS)]
    wire = events_to_wire(events, 0, 0)
    assert wire.ByteSize() <= MAX_MESSAGE_BYTES
    came = events_from_wire(wire)
    assert came[-1].id == MOST_EVENTS - 1
    assert 40 < len(came) < MOST_EVENTS - 1
    assert len(came[-1].message) == MAX_TEXT_CHARS


def test_a_message_of_several_lines_becomes_one() -> None:
    (came,) = events_from_wire(events_to_wire([event(1, "one\ntwo\x1b[31m")], 0, 0))
    assert came.message == "one two [31m"


@pytest.mark.parametrize(
    "change",
    [{"severity": "fatal"}, {"kind": "a\nb"}, {"message": "\x1b[2J"}, {"at_unix_seconds": float("nan")}],
)
def test_what_no_kvtierd_would_say_is_refused(change: dict[str, object]) -> None:
    good = {"id": 1, "at_unix_seconds": 1.0, "severity": "info", "kind": "k", "message": "m"}
    with pytest.raises(ClusterError):
        events_from_wire(pb.PeerEventsReply(events=[pb.PeerEvent(**(good | change))]))  # type: ignore[arg-type]
    with pytest.raises(ClusterError):
        events_from_wire(pb.PeerEventsReply(events=[pb.PeerEvent(**good)] * (MOST_EVENTS + 1)))  # type: ignore[arg-type]
