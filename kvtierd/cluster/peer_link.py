"""One peer as this node reaches it: one channel, and what is known from talking through it."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, TypeVar, cast

import grpc

from kvtierd.cluster.clock import boottime_seconds
from kvtierd.cluster.election_messages import AnyMessage
from kvtierd.cluster.hello import ClockOffset, NodeFacts
from kvtierd.cluster.peer_events import events_from_wire
from kvtierd.cluster.peer_security import PeerSecurity
from kvtierd.cluster.peer_wire import (
    KEEPALIVE_SECONDS,
    MAX_TEXT_CHARS,
    SENDER_KEY,
    channel_options,
    election_from_wire,
    election_to_wire,
    epoch,
    facts_from_wire,
    malformed,
    seconds,
    text,
    view_from_wire,
)
from kvtierd.cluster.refusals import Refusals
from kvtierd.cluster.standing import ClusterView
from kvtierd.cluster.v1 import peers_pb2 as pb
from kvtierd.cluster.v1 import peers_pb2_grpc
from kvtierd.errors import ClusterError
from kvtierd.events import Event

MOST_ANSWERS = 16  # to one election message
Reply = TypeVar("Reply")


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """A view as a peer sent it; ``view`` is ``None`` when it knows of no master."""

    view: ClusterView | None
    revision: int
    age_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Greeting:
    """A peer's answer to a hello."""

    facts: NodeFacts
    offer: Offer


class PeerLink:
    """Calls to one peer. Every call has a deadline; the channel is opened with the first one.

    Args:
        node: This node.
        name: The peer, as the settings name it.
        longest_backoff_seconds: Between attempts to connect; short for voters, on whom an election waits.
        keepalive_seconds: Between pings, while a call is under way.

    Attributes:
        problem: Why the last call failed, in words; "" when it did not.
        last_contact_seconds: When it last answered or called, of CLOCK_BOOTTIME; ``None``: never.
        facts_at_seconds: When it last said what it is.
        facts: What it last said of itself.
        calls: How many calls went out, and came back well or not, by method.
    """

    def __init__(
        self,
        node: str,
        cluster: str,
        name: str,
        security: PeerSecurity,
        refusals: Refusals,
        *,
        longest_backoff_seconds: float = 5.0,
        keepalive_seconds: float = KEEPALIVE_SECONDS,
        now: Callable[[], float] = boottime_seconds,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.name = name
        self.problem = ""
        self.last_contact_seconds: float | None = None
        self.facts_at_seconds: float | None = None
        self.facts: NodeFacts | None = None
        self.clock = ClockOffset()
        self.calls: Counter[str] = Counter()
        self._node = node
        self._cluster = cluster
        self._security = security
        self._refusals = refusals
        self._now = now
        self._wall = wall
        self._channel: grpc.aio.Channel | None = None
        self._methods: Any = None
        self._generation = -1
        self._longest_backoff_seconds = longest_backoff_seconds
        self._keepalive_seconds = keepalive_seconds
        self._metadata = ((SENDER_KEY, node),)

    def met(self, facts: NodeFacts | None = None) -> None:
        """It has answered, or called here."""
        self.last_contact_seconds = self._now()
        if facts is not None:
            self.facts, self.facts_at_seconds = facts, self._now()

    # -- calls; all raise ClusterError: cluster.unreachable, cluster.refused, cluster.malformed

    async def elect(self, message: AnyMessage, timeout_seconds: float) -> list[AnyMessage]:
        """Sends an election message; the answers, all from this peer."""
        reply = await self._call("Elect", election_to_wire(message), pb.ElectionReply, timeout_seconds)
        if len(reply.answers) > MOST_ANSWERS:
            raise self._bad(malformed(f"{len(reply.answers)} answers"))
        answers = [self._read(election_from_wire, answer) for answer in reply.answers]
        for answer in answers:
            if answer.sender != self.name:
                raise self._bad(malformed(f"an answer that says it is from {answer.sender}"))
        return answers

    async def hello(self, request: pb.HelloRequest, timeout_seconds: float) -> Greeting:
        """Tells the peer about this node and learns about it, its clock included."""
        asked, started = self._wall(), time.monotonic()
        reply = await self._call("Hello", request, pb.HelloReply, timeout_seconds)
        elapsed = time.monotonic() - started
        greeting = self._read(_greeting, reply)
        if greeting.facts.node != self.name:
            raise self._bad(malformed(f"it says it is {greeting.facts.node}"))
        self.met(greeting.facts)
        self.clock.add(asked, reply.received_unix_seconds, reply.sent_unix_seconds, elapsed)
        return greeting

    async def take_over(self, under_epoch: int, timeout_seconds: float) -> int:
        """Makes the peer the master after this node; the new epoch, which it has on disk."""
        request = pb.TakeOverRequest(cluster=self._cluster, sender=self._node, epoch=under_epoch)
        reply = await self._call("TakeOver", request, pb.TakeOverReply, timeout_seconds)
        if reply.epoch == 0:
            raise _refused(reply)
        return self._read(lambda r: epoch("epoch", r.epoch), reply)

    async def prepare(self, under_epoch: int, seconds: float, timeout_seconds: float) -> None:
        """Has the peer start a MetaService that nobody uses yet; returns when it answers."""
        request = pb.PrepareRequest(
            cluster=self._cluster, sender=self._node, epoch=under_epoch, seconds=seconds
        )
        reply = await self._call("Prepare", request, pb.PrepareReply, timeout_seconds)
        if reply.code:
            raise _refused(reply)

    async def change_holders(
        self,
        under_epoch: int,
        token: str,
        reason: str,
        timeout_seconds: float,
        *,
        add_bytes: int = 0,
        remove_unit: str = "",
    ) -> tuple[str, int]:
        """Has the peer add a pool holder, or remove one; its unit and its memory in bytes, when that is done."""
        request = pb.ChangeHoldersRequest(
            cluster=self._cluster,
            sender=self._node,
            epoch=under_epoch,
            token=token,
            reason=reason[:MAX_TEXT_CHARS],
        )
        if remove_unit:
            request.remove_unit = remove_unit
        else:
            request.add_bytes = add_bytes
        reply = await self._call("ChangeHolders", request, pb.ChangeHoldersReply, timeout_seconds)
        if reply.code:
            raise _refused(reply)
        return self._read(lambda r: (text("unit", r.unit), int(r.memory_bytes)), reply)

    async def events(self, last: int, after_id: int, timeout_seconds: float) -> list[Event]:
        """What happened there, oldest first."""
        request = pb.PeerEventsRequest(cluster=self._cluster, sender=self._node, last=last, after_id=after_id)
        reply = await self._call("Events", request, pb.PeerEventsReply, timeout_seconds)
        return self._read(events_from_wire, reply)

    async def watch(self, timeout_seconds: float) -> AsyncGenerator[Offer]:
        """The peer's views, newest first and then each change; ends with an error when the time is up at the latest.

        Close it (``aclosing``) to hang up.
        """
        request = pb.WatchRequest(cluster=self._cluster, sender=self._node)
        call = (await self._stub()).WatchView(request, timeout=timeout_seconds, metadata=self._metadata)
        self.calls["WatchView"] += 1
        try:
            async for view in call:
                self.met()
                self.problem = ""
                if view.cluster != self._cluster:
                    raise self._bad(malformed(f"a view of cluster {view.cluster[:40]!r}"))
                yield self._read(_offer, view)
        except grpc.aio.AioRpcError as error:
            raise self._failed("WatchView", error, timeout_seconds) from None
        finally:
            call.cancel()

    async def close(self) -> None:
        """Hangs up; the next call connects again (with new certificates, if they have been renewed)."""
        channel, self._channel, self._methods = self._channel, None, None
        if channel is not None:
            await channel.close(None)

    # -- inside

    async def _stub(self) -> Any:
        generation = self._security.generation
        if self._methods is None or generation != self._generation:
            await self.close()  # a channel keeps the certificate that it began with
            options = channel_options(
                longest_backoff_seconds=self._longest_backoff_seconds,
                keepalive_seconds=self._keepalive_seconds,
            )
            try:
                self._channel = self._security.channel(self.name, options=options)
            except ClusterError as error:
                self.problem = error.message
                self._refusals.note(self.name, "own-certificate", error.message, what="peer not called")
                raise
            self._methods = peers_pb2_grpc.PeersStub(self._channel)  # type: ignore[no-untyped-call]
            self._generation = generation
        return self._methods

    async def _call(self, method: str, request: Any, reply: type[Reply], timeout_seconds: float) -> Reply:
        self.calls[method] += 1
        methods = await self._stub()
        try:
            answer = await getattr(methods, method)(request, timeout=timeout_seconds, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise self._failed(method, error, timeout_seconds) from None
        self.met()
        self.problem = ""
        return cast("Reply", answer)

    def _read(self, read: Callable[[Any], Reply], wire: Any) -> Reply:
        try:
            return read(wire)
        except ClusterError as error:
            raise self._bad(error) from None

    def _bad(self, error: ClusterError) -> ClusterError:
        self.problem = error.message
        self.calls["malformed"] += 1
        self._refusals.note(self.name, "malformed-answer", error.message, what="answer refused")
        return error

    def _failed(self, method: str, error: grpc.aio.AioRpcError, timeout_seconds: float) -> ClusterError:
        code, cause, why = explain(error, timeout_seconds)
        self.calls[f"{method} failed"] += 1
        if code == "cluster.refused":
            self.met()
        if not (method == "WatchView" and cause == "timeout"):  # streams are opened anew from time to time
            self.problem = why
            self._refusals.note(self.name, f"call-{cause}", why, what="call to a peer failed")
        return ClusterError(
            f"{self.name} " + ("refuses the call" if code == "cluster.refused" else "cannot be reached"),
            why=why,
            hint="see kvtierctl peers there and here",
            code=code,
        )


_REFUSED = {
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
}


def explain(error: grpc.aio.AioRpcError, timeout_seconds: float) -> tuple[str, str, str]:
    """A failed call as (code of ours, cause in a word, why in words)."""
    status, details = error.code(), (error.details() or "").strip()
    if status == grpc.StatusCode.DEADLINE_EXCEEDED:
        return "cluster.unreachable", "timeout", f"no answer within {timeout_seconds:g} s"
    if status in _REFUSED:
        return "cluster.refused", "refused", details or status.name
    low = details.lower()
    if status == grpc.StatusCode.CANCELLED:
        return "cluster.unreachable", "down", "it has ended the call"
    for sign, cause, why in _SIGNS:
        if sign in low:
            return "cluster.unreachable", cause, why
    return "cluster.unreachable", "failed", details.rsplit("last error:", 1)[-1].strip() or status.name


# gRPC gives what went wrong as text only.
_SIGNS: Sequence[tuple[str, str, str]] = (
    ("certificate has expired", "tls", "its certificate has expired, or the clock here is wrong"),
    ("certificate is not yet valid", "tls", "its certificate is not valid yet, or the clock here is wrong"),
    ("hostname verification", "tls", "its certificate is another node's"),
    ("certificate_verify_failed", "tls", "its certificate is not signed by the cluster's CA"),
    ("connection refused", "down", "nothing listens there: kvtierd does not run, or uses another port"),
    ("cancelling all calls", "down", "it is shutting down"),
    ("no route to host", "network", "there is no route to it"),
    ("network is unreachable", "network", "there is no route to it"),
    ("ping timeout", "silent", "it has stopped answering"),
    ("ping_timeout", "silent", "it has stopped answering"),
    # With TLS 1.3 a server judges the client's certificate after the client has taken the handshake for done.
    (
        "socket closed",
        "hung-up",
        "it hung up: it was ended, or it does not accept this node's certificate",
    ),
)


def _refused(reply: pb.TakeOverReply | pb.PrepareReply | pb.ChangeHoldersReply) -> ClusterError:
    """Why the peer does not do what it was asked for, in its own words."""
    return ClusterError(
        text("problem", reply.problem), why=text("why", reply.why), hint=text("hint", reply.hint),
        code=text("code", reply.code or "cluster.refused"),
    )  # fmt: skip


def _offer(wire: pb.View) -> Offer:
    return Offer(view_from_wire(wire), wire.revision, wire.age_seconds)


def _greeting(wire: pb.HelloReply) -> Greeting:
    seconds("received", wire.received_unix_seconds)
    seconds("sent", wire.sent_unix_seconds)
    return Greeting(facts_from_wire(wire.facts), _offer(wire.view))


async def close_all(links: Sequence[PeerLink]) -> None:
    """Closes all channels; one that will not close is left."""
    for link in links:
        with contextlib.suppress(grpc.aio.UsageError):
            await link.close()
