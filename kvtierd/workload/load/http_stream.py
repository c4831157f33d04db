"""HTTP/1.1 for many streams at once: each piece of an answer is handed on the moment it is read.

A small client of our own on asyncio's protocols. A library that wakes a task for every piece costs twice the CPU time
(measured: docs/benchmarks.md), and the time at which a piece is seen is then the time at which the task ran.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import socket
import ssl
from collections.abc import Mapping
from typing import NamedTuple, Protocol, cast
from urllib.parse import urlsplit

from kvtierd.errors import WorkloadError

MOST_HEAD_BYTES = 64 * 1024
MOST_ERROR_BYTES = 64 * 1024


class HttpFaultError(WorkloadError):
    """A request without a whole answer. ``kind``: connection, tls, protocol, cut."""

    code = "load.http"

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message, code=f"load.{kind}")
        self.kind = kind


class Head(NamedTuple):
    """Status and headers (names in small letters) of an answer."""

    status: int
    headers: Mapping[str, str]

    @property
    def media_type(self) -> str:
        """``Content-Type`` without its parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()


class Sink(Protocol):
    """Takes an answer as it comes."""

    def on_head(self, head: Head) -> None:
        """Called once, before any data."""

    def on_data(self, data: bytes) -> None:
        """Called for each piece of the body, its transfer coding taken off."""


class Origin(NamedTuple):
    """The server's part of an address, and the path in front of ``/v1``."""

    scheme: str
    host: str
    port: int
    prefix: str

    @property
    def authority(self) -> str:
        """As in ``Host:``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """``http://HOST:PORT/PREFIX``."""
        return f"{self.scheme}://{self.authority}{self.prefix}"


def read_origin(url: str) -> Origin:
    """Where ``http[s]://HOST[:PORT][/PREFIX][/v1]`` is.

    Raises:
        WorkloadError: it is not such an address, or holds a user or a password.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:  # a port that is no number
        parts, host, port = urlsplit(""), None, None
    if parts.scheme not in {"http", "https"} or not host or not url.isascii():
        raise WorkloadError(
            f"{url!r} is not an address of a server", hint="write it as http://HOST:PORT", code="load.url"
        )
    if parts.username or parts.password or parts.query or parts.fragment:
        raise WorkloadError(
            "an address may hold neither a user, a password, nor a query",
            hint="a key is read from the environment or from a file (--api-key-file)",
            code="load.url",
        )
    prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return Origin(parts.scheme, host, port or (443 if parts.scheme == "https" else 80), prefix)


class HttpStreams:
    """Connections to one server, kept alive and used again."""

    def __init__(self, origin: Origin, *, headers: Mapping[str, str] | None = None) -> None:
        self.origin = origin
        self._headers = dict(headers or {})
        self._idle: collections.deque[_Connection] = collections.deque()
        self._tls = ssl.create_default_context() if origin.scheme == "https" else None

    async def ask(self, method: str, path: str, body: bytes, sink: Sink) -> None:
        """Sends one request and feeds the answer to ``sink``; returns with the answer's end.

        A connection kept from before may have been closed by the server just now; then it is done once more on a new one.

        Raises:
            HttpFaultError: no connection, no HTTP, or the answer was cut off.
            Exception: what ``sink`` raised.
        """
        request = self._request(method, path, body)
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                try:
                    await self._exchange(connection, request, sink)
                except _StaleError:
                    continue
                return
        await self._exchange(await self._connect(), request, sink)

    def close(self) -> None:
        """Hangs up everywhere."""
        while self._idle:
            self._idle.pop().abort()

    def _request(self, method: str, path: str, body: bytes) -> bytes:
        lines = [
            f"{method} {self.origin.prefix}{path} HTTP/1.1",
            f"Host: {self.origin.authority}",
            "Accept: text/event-stream, application/json",
            "Accept-Encoding: identity",
            *(f"{name}: {value}" for name, value in self._headers.items()),
        ]
        if method != "GET":
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        where = self.origin.authority
        try:
            _, connection = await loop.create_connection(
                _Connection, self.origin.host, self.origin.port, ssl=self._tls
            )
        except ssl.SSLError as error:
            raise HttpFaultError("tls", f"no TLS with {where}: {error.reason or error}") from error
        except OSError as error:
            raise HttpFaultError("connection", f"{where} cannot be reached: {_told(error)}") from error
        return connection

    async def _exchange(self, connection: _Connection, request: bytes, sink: Sink) -> None:
        try:
            await connection.exchange(request, sink)
        except BaseException:
            connection.abort()
            raise
        if connection.usable:
            self._idle.append(connection)
        else:
            connection.abort()


class _StaleError(Exception):
    """A kept connection ended before a byte of the answer came."""


class _Connection(asyncio.Protocol):
    """One connection: one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: _Answer | None = None
        self._done: asyncio.Future[None] | None = None
        self._used = False
        self._closed = False

    @property
    def usable(self) -> bool:
        """Another request may be sent on it."""
        return not self._closed and self._transport is not None and not self._transport.is_closing()

    async def exchange(self, request: bytes, sink: Sink) -> None:
        assert self._transport is not None
        again, self._used = self._used, True
        answer = self._answer = _Answer(sink)
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        except HttpFaultError as fault:
            if again and fault.kind in {"connection", "cut"} and not answer.begun:
                raise _StaleError from None
            raise
        finally:
            self._answer = self._done = None
        if not answer.keep_alive:
            self._closed = True

    def abort(self) -> None:
        self._closed = True
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's does not derive from asyncio's
        found = transport.get_extra_info("socket")
        if found is not None:
            with contextlib.suppress(OSError):
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._done is None or self._done.done():
            self._closed = True  # nobody asked: what it is cannot be known
            return
        try:
            if self._answer.feed(data):
                self._done.set_result(None)
        except Exception as error:  # noqa: BLE001 - handed to who waits for the answer
            self._done.set_exception(error)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._closed = True
        if self._answer is None or self._done is None or self._done.done():
            return
        if error is None and self._answer.ends_with_connection:
            self._done.set_result(None)
            return
        begun = self._answer.begun
        what = f": {_told(error)}" if isinstance(error, OSError) else ""
        self._done.set_exception(
            HttpFaultError("cut", f"the connection ended in the middle of the answer{what}")
            if begun
            else HttpFaultError("connection", f"the server hung up without an answer{what}")
        )


class _Answer:
    """Takes an answer apart: head, then body by length, by chunks, or up to the connection's end."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._rest = b""
        self._in_body = False
        self._chunked = False
        self._left: int | None = 0  # bytes of the body or of this chunk that are still to come; None: unknown
        self._chunk_end = False  # the CRLF behind a chunk is still to come
        self._trailer = False
        self.begun = False
        self.keep_alive = True

    @property
    def ends_with_connection(self) -> bool:
        """The body has no length of its own: the connection's end is its end."""
        return self._in_body and self._left is None

    def feed(self, data: bytes) -> bool:
        """True when the answer is complete."""
        self.begun = True
        if not self._in_body:
            return self._feed_head(data)
        if self._chunked:
            return self._feed_chunks(data)
        if self._left is None:
            self._sink.on_data(data)
            return False
        self._left -= len(data)
        if self._left < 0:
            self.keep_alive = False
            data = data[: self._left]
        if data:
            self._sink.on_data(data)
        return self._left <= 0

    def _feed_head(self, data: bytes) -> bool:
        self._rest += data
        head, found, body = self._rest.partition(b"\r\n\r\n")
        if not found:
            if len(self._rest) > MOST_HEAD_BYTES or not b"HTTP/1."[: len(self._rest)] == self._rest[:7]:
                raise HttpFaultError("protocol", f"the server does not speak HTTP/1.1: {self._rest[:60]!r}")
            return False
        status, headers = _read_head(head)
        self._rest = b""
        if 100 <= status < 200:  # 100 Continue and the like: the real head follows
            return self._feed_head(body)
        self._in_body = True
        self.keep_alive = "close" not in headers.get("connection", "").lower()
        length = headers.get("content-length")
        if "chunked" in headers.get("transfer-encoding", "").lower():
            self._chunked = True
        elif length is not None:
            if not (length.isascii() and length.isdigit()):
                raise HttpFaultError("protocol", f"Content-Length is {length[:40]!r}")
            self._left = int(length)
        elif status in {204, 304}:
            self._left = 0
        else:
            self._left, self.keep_alive = None, False
        self._sink.on_head(Head(status, headers))
        if self._left == 0 and not self._chunked:
            return True
        return self.feed(body) if body else False

    def _feed_chunks(self, data: bytes) -> bool:
        if self._rest:
            data, self._rest = self._rest + data, b""
        at, end = 0, len(data)
        while at < end:
            if self._left:
                piece = data[at : at + self._left]
                self._left -= len(piece)
                at += len(piece)
                self._chunk_end = not self._left
                self._sink.on_data(piece)
                continue
            line_end = data.find(b"\r\n", at)
            if line_end < 0:
                self._rest = data[at:]
                if len(self._rest) > MOST_HEAD_BYTES:
                    raise HttpFaultError("protocol", "a chunk's size has no end")
                return False
            line, at = data[at:line_end], line_end + 2
            if self._chunk_end:
                if line:
                    raise HttpFaultError("protocol", "a chunk is longer than its size")
                self._chunk_end = False
            elif self._trailer:
                if not line:
                    return True
            else:
                self._left = _chunk_size(line)
                self._trailer = self._left == 0
        return False


def _chunk_size(line: bytes) -> int:
    text = line.partition(b";")[0].strip()
    try:
        if not text.isalnum():
            raise ValueError
        return int(text, 16)
    except ValueError:
        raise HttpFaultError("protocol", f"a chunk's size is {text[:40]!r}") from None


def _read_head(head: bytes) -> tuple[int, dict[str, str]]:
    status_line, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = status_line.partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
        raise HttpFaultError("protocol", f"the server does not speak HTTP/1.1: {status_line[:60]!r}")
    fields = (line.partition(":") for line in lines)
    return int(rest[:3]), {name.strip().lower(): value.strip() for name, _, value in fields}


def _told(error: OSError) -> str:
    # asyncio's own text for several addresses repeats the address; the kernel's words are enough.
    return error.strerror or str(error) or type(error).__name__
