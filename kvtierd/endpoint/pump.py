"""Moves bytes: asyncio protocols that pump between a client and a MetaService or its config store.

Transports and protocols instead of streams: two callbacks a frame, no task switch. Back-pressure goes both
ways: when one side cannot take more, reading from the other stops.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

from kvtierd.endpoint.clients import ClientProcess
from kvtierd.endpoint.greeting import StoreGreeting
from kvtierd.memcache import framing

EARLY_LIMIT_BYTES = 64 * 1024  # what a client may send before it is connected
WRITE_HIGH_BYTES = 1024 * 1024
GREETING_SETTLE_SECONDS = 0.02
GREETING_LIMIT_SECONDS = 1.0

_receive_buffer = memoryview(bytearray(256 * 1024))


class Receiver(asyncio.BufferedProtocol):
    """Receives into one buffer for all connections: it is emptied before anyone else can receive.

    A plain ``asyncio.Protocol`` allocates 256 KiB for every read.
    """

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return _receive_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """They are there."""
        self.data_received(bytes(_receive_buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """The bytes, to keep."""
        raise NotImplementedError


class ConnectionEvents(Protocol):
    """Whom a connection tells what happened to it."""

    def opened(self, connection: ClientConnection) -> None:
        """Accepted: start the door's work."""
        ...

    def gone(self, connection: ClientConnection) -> None:
        """Over, once, at the end."""
        ...

    def backend_lost(self) -> None:
        """The MetaService closed a connection, or was left because it is silent."""
        ...


class ClientConnection(Receiver):
    """An accepted connection: keeps early bytes until a backend is there, then is pumped.

    The base of both ports.
    """

    def __init__(self, events: ConnectionEvents) -> None:
        self._events = events
        self.transport = cast("asyncio.Transport", None)
        self.server: ServerConnection | None = None
        self.client: ClientProcess | None = None
        self.early = bytearray()
        self.early_arrived = asyncio.Event()
        self.ended = False
        self.gone = False
        self.write_paused = False
        self.reading = True

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accepted."""
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        self._events.opened(self)

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        if self.server is not None:
            self.server.write(data)
            return
        self.early += data
        self.early_arrived.set()
        self.regulate()

    def eof_received(self) -> bool:
        """The client sends no more: what it sent is passed on, then both sides close."""
        self.ended = True
        self.early_arrived.set()
        if self.server is not None:
            self.server.finish()
        return self.server is not None

    def connection_lost(self, exc: Exception | None) -> None:
        """Over."""
        self.ended = self.gone = True
        self.early_arrived.set()
        if self.server is not None:
            self.server.abort()
            self.server = None
        self._events.gone(self)

    def pause_writing(self) -> None:
        """The client reads slowly."""
        self.write_paused = True
        self.regulate()
        if self.server is not None:
            self.server.regulate()

    def resume_writing(self) -> None:
        """The client caught up."""
        self.write_paused = False
        self.regulate()
        if self.server is not None:
            self.server.regulate()

    # for the other side and the door

    def regulate(self) -> None:
        """Reads from the client or stops, as everything that must take its bytes can."""
        wanted = self.wants_bytes() and not self.transport.is_closing()
        if wanted and not self.reading:
            self.transport.resume_reading()
        elif not wanted and self.reading and not self.transport.is_closing():
            self.transport.pause_reading()
        self.reading = wanted

    def wants_bytes(self) -> bool:
        """Whether more bytes from the client have a place to go."""
        if self.server is None:
            return len(self.early) < EARLY_LIMIT_BYTES
        return not self.server.write_paused

    def attach(self, server: ServerConnection) -> None:
        """A backend is there: early bytes go first."""
        self.server = server
        if self.early:
            server.write(bytes(self.early))
            self.early.clear()
        if self.ended:
            server.finish()
        self.regulate()

    def server_data(self, data: bytes) -> None:
        """Bytes from the backend."""
        self.transport.write(data)

    def server_gone(self) -> None:
        """The backend closed."""
        self.server = None
        self._events.backend_lost()
        self.transport.close()

    def cut(self, *, farewell: bool = False) -> None:
        """Close, so that the client connects anew. ``farewell``: this endpoint will not be there."""
        if self.server is not None:
            self.server.abort()
        self.transport.close()


class ServerConnection(Receiver):
    """The connection to the MetaService (or its config store) that belongs to one client connection."""

    def __init__(self, owner: ClientConnection) -> None:
        self._owner = owner
        self.transport = cast("asyncio.Transport", None)
        self.write_paused = False
        self.reading = True
        self._handshake: asyncio.Future[bytes] | None = None
        self._greeting = bytearray()

    async def shake_hands(self, hello: bytes, timeout_seconds: float) -> bytes:
        """Sends the client's handshake; the server's two bytes, and whatever came with them.

        Raises:
            OSError: closed, or no answer in time (``TimeoutError``).
        """
        self._handshake = asyncio.get_running_loop().create_future()
        self.transport.write(hello)
        async with asyncio.timeout(timeout_seconds):
            return await self._handshake

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)

    def data_received(self, data: bytes) -> None:
        """Bytes from the backend."""
        if self._handshake is None:
            self._owner.server_data(data)
            return
        self._greeting += data
        if len(self._greeting) >= framing.SERVER_HANDSHAKE_BYTES and not self._handshake.done():
            self._handshake.set_result(bytes(self._greeting))
            self.transport.pause_reading()  # until the link is there
            self.reading = False

    def begin(self) -> None:
        """From now on bytes go to the owner."""
        self._handshake = None
        self.regulate()

    def connection_lost(self, exc: Exception | None) -> None:
        """The backend is gone."""
        if self._handshake is not None and not self._handshake.done():
            self._handshake.set_exception(exc if isinstance(exc, OSError) else ConnectionResetError("closed"))
        elif self._owner.server is self:
            self._owner.server_gone()

    def pause_writing(self) -> None:
        """The backend reads slowly."""
        self.write_paused = True
        self._owner.regulate()

    def resume_writing(self) -> None:
        """The backend caught up."""
        self.write_paused = False
        self._owner.regulate()

    def regulate(self) -> None:
        """Reads from the backend or stops, as the client can take its bytes."""
        wanted = not self._owner.write_paused
        if self.transport.is_closing() or wanted == self.reading:
            return
        self.reading = wanted
        if wanted:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()

    def write(self, data: bytes) -> None:
        """Bytes to the backend; dropped when it is gone, which ``connection_lost`` tells."""
        if not self.transport.is_closing():
            self.transport.write(data)

    def finish(self) -> None:
        """FIN behind everything written; over TLS, which knows no half-closed connections, the end."""
        if self.transport.is_closing():
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def abort(self) -> None:
        """Close at once."""
        self.transport.abort()


class StoreConnection(ClientConnection):
    """A client connection on the config-store port: a plain relay, but for the server's first bytes."""

    def __init__(self, events: ConnectionEvents) -> None:
        super().__init__(events)
        self._greeting: StoreGreeting | None = StoreGreeting()

    def attach(self, server: ServerConnection) -> None:
        """A backend is there."""
        super().attach(server)
        asyncio.get_running_loop().call_later(GREETING_LIMIT_SECONDS, self._greeting_over)

    def server_data(self, data: bytes) -> None:
        """Bytes from the config store."""
        greeting = self._greeting
        if greeting is None:
            super().server_data(data)
            return
        was_answered = greeting.answered
        now = greeting.feed(data)
        if now:
            self.transport.write(now)
        if greeting.answered and not was_answered:
            asyncio.get_running_loop().call_later(GREETING_SETTLE_SECONDS, self._greeting_over)

    def server_gone(self) -> None:
        """The config store closed: nothing is kept back any more."""
        self._greeting_over()
        super().server_gone()

    def _greeting_over(self) -> None:
        greeting, self._greeting = self._greeting, None
        rest = greeting.finish() if greeting is not None else b""
        if rest and not self.transport.is_closing():
            self.transport.write(rest)
