"""The server that the other nodes of the cluster talk to, with the standard health service beside it.

It trusts nobody further than needed: only nodes that the settings list and the certificate names get in, messages,
streams and calls are bounded, and a refusal is logged once per peer and cause.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NoReturn

import grpc
import structlog
from grpc_health.v1 import _async as health_async
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvtierd.cluster.clock import boottime_seconds
from kvtierd.cluster.election_messages import AnyMessage, Refusal
from kvtierd.cluster.handshakes import Handshakes
from kvtierd.cluster.hello import NodeFacts
from kvtierd.cluster.peer_events import events_to_wire
from kvtierd.cluster.peer_link import PeerLink
from kvtierd.cluster.peer_security import PeerSecurity
from kvtierd.cluster.peer_wire import (
    HEARTBEAT_SECONDS,
    MAX_MESSAGE_BYTES,
    SENDER_KEY,
    SERVER_OPTIONS,
    SERVICE,
    election_from_wire,
    election_to_wire,
    epoch,
    facts_from_wire,
    facts_to_wire,
    permitted,
    text,
    view_from_wire,
    view_to_wire,
)
from kvtierd.cluster.refusals import Refusals
from kvtierd.cluster.v1 import peers_pb2 as pb
from kvtierd.cluster.v1 import peers_pb2_grpc
from kvtierd.cluster.view_board import ViewBoard
from kvtierd.errors import ClusterError, KvtierError
from kvtierd.events import Event

SLOW_SECONDS = 5.0  # a watcher that has not taken a view by then is dropped
STREAMS_PER_PEER = (
    2  # the newest ones count: of a peer that connects again the old one may not have ended yet
)
CALLS_PER_SECOND = 50.0  # of one peer; an election makes a few
BURST_CALLS = 200.0
UNREAD_SECONDS = 2.0  # a call of which no message has come by then: too large, or cut off

Context = grpc.aio.ServicerContext[Any, Any]
_log = structlog.get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class HolderChange:
    """What a master wants of a node: one more pool holder, or one that was added away.

    Attributes:
        sender: The master, as it says, and by its certificate.
        epoch: Under which it is the master.
        token: A request that is repeated has the same.
        reason: Why, in words.
        add_bytes: The memory of the one to add; 0: none.
        remove_unit: The unit to remove; "": none.
    """

    sender: str
    epoch: int
    token: str
    reason: str
    add_bytes: int = 0
    remove_unit: str = ""


@dataclasses.dataclass(slots=True)
class Desk:
    """Who answers in this node; what is ``None`` is refused: this way of naming a master has no such thing."""

    facts: Callable[[], NodeFacts]
    elect: Callable[[AnyMessage], Awaitable[Sequence[AnyMessage]]] | None = None
    take_over: Callable[[str, int], Awaitable[int]] | None = None
    prepare: Callable[[str, int, float], Awaitable[None]] | None = None
    events: Callable[[], Sequence[Event]] = tuple
    change_holders: Callable[[HolderChange], Awaitable[tuple[str, int]]] | None = None


class _Allowance:
    """How many calls a peer may still make: so many at once, so many a second."""

    def __init__(self, now: float) -> None:
        self._left, self._at = BURST_CALLS, now

    def take(self, now: float) -> bool:
        self._left = min(BURST_CALLS, self._left + (now - self._at) * CALLS_PER_SECOND)
        self._at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class _Arrivals(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not subscriptable when it runs
    """Notices calls whose message never comes through: gRPC refuses a message that is too large before any of our code."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(details)
        if handler is None or not details.method.startswith(f"/{SERVICE}/"):
            return handler
        who = next((str(v) for k, v in details.invocation_metadata or () if k == SENDER_KEY), "(unknown)")[
            :64
        ]
        why = f"no message within {UNREAD_SECONDS:g} s: larger than {MAX_MESSAGE_BYTES} bytes, or cut off"
        waiting = asyncio.get_running_loop().call_later(
            UNREAD_SECONDS, self._refusals.note, who, "unreadable", why
        )
        read = handler.request_deserializer

        def arrived(data: bytes) -> Any:
            waiting.cancel()
            return read(data)

        return handler._replace(request_deserializer=arrived)


class _Servicer(peers_pb2_grpc.PeersServicer):
    """Translates between protobuf and the node."""

    def __init__(
        self,
        cluster: str,
        desk: Desk,
        board: ViewBoard,
        links: Mapping[str, PeerLink],
        security: PeerSecurity,
        refusals: Refusals,
        handshakes: Handshakes,
        now: Callable[[], float],
    ) -> None:
        self._cluster = cluster
        self._desk = desk
        self._board = board
        self._links = links
        self._security = security
        self._refusals = refusals
        self._handshakes = handshakes
        self._now = now
        self._allowances: dict[str, _Allowance] = {}
        self.streams: dict[str, list[asyncio.Event]] = {}

    async def Elect(self, request: pb.ElectionMessage, context: Context) -> pb.ElectionReply:  # noqa: N802
        # The cluster's name and the digest are the elector's business: it answers why it does not count this vote.
        peer = await self._admit(context, request.sender)
        if self._desk.elect is None:
            await self._refuse(context, peer, "no-elections", "this node takes no part in elections")
        try:
            answers = await self._desk.elect(election_from_wire(request))
        except ClusterError as error:
            await self._abort(context, peer, error)
        for answer in answers:
            if isinstance(answer, Refusal) and answer.reason in _WRONG:
                self._refusals.note(peer, answer.reason, _WRONG[answer.reason])
        return pb.ElectionReply(answers=[election_to_wire(answer) for answer in answers])

    async def Hello(self, request: pb.HelloRequest, context: Context) -> pb.HelloReply:  # noqa: N802
        received = time.time()
        peer = await self._admit(context, request.facts.node, request.cluster)
        try:
            facts, view = facts_from_wire(request.facts), view_from_wire(request.view)
        except ClusterError as error:
            await self._abort(context, peer, error)
        self._links[peer].met(facts)
        self._board.offer(view, request.view.revision, request.view.age_seconds, peer)
        return pb.HelloReply(
            facts=facts_to_wire(self._desk.facts()),
            view=self._view(),
            received_unix_seconds=received,
            sent_unix_seconds=time.time(),
        )

    async def TakeOver(self, request: pb.TakeOverRequest, context: Context) -> pb.TakeOverReply:  # noqa: N802
        peer = await self._admit(context, request.sender, request.cluster)
        if self._desk.take_over is None:
            await self._refuse(context, peer, "no-take-over", "this cluster's master is not named by hand")
        try:
            # A caller that hangs up must not leave the new epoch half taken.
            epoch = await asyncio.shield(asyncio.ensure_future(self._desk.take_over(peer, request.epoch)))
        except KvtierError as error:
            return pb.TakeOverReply(**_refusal(error))
        return pb.TakeOverReply(epoch=epoch)

    async def Prepare(self, request: pb.PrepareRequest, context: Context) -> pb.PrepareReply:  # noqa: N802
        peer = await self._admit(context, request.sender, request.cluster)
        if self._desk.prepare is None:
            await self._refuse(context, peer, "no-prepare", "this node cannot become the master")
        try:
            seconds = permitted("seconds", request.seconds)
        except ClusterError as error:
            await self._abort(context, peer, error)
        try:
            await self._desk.prepare(peer, request.epoch, seconds)
        except KvtierError as error:
            return pb.PrepareReply(**_refusal(error))
        return pb.PrepareReply()

    async def Events(self, request: pb.PeerEventsRequest, context: Context) -> pb.PeerEventsReply:  # noqa: N802
        await self._admit(context, request.sender, request.cluster)
        return events_to_wire(self._desk.events(), request.last, request.after_id)

    async def ChangeHolders(  # noqa: N802
        self, request: pb.ChangeHoldersRequest, context: Context
    ) -> pb.ChangeHoldersReply:
        peer = await self._admit(context, request.sender, request.cluster)
        if self._desk.change_holders is None:
            await self._refuse(context, peer, "no-holders", "this node holds nothing of the pool")
        try:
            change = HolderChange(
                peer,
                epoch("epoch", request.epoch),
                text("token", request.token),
                text("reason", request.reason),
                request.add_bytes,
                text("remove_unit", request.remove_unit),
            )
        except ClusterError as error:
            await self._abort(context, peer, error)
        try:
            # A caller that hangs up must not leave it half done.
            unit, memory_bytes = await asyncio.shield(
                asyncio.ensure_future(self._desk.change_holders(change))
            )
        except KvtierError as error:
            return pb.ChangeHoldersReply(**_refusal(error))
        return pb.ChangeHoldersReply(unit=unit, memory_bytes=memory_bytes)

    async def WatchView(self, request: pb.WatchRequest, context: Context) -> None:  # noqa: N802
        peer = await self._admit(context, request.sender, request.cluster)
        # Everybody's stream ends when the others' grow too many is no rule; each peer's own are bounded.
        over = asyncio.Event()
        mine = self.streams.setdefault(peer, [])
        mine.append(over)
        for older in mine[:-STREAMS_PER_PEER]:
            older.set()
        try:
            while not over.is_set():
                posted = self._board.posted
                try:
                    async with asyncio.timeout(SLOW_SECONDS):
                        await context.write(self._view())
                except TimeoutError:
                    self._refusals.note(
                        peer, "slow", f"it has not taken a view for {SLOW_SECONDS:g} s; its stream is ended"
                    )
                    return
                # Not all at the same moment: watchers that came at once would make a wave every few seconds.
                await self._board.changed(posted, HEARTBEAT_SECONDS * random.uniform(0.8, 1.0))
        finally:
            mine.remove(over)
            if not mine:
                self.streams.pop(peer, None)

    def _view(self) -> pb.View:
        board = self._board
        return view_to_wire(self._cluster, board.newest, board.posted.revision, board.age_seconds())

    # -- the door

    async def _admit(self, context: Context, claimed: str, cluster: str | None = None) -> str:
        """The caller's name, or the end of the call."""
        self._handshakes.arrived(context.peer())
        try:
            peer = self._security.identify(context.auth_context(), claimed)
        except ClusterError as error:
            # Not under the name that it claims, which may be an honest peer's.
            await self._refuse(
                context, _host(context.peer()), error.stable_code.split(".")[-1], error.message
            )
        if peer not in self._links:  # this node itself, for one
            await self._refuse(context, peer, "not-listed", f"{peer} is not another node of this cluster")
        if cluster is not None and cluster != self._cluster:
            await self._refuse(
                context, peer, "cluster-differs", f"this node belongs to cluster {self._cluster}"
            )
        now = self._now()
        if not self._allowances.setdefault(peer, _Allowance(now)).take(now):
            await self._refuse(
                context, peer, "too-many-calls", "too many calls", grpc.StatusCode.RESOURCE_EXHAUSTED
            )
        self._links[peer].met()
        return peer

    async def _refuse(
        self,
        context: Context,
        peer: str,
        cause: str,
        why: str,
        status: grpc.StatusCode = grpc.StatusCode.PERMISSION_DENIED,
    ) -> NoReturn:
        self._refusals.note(peer, cause, why)
        await context.abort(status, why)
        raise AssertionError  # abort always raises

    async def _abort(self, context: Context, peer: str, error: ClusterError) -> NoReturn:
        """What the call asked for is malformed, or not possible now."""
        if error.stable_code == "cluster.malformed":
            await self._refuse(context, peer, "malformed", error.message, grpc.StatusCode.INVALID_ARGUMENT)
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
        raise AssertionError  # abort always raises


_WRONG = {
    "digest-differs": "its list of voters, clock drift or kill margin is not the same as here",
    "cluster-differs": "it belongs to a cluster of another name",
    "not-a-voter": "it takes part in elections, but is not one of the voters here",
    "lease": "the length of its lease is out of range",
}


class _Health(health_async.HealthServicer):  # type: ignore[misc]  # it has no types
    """The standard service; whoever asks it has come to a call too."""

    def __init__(self, handshakes: Handshakes) -> None:
        super().__init__()
        self._handshakes = handshakes

    async def Check(self, request: Any, context: Context) -> Any:  # noqa: N802
        self._handshakes.arrived(context.peer())
        return await super().Check(request, context)

    async def Watch(self, request: Any, context: Context) -> None:  # noqa: N802
        self._handshakes.arrived(context.peer())
        await super().Watch(request, context)


def _refusal(error: KvtierError) -> dict[str, Any]:
    """The fields of a reply that says no."""
    return {"code": error.stable_code, "problem": error.message, "why": error.why, "hint": error.hint}


def _host(address: str) -> str:
    """Of a caller's address as gRPC writes it, the part that stays the same when it calls again."""
    return address.rpartition(":")[0] or address


class PeerServer:
    """Serves the other nodes until closed.

    Args:
        host, port: Where to listen; port 0 takes a free one.
        links: By name, all peers of the settings but this node: who may call, and where it is noted that they did.
    """

    def __init__(
        self,
        cluster: str,
        host: str,
        port: int,
        *,
        desk: Desk,
        board: ViewBoard,
        links: Mapping[str, PeerLink],
        security: PeerSecurity,
        refusals: Refusals,
        now: Callable[[], float] = boottime_seconds,
    ) -> None:
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._security = security
        self.handshakes = Handshakes(lambda: security.handshakes, refusals)
        self._servicer = _Servicer(cluster, desk, board, links, security, refusals, self.handshakes, now)
        self._server = grpc.aio.server(
            options=SERVER_OPTIONS,
            interceptors=(_Arrivals(refusals),),
            maximum_concurrent_rpcs=64 + (STREAMS_PER_PEER + 2) * len(links),
        )
        self._health = _Health(self.handshakes)
        self.port = port
        peers_pb2_grpc.add_PeersServicer_to_server(self._servicer, self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    @property
    def streams(self) -> int:
        """How many peers' streams are open."""
        return sum(len(streams) for streams in self._servicer.streams.values())

    async def start(self) -> None:
        """Listens.

        Raises:
            ClusterError: ``cluster.listen``, ``certs.*``.
        """
        self.port = self._security.add_port(self._server, self._address)
        await self._server.start()
        for service in ("", SERVICE):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)

    async def close(self, grace_seconds: float = 0.2) -> None:
        """Ends streams and stops listening."""
        with contextlib.suppress(grpc.aio.UsageError):
            await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_seconds)
