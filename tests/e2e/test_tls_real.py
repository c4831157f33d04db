"""MemCache's own TLS on the real MetaService: kvtierd's files and keys, its health probe, and who is refused."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from pathlib import Path

import pytest
from lab import RealTier, wait_until

from kvtierd.cluster.certs import Authority, make_authority
from kvtierd.errors import MemcacheError
from kvtierd.host.memcache_tls import prepare_tls
from kvtierd.http_get import TlsFiles
from kvtierd.memcache.rest import MetaClient
from kvtierd.plan.model import HttpTls, MemcacheTls
from kvtierd.plan.tls import tls_keys

pytestmark = pytest.mark.real

JOIN_SECONDS = 150.0  # MemCache loses a first message over TLS now and then, and tries again 28 s later


@pytest.fixture
def tls(tmp_path: Path) -> MemcacheTls:
    make_authority(tmp_path / "ca")
    issued = Authority.load(tmp_path / "ca").issue("a", "c")
    (tmp_path / "node.pem").write_bytes(issued.certificate_pem)
    (tmp_path / "node.key").write_bytes(issued.key_pem)
    files = {
        "ca": str(tmp_path / "ca" / "ca.pem"), "cert": str(tmp_path / "node.pem"), "key": str(tmp_path / "node.key"),
    }  # fmt: skip
    made = MemcacheTls(
        directory=str(tmp_path / "tls"), **files, http=HttpTls(**files, server_name="a.c.kvtierd")
    )
    prepare_tls(made, None)
    return made


HELLO = (
    bytes.fromhex("1b0f0100") + bytes(4) + b"\xff" * 8
)  # a client without a rank; it comes before the handshake


def answer_to(port: int, tls: MemcacheTls, *, certificate: bool) -> bytes | str:
    """What the service answers to a client's hello over TLS; how it refuses in OpenSSL's words."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(tls.ca)
    if certificate:
        context.load_cert_chain(tls.cert, tls.key)
    with socket.create_connection(("127.0.0.1", port), timeout=5) as plain:
        plain.sendall(HELLO)
        try:
            with context.wrap_socket(plain) as secured:
                return secured.recv(16)
        except ssl.SSLError as error:
            return str(error.reason)


def test_the_pool_works_over_tls_and_strangers_are_refused(real_tier: RealTier, tls: MemcacheTls) -> None:
    assert tls.http is not None
    http = TlsFiles(**tls.http.model_dump())
    url = f"https://127.0.0.1:{real_tier.metrics_port}"
    keys = tls_keys(tls, "meta", "1.3.0") | {"ock.mmc.meta_service.metrics_url": url}
    meta = real_tier.start_meta(wait=False, conf=keys)

    def healthy() -> bool:
        assert meta.alive, meta.output()[-2000:]
        with contextlib.suppress(MemcacheError):
            return asyncio.run(MetaClient(url, tls=http).health()).ok
        return False

    wait_until(healthy, 20, "/health over TLS says ok")
    assert answer_to(real_tier.meta_port, tls, certificate=True) == bytes(2), "it takes its own"
    for port in (real_tier.meta_port, real_tier.store_port):
        assert answer_to(port, tls, certificate=False) == "TLSV13_ALERT_CERTIFICATE_REQUIRED"
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    stranger.load_verify_locations(tls.ca)
    stranger.check_hostname = False
    with pytest.raises((ssl.SSLError, ConnectionError)):
        plain = socket.create_connection(("127.0.0.1", real_tier.metrics_port), timeout=5)
        with plain, stranger.wrap_socket(plain) as secured:
            secured.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            if secured.recv(100) == b"":
                raise ConnectionError("hung up")

    written = real_tier.write_local_conf

    def with_tls(name: str, *, dram: str, max_dram: str) -> Path:
        path = written(name, dram=dram, max_dram=max_dram)
        with path.open("a") as stream:
            stream.writelines(f"{k} = {v}\n" for k, v in tls_keys(tls, "local", "1.3.0").items())
        return path

    real_tier.write_local_conf = with_tls  # type: ignore[method-assign]
    real_tier.start_pool(init_deadline_seconds=JOIN_SECONDS)
    client = real_tier.client(timeout_seconds=JOIN_SECONDS)
    assert client.put("key", size=4096) == 0
    assert client.get_into("key", size=4096) == "ok"

    real_tier.write_local_conf = written  # type: ignore[method-assign]
    plain_client = real_tier.start_pool(device=1, init_deadline_seconds=8, wait=False)
    assert plain_client.wait(40) != 0, "a pool holder without TLS has joined"
    assert client.get_into("key", size=4096) == "ok"
