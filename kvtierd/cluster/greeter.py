"""Says hello to other nodes from time to time: each learns what the other is, what time it has, and the newer view.

In a small cluster everybody greets everybody. In a large one a node greets the master and a few others in turn, and less
often, so that what it costs a node, the master too, does not grow with the cluster; news still gets around since every
greeting carries it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping

from kvtierd.cluster.hello import NodeFacts
from kvtierd.cluster.peer_link import PeerLink
from kvtierd.cluster.peer_wire import facts_to_wire, view_to_wire
from kvtierd.cluster.v1 import peers_pb2 as pb
from kvtierd.cluster.view_board import ViewBoard
from kvtierd.errors import ClusterError

ROUND_SECONDS = 10.0
MOST_GREETINGS_PER_SECOND = 10.0  # that a master gets from all others together
HELLO_SECONDS = 2.0  # deadline of one
SMALL_CLUSTER = 8
OTHERS_PER_ROUND = 2
AT_ONCE = 32


def round_seconds(nodes: int) -> float:
    """Time between a node's rounds in a cluster of so many."""
    return max(ROUND_SECONDS, nodes / MOST_GREETINGS_PER_SECOND)


class Greeter:
    """One node's greetings.

    Args:
        links: By name, all peers.
        facts: What this node says of itself.
    """

    def __init__(
        self,
        cluster: str,
        links: Mapping[str, PeerLink],
        board: ViewBoard,
        facts: Callable[[], NodeFacts],
        *,
        round_seconds: float = ROUND_SECONDS,
    ) -> None:
        self._cluster = cluster
        self._links = links
        self._board = board
        self._facts = facts
        self._round_seconds = round_seconds
        self._turn: list[str] = []

    async def run(self) -> None:
        """Works until it is cancelled."""
        while True:
            await self.greet(self._next())
            await asyncio.sleep(self._round_seconds * random.uniform(0.75, 1.25))

    async def greet(self, names: Iterable[str], timeout_seconds: float = HELLO_SECONDS) -> set[str]:
        """Greets these peers; those that answered. Their views are on the board then."""
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(name: str) -> str:
            async with gate:
                return name if await self._hello(name, timeout_seconds) else ""

        return set(await asyncio.gather(*(one(name) for name in names if name in self._links))) - {""}

    async def _hello(self, name: str, timeout_seconds: float) -> bool:
        board = self._board
        request = pb.HelloRequest(
            cluster=self._cluster,
            facts=facts_to_wire(self._facts()),
            view=view_to_wire(self._cluster, board.newest, board.posted.revision, board.age_seconds()),
        )
        try:
            greeting = await self._links[name].hello(request, timeout_seconds)
        except ClusterError:
            return False  # the link says why
        offer = greeting.offer
        board.offer(offer.view, offer.revision, offer.age_seconds, name)
        return True

    def _next(self) -> list[str]:
        """Whom to greet in this round."""
        if len(self._links) <= SMALL_CLUSTER:
            return list(self._links)
        if len(self._turn) < OTHERS_PER_ROUND:
            self._turn = random.sample(list(self._links), len(self._links))
        chosen, self._turn = self._turn[:OTHERS_PER_ROUND], self._turn[OTHERS_PER_ROUND:]
        newest = self._board.newest
        if newest is not None and newest.master in self._links and newest.master not in chosen:
            chosen.append(newest.master)
        return chosen
