"""Who is not let in through the port for peers, and what is said of it. The other side is scripted here."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from endpoint_lab import CLUSTER, Client, EndpointCluster, Node, answer_of, exist

from kvtierd.endpoint import hop
from kvtierd.endpoint.hop import ANSWER_BYTES, Answer, Hello, Port, Verdict
from kvtierd.memcache import framing


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[EndpointCluster]:
    """node-a is master and listens; node-b is listed and not running."""
    cluster = EndpointCluster(tmp_path, "ab")
    await cluster.fake.start()
    node = cluster["a"]
    node.launch()
    await node.until(lambda s: s["inbound"]["listen_error"] == "")
    await node.control.set_target(cluster.local, epoch=3)
    await node.control.admit("all")
    await node.until(lambda s: s["backend"]["reachable"])
    yield cluster
    await cluster.close()


def context(files: dict[str, str] | None, **changes: object) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    made.set_alpn_protocols([hop.ALPN])
    if files is not None:
        made.load_cert_chain(files["cert"], files["key"])
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def hello(**changes: object) -> bytes:
    fields: dict[str, object] = {"port": Port.META, "epoch": 3, "cluster": CLUSTER, "node": "node-b"}
    return Hello(**(fields | changes)).encode()  # type: ignore[arg-type]


async def say(node: Node, tls: ssl.SSLContext | None, data: bytes, seconds: float = 5.0) -> bytes:
    """Connects, sends, and gives what came back until the other side closed."""
    answer = b""
    with contextlib.suppress(OSError):  # SSLError too
        reader, writer = await asyncio.open_connection(
            node.ip, node.peer_port, ssl=tls, server_hostname="any" if tls else None
        )
        try:
            writer.write(data)
            async with asyncio.timeout(seconds):
                while chunk := await reader.read(65536):
                    answer += chunk
        finally:
            writer.transport.abort()
    return answer


async def check(node: Node, reason: str, tls: ssl.SSLContext | None, data: bytes) -> bytes:
    """Twice, both counted. What was answered."""
    before = (await node.control.status())["inbound"]["refused"]
    answer = b""
    for _ in range(2):
        answer = await say(node, tls, data)
    expected = before | {reason: before.get(reason, 0) + 2}
    status = await node.until(lambda s: sum(s["inbound"]["refused"].values()) == sum(expected.values()))
    assert status["inbound"]["refused"] == expected
    assert status["inbound"]["links"] == 0
    assert "Traceback" not in node.log
    return answer


def check_log(node: Node) -> None:
    """One line for each reason and sender, however often."""
    lines = [line.partition(" WARNING ")[2] for line in node.log.splitlines() if "refused a link" in line]
    assert lines
    assert len(lines) == len(set(lines))


async def test_a_listed_peer_with_its_certificate_is_let_in(cluster: EndpointCluster) -> None:
    files = cluster.authority.issue("node-b", "127.0.0.2")
    reader, writer = await asyncio.open_connection(
        cluster["a"].ip, cluster["a"].peer_port, ssl=context(files), server_hostname="any"
    )
    writer.write(hello(port=Port.CONFIG_STORE))
    answer = Answer.decode(await reader.readexactly(ANSWER_BYTES))
    assert (answer.verdict, answer.epoch) == (Verdict.ACCEPTED, 3)
    writer.write(b"hello")
    assert await reader.read(100) == b"HELLO"
    writer.transport.abort()
    assert (await cluster["a"].until(lambda s: s["inbound"]["links"] == 0))["inbound"]["refused"] == {}


async def test_certificates(cluster: EndpointCluster) -> None:
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("wrong-name", {"names": ("node-c", "node-c.prod.kvtierd")}),
        ("wrong-name", {"cluster": "test"}),
        ("wrong-name", {"names": ("node-b", "node-b.test.kvtierd")}),  # its plain name does not help it
        ("wrong-name", {"names": ("*.prod.kvtierd",)}),
        ("wrong-ca", {"ca": trustme.CA()}),
        ("expired", {"days": -1.0}),
        ("not-yet-valid", {"days": 90.0}),
    ]
    for reason, issue in wrong:
        files = cluster.authority.issue("node-b", "127.0.0.2", suffix=".odd", **issue)
        answer = await check(cluster["a"], reason, context(files), hello())
        if reason == "wrong-name":
            assert Answer.decode(answer).verdict == Verdict.UNKNOWN_PEER
        else:
            assert answer == b""
    await check(cluster["a"], "no-certificate", context(None), hello())
    check_log(cluster["a"])


async def test_a_certificate_of_ones_own_authority_with_a_plain_name(cluster: EndpointCluster) -> None:
    files = cluster.authority.issue("node-b", "127.0.0.2", names=("node-b",), suffix=".plain")
    answer = await asyncio.wait_for(_first(cluster["a"], context(files), hello()), 5)
    assert Answer.decode(answer).verdict == Verdict.ACCEPTED


async def _first(node: Node, tls: ssl.SSLContext, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(node.ip, node.peer_port, ssl=tls, server_hostname="any")
    try:
        writer.write(data)
        return await reader.readexactly(ANSWER_BYTES)
    finally:
        writer.transport.abort()


async def test_what_is_not_tls_of_today(cluster: EndpointCluster) -> None:
    for data in (hello(), b"GET / HTTP/1.1\r\n\r\n", bytes(100_000)):
        await check(cluster["a"], "not-tls", None, data)
    for data in (b"", b"\x16\x03\x01\x02"):
        await check(cluster["a"], "slow", None, data)
    files = cluster.authority.issue("node-b", "127.0.0.2")
    old = context(files, maximum_version=ssl.TLSVersion.TLSv1_2)
    await check(cluster["a"], "tls-version", old, hello())
    check_log(cluster["a"])


async def test_what_is_not_a_hello(cluster: EndpointCluster) -> None:
    tls = context(cluster.authority.issue("node-b", "127.0.0.2"))
    for reason, data in (
        ("not-hop", b"GET / HTTP/1.1\r\n\r\n"),
        ("not-hop", b"kvtx" + bytes(148)),
        ("not-hop", b"kvth\x01\x09" + bytes(146)),  # a port that there is not
        ("not-hop", hello()[:88] + b"\xff" * 64),  # a name that is no text
        ("oversized", hello() + b"x"),
        ("oversized", hello() + bytes(1_000_000)),
        ("slow", hello()[:100]),
    ):
        assert await check(cluster["a"], reason, tls, data) == b""
    check_log(cluster["a"])


async def test_verdicts(cluster: EndpointCluster) -> None:
    tls = context(cluster.authority.issue("node-b", "127.0.0.2"))
    cases: list[tuple[dict[str, object], Verdict]] = [
        ({"cluster": "other"}, Verdict.OTHER_CLUSTER),
        ({"node": "node-x"}, Verdict.UNKNOWN_PEER),
        ({"node": "node-a"}, Verdict.UNKNOWN_PEER),  # itself
        ({"epoch": 2}, Verdict.STALE_EPOCH),
        ({"epoch": 4}, Verdict.DEPOSED),
    ]
    for changes, verdict in cases:
        answer = Answer.decode(await check(cluster["a"], verdict.reason, tls, hello(**changes)))
        assert answer.verdict == verdict
        assert answer.life == 0
    check_log(cluster["a"])


async def test_another_version_is_told_so(cluster: EndpointCluster) -> None:
    files = cluster.authority.issue("node-b", "127.0.0.2")
    newer = hello()[:4] + b"\x02" + hello()[5:]
    answer = Answer.decode(await check(cluster["a"], "other-version", context(files), newer))
    assert answer.verdict == Verdict.OTHER_VERSION


async def test_a_crowd_at_the_door_is_bounded_and_does_not_keep_others_out(cluster: EndpointCluster) -> None:
    node = cluster["a"]
    assert node.process is not None
    descriptors = Path(f"/proc/{node.process.pid}/fd")
    before = len(list(descriptors.iterdir()))
    crowd = [await asyncio.open_connection(node.ip, node.peer_port) for _ in range(200)]
    await node.until(lambda s: s["inbound"]["refused"].get("crowded", 0) >= 72)
    client = await node.client()
    started = time.monotonic()
    assert answer_of(await client.ask(exist(1))) == framing.RESULT_NOT_FOUND  # mode recover
    assert time.monotonic() - started < 0.5
    await node.until(lambda s: s["inbound"]["refused"].get("slow", 0) >= 100)
    files = cluster.authority.issue("node-b", "127.0.0.2")
    answer = Answer.decode(await _first(node, context(files), hello()))
    assert answer.verdict == Verdict.ACCEPTED
    for _, writer in crowd:
        writer.transport.abort()
    client.writer.close()
    await node.until(lambda s: s["inbound"]["links"] == 0 and len(list(descriptors.iterdir())) <= before + 2)


async def test_a_renewed_certificate_is_taken_without_a_restart(cluster: EndpointCluster) -> None:
    node = cluster["b"]
    expired = cluster.authority.issue("node-b", "127.0.0.2", days=-1.0)
    assert expired == node.config["tls"]
    node.launch()
    await node.until(lambda s: s["inbound"]["listen_error"] == "")
    await node.control.set_target({"peer": "node-a"}, epoch=3)
    status = await node.until(lambda s: "closed without an answer" in s["backend"]["last_error"])
    first = status["tls"]["loaded_unix_seconds"]
    Path(expired["key"]).write_text("half a key")
    await node.until(lambda s: s["tls"]["problem"] != "")
    cluster.authority.issue("node-b", "127.0.0.2")
    status = await node.until(lambda s: s["backend"]["reachable"])
    assert status["tls"]["problem"] == ""
    assert status["tls"]["loaded_unix_seconds"] > first
    await node.control.admit("all")
    client = await node.client()
    assert (await cluster["a"].control.status())["inbound"]["refused"]["expired"] >= 1
    client.writer.close()


async def test_a_master_that_is_somebody_else_is_not_used(cluster: EndpointCluster) -> None:
    master, node = cluster["a"], cluster["b"]
    node.launch()
    await node.control_ready()
    await node.control.set_target({"peer": "node-a"}, epoch=3)
    await node.until(lambda s: s["backend"]["reachable"])
    await node.control.admit("all")
    for why, issue in (
        ("its certificate is not node-a's", {"names": ("node-c.prod.kvtierd",)}),
        ("wrong-ca", {"ca": trustme.CA()}),
        ("expired", {"days": -1.0}),
    ):
        cluster.authority.issue("node-a", "127.0.0.1", **issue)  # type: ignore[arg-type]
        master.kill()
        master.launch()
        waiting = await Client.connect(node.meta, host=node.ip)
        await node.until(
            lambda s, why=why: why in s["backend"]["last_error"] and not s["backend"]["reachable"]
        )
        await node.until(lambda s: s["waiting"] == 1)
        waiting.writer.close()
    await master.until(lambda s: s["inbound"]["links"] == 0)


async def test_without_any_certificate_files_this_hosts_clients_are_served(tmp_path: Path) -> None:
    cluster = EndpointCluster(tmp_path, "ab")
    for kind in ("cert", "key"):
        Path(cluster["a"].config["tls"][kind]).unlink()
    await cluster.fake.start()
    node = cluster["a"]
    try:
        node.launch()
        await node.until(lambda s: s["inbound"]["listen_error"] == "")
        await node.control.set_target(cluster.local, epoch=1)
        await node.control.admit("all")
        client = await node.client()
        assert await say(node, None, b"x") == b""
        status = await node.until(lambda s: s["inbound"]["refused"] == {"no-tls": 1})
        assert "No such file" in status["tls"]["problem"]
        client.writer.close()
    finally:
        await cluster.close()
