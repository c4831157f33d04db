from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from kvtierd.plan.model import HttpProbe, LogProbe, TcpProbe
from kvtierd.units.probes import OK, ProbeResult, run_probe, run_probes

Serve = Callable[[bytes], Awaitable[str]]


async def never_logged(_: str) -> bool:
    return False


async def probe(url: str, timeout_seconds: float = 2.0, **fields: object) -> ProbeResult:
    spec = HttpProbe.model_validate({"url": url, **fields})
    return await run_probe(spec, timeout_seconds=timeout_seconds, has_logged=never_logged)


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Servers that read one request, answer with these bytes, and keep the connection open."""
    servers: list[asyncio.Server] = []
    requests: list[bytes] = []

    async def start(answer: bytes) -> str:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            requests.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(answer)
            await writer.drain()
            if b"connection: close" in answer.lower():
                writer.close()
                return
            await reader.read()
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        servers.append(server)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/health?x=1"

    start.requests = requests  # type: ignore[attr-defined]
    yield start
    for server in servers:
        server.close()


HEALTHY = b'HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n{"status":"ok"}'


async def test_http_reads_the_body_and_leaves_the_connection_open(serve: Serve) -> None:
    url = await serve(HEALTHY)
    begun = time.monotonic()
    assert await probe(url, body_contains='"status":"ok"') == OK
    assert time.monotonic() - begun < 1  # did not wait for the server to close
    request = serve.requests[0]  # type: ignore[attr-defined]
    assert request.startswith(b"GET /health?x=1 HTTP/1.1\r\n")
    assert b"connection:" not in request.lower()


async def test_http_wrong_status_and_body_are_named(serve: Serve) -> None:
    assert "answered 503 instead of 200" in (await probe(await serve(b"HTTP/1.1 503 Busy\r\n\r\n"))).reason
    result = await probe(await serve(HEALTHY), body_contains="service_ready")
    assert not result.ok
    assert "'service_ready'" in result.reason
    assert '{"status":"ok"}' in result.reason


async def test_http_status_can_be_another_one(serve: Serve) -> None:
    assert await probe(await serve(b"HTTP/1.1 204 No Content\r\n\r\n"), status=204) == OK


async def test_http_chunked_and_until_close(serve: Serve) -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nser\r\n4;x=y\r\nvice\r\n0\r\n\r\n"
    assert await probe(await serve(chunked), body_contains="service") == OK
    closing = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nservice"
    assert await probe(await serve(closing), body_contains="service") == OK


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 xyz\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nbody",
        b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\nConnection: close\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"\xff" * 5000,
    ],
)
async def test_http_nonsense_is_a_reason_not_an_exception(serve: Serve, answer: bytes) -> None:
    result = await probe(await serve(answer), timeout_seconds=0.3, body_contains="ok")
    assert not result.ok
    assert result.reason


async def test_http_endless_body_is_bounded(serve: Serve) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999\r\n\r\n" + b"x" * 300_000
    assert not (await probe(await serve(answer), body_contains="ok")).ok


async def test_a_silent_server_takes_the_limit_and_no_longer(serve: Serve) -> None:
    begun = time.monotonic()
    result = await probe(await serve(b""), timeout_seconds=0.2)
    assert 0.15 < time.monotonic() - begun < 1
    assert "did not answer within 0.2 s" in result.reason


@pytest.mark.parametrize(
    "url", ["https://127.0.0.1/", "nonsense", "http://", "http://127.0.0.1:99999/", "http://[::"]
)
async def test_bad_addresses_are_reasons(url: str) -> None:
    result = await probe(url)
    assert not result.ok
    assert result.reason


async def test_tcp() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert await run_probe(TcpProbe(port=port), timeout_seconds=1, has_logged=never_logged) == OK
    result = await run_probe(TcpProbe(port=port), timeout_seconds=1, has_logged=never_logged)
    assert f"127.0.0.1:{port}" in result.reason


async def test_log_asks_for_its_text() -> None:
    asked = []

    async def has_logged(text: str) -> bool:
        asked.append(text)
        return len(asked) > 1

    log = LogProbe(contains="Started MetaService")
    assert not (await run_probe(log, timeout_seconds=1, has_logged=has_logged)).ok
    assert (await run_probe(log, timeout_seconds=1, has_logged=has_logged)).ok
    assert asked == ["Started MetaService"] * 2


async def test_a_log_that_cannot_be_asked_is_a_reason() -> None:
    async def broken(_: str) -> bool:
        raise RuntimeError("no shim")

    result = await run_probe(LogProbe(contains="x"), timeout_seconds=1, has_logged=broken)
    assert result == ProbeResult(ok=False, reason="the log: RuntimeError: no shim")


async def test_all_probes_must_hold_and_the_first_failure_is_told(serve: Serve) -> None:
    good, bad = HttpProbe(url=await serve(HEALTHY)), HttpProbe(url=await serve(b"HTTP/1.1 500 X\r\n\r\n"))
    assert (await run_probes([good, good], timeout_seconds=1, has_logged=never_logged)).ok
    result = await run_probes([good, bad, LogProbe(contains="x")], timeout_seconds=1, has_logged=never_logged)
    assert "500" in result.reason


async def test_no_probes_is_a_success() -> None:
    assert await run_probes([], timeout_seconds=1, has_logged=never_logged) == OK
