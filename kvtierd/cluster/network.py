"""This node's part in the network of peers, put together: links, board, server, view stream, greetings."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterable

import structlog

from kvtierd.cluster.clock import boottime_seconds
from kvtierd.cluster.election_messages import AnyMessage
from kvtierd.cluster.greeter import HELLO_SECONDS, Greeter, round_seconds
from kvtierd.cluster.hello import NodeFacts, differences
from kvtierd.cluster.peer_link import PeerLink, close_all
from kvtierd.cluster.peer_security import PeerSecurity
from kvtierd.cluster.peer_server import Desk, PeerServer
from kvtierd.cluster.peer_wire import KEEPALIVE_SECONDS, LARGE_CLUSTER, LARGE_CLUSTER_KEEPALIVE_SECONDS
from kvtierd.cluster.refusals import Refusals
from kvtierd.cluster.standing import PeerContact, Standing
from kvtierd.cluster.view_board import ViewBoard
from kvtierd.cluster.view_stream import ViewStream
from kvtierd.errors import ClusterError
from kvtierd.settings import ClusterSettings

VOTER_BACKOFF_SECONDS = 1.0
LONGEST_BACKOFF_SECONDS = 5.0
LISTEN_AGAIN_SECONDS = 2.0
REACH_AGAIN_SECONDS = 0.2

_log = structlog.get_logger(__name__)


class PeerNetwork:
    """What a coordinator and the daemon use to talk with the other nodes. All calls come from one asyncio loop.

    Args:
        settings: ``[cluster]``; its peers contain this node.
        facts: What this node says of itself; role, epoch and master are filled in from ``standing``.
        host: Where to listen; default: this node's address in the settings.
        greet_seconds: Between two rounds of greetings.

    Attributes:
        standing: Set by whoever runs the coordinator, for the facts.
        problem: Why this node cannot be reached by the others; "" when it can.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        node: str,
        security: PeerSecurity,
        *,
        facts: Callable[[], NodeFacts] | None = None,
        host: str | None = None,
        greet_seconds: float | None = None,
        now: Callable[[], float] = boottime_seconds,
    ) -> None:
        self.settings = settings
        self.node = node
        self.standing = Standing("unknown")
        self.problem = ""
        self.refusals = Refusals(now)
        self._listening = False
        self._started_seconds = time.monotonic()
        self._facts = facts or (lambda: NodeFacts(node))
        self._now = now
        voters = settings.voters if settings.mode == "lease" else ()
        self._voters = frozenset(voters)
        self.links = {
            peer.name: PeerLink(
                node,
                settings.name,
                peer.name,
                security,
                self.refusals,
                longest_backoff_seconds=(
                    VOTER_BACKOFF_SECONDS if peer.name in voters else LONGEST_BACKOFF_SECONDS
                ),
                keepalive_seconds=(
                    LARGE_CLUSTER_KEEPALIVE_SECONDS
                    if len(settings.peers) > LARGE_CLUSTER
                    else KEEPALIVE_SECONDS
                ),
                now=now,
            )
            for peer in settings.peers
            if peer.name != node
        }
        self.board = ViewBoard(
            node, {peer.name for peer in settings.peers if not peer.witness}, self.refusals, now=now
        )
        self.desk = Desk(self.facts)
        self.stream = ViewStream(node, self.links, self.board, first=voters, hint=lambda: self.hint, now=now)
        self.hint = ""
        self.greeter = Greeter(
            settings.name, self.links, self.board, self.facts,
            round_seconds=round_seconds(len(settings.peers)) if greet_seconds is None else greet_seconds,
        )  # fmt: skip
        self.server = PeerServer(
            settings.name,
            host or next(peer.address for peer in settings.peers if peer.name == node),
            settings.port,
            desk=self.desk,
            board=self.board,
            links=self.links,
            security=security,
            refusals=self.refusals,
            now=now,
        )

    async def run(self) -> None:
        """Listens, follows the view and greets until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._serve())
            tasks.create_task(self.stream.run())
            tasks.create_task(self.greeter.run())

    async def close(self) -> None:
        """Stops listening and hangs up. ``run`` has been cancelled before."""
        await self.server.close()
        await close_all(list(self.links.values()))

    # -- what coordinators use

    async def elect(self, to: str, message: AnyMessage, timeout_seconds: float) -> list[AnyMessage]:
        """Sends a message to a voter; its answers.

        Raises:
            ClusterError: they do not come; the link says why.
        """
        return await self.links[to].elect(message, timeout_seconds)

    async def greet(self, names: Iterable[str], timeout_seconds: float = HELLO_SECONDS) -> set[str]:
        """Tells these peers the news and learns theirs; those that answered."""
        return await self.greeter.greet(names, timeout_seconds)

    async def reach(self, name: str, seconds: float) -> bool:
        """Whether this peer answers within that time; one that has just come up may need a second attempt."""
        end = time.monotonic() + seconds
        while name not in await self.greet([name], seconds):
            if time.monotonic() >= end:
                return False
            await asyncio.sleep(REACH_AGAIN_SECONDS)
        return True

    def uptime_seconds(self, name: str) -> float:
        """For how long this peer's kvtierd has run, as it last said; 0 when it never did."""
        facts = self.links[name].facts
        return facts.uptime_seconds if facts is not None else 0.0

    async def take_over(self, to: str, epoch: int, timeout_seconds: float) -> int:
        """Makes a peer the master after this one; the new epoch.

        Raises:
            ClusterError: it refuses, or cannot be reached.
        """
        return await self.links[to].take_over(epoch, timeout_seconds)

    async def prepare(self, to: str, epoch: int, seconds: float, timeout_seconds: float) -> None:
        """Has a peer start the MetaService that it will need as the next master; returns when it answers.

        Raises:
            ClusterError: it refuses, cannot be reached, or its MetaService does not come up.
        """
        await self.links[to].prepare(epoch, seconds, timeout_seconds)

    async def change_holders(
        self,
        to: str,
        epoch: int,
        token: str,
        reason: str,
        timeout_seconds: float,
        *,
        add_bytes: int = 0,
        remove_unit: str = "",
    ) -> tuple[str, int]:
        """Has a peer add a pool holder, or remove one that was added; its unit and its memory in bytes.

        Raises:
            ClusterError: it refuses, cannot be reached, or it did not work out there; then nothing has changed.
        """
        return await self.links[to].change_holders(
            epoch, token, reason, timeout_seconds, add_bytes=add_bytes, remove_unit=remove_unit
        )

    def set_hint(self, master: str) -> None:
        """Who is probably the master, before any view says so."""
        if master != self.hint:
            self.hint = master
            self.stream.look_again()

    def contact(self, name: str) -> PeerContact:
        """One peer, as its link sees it."""
        link = self.links[name]
        last = link.last_contact_seconds
        return PeerContact(
            name,
            name in self._voters,
            None if last is None else max(0.0, self._now() - last),
            link.problem or link.clock.problem(),
        )

    # -- what the daemon shows

    def facts(self) -> NodeFacts:
        """What this node says of itself now."""
        standing = self.standing
        return dataclasses.replace(
            self._facts(),
            node=self.node,
            role=standing.role,
            epoch=standing.epoch,
            master=standing.master,
            uptime_seconds=time.monotonic() - self._started_seconds,
        )

    def differences(self) -> dict[str, tuple[str, ...]]:
        """By peer: where it does not fit together with this node."""
        mine = self.facts()
        found = {
            name: differences(mine, link.facts) for name, link in self.links.items() if link.facts is not None
        }
        return {name: texts for name, texts in found.items() if texts}

    async def _serve(self) -> None:
        """A node whose address is not there yet (boot) tries until it is."""
        while not self._listening:
            try:
                await self.server.start()
            except ClusterError as error:
                if not self.problem:
                    _log.error(error.message, why=error.why, hint=error.hint)
                self.problem = error.message
                await asyncio.sleep(LISTEN_AGAIN_SECONDS)
            else:
                self.problem = ""
                self._listening = True
        await self.server.handshakes.run()
