"""One bounded HTTP GET over asyncio streams, for metrics and health on the local host.

A small HTTP/1.1 reader instead of a library: importing aiohttp costs the daemon 8 to 14 MiB of its 80 MB for a few
GET requests a second, and http.client has no deadline for a whole call.

It never sends ``Connection: close``: memcache_hybrid 1.3.0 answers that, and HTTP/1.0, without the body. Each call
opens a connection and hangs up after the answer, since that service keeps idle ones for 60 s.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from typing import Any, ClassVar, NamedTuple
from urllib.parse import urlsplit

from kvtierd.errors import KvtierError

MOST_BODY_BYTES = 8 * 1024**2
MOST_HEAD_BYTES = 16 * 1024


class HttpError(KvtierError):
    """A GET that gave no HTTP answer.

    ``stable_code`` is ``http.url``, ``http.unreachable``, ``http.timeout``, ``http.tls`` (no certificate that
    fits) or ``http.answer`` (what came is no HTTP,
    incomplete or too long).
    """

    code: ClassVar[str] = "http"


class TlsFiles(NamedTuple):
    """For ``https://``: whom to believe, what to show, and the name that the other side's certificate must have."""

    ca: str
    cert: str
    key: str
    server_name: str


class HttpAnswer(NamedTuple):
    """Any answer, whatever its status."""

    status: int
    body: bytes


async def http_get(
    url: str,
    *,
    timeout_seconds: float = 2.0,
    most_body_bytes: int = MOST_BODY_BYTES,
    body_of_status: int | None = None,
    method: str = "GET",
    json_body: Any = None,
    bearer: str | None = None,
    tls: TlsFiles | None = None,
) -> HttpAnswer:
    """The answer to a GET (or to another ``method``, with ``json_body`` as its body) of an ``http://`` address.

    Args:
        url: ``http://HOST:PORT/PATH``, already quoted; ``https://`` with ``tls``, and only with it.
        timeout_seconds: The limit of the whole call, from connecting to the last byte.
        most_body_bytes: A longer body is an error.
        body_of_status: Read the body only of an answer with this status; ``None``: of any.
        bearer: A key for ``Authorization: Bearer``: letters, digits and ``._~+/=-``. It is in no error.

    Raises:
        HttpError: There was no answer; see its codes.
    """
    host, port, authority, path = _split(url, "https" if tls is not None else "http")
    secured: dict[str, Any] = {}
    if tls is not None:
        secured = {"ssl": _context(url, tls), "server_hostname": tls.server_name}
    try:
        async with asyncio.timeout(timeout_seconds):
            reader, writer = await asyncio.open_connection(host, port, limit=MOST_HEAD_BYTES, **secured)
            try:
                writer.write(_request(method, path, authority, json_body, bearer))
                await writer.drain()
                return await _read_answer(reader, most_body_bytes, body_of_status)
            finally:
                writer.transport.abort()
    except TimeoutError as error:
        raise HttpError(f"{url} did not answer within {timeout_seconds:g} s", code="http.timeout") from error
    except ssl.SSLError as error:
        raise HttpError(
            f"{url} and kvtierd do not accept each other's certificates",
            why=getattr(error, "verify_message", "") or error.reason or str(error),
            hint="kvtierctl certs show says whose they are and until when",
            code="http.tls",
        ) from error
    except OSError as error:
        raise HttpError(
            f"{url} cannot be reached: {error.strerror or error}", code="http.unreachable"
        ) from error
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
        raise HttpError(
            f"{url} did not answer in HTTP, or not completely", why=str(error), code="http.answer"
        ) from error


def _request(method: str, path: str, authority: str, json_body: Any, bearer: str | None) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: {authority}\r\nAccept: */*\r\n"
    if bearer is not None:
        head += f"Authorization: Bearer {bearer}\r\n"
    if json_body is None and method == "GET":
        return f"{head}\r\n".encode("ascii")
    body = b"" if json_body is None else json.dumps(json_body).encode()
    return (
        f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode("ascii") + body
    )


async def fetch_text(url: str, *, timeout_seconds: float = 2.0) -> str:
    """The body of a 200 answer as text, undecodable bytes replaced: for metrics.

    Raises:
        HttpError: No answer, or another status (``http.status``).
    """
    answer = await http_get(url, timeout_seconds=timeout_seconds)
    if answer.status != 200:
        raise HttpError(f"{url} answered with status {answer.status}", code="http.status")
    return answer.body.decode(errors="replace")


def _context(url: str, tls: TlsFiles) -> ssl.SSLContext:
    """Made anew for each call, so that renewed certificates count; a few milliseconds, on loopback, every 2 s."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_verify_locations(tls.ca)
        context.load_cert_chain(tls.cert, tls.key)
    except (OSError, ssl.SSLError) as error:
        raise HttpError(
            f"{url} cannot be asked: a certificate cannot be used",
            why=f"one of {tls.ca}, {tls.cert} and {tls.key}: {error.strerror or error}",
            hint="kvtierctl certs makes them; their places are in [cluster] tls",
            code="http.tls",
        ) from error
    return context


def _split(url: str, scheme: str) -> tuple[str, int, str, str]:
    """(host, port, authority, path and query) of an address. Raises HttpError."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:  # a port that is no number, or too large
        host = port = None
    if (
        not url.startswith(f"{scheme}://")
        or not host
        or not url.isascii()
        or not url.isprintable()
        or " " in url
    ):
        raise HttpError(
            f"{url!r} is not an address to ask",
            hint=f"write it as {scheme}://HOST:PORT/PATH",
            code="http.url",
        )
    return (
        host,
        port or (443 if scheme == "https" else 80),
        parts.netloc,
        (parts.path or "/") + (f"?{parts.query}" if parts.query else ""),
    )


async def _read_answer(
    reader: asyncio.StreamReader, most_body_bytes: int, body_of_status: int | None
) -> HttpAnswer:
    head = await reader.readuntil(b"\r\n\r\n")
    status_line, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    version, _, rest = status_line.partition(" ")
    code = rest[:3]
    if not version.startswith("HTTP/1.") or not (code.isascii() and code.isdigit()):
        raise ValueError(f"not an HTTP answer: {status_line[:80]!r}")
    if body_of_status is not None and int(code) != body_of_status:
        return HttpAnswer(int(code), b"")
    fields = [
        (name.strip().lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)
    ]
    if any(name == "transfer-encoding" and value.lower() == "chunked" for name, value in fields):
        return HttpAnswer(int(code), await _read_chunks(reader, most_body_bytes))
    lengths = {value for name, value in fields if name == "content-length"}
    if not lengths:
        return HttpAnswer(int(code), await _read_to_end(reader, most_body_bytes))
    length = lengths.pop()
    if lengths or not (length.isascii() and length.isdigit()):
        raise ValueError(f"Content-Length is {length[:40]!r}")
    _check_length(int(length), most_body_bytes)
    return HttpAnswer(int(code), await reader.readexactly(int(length)))


async def _read_chunks(reader: asyncio.StreamReader, most_body_bytes: int) -> bytes:
    body = bytearray()
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line.split(b";")[0], 16)
        if size < 0:
            raise ValueError("a chunk has a negative size")
        _check_length(len(body) + size, most_body_bytes)
        if size == 0:
            return bytes(body)  # trailers are of no interest, and the connection is not used again
        body += await reader.readexactly(size)
        if await reader.readexactly(2) != b"\r\n":
            raise ValueError("a chunk is longer than its size")


async def _read_to_end(reader: asyncio.StreamReader, most_body_bytes: int) -> bytes:
    body = bytearray()
    while block := await reader.read(65536):
        body += block
        _check_length(len(body), most_body_bytes)
    return bytes(body)


def _check_length(length: int, most_body_bytes: int) -> None:
    if length > most_body_bytes:
        raise ValueError(f"the body has {length} bytes or more; the limit is {most_body_bytes}")
