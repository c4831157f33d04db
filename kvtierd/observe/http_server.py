"""A small HTTP/1.1 server for a few read-only pages: bounded in clients, bytes and time.

Its own instead of a library's, as the reader in ``http_get`` is: the daemon has 80 MB, and a web framework takes 10 of them.
Only GET and HEAD of paths that it is given; a request with a body is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import ipaddress
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NamedTuple

import structlog

log = structlog.get_logger(__name__)

MOST_CLIENTS: Final = 32
MOST_HEAD_BYTES: Final = 8 * 1024
HEAD_SECONDS: Final = 5.0
IDLE_SECONDS: Final = 75.0  # longer than the usual minute between two scrapes
WRITE_SECONDS: Final = 10.0
_ALLOWED: Final = "GET, HEAD"


class Request(NamedTuple):
    """What a handler gets. ``headers`` by small name; of a name that comes twice, the last."""

    path: str
    headers: Mapping[str, str]


class Response(NamedTuple):
    """What a handler answers."""

    body: bytes
    content_type: str
    status: int = 200
    headers: Mapping[str, str] = {}


Handler = Callable[[Request], Response]


class _RefusedError(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


class HttpServer:
    """Serves ``pages`` (path -> handler) on one address.

    Args:
        pages: The handlers; they must not block. One that raises is answered with 500 and logged.
        local_only: Answer only requests whose ``Host`` is an address or ``localhost``: else any web page that a browser on
            this host shows could read them, by a name that its owner points to 127.0.0.1.

    ``refused`` counts what was not answered as asked for.
    """

    def __init__(self, pages: Mapping[str, Handler], *, local_only: bool) -> None:
        self.refused = 0
        self._pages = pages
        self._local_only = local_only
        self._server: asyncio.Server | None = None
        self._clients: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._idle: dict[asyncio.Task[None], None] = {}  # the longest idle first

    async def start(self, host: str, port: int, context: ssl.SSLContext | None = None) -> int:
        """Begins to listen; returns the port. Raises ``OSError``."""
        more: dict[str, float] = {} if context is None else {"ssl_handshake_timeout": HEAD_SECONDS}
        self._server = await asyncio.start_server(
            self._accept, host, port, limit=MOST_HEAD_BYTES, ssl=context, backlog=64, **more
        )
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stops listening and hangs up."""
        if self._server is not None:
            self._server.close()
        tasks = list(self._clients)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Awaitable[None] | None:
        if len(self._clients) >= MOST_CLIENTS and not self._drop_an_idle_one():
            self.refused += 1
            writer.transport.abort()
            return None
        task = asyncio.create_task(self._serve(reader, writer), name="exporter client")
        self._clients[task] = writer
        task.add_done_callback(self._gone)
        return None

    def _gone(self, task: asyncio.Task[None]) -> None:
        self._clients.pop(task).transport.abort()
        self._idle.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("exporter.client-failed", error=f"{type(error).__name__}: {error}")

    def _drop_an_idle_one(self) -> bool:
        oldest = next(iter(self._idle), None)
        if oldest is None:
            return False
        del self._idle[oldest]
        oldest.cancel()
        return True

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(TimeoutError, OSError, asyncio.IncompleteReadError):
            while True:
                keep = await self._answer_one(reader, writer)
                if not keep:
                    break
            await _end(writer)

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        try:
            head = await self._read_head(reader)
            method, request, keep = _parse(head)
            response = self._respond(request)
        except _RefusedError as refusal:
            self.refused += 1
            method, keep = "GET", False
            more = {"Allow": _ALLOWED} if refusal.status == http.HTTPStatus.METHOD_NOT_ALLOWED else {}
            response = Response(
                f"{refusal.text}\n".encode(), "text/plain; charset=utf-8", refusal.status, more
            )
        writer.write(_head_of(response, keep=keep))
        if method != "HEAD":
            writer.write(response.body)
        async with asyncio.timeout(WRITE_SECONDS):
            await writer.drain()
        return keep

    async def _read_head(self, reader: asyncio.StreamReader) -> bytes:
        me = asyncio.current_task()
        assert me is not None
        self._idle[me] = None
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                first = await reader.readexactly(1)
        finally:
            self._idle.pop(me, None)
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                return first + await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise _RefusedError(431, f"the request's head is longer than {MOST_HEAD_BYTES} bytes") from None

    def _respond(self, request: Request) -> Response:
        if self._local_only and not _is_local(request.headers.get("host")):
            raise _RefusedError(421, "ask by address, or as localhost")
        handler = self._pages.get(request.path)
        if handler is None:
            raise _RefusedError(404, "there is " + ", ".join(self._pages))
        try:
            return handler(request)
        except Exception:
            log.exception("exporter.page-failed", path=request.path)
            raise _RefusedError(500, "this page cannot be made; kvtierd's log says why") from None


def _parse(head: bytes) -> tuple[str, Request, bool]:
    """(method, request, whether the connection goes on) of a request's head. Raises ``_RefusedError``."""
    line, *lines = head[:-4].decode("latin-1").split("\r\n")
    parts = line.split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
        raise _RefusedError(400, "this is no HTTP/1 request")
    method, target, version = parts
    headers: dict[str, str] = {}
    for text in lines:
        name, colon, value = text.partition(":")
        if not colon or not name or name != name.strip():
            raise _RefusedError(400, "a header line is none")
        headers[name.lower()] = value.strip()
    if method not in {"GET", "HEAD"}:
        raise _RefusedError(405, "this is read-only")
    if "transfer-encoding" in headers or headers.get("content-length", "0") != "0":
        raise _RefusedError(413, "a request has no body here")
    wish = headers.get("connection", "").lower()
    keep = "close" not in wish and (version != "HTTP/1.0" or "keep-alive" in wish)
    return method, Request(target.partition("?")[0], headers), keep


def _head_of(response: Response, *, keep: bool) -> bytes:
    reason = http.HTTPStatus(response.status).phrase
    fields = {
        "Content-Type": response.content_type,
        "Content-Length": str(len(response.body)),
        "Connection": "keep-alive" if keep else "close",
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        **response.headers,
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {response.status} {reason}\r\n{lines}\r\n".encode("latin-1")


def _is_local(host: str | None) -> bool:
    """Whether a ``Host`` header is an address or localhost; a request without one comes from no browser."""
    if host is None:
        return True
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() and not host.endswith("]") else host
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


async def _end(writer: asyncio.StreamWriter) -> None:
    """Hangs up after what was written has gone out: an abort could overtake it."""
    with contextlib.suppress(TimeoutError, OSError):
        async with asyncio.timeout(HEAD_SECONDS):
            writer.close()
            await writer.wait_closed()
