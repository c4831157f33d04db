"""Opens connections to where the MetaService is: on this host, or through the endpoint of the node that is master.

Between nodes: mutual TLS, then hello and answer (see ``hop``), then the bytes as they are. Whether the other side is
still there is the kernel's business: ``TCP_USER_TIMEOUT`` and keep-alive give a hop up after ``hop_seconds``. That is
long on purpose. A network that is away for some seconds costs misses and no connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import Any, cast

from kvtierd.endpoint import names
from kvtierd.endpoint.certificates import Certificates, refusal_of
from kvtierd.endpoint.config import EndpointConfig
from kvtierd.endpoint.hop import ANSWER_BYTES, Answer, Hello, HopProtocolError, Port, Verdict
from kvtierd.endpoint.pump import Receiver
from kvtierd.endpoint.state import EndpointState
from kvtierd.endpoint.targets import Address, Peer, PeerTarget, Target
from kvtierd.errors import EndpointError

SHUTDOWN_SECONDS = 1.0
_TCP_RTO_MAX_MS = 44  # Linux 6.15; without it a link speaks again up to as long after a cut as the cut was
_RTO_MAX_MS = 1000
_ANY_NAME = "kvtierd"  # asyncio wants one; names are checked here and not by ssl


class NoRoute(OSError):  # noqa: N818
    """There is no master at present, as far as this endpoint was told."""


class HopError(OSError):
    """The master's endpoint cannot be reached or trusted. That says nothing about its MetaService."""


class HopRefused(HopError):  # noqa: N818
    """The master's endpoint answered no. ``answer`` has the verdict and its epoch."""

    def __init__(self, answer: Answer, peer: str) -> None:
        super().__init__(f"{peer}: {answer.reason}")
        self.answer = answer


class MetaGoneError(ConnectionRefusedError):
    """Nobody listens where the MetaService should be: said by the kernel, or by the master's endpoint."""


def tune(hop_socket: socket.socket, hop_seconds: float) -> None:
    """Makes a silent hop break after that time. What the kernel does not know is left out."""
    keep_alives = max(1, int(hop_seconds))
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, keep_alives),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(hop_seconds * 1000)),
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _RTO_MAX_MS),
    ):
        with contextlib.suppress(OSError):
            hop_socket.setsockopt(level, option, value)


class _Asker(Receiver):
    """The asking side until the answer is there."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.received = bytearray()
        self.lost = False
        self.transport = cast("asyncio.Transport", None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.received += data
        if len(self.received) >= ANSWER_BYTES and not self.answer.done():
            self.answer.set_result(bytes(self.received[:ANSWER_BYTES]))
            self.transport.pause_reading()  # until the connection has its owner

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if not self.answer.done():
            self.answer.set_exception(exc or ConnectionResetError("closed without an answer"))
            self.answer.exception()  # seen, even when nobody waits any more


class Dialer:
    """Opens connections along ``state.route``."""

    def __init__(
        self, config: EndpointConfig, state: EndpointState, certificates: Certificates | None
    ) -> None:
        self.config = config  # replaced when the list of peers is read again
        self._state = state
        self._certificates = certificates
        self.on_higher_epoch: Callable[[int], None] = lambda epoch: None
        self.last_refusal = ""

    async def open(
        self,
        port: Port,
        opener: Callable[[], asyncio.BaseProtocol],
        timeout_seconds: float,
        *,
        era: int = 0,
        joined: bool = False,
        question: bool = False,
    ) -> Answer | None:
        """Opens one connection; ``opener`` makes its protocol. What the master's endpoint said, ``None`` without a hop.

        ``era``, ``joined``, ``question``: see ``Hello``.

        Raises:
            OSError: ``MetaGoneError``, ``HopRefused``, ``HopError``, ``NoRoute``, ``TimeoutError``, or what the kernel said.
        """
        route = self._state.route
        if route is None:
            raise NoRoute("no master at present")
        async with asyncio.timeout(timeout_seconds):
            if isinstance(route, Target):
                await connect(route.meta if port is Port.META else route.config_store, opener)
                return None
            hello = Hello(
                port,
                self._state.epochs.told,
                self.config.cluster,
                self.config.node,
                era=era,
                joined=joined,
                question=question,
            )
            return await self._hop(route, hello, opener)

    async def _hop(
        self, route: PeerTarget, hello: Hello, opener: Callable[[], asyncio.BaseProtocol]
    ) -> Answer:
        peer = self.config.peer(route.peer)
        if peer is None:
            raise HopError(f"{route.peer} is not among the peers")
        asker = await self._reach(peer)
        handed_over = False
        try:
            answer = await self._ask(peer, asker, hello)
            if asker.lost:
                raise self._failed(peer, "closed behind its answer")
            protocol = opener()
            protocol.connection_made(asker.transport)
            asker.transport.set_protocol(protocol)
            rest = bytes(asker.received[ANSWER_BYTES:])
            if rest:
                cast("Receiver", protocol).data_received(rest)
            asker.transport.resume_reading()
            handed_over = True
        finally:
            if not handed_over:
                asker.transport.abort()
        self.last_refusal = ""
        return answer

    async def _reach(self, peer: Peer) -> _Asker:
        """A connection to the peer's endpoint, which is who it should be."""
        asker = _Asker()
        extra: dict[str, Any] = {}
        try:
            if self._certificates is not None:
                extra = {
                    "ssl": self._certificates.client(),
                    "server_hostname": _ANY_NAME,
                    "ssl_shutdown_timeout": SHUTDOWN_SECONDS,
                }
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: asker, peer.address.host, peer.address.port, **extra)
        except EndpointError as error:
            raise self._failed(peer, error.message) from None
        except TimeoutError:
            raise
        except OSError as error:
            why = refusal_of(error) if isinstance(error, ssl.SSLError) else error.strerror or str(error)
            raise self._failed(peer, why) from error
        tune(asker.transport.get_extra_info("socket"), self.config.hop_seconds)
        if self._certificates is not None:
            certificate = asker.transport.get_extra_info("ssl_object").getpeercert()
            if not names.speaks_for(names.dns_names(certificate), peer.name, self.config.cluster):
                asker.transport.abort()
                raise self._failed(peer, f"its certificate is not {peer.name}'s")
        return asker

    async def _ask(self, peer: Peer, asker: _Asker, hello: Hello) -> Answer:
        asker.transport.write(hello.encode())
        try:
            answer = Answer.decode(await asker.answer)
        except HopProtocolError as error:
            raise self._failed(peer, str(error)) from None
        except TimeoutError:
            raise
        except OSError as error:
            # With TLS 1.3 the other side looks at our certificate when our side of the handshake is over already.
            why = (
                refusal_of(error)
                if isinstance(error, ssl.SSLError)
                else "closed without an answer; its log says why"
            )
            raise self._failed(peer, why) from error
        if answer.verdict == Verdict.ACCEPTED:
            return answer
        self.last_refusal = answer.reason
        if answer.epoch > self._state.epochs.seen and answer.verdict == Verdict.STALE_EPOCH:
            self.on_higher_epoch(answer.epoch)
        if answer.verdict == Verdict.META_GONE:
            raise MetaGoneError(f"{peer.name} says that its MetaService is gone")
        raise HopRefused(answer, peer.name)

    def _failed(self, peer: Peer, why: str) -> HopError:
        return HopError(f"{peer.name} ({peer.address}): {why}")


async def connect(address: Address, opener: Callable[[], asyncio.BaseProtocol]) -> None:
    """A connection without a hop. Raises ``OSError``, ``MetaGoneError`` when nobody listens."""
    try:
        await asyncio.get_running_loop().create_connection(opener, address.host, address.port)
    except ConnectionRefusedError as error:
        raise MetaGoneError(f"{address}: {error.strerror or error}") from error
