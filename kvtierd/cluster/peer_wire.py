"""What goes between nodes: limits, timings, and the way from values to protobuf and back.

Whoever sends is known by its certificate, but may be broken all the same: numbers out of range and texts without end
are refused here, so that nothing behind has to expect them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar, get_args

from kvtierd.cluster.election_messages import (
    AnyMessage,
    EpochAnswer,
    EpochQuery,
    Grant,
    Probe,
    Reason,
    Refusal,
    Release,
    Request,
    Willing,
)
from kvtierd.cluster.hello import EngineFacts, HostMemory, NodeFacts, OwnRank
from kvtierd.cluster.standing import ClusterView, PoolRank
from kvtierd.cluster.v1 import peers_pb2 as pb
from kvtierd.errors import ClusterError

SERVICE = "kvtierd.v1.Peers"
_T = TypeVar("_T")
SENDER_KEY = "kvtierd-node"  # metadata: who calls, for the record when the message itself cannot be read
MAX_MESSAGE_BYTES = 256 * 1024
MAX_TEXT_CHARS = 2048
MOST_RANKS = 1024  # the largest world_size
MOST_HOLDERS = 64  # added ones, of a node
MOST_ENGINES = 64  # of a node
MAX_EPOCH = 2**53
LONGEST_PERMIT_SECONDS = 60.0
KEEPALIVE_SECONDS = 1.0  # a dead peer is found within this and the next one
PING_TIMEOUT_SECONDS = 1.0
# In a large cluster a master is pinged by hundreds; there it may take two seconds longer.
LARGE_CLUSTER = 50
LARGE_CLUSTER_KEEPALIVE_SECONDS = 3.0
# Of a view stream on which nothing happens. Pings find dead hosts and frozen processes; this finds a kvtierd that hangs
# while its gRPC threads still answer pings, and says how old the view is.
HEARTBEAT_SECONDS = 20.0
SILENCE_SECONDS = 50.0  # after this the stream is given up


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


_BOTH: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 8 * 1024),
)
SERVER_OPTIONS: tuple[tuple[str, Any], ...] = (
    *_BOTH,
    ("grpc.so_reuseport", 0),  # or two daemons could share the port and each get half of the calls
    ("grpc.max_concurrent_streams", 16),  # a connection
    ("grpc.server_handshake_timeout_ms", 5000),
    # Clients ping often by our own choice; by default a server takes that for abuse and hangs up.
    ("grpc.http2.max_ping_strikes", 0),
    # Followers find a dead master, so a server need not be quick in finding dead followers.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.ping_timeout_ms", 5000),
    ("grpc.http2.max_pings_without_data", 0),
)


def channel_options(
    *, longest_backoff_seconds: float, keepalive_seconds: float
) -> tuple[tuple[str, Any], ...]:
    """For a channel to a peer; gRPC connects again by itself, after a time with jitter that grows up to the longest."""
    return (
        *_BOTH,
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.keepalive_time_ms", _milliseconds(keepalive_seconds)),
        ("grpc.keepalive_timeout_ms", _milliseconds(PING_TIMEOUT_SECONDS)),
        ("grpc.http2.ping_timeout_ms", _milliseconds(PING_TIMEOUT_SECONDS)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", 2000),  # and so long an attempt may take, TLS included
        ("grpc.max_reconnect_backoff_ms", _milliseconds(longest_backoff_seconds)),
        ("grpc.client_idle_timeout_ms", 60_000),
    )


def malformed(what: str) -> ClusterError:
    """A message that no kvtierd would send."""
    return ClusterError(f"a message from a peer is malformed: {what}", code="cluster.malformed")


# -- elections


def election_to_wire(message: AnyMessage) -> pb.ElectionMessage:
    """The protobuf form of a voter's message."""
    wire = pb.ElectionMessage(
        cluster=message.cluster,
        digest=message.digest,
        sender=message.sender,
        epoch=message.epoch,
        number=message.number,
    )
    if isinstance(message, Probe):
        wire.probe.incarnation, wire.probe.lease_seconds = message.incarnation, message.lease_seconds
    elif isinstance(message, Request):
        wire.request.incarnation, wire.request.lease_seconds = message.incarnation, message.lease_seconds
    elif isinstance(message, Grant):
        wire.grant.idle_seconds = message.idle_seconds
    elif isinstance(message, Refusal):
        wire.refusal.reason, wire.refusal.holder = message.reason, message.holder
        wire.refusal.remaining_seconds = message.remaining_seconds
    elif isinstance(message, Release):
        wire.release.incarnation, wire.release.successor = message.incarnation, message.successor
    elif isinstance(message, EpochAnswer):
        wire.epoch_answer.remembers = message.remembers
        wire.epoch_answer.promise_seconds = message.promise_seconds
    # A message that is all defaults would otherwise not say what it is.
    getattr(wire, _BODIES[type(message)]).SetInParent()
    return wire


_BODIES: dict[type, str] = {
    Probe: "probe",
    Willing: "willing",
    Request: "request",
    Grant: "grant",
    Refusal: "refusal",
    Release: "release",
    EpochQuery: "epoch_query",
    EpochAnswer: "epoch_answer",
}


def election_from_wire(wire: pb.ElectionMessage) -> AnyMessage:
    """A voter's message.

    Raises:
        ClusterError: ``cluster.malformed``.
    """
    base = (
        text("cluster", wire.cluster),
        text("digest", wire.digest),
        text("sender", wire.sender),
        epoch("epoch", wire.epoch),
        wire.number,
    )
    body = wire.WhichOneof("body")
    if body == "probe":
        return Probe(*base, wire.probe.incarnation, seconds("lease", wire.probe.lease_seconds))
    if body == "willing":
        return Willing(*base)
    if body == "request":
        return Request(*base, wire.request.incarnation, seconds("lease", wire.request.lease_seconds))
    if body == "grant":
        return Grant(*base, seconds("idle", wire.grant.idle_seconds))
    if body == "refusal":
        refusal = wire.refusal
        if refusal.reason not in get_args(Reason):
            raise malformed(f"{refusal.reason[:40]!r} is no reason")
        return Refusal(
            *base,
            refusal.reason,  # type: ignore[arg-type]  # one of them, see above
            text("holder", refusal.holder),
            seconds("remaining", refusal.remaining_seconds),
        )
    if body == "release":
        return Release(*base, wire.release.incarnation, text("successor", wire.release.successor))
    if body == "epoch_query":
        return EpochQuery(*base)
    if body == "epoch_answer":
        answer = wire.epoch_answer
        return EpochAnswer(*base, answer.remembers, seconds("promise", answer.promise_seconds))
    raise malformed("it says nothing")


# -- views


def view_to_wire(cluster: str, view: ClusterView | None, revision: int, age_seconds: float) -> pb.View:
    """The protobuf form of a view; without one, of "I know of no master"."""
    if view is None:
        return pb.View(cluster=cluster)
    return pb.View(
        cluster=cluster,
        epoch=view.epoch,
        master=view.master,
        address=view.address,
        meta_service_url=view.meta_service_url,
        config_store_url=view.config_store_url,
        since_unix_seconds=view.since_unix_seconds,
        why=view.why[:MAX_TEXT_CHARS],
        tier_state=view.tier_state,
        served_life=view.served_life,
        revision=revision,
        age_seconds=age_seconds,
        pool_ranks=[
            pb.PoolRank(rank=r.rank, role=r.role, active=r.active, memory_bytes=r.memory_bytes)
            for r in view.pool_ranks[:MOST_RANKS]
        ],
    )


def view_from_wire(wire: pb.View) -> ClusterView | None:
    """The view; ``None`` when the sender knows of no master. Its revision and age stay where they are.

    Raises:
        ClusterError: ``cluster.malformed``.
    """
    if wire.epoch == 0:
        return None
    seconds("age", wire.age_seconds)
    if len(wire.pool_ranks) > MOST_RANKS:
        raise malformed(f"a view with {len(wire.pool_ranks)} ranks")
    if not wire.master or wire.revision > 2**62:
        raise malformed("a view without a master, or with an impossible revision")
    return ClusterView(
        epoch=epoch("epoch", wire.epoch),
        master=text("master", wire.master),
        address=text("address", wire.address),
        meta_service_url=text("meta_service_url", wire.meta_service_url),
        config_store_url=text("config_store_url", wire.config_store_url),
        since_unix_seconds=seconds("since", wire.since_unix_seconds),
        why=text("why", wire.why),
        tier_state=text("tier_state", wire.tier_state),
        served_life=text("served_life", wire.served_life),
        pool_ranks=tuple(
            PoolRank(r.rank, text("role", r.role), r.active, r.memory_bytes) for r in wire.pool_ranks
        ),
    )


# -- facts


def facts_to_wire(facts: NodeFacts) -> pb.NodeFacts:
    """The protobuf form of what a node says of itself."""
    return pb.NodeFacts(
        node=facts.node,
        version=facts.version,
        memcache_version=facts.memcache_version,
        hash_seed=facts.hash_seed,
        world_size=facts.world_size,
        protocol=facts.protocol,
        settings_digest=facts.settings_digest,
        role=facts.role,
        epoch=facts.epoch,
        master=facts.master,
        uptime_seconds=facts.uptime_seconds,
        endpoint_life=facts.endpoint_life,
        survivors_missing=facts.survivors_missing,
        clean_epoch=facts.clean_epoch,
        memory=None if facts.memory is None else _memory_to_wire(facts.memory),
        ranks=[pb.OwnRank(rank=r.rank, unit=r.unit) for r in facts.ranks[:MOST_RANKS]],
        engines=[
            pb.EngineIdentity(
                unit=e.unit, group=e.group, hash_seed=e.hash_seed, model=e.model[:MAX_TEXT_CHARS],
                block_tokens=e.block_tokens,
            )
            for e in facts.engines[:MOST_ENGINES]
        ],
        busy_groups=facts.busy_groups[:MOST_ENGINES],
    )  # fmt: skip


def _memory_to_wire(memory: HostMemory) -> pb.HostMemory:
    return pb.HostMemory(
        available_bytes=memory.available_bytes,
        total_bytes=memory.total_bytes,
        headroom_bytes=memory.headroom_bytes,
        room_bytes=memory.room_bytes,
        holders=memory.holders[:MOST_HOLDERS],
    )


def facts_from_wire(wire: pb.NodeFacts) -> NodeFacts:
    """What a node says of itself.

    Raises:
        ClusterError: ``cluster.malformed``.
    """
    return NodeFacts(
        node=text("node", wire.node),
        version=text("version", wire.version),
        memcache_version=text("memcache_version", wire.memcache_version),
        hash_seed=text("hash_seed", wire.hash_seed),
        world_size=wire.world_size,
        protocol=text("protocol", wire.protocol),
        settings_digest=text("settings_digest", wire.settings_digest),
        role=text("role", wire.role),
        epoch=epoch("epoch", wire.epoch),
        master=text("master", wire.master),
        uptime_seconds=seconds("uptime", wire.uptime_seconds),
        endpoint_life=text("endpoint_life", wire.endpoint_life),
        survivors_missing=wire.survivors_missing,
        clean_epoch=epoch("clean_epoch", wire.clean_epoch),
        memory=_memory_from_wire(wire.memory) if wire.HasField("memory") else None,
        ranks=tuple(OwnRank(r.rank, text("unit", r.unit)) for r in few("ranks", wire.ranks, MOST_RANKS)),
        engines=tuple(
            EngineFacts(
                text("unit", e.unit),
                text("group", e.group),
                text("hash_seed", e.hash_seed) if e.HasField("hash_seed") else None,
                text("model", e.model),
                e.block_tokens if e.HasField("block_tokens") else None,
            )
            for e in few("engines", wire.engines, MOST_ENGINES)
        ),
        busy_groups=tuple(text("group", g) for g in few("busy groups", wire.busy_groups, MOST_ENGINES)),
    )


def _memory_from_wire(wire: pb.HostMemory) -> HostMemory:
    return HostMemory(
        wire.available_bytes,
        wire.total_bytes,
        wire.headroom_bytes,
        wire.room_bytes if wire.HasField("room_bytes") else None,
        tuple(text("holder", h) for h in few("holders", wire.holders, MOST_HOLDERS)),
    )


# -- checks


def text(what: str, value: str) -> str:
    """A text of sensible length that has no control characters in it: it may end up on a terminal."""
    if len(value) > MAX_TEXT_CHARS or not value.isprintable():
        raise malformed(f"{what} is too long, or not printable")
    return value


def few(what: str, values: Sequence[_T], most: int) -> Sequence[_T]:
    """No more than there can be."""
    if len(values) > most:
        raise malformed(f"{len(values)} {what}")
    return values


def seconds(what: str, value: float) -> float:
    """A time that is a number, and not negative."""
    if not math.isfinite(value) or value < 0:
        raise malformed(f"{what} of {value} seconds")
    return value


def epoch(what: str, value: int) -> int:
    """An epoch that leaves room for later ones."""
    if value > MAX_EPOCH:
        raise malformed(f"{what} {value}")
    return value


def permitted(what: str, value: float) -> float:
    """For how long something may go on by another node's word."""
    if not 0.0 < seconds(what, value) <= LONGEST_PERMIT_SECONDS:
        raise malformed(f"{what} = {value}")
    return value
