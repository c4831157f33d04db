"""The events of all nodes in one list."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvtierd.errors import ClusterError
from kvtierd.events import Event, EventLog
from kvtierd.node.cluster_events import MISSING, ClusterEvents


class Link:
    """Another node; answers as the real one does."""

    def __init__(self) -> None:
        self.events_there: list[Event] = []
        self.down = False
        self.asked: list[tuple[int, int]] = []

    async def events(self, last: int, after_id: int, timeout_seconds: float) -> list[Event]:
        self.asked.append((last, after_id))
        if self.down:
            raise ClusterError("b cannot be reached", code="cluster.unreachable")
        later = [e for e in self.events_there if e.id > after_id]
        return later[-last:] if last else later


def world(directory: Path) -> tuple[ClusterEvents, EventLog, Link]:
    clock = iter([10.0, 30.0, 50.0, 70.0])
    own = EventLog(directory, now=lambda: next(clock))
    link = Link()
    network: Any = SimpleNamespace(node="a", links={"b": link})
    return ClusterEvents(network, own), own, link


def said(events: list[tuple[str, Event]]) -> list[tuple[str, str]]:
    return [(node, event.message) for node, event in events]


async def test_they_are_in_the_order_of_time_and_come_once(tmp_path: Path) -> None:
    reader, own, link = world(tmp_path)
    own.add("info", "k", "a first")
    own.add("info", "k", "a second")
    link.events_there = [Event(7, 20.0, "info", "k", "", "b between")]
    assert said(await reader.next(0)) == [("a", "a first"), ("b", "b between"), ("a", "a second")]
    assert await reader.next(0) == []
    link.events_there.append(Event(8, 40.0, "info", "k", "", "b later"))
    own.add("info", "k", "a third")
    assert said(await reader.next(0)) == [("b", "b later"), ("a", "a third")]
    assert link.asked[-1] == (0, 7)


async def test_the_last_ones_are_the_last_of_all(tmp_path: Path) -> None:
    reader, own, link = world(tmp_path)
    own.add("info", "k", "a first")
    own.add("info", "k", "a second")
    link.events_there = [Event(n, 20.0 + n, "info", "k", "", f"b {n}") for n in range(1, 4)]
    assert said(await reader.next(2)) == [("b", "b 3"), ("a", "a second")]


async def test_a_node_that_does_not_answer_is_named_once(tmp_path: Path) -> None:
    reader, own, link = world(tmp_path)
    own.add("info", "k", "a first")
    link.down = True
    first = await reader.next(0)
    assert first[0] == ("a", own.last()[0])
    assert (first[1][0], first[1][1].kind) == ("b", MISSING)
    assert "cannot be reached" in first[1][1].message
    assert await reader.next(0) == []
    link.down = False
    link.events_there = [Event(1, 20.0, "info", "k", "", "b was busy")]
    assert said(await reader.next(0)) == [("b", "b was busy")]
    link.down = True
    assert [e.kind for _, e in await reader.next(0)] == [MISSING]


async def test_following_goes_on(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("kvtierd.node.cluster_events.ASK_AGAIN_SECONDS", 0.01)
    reader, own, link = world(tmp_path)
    own.add("info", "k", "a first")
    own.add("info", "k", "a second")
    seen = []
    async with contextlib.aclosing(reader.follow(1)) as events:  # type: ignore[type-var]
        async for node, event in events:
            seen.append((node, event.message))
            if len(seen) == 1:
                link.events_there = [Event(1, 90.0, "info", "k", "", "b new")]
            else:
                break
    assert seen == [("a", "a second"), ("b", "b new")]
