"""The master's side of a hop: takes links from other nodes' endpoints and relays them to the MetaService of this host.

Who comes in: a listed peer with a certificate of its own, of this cluster, with the epoch that this endpoint was told.
The master's mode holds for every node: requests on data from peers are held, answered as misses or passed on as those
of its own clients are, so that a quiesce or a purge does not depend on what other nodes have heard of it. So do the
master's closed doors: newcomers of any node wait until the master admits all.

Everything is bounded: connections that have not said who they are, links of one peer, the bytes and the time of a
hello.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

from kvtierd.endpoint import names
from kvtierd.endpoint.actions import LinkTimes, Mode
from kvtierd.endpoint.certificates import Certificates, refusal_of
from kvtierd.endpoint.clients import ClientProcess, Counters, Identity
from kvtierd.endpoint.config import EndpointConfig
from kvtierd.endpoint.dial import SHUTDOWN_SECONDS, connect, tune
from kvtierd.endpoint.door import Refused, read_handshake
from kvtierd.endpoint.hop import ALPN, HELLO_BYTES, Answer, Hello, HopProtocolError, Port, Verdict
from kvtierd.endpoint.identity import is_alive
from kvtierd.endpoint.link import Link
from kvtierd.endpoint.listeners import bind
from kvtierd.endpoint.peers import PeerRow, Refusals, row_dict
from kvtierd.endpoint.pump import ClientConnection, Receiver, ServerConnection
from kvtierd.endpoint.relay import MetaConnection
from kvtierd.endpoint.state import Admission, EndpointState
from kvtierd.endpoint.targets import Address, Target
from kvtierd.endpoint.watcher import BackendWatcher
from kvtierd.errors import EndpointError
from kvtierd.memcache import framing

_log = logging.getLogger(__name__)
MAX_UNKNOWN = 256  # connections that have not yet said who they are
MAX_UNKNOWN_PER_HOST = 128
ROOM_FOR_QUESTIONS = 8
LISTEN_AGAIN_SECONDS = 1.0
LOCAL_DIAL_SECONDS = 1.0
_NEVER_SECONDS = 1e9  # the node whose client waits decides what is silence


class _Refusal(Exception):  # noqa: N818
    """This connection is not let in. ``verdict`` is what the peer is told, if it may be told anything."""

    def __init__(self, reason: str, verdict: Verdict | None = None) -> None:
        super().__init__(reason)
        self.verdict = verdict


class _Doorstep(Receiver):
    """A connection that has not said who it is."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.transport = cast("asyncio.Transport", None)
        self.received = bytearray()
        self.news = asyncio.Event()
        self.connected = self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.connected = True

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.news.set()
        if len(self.received) >= HELLO_BYTES:
            self.transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.news.set()

    async def hello(self) -> Hello:
        """Waits for it. Raises ``_Refusal``."""
        while len(self.received) < HELLO_BYTES and not self.lost:
            if self.received and not self.received.startswith(b"kvth"[: len(self.received)]):
                raise _Refusal("not-hop")
            self.news.clear()
            await self.news.wait()
        if self.lost:
            raise _Refusal("hung-up")
        if len(self.received) > HELLO_BYTES:
            raise _Refusal("oversized")  # nothing may follow before the answer
        try:
            return Hello.decode(bytes(self.received))
        except HopProtocolError as error:
            reason = str(error)
            raise _Refusal(reason, Verdict.OTHER_VERSION if reason == "other-version" else None) from None


class InboundMeta(MetaConnection):
    """A peer's link on the meta port. The peer answers its client; here the link only ends."""

    row: PeerRow

    def server_gone(self) -> None:
        """The MetaService closed: what is in flight gets its errors, and then the peer is told."""
        super().server_gone()
        self.transport.close()

    def cut(self, *, farewell: bool = False) -> None:
        """Ends it at once, on both sides."""
        if self.link is None:
            super().cut()
        else:
            self.run(self.link.client_lost())


class InboundStore(ClientConnection):
    """A peer's link on the config-store port."""

    row: PeerRow

    def __init__(self, events: Any) -> None:
        super().__init__(events)
        self.counters = Counters()

    def data_received(self, data: bytes) -> None:
        """Bytes from the peer."""
        self.counters.bytes_from_client += len(data)
        super().data_received(data)

    def server_data(self, data: bytes) -> None:
        """Bytes from the config store."""
        self.counters.bytes_to_client += len(data)
        super().server_data(data)

    def eof_received(self) -> bool:
        """TLS has no half-closed connections: it is over."""
        super().eof_received()
        return False


class PeerGate:
    """Listens for peers and keeps their links.

    Args:
        config: the endpoint's; ``config`` is replaced when the list of peers is read again.
        state: the endpoint's.
        watcher: told when a link to the MetaService breaks.
        certificates: ``None`` with ``insecure``.
        saw_epoch: told of a higher epoch; returns when it is on disk and this endpoint has drawn the consequences.
    """

    def __init__(
        self,
        config: EndpointConfig,
        state: EndpointState,
        watcher: BackendWatcher,
        certificates: Certificates | None,
        saw_epoch: Callable[[int], Awaitable[None]],
    ) -> None:
        self.config = config
        self._state = state
        self._watcher = watcher
        self._certificates = certificates
        self._saw_epoch = saw_epoch
        self._times = LinkTimes(
            silence=_NEVER_SECONDS, registration_silence=_NEVER_SECONDS, hold=config.hold_seconds
        )
        self._rows: dict[str, PeerRow] = {}
        self._refusals = Refusals()
        self._listen_error = "" if config.peer_listen is None else "not tried yet"
        self._unknown: dict[_Doorstep, asyncio.Task[None]] = {}
        self.links: set[InboundMeta | InboundStore] = set()

    # -- life ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Takes links until it is cancelled."""
        if self.config.peer_listen is None:
            return
        loop = asyncio.get_running_loop()
        with await self._bind(self.config.peer_listen) as listener:
            while True:
                try:
                    accepted, address = await loop.sock_accept(listener)
                except OSError as error:  # no descriptors left, or the connection was gone already
                    _log.warning("cannot accept a link from a peer: %s", error)
                    await asyncio.sleep(LISTEN_AGAIN_SECONDS / 10)
                    continue
                self._arrived(accepted, str(address[0]))

    async def _bind(self, address: Address) -> socket.socket:
        """Tries again and again: the node's address may come late."""
        while True:
            try:
                listener = bind(address)
            except EndpointError as error:
                if self._listen_error != error.message:
                    _log.warning("no links from peers: %s", error.message)
                self._listen_error = error.message
                await asyncio.sleep(LISTEN_AGAIN_SECONDS)
            else:
                self._listen_error = ""
                _log.info("listening for peers on %s", address)
                return listener

    def close(self) -> None:
        """The links there are end."""
        for task in list(self._unknown.values()):
            task.cancel()
        self.drop()

    def drop(self, *, only: str | None = None) -> int:
        """Ends every link at once, or those of one peer. Returns how many."""
        going = [c for c in self.links if only in (None, c.row.name)]
        for connection in going:
            connection.cut()
        return len(going)

    def peers_changed(self, config: EndpointConfig) -> None:
        """The list was read again: who is not on it any more loses its links."""
        self.config = config
        for name in [name for name in self._rows if config.peer(name) is None]:
            self.drop(only=name)
            del self._rows[name]

    # -- the door --------------------------------------------------------------------------------

    def _arrived(self, accepted: socket.socket, host: str) -> None:
        doorstep = _Doorstep(host)
        same_host = sum(other.host == host for other in self._unknown)
        if len(self._unknown) >= MAX_UNKNOWN or same_host >= MAX_UNKNOWN_PER_HOST:
            self._refused("crowded", "", doorstep)
            accepted.close()
            return
        task = asyncio.create_task(self._let_in(accepted, doorstep))
        self._unknown[doorstep] = task
        task.add_done_callback(lambda _: self._unknown.pop(doorstep, None))

    async def _let_in(self, accepted: socket.socket, doorstep: _Doorstep) -> None:
        peer = ""
        try:
            async with asyncio.timeout(self.config.handshake_seconds):
                await self._secure(accepted, doorstep)
                hello = await doorstep.hello()
            peer = self._identify(doorstep, hello)
            await self._judge(hello)
            connection, server = await self._connect(doorstep, hello)
            if isinstance(connection, InboundMeta):
                await self._start_meta(connection, server)
        except _Refusal as refusal:
            self._refused(str(refusal), peer, doorstep)
            if refusal.verdict is not None and not doorstep.lost:
                seen = self._state.epochs.seen
                doorstep.transport.write(Answer(refusal.verdict, seen).encode())
            doorstep.transport.close()
        except BaseException as error:
            if doorstep.connected:
                doorstep.transport.abort()
            else:
                accepted.close()
            if isinstance(error, OSError | EndpointError):
                self._refused(
                    "no-tls" if isinstance(error, EndpointError) else refusal_of(error), peer, doorstep
                )
            elif isinstance(error, Exception):  # one peer's trouble must not be everyone's
                _log.exception("a link from a peer could not be let in")
            else:
                raise

    async def _secure(self, accepted: socket.socket, doorstep: _Doorstep) -> None:
        """TLS, with whoever it is. Raises ``OSError`` (``SSLError``), ``EndpointError`` without certificates."""
        extra: dict[str, Any] = {}
        if self._certificates is not None:
            extra = {
                "ssl": self._certificates.server(),
                "ssl_handshake_timeout": self.config.handshake_seconds,
                "ssl_shutdown_timeout": SHUTDOWN_SECONDS,
            }
        tune(accepted, self.config.hop_seconds)
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: doorstep, accepted, **extra)
        if self._certificates is not None:
            tls = doorstep.transport.get_extra_info("ssl_object")
            if tls.selected_alpn_protocol() != ALPN:
                raise _Refusal("not-hop")

    def _identify(self, doorstep: _Doorstep, hello: Hello) -> str:
        """The peer's name, when the hello, the list and the certificate agree."""
        if hello.cluster != self.config.cluster:
            raise _Refusal(Verdict.OTHER_CLUSTER.reason, Verdict.OTHER_CLUSTER)
        peer = self.config.peer(hello.node)
        if peer is None:
            raise _Refusal(Verdict.UNKNOWN_PEER.reason, Verdict.UNKNOWN_PEER)
        if self._certificates is not None:
            certificate = doorstep.transport.get_extra_info("ssl_object").getpeercert()
            if not names.speaks_for(names.dns_names(certificate), peer.name, self.config.cluster):
                raise _Refusal("wrong-name", Verdict.UNKNOWN_PEER)
        row = self._rows.setdefault(peer.name, PeerRow(peer.name, str(peer.address)))
        row.last_seen_unix_seconds = time.time()
        return peer.name

    async def _judge(self, hello: Hello) -> None:
        state = self._state
        if hello.epoch < state.epochs.seen:
            raise _refusal(Verdict.STALE_EPOCH)
        if hello.epoch > state.epochs.told:
            was_master = isinstance(state.target, Target)
            await self._saw_epoch(hello.epoch)
            raise _refusal(Verdict.DEPOSED if was_master else Verdict.NOT_MASTER)
        if not isinstance(state.route, Target):
            raise _refusal(Verdict.NOT_MASTER)
        if self._is_full(hello):
            raise _refusal(Verdict.TOO_MANY)
        if state.backend.process is not None and not is_alive(state.backend.process):
            self._watcher.doubt()  # with no link of its own this endpoint has not noticed
            raise _refusal(Verdict.META_SILENT)
        if not state.backend.reachable:
            raise _refusal(Verdict.META_GONE if state.backend.gone else Verdict.META_SILENT)
        if state.admission is not Admission.ALL and not (hello.joined or hello.question):
            raise _refusal(Verdict.NOT_ADMITTED)
        if hello.era and hello.era == state.backend.era:
            raise _refusal(Verdict.LATE_RETURN)

    def _is_full(self, hello: Hello) -> bool:
        most = self.config.max_peer_links + (ROOM_FOR_QUESTIONS if hello.question else 0)
        return self._rows[hello.node].links >= most

    async def _connect(
        self, doorstep: _Doorstep, hello: Hello
    ) -> tuple[InboundMeta | InboundStore, ServerConnection]:
        """Connects to the MetaService, says yes, and hands the connection over to its protocol."""
        state, route = self._state, self._state.route
        assert isinstance(route, Target)
        generation = state.generation
        connection: InboundMeta | InboundStore
        connection = InboundMeta(self) if hello.port is Port.META else InboundStore(self)
        server = ServerConnection(connection)
        try:
            async with asyncio.timeout(LOCAL_DIAL_SECONDS):
                await connect(route.meta if hello.port is Port.META else route.config_store, lambda: server)
        except OSError as error:
            self._watcher.doubt()
            gone = isinstance(error, ConnectionRefusedError)
            raise _refusal(Verdict.META_GONE if gone else Verdict.META_SILENT) from None
        if doorstep.lost or generation != state.generation or route != state.route:
            server.abort()
            raise _Refusal("hung-up") if doorstep.lost else _refusal(Verdict.NOT_MASTER)
        if self._is_full(hello):  # others came while this one was connected
            server.abort()
            raise _refusal(Verdict.TOO_MANY)
        row = self._rows[hello.node]
        row.links += 1
        row.links_total += 1
        connection.row = row
        connection.connection_made(doorstep.transport)
        doorstep.transport.set_protocol(connection)
        doorstep.transport.write(
            Answer(Verdict.ACCEPTED, state.epochs.told, state.backend.life, state.backend.era).encode()
        )
        doorstep.transport.resume_reading()
        self.links.add(connection)
        if isinstance(connection, InboundStore):
            connection.attach(server)
        return connection, server

    async def _start_meta(self, connection: InboundMeta, server: ServerConnection) -> None:
        """The handshake of the client behind the peer, then the link."""
        client = ClientProcess(Identity(address=f"peer {connection.row.name}"))
        now = time.monotonic
        try:
            try:
                handshake = await read_handshake(connection, self.config.handshake_seconds)
            except framing.FramingError as error:
                if self._state.link_mode is Mode.RECOVER:
                    raise _Refusal("plain-in-recover") from None  # what is not understood cannot be filtered
                link = Link.plain(client, now(), self._times, str(error))
                connection.start_link(link, server, b"")
                return
            greeting = await server.shake_hands(handshake, self.config.silence_seconds)
            if connection.gone:
                raise _Refusal("hung-up")
            if not greeting.startswith(framing.HANDSHAKE_ACCEPTED):
                connection.transport.write(greeting)
                raise _Refusal("meta-refused")
            link = Link(client, self._state.link_mode, now(), self._times)
            connection.start_link(link, server, greeting)
        except BaseException as error:
            server.abort()
            connection.transport.close()
            if isinstance(error, OSError):
                self._watcher.doubt()
            if isinstance(error, OSError | Refused):
                raise _Refusal("meta-silent" if isinstance(error, OSError) else "slow") from None
            raise

    def _refused(self, reason: str, peer: str, doorstep: _Doorstep) -> None:
        sender = peer or doorstep.host
        if peer in self._rows:
            self._rows[peer].refused[reason] += 1
        if self._refusals.count(reason, sender, time.monotonic()):
            _log.warning("refused a link from %s: %s (said once an hour)", sender, reason)

    # -- what connections tell -------------------------------------------------------------------

    def opened(self, connection: ClientConnection) -> None:
        """Accepted: all was done before."""

    def gone(self, connection: ClientConnection) -> None:
        """A link is over."""
        inbound = cast("InboundMeta | InboundStore", connection)
        if inbound in self.links:
            self.links.discard(inbound)
            inbound.row.ended(_counters(inbound))

    def backend_lost(self) -> None:
        """The MetaService closed a link."""
        self._watcher.doubt()

    def meta_links(self) -> list[tuple[MetaConnection, Link]]:
        """Links on the meta port, for mode, time and quiet."""
        return [(c, c.link) for c in self.links if isinstance(c, InboundMeta) and c.link is not None]

    # -- status ----------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """The ``inbound`` object of ``status``."""
        live: dict[str, list[Counters]] = collections.defaultdict(list)
        for connection in self.links:
            live[connection.row.name].append(_counters(connection))
        return {
            "listen": None if self.config.peer_listen is None else str(self.config.peer_listen),
            "listen_error": self._listen_error,
            "links": len(self.links),
            "refused": self._refusals.as_dict(),
            "peers": [row_dict(row, live[row.name]) for row in self._rows.values()],
        }


def _refusal(verdict: Verdict) -> _Refusal:
    return _Refusal(verdict.reason, verdict)


def _counters(connection: InboundMeta | InboundStore) -> Counters:
    if isinstance(connection, InboundStore):
        return connection.counters
    return connection.link.client.counters if connection.link is not None else Counters()
