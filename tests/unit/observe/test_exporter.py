import asyncio
import contextlib
import json
import re
import ssl
import time

import pytest
import trustme

from kvtierd.http_get import HttpError, TlsFiles, http_get
from kvtierd.observe import http_server
from kvtierd.observe.exporter import Exporter, ExporterError, ListenAddress
from kvtierd.observe.page import load_page
from kvtierd.observe.tls import ServerFiles

from .full import full, picture

LOCAL = ListenAddress("127.0.0.1", 0)


@contextlib.asynccontextmanager
async def serving(look=full, **more):
    exporter = Exporter(look, **more)
    port = await exporter.start(LOCAL)
    try:
        yield exporter, f"http://127.0.0.1:{port}", port
    finally:
        await exporter.close()


async def ask(port, request, *, read=True):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        await writer.drain()
        return await asyncio.wait_for(reader.read(), 10) if read else b""
    finally:
        writer.close()


def status_of(answer):
    return int(answer.split(b" ")[1])


async def test_prometheus_text_and_openmetrics_by_what_is_accepted():
    async with serving() as (_, url, port):
        plain = await http_get(f"{url}/metrics")
        assert plain.status == 200
        assert b'\nkvtierd_tier_hit_ratio{tier="L3",window="5m"} 0.8\n' in plain.body
        head = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: application/openmetrics-text;version=1.0.0\r\n"
        answer = await ask(port, head + b"Connection: close\r\n\r\n")
        assert b"Content-Type: application/openmetrics-text; version=1.0.0; charset=utf-8" in answer
        assert answer.endswith(b"# EOF\n")
        odd = await ask(
            port,
            b"GET /metrics?x=1 HTTP/1.1\r\nConnection: close\r\n"
            b"Accept: application/openmetrics-text;version=\xff\xfe,;;=\r\n\r\n",
        )
        assert status_of(odd) == 200


async def test_the_page_and_its_json():
    async with serving() as (exporter, url, port):
        exporter.note()
        assert json.loads((await http_get(f"{url}/status.json")).body)["history"]["L3"] == [0.8]
        answer = await ask(port, b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b"Content-Security-Policy: default-src 'none'; script-src 'sha256-" in answer
        assert b"X-Frame-Options: DENY" in answer


def test_the_page_needs_nothing_from_elsewhere():
    page, policy = load_page()
    text = page.decode()
    assert not re.search(r"(?:src|href)=[\"'](?!data:|/status\.json)", text)
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}, (
        "a name, not an address"
    )
    assert text.count("<script>") == 1
    assert "innerHTML" not in text
    assert " style=" not in text
    assert "unsafe" not in policy
    assert len(page) < 30_000


async def test_head_gives_no_body_and_the_connection_goes_on():
    async with serving() as (_, __, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"HEAD /metrics HTTP/1.1\r\nHost: 127.0.0.1:1\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert int(re.search(rb"Content-Length: (\d+)", head)[1]) > 1000
        writer.write(b"GET /status.json HTTP/1.1\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        body = await reader.readexactly(int(re.search(rb"Content-Length: (\d+)", head)[1]))
        assert json.loads(body)["node"] == "host-0"
        writer.close()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 2\r\n\r\nhi", 405),
        (b"DELETE / HTTP/1.1\r\n\r\n", 405),
        (b"GET /metrics HTTP/1.1\r\nContent-Length: 2\r\n\r\nhi", 413),
        (b"GET /metrics HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 413),
        (b"GET /etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"GET /../metrics HTTP/1.1\r\n\r\n", 404),
        (b"GET http://127.0.0.1/metrics HTTP/1.1\r\n\r\n", 404),
        (b"GET /metrics\r\n\r\n", 400),
        (b"GET /metrics HTTP/2\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost : x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 20_000 + b"\r\n\r\n", 431),
        (b"GET /metrics HTTP/1.1\r\nHost: evil.example:9476\r\n\r\n", 421),
        (b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1.evil.example\r\n\r\n", 421),
    ],
)
async def test_what_is_not_served_is_refused(request_bytes, status):
    async with serving() as (exporter, _, port):
        answer = await ask(port, request_bytes)
        assert status_of(answer) == status
        assert b"Connection: close" in answer
        assert exporter.refused == 1


@pytest.mark.parametrize(
    "host", [b"127.0.0.1", b"127.0.0.1:9476", b"localhost:9476", b"[::1]:9476", b"10.0.0.1"]
)
async def test_addresses_and_localhost_are_answered(host):
    async with serving() as (_, __, port):
        answer = await ask(port, b"GET /metrics HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n")
        assert status_of(answer) == 200


async def test_slow_and_silent_clients_are_hung_up_on(monkeypatch):
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(http_server, "IDLE_SECONDS", 0.4)
    async with serving() as (_, url, port):
        silent = await asyncio.open_connection("127.0.0.1", port)
        slow = await asyncio.open_connection("127.0.0.1", port)
        slow[1].write(b"GET /met")
        assert (await http_get(f"{url}/metrics")).status == 200
        started = time.monotonic()
        assert await asyncio.wait_for(slow[0].read(), 5) == b""
        assert await asyncio.wait_for(silent[0].read(), 5) == b""
        assert time.monotonic() - started < 3


async def test_many_clients_neither_grow_nor_shut_out_a_scrape(monkeypatch):
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 30.0)
    async with serving() as (exporter, url, port):
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(100)]
        assert (await http_get(f"{url}/metrics")).status == 200, "idle ones make room"
        assert len(exporter._server._clients) <= http_server.MOST_CLIENTS
        for _, writer in idle:
            writer.close()
        await asyncio.sleep(0.05)
        busy = [await asyncio.open_connection("127.0.0.1", port) for _ in range(http_server.MOST_CLIENTS)]
        for _, writer in busy:
            writer.write(b"G")
        await asyncio.sleep(0.1)
        with pytest.raises(HttpError):
            await http_get(f"{url}/metrics")
        assert exporter.refused >= 1
        for _, writer in busy:
            writer.close()


async def test_a_client_that_does_not_read_is_given_up(monkeypatch):
    monkeypatch.setattr(http_server, "WRITE_SECONDS", 0.3)
    async with serving() as (exporter, _, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.transport.pause_reading()
        for _ in range(2000):
            writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        for _ in range(100):
            await asyncio.sleep(0.05)
            if not exporter._server._clients:
                break
        assert not exporter._server._clients
        writer.close()


async def test_a_page_that_cannot_be_made_is_500_without_details_and_the_next_is_well():
    broken = [True]

    def look():
        if broken[0]:
            raise RuntimeError("secret path /root/x")
        return full()

    async with serving(look) as (exporter, _, port):
        answer = await ask(port, b"GET /metrics HTTP/1.1\r\n\r\n")
        assert status_of(answer) == 500
        assert b"secret" not in answer
        exporter.note()
        broken[0] = False
        assert status_of(await ask(port, b"GET /metrics HTTP/1.1\r\nConnection: close\r\n\r\n")) == 200


async def test_what_was_made_serves_many():
    made = []
    clock = [0.0]

    def look():
        made.append(1)
        return full()

    async with serving(look, clock=lambda: clock[0]) as (_, url, __):
        for _ in range(20):
            await http_get(f"{url}/metrics")
        assert len(made) == 1
        clock[0] = 1.0
        await http_get(f"{url}/metrics")
        assert len(made) == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:9476", ("127.0.0.1", 9476)),
        ("localhost:9476", ("127.0.0.1", 9476)),
        ("127.8.8.8:1", ("127.8.8.8", 1)),
        ("[::1]:9476", ("::1", 9476)),
        ("off", None),
    ],
)
def test_addresses_on_loopback(text, expected):
    found = ListenAddress.parse(text, tls=False)
    assert found == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "9476",
        "127.0.0.1",
        "127.0.0.1:",
        "127.0.0.1:99999",
        "host:9476",
        "::1:9476",
        "[127.0.0.1]:1",
        "127.0.0.1:٣",
        ":9476",
    ],
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ExporterError) as caught:
        ListenAddress.parse(text, tls=True)
    assert caught.value.stable_code == "exporter.address"


@pytest.mark.parametrize("text", ["0.0.0.0:9476", "10.0.0.1:9476", "[::]:9476"])
def test_beyond_loopback_only_with_certificates(text):
    with pytest.raises(ExporterError) as caught:
        ListenAddress.parse(text, tls=False)
    assert caught.value.stable_code == "exporter.plain"
    assert "tls" in caught.value.hint
    assert ListenAddress.parse(text, tls=True) is not None


async def test_a_port_that_is_taken_is_an_error_that_says_so():
    async with serving() as (_, __, port):
        with pytest.raises(ExporterError) as caught:
            await Exporter(full).start(ListenAddress("127.0.0.1", port))
        assert caught.value.stable_code == "exporter.listen"


def certificate(authority, folder, name):
    issued = authority.issue_cert(name)
    key, cert = folder / f"{name}.key", folder / f"{name}.pem"
    issued.private_key_pem.write_to_path(key)
    issued.cert_chain_pems[0].write_to_path(cert)
    return str(cert), str(key)


@pytest.fixture
def files(tmp_path):
    authority = trustme.CA()
    ca = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca)
    return ServerFiles(str(ca), *certificate(authority, tmp_path, "host-a")), authority, tmp_path


async def test_mutual_tls(files):
    server_files, authority, folder = files
    exporter = Exporter(full, tls=server_files)
    port = await exporter.start(LOCAL)
    url = f"https://127.0.0.1:{port}/metrics"
    mine = TlsFiles(server_files.ca, *certificate(authority, folder, "prometheus"), "host-a")
    assert (await http_get(url, tls=mine)).status == 200
    strange = trustme.CA()
    other = TlsFiles(server_files.ca, *certificate(strange, folder, "mallory"), "host-a")
    with pytest.raises(HttpError):
        await http_get(url, tls=other)
    context = ssl.create_default_context(cafile=server_files.ca)
    context.check_hostname = False
    with pytest.raises((ssl.SSLError, ConnectionError)):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        await writer.drain()
        if not await reader.read(100):
            raise ConnectionResetError
    with pytest.raises(HttpError):
        await http_get(f"http://127.0.0.1:{port}/metrics", timeout_seconds=1)
    await exporter.close()


async def test_a_renewed_certificate_counts_for_new_connections(files):
    server_files, authority, folder = files
    exporter = Exporter(full, tls=server_files)
    port = await exporter.start(LOCAL)
    mine = certificate(authority, folder, "prometheus")
    cert, key = certificate(authority, folder, "host-b")
    for source, target in ((cert, server_files.cert), (key, server_files.key)):
        with open(source, "rb") as read, open(target, "wb") as write:
            write.write(read.read())
    exporter.note()
    answer = await http_get(
        f"https://127.0.0.1:{port}/metrics", tls=TlsFiles(server_files.ca, *mine, "host-b")
    )
    assert answer.status == 200
    with open(server_files.key, "w") as write:
        write.write("nonsense")
    exporter.note()
    assert exporter.tls_problem
    answer = await http_get(
        f"https://127.0.0.1:{port}/metrics", tls=TlsFiles(server_files.ca, *mine, "host-b")
    )
    assert answer.status == 200, "what was read before stays in use"
    await exporter.close()


async def test_certificates_that_cannot_be_used_are_an_error(tmp_path):
    missing = ServerFiles(*(str(tmp_path / name) for name in ("ca", "cert", "key")))
    with pytest.raises(ExporterError) as caught:
        await Exporter(full, tls=missing).start(LOCAL)
    assert caught.value.stable_code == "exporter.tls"


async def test_before_the_first_picture_it_answers_too():
    async with serving(lambda: full(picture=None)) as (_, url, __):
        assert (await http_get(f"{url}/metrics")).status == 200
        assert json.loads((await http_get(f"{url}/status.json")).body)["tiers"] == []


def test_a_note_keeps_history():
    exporter = Exporter(lambda: full(picture=picture(now_seconds=5.0)))
    exporter.note()
    assert exporter.history.as_dict(6.0)["age_seconds"] == [1.0]
