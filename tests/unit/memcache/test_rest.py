"""MetaClient against a server that answers exactly the given bytes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvtierd.errors import MemcacheError
from kvtierd.http_get import MOST_BODY_BYTES, HttpError, http_get
from kvtierd.memcache.rest import MetaClient, fetch_text

FIXTURES = Path(__file__).parents[2] / "fixtures" / "memcache"


def http(body: bytes, status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: x\r\nContent-Length: {len(body)}\r\nConnection: keep-alive\r\n\r\n"
    return head.encode() + body


class Server:
    def __init__(self) -> None:
        self.answer: bytes | dict[str, bytes] = b""
        self.chunk_pause_seconds = 0.0
        self.hold_open = True
        self.requests: list[bytes] = []
        self.open_connections = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open_connections += 1
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                request = await reader.readuntil(b"\r\n\r\n")
                self.requests.append(request)
                answer = self.answer
                if isinstance(answer, dict):
                    answer = answer[request.split(b" ")[1].decode()]
                for start in (
                    range(0, len(answer), 65536) if not self.chunk_pause_seconds else range(len(answer))
                ):
                    step = 1 if self.chunk_pause_seconds else 65536
                    writer.write(answer[start : start + step])
                    await writer.drain()
                    await asyncio.sleep(self.chunk_pause_seconds)
                if self.hold_open:
                    await reader.read()
        finally:
            self.open_connections -= 1
            writer.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    fake = Server()
    listener = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    fake.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    yield fake
    listener.close()


async def test_recorded_answers_become_values(server: Server) -> None:
    server.answer = {
        "/health": http((FIXTURES / "health.json").read_bytes()),
        "/api/v1/capacity/usage": http((FIXTURES / "capacity-pfs.json").read_bytes()),
        "/api/v1/capacity/segment_remaining": http((FIXTURES / "segments-pfs.json").read_bytes()),
        "/api/v1/mf/cluster_status": http((FIXTURES / "cluster-status-pfs.json").read_bytes()),
        "/metrics": http((FIXTURES / "metrics.txt").read_bytes()),
        "/get_all_keys": http(b"a\nb\n"),
    }
    client = MetaClient(server.url)
    assert (await client.health()).ok
    state = await client.pool_state()
    assert state.capacity.dram.total_bytes == 64 * 1024**2
    assert state.segments[0].name == "rank-0-dram"
    assert state.cluster.roles() == {0: "provider", 1: "proxy"}
    assert "memcache_total_capacity_bytes" in await client.metrics_text()
    assert await client.keys() == ("a", "b")


async def test_the_request_avoids_what_makes_the_service_leave_the_body_out(server: Server) -> None:
    server.answer = http(b"x")
    await MetaClient(server.url).get("/livez")
    (request,) = server.requests
    assert request.startswith(b"GET /livez HTTP/1.1\r\n")
    assert b"close" not in request.lower()


async def test_no_connection_is_left_behind(server: Server) -> None:
    server.answer = http(b"x")
    for _ in range(3):
        await MetaClient(server.url).get("/livez")
    for _ in range(100):
        if server.open_connections == 0:
            break
        await asyncio.sleep(0.01)
    assert server.open_connections == 0


async def test_nothing_listens(server: Server) -> None:
    with pytest.raises(MemcacheError, match="cannot be reached: ") as caught:
        await MetaClient("http://127.0.0.1:1").health()
    assert caught.value.stable_code == "memcache.unreachable"


@pytest.mark.parametrize("pause_seconds", [0.0, 0.02], ids=["silent", "a byte at a time"])
async def test_the_deadline_covers_the_whole_call(server: Server, pause_seconds: float) -> None:
    server.answer = http(b"x" * 1000) if pause_seconds else b""
    server.chunk_pause_seconds = pause_seconds
    started = time.monotonic()
    with pytest.raises(MemcacheError, match=r"within 0\.2 s") as caught:
        await MetaClient(server.url, timeout_seconds=0.2).health()
    assert caught.value.stable_code == "memcache.timeout"
    assert time.monotonic() - started < 2


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x1b\x0f\x01\x00" * 8 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nbody without a length",
        b"HTTP/1.1 2x0 OK\r\nContent-Length: 1\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nabcde\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabcdef\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\n",
        f"HTTP/1.1 200 OK\r\nContent-Length: {MOST_BODY_BYTES + 1}\r\n\r\n".encode(),
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 10_000,
        http(b"", "404 Not Found"),
        http(b"not json"),
    ],
)
async def test_whatever_else_answers_is_an_error(server: Server, answer: bytes) -> None:
    server.answer, server.hold_open = answer, False
    with pytest.raises(MemcacheError) as caught:
        await MetaClient(server.url).health()
    assert caught.value.stable_code == "memcache.answer"


@pytest.mark.parametrize(
    "answer",
    [
        http(b"some text"),
        b"HTTP/1.1 200 OK\r\n\r\nsome text",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n4;x=y\r\nsome\r\n5\r\n text\r\n0\r\n\r\n",
    ],
    ids=["length", "end of connection", "chunks"],
)
async def test_all_ways_to_delimit_a_body(server: Server, answer: bytes) -> None:
    server.answer, server.hold_open = answer, False
    assert await fetch_text(f"{server.url}/metrics?x=1") == "some text"
    assert server.requests[0].startswith(b"GET /metrics?x=1 HTTP/1.1\r\n")


async def test_a_body_without_end_is_cut_off(server: Server) -> None:
    server.answer = b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 300_000
    with pytest.raises(HttpError) as caught:
        await http_get(server.url, most_body_bytes=100_000)
    assert caught.value.stable_code == "http.answer"
    assert "the limit is 100000" in caught.value.why


async def test_text_is_only_taken_from_a_200(server: Server) -> None:
    server.answer = http(b"no such page", "404 Not Found")
    assert await http_get(server.url) == (404, b"no such page")
    with pytest.raises(HttpError, match="status 404"):
        await fetch_text(server.url)


@pytest.mark.parametrize(
    "url",
    [
        "https://127.0.0.1:8000",
        "127.0.0.1:8000",
        "http://:8000",
        "http://h:99999",
        "http://h:1/a b",
        "http://h:1/\r\nX: y",
    ],
)
async def test_urls_that_cannot_work(url: str) -> None:
    with pytest.raises(MemcacheError) as caught:
        await MetaClient(url).health()
    assert caught.value.stable_code == "memcache.url"
