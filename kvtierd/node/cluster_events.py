"""What happened on all nodes, in one list: each node is asked for its own, the times are by each node's own clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from kvtierd.cluster.network import PeerNetwork
from kvtierd.cluster.peer_events import MOST_EVENTS
from kvtierd.errors import ClusterError
from kvtierd.events import Event, EventLog

ASK_SECONDS = 3.0
ASK_AGAIN_SECONDS = 1.0
AT_ONCE = 32  # nodes asked
MISSING = "cluster.events-missing"

NodeEvent = tuple[str, Event]


class ClusterEvents:
    """One reader's way through the events of all nodes."""

    def __init__(self, network: PeerNetwork, own: EventLog) -> None:
        self._network = network
        self._own = own
        self._after: dict[str, int] = {}
        self._missing: set[str] = set()

    async def next(self, last: int) -> list[NodeEvent]:
        """What is new since the call before, oldest first; ``last`` at most (0: no limit but each node's own).

        A node that does not answer has an event that says so, once until it answers again.
        """
        gate = asyncio.Semaphore(AT_ONCE)

        async def ask(name: str) -> list[NodeEvent]:
            async with gate:
                return await self._ask(name, last)

        found = await asyncio.gather(*(ask(name) for name in self._network.links))
        events = [*self._here(last), *(event for events in found for event in events)]
        events.sort(key=lambda e: e[1].at_unix_seconds)
        return events[-last:] if last else events

    async def follow(self, last: int) -> AsyncIterator[NodeEvent]:
        """The last ones, then new ones as they come; does not end."""
        while True:
            for event in await self.next(last):
                yield event
            last = 0
            await asyncio.sleep(ASK_AGAIN_SECONDS)

    def _here(self, last: int) -> list[NodeEvent]:
        name = self._network.node
        after = self._after.get(name, 0)
        events = [e for e in self._own.last() if e.id > after][-(last or MOST_EVENTS) :]
        return self._noted(name, events)

    async def _ask(self, name: str, last: int) -> list[NodeEvent]:
        try:
            events = await self._network.links[name].events(last, self._after.get(name, 0), ASK_SECONDS)
        except ClusterError as error:
            if name in self._missing:
                return []
            self._missing.add(name)
            text = f"what happened on {name} is not known: {error.message}"
            return [(name, Event(0, time.time(), "warning", MISSING, "", text))]
        self._missing.discard(name)
        return self._noted(name, events)

    def _noted(self, name: str, events: list[Event]) -> list[NodeEvent]:
        if events:
            self._after[name] = events[-1].id
        return [(name, event) for event in events]
