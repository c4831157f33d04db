"""http_get over mutual TLS, against a real server: the name, both certificates, and what goes wrong."""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvtierd.cluster.certs import Authority, make_authority
from kvtierd.http_get import HttpError, TlsFiles, http_get
from kvtierd.plan.model import HttpProbe, HttpTls
from kvtierd.units.probes import run_probe


@dataclasses.dataclass
class Certificates:
    directory: Path

    def issue(self, node: str, authority: str = "ca") -> TlsFiles:
        place = self.directory / authority
        if not place.exists():
            make_authority(place)
        issued = Authority.load(place).issue(node, "c")
        cert, key = place / f"{node}.pem", place / f"{node}.key"
        cert.write_bytes(issued.certificate_pem)
        key.write_bytes(issued.key_pem)
        return TlsFiles(str(place / "ca.pem"), str(cert), str(key), "a.c.kvtierd")


@asynccontextmanager
async def service(files: TlsFiles) -> AsyncIterator[str]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await writer.drain()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)
    context.load_verify_locations(files.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    async with server:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/health"


async def test_the_right_node_is_asked_and_answers(tmp_path: Path) -> None:
    files = Certificates(tmp_path).issue("a")
    async with service(files) as url:
        assert (await http_get(url, tls=files)).body == b"ok"
        probe = HttpProbe(url=url, tls=HttpTls(**files._asdict()))

        async def never(_: str) -> bool:
            return False

        assert (await run_probe(probe, timeout_seconds=5, has_logged=never)).ok


@pytest.mark.parametrize("wrong", ["another node", "another authority here", "a missing key"])
async def test_whoever_is_not_right_is_not_talked_to(tmp_path: Path, wrong: str) -> None:
    certificates = Certificates(tmp_path)
    mine = certificates.issue("a")
    theirs = certificates.issue("b") if wrong == "another node" else mine
    if wrong == "another authority here":
        other = certificates.issue("a", "other-ca")
        mine = other._replace(ca=mine.ca)  # believes the service, is not believed by it
    elif wrong == "a missing key":
        mine = mine._replace(key=str(tmp_path / "none"))
    async with service(theirs) as url:
        with pytest.raises(HttpError) as caught:
            await http_get(url, tls=mine)
    assert caught.value.stable_code in {"http.tls", "http.unreachable", "http.answer"}
    if wrong != "another authority here":  # what a server says after a handshake, TLS 1.3 may lose
        assert caught.value.stable_code == "http.tls"


async def test_https_without_certificates_and_http_with_them_are_refused() -> None:
    for url, tls in (("https://127.0.0.1:1/", None), ("http://127.0.0.1:1/", TlsFiles("a", "b", "c", "d"))):
        with pytest.raises(HttpError) as caught:
            await http_get(url, tls=tls)
        assert caught.value.stable_code == "http.url"
