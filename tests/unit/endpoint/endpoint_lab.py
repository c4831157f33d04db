"""What the tests of the endpoint share: a fake MetaService, scripted clients, certificates, clusters of endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trustme

from kvtierd.endpoint.control import EndpointControl
from kvtierd.endpoint.names import certificate_names
from kvtierd.errors import EndpointError
from kvtierd.memcache import framing
from kvtierd.memcache.framing import FrameDecoder, Opcode
from kvtierd.workload.demo import free_ports

CLUSTER = "prod"
RANKED = framing.HANDSHAKE_MAGIC + bytes(12)


def exist(sequence: int, key: str = "k") -> bytes:
    body = struct.pack("<hhII", 0, Opcode.IS_EXIST, 0, len(key)) + key.encode()
    return framing.encode_frame(Opcode.IS_EXIST, sequence, body)


def answer_of(frame: framing.Frame) -> int:
    return int(struct.unpack_from("<i", frame.raw, framing.HEADER_BYTES + 8)[0])


class FakeMeta:
    """Answers every lookup with a hit. ``frozen``: accepts, and answers only when it is not any more."""

    def __init__(self, meta_port: int, store_port: int) -> None:
        self.ports = meta_port, store_port
        self.frozen = False
        self.seen: list[int] = []
        self.writers: set[asyncio.StreamWriter] = set()
        self.servers: list[asyncio.Server] = []

    async def start(self) -> None:
        self.servers = [
            await asyncio.start_server(self._meta, "127.0.0.1", self.ports[0]),
            await asyncio.start_server(self._store, "127.0.0.1", self.ports[1]),
        ]

    def kill(self) -> None:
        for server in self.servers:
            server.close()
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()

    async def _store(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.add(writer)
        while data := await self._read(reader):
            writer.write(data.upper())
        writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        try:
            return await reader.read(65536)
        except OSError:
            return b""

    async def _thawed(self) -> None:
        while self.frozen:
            await asyncio.sleep(0.01)

    async def _meta(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.add(writer)
        await self._thawed()
        hello = await self._read(reader)
        if not hello.startswith(framing.HANDSHAKE_MAGIC):
            while hello:
                writer.write(hello[::-1])
                hello = await self._read(reader)
            writer.close()
            return
        writer.write(framing.HANDSHAKE_ACCEPTED)
        decoder, data = FrameDecoder(), hello[16:]
        while data or (data := await self._read(reader)):
            for frame in decoder.feed(data):
                self.seen.append(frame.opcode)
                await self._thawed()
                writer.write(framing.error_answer(frame.opcode, frame.sequence, 1, 0))
            data = b""
        writer.close()


class Client:
    """A scripted client in this process: all of them are one identity to the endpoint."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer, self.decoder = reader, writer, FrameDecoder()
        self.frames: list[framing.Frame] = []

    @classmethod
    async def connect(cls, port: int, hello: bytes = RANKED, *, host: str = "127.0.0.1") -> Client:
        client = cls(*await asyncio.open_connection(host, port))
        client.writer.write(hello)
        return client

    async def greeted(self, timeout_seconds: float = 5.0) -> bytes:
        async with asyncio.timeout(timeout_seconds):
            return await self.reader.readexactly(2)

    async def ask(self, data: bytes, timeout_seconds: float = 5.0) -> framing.Frame:
        self.writer.write(data)
        return await self.frame(timeout_seconds)

    async def frame(self, timeout_seconds: float = 5.0) -> framing.Frame:
        async with asyncio.timeout(timeout_seconds):
            while not self.frames:
                data = await self.reader.read(65536)
                if not data:
                    raise EOFError
                self.frames += self.decoder.feed(data)
        return self.frames.pop(0)

    async def ended(self, timeout_seconds: float = 5.0) -> None:
        async with asyncio.timeout(timeout_seconds):
            with contextlib.suppress(ConnectionError):
                while await self.reader.read(65536):
                    pass
        self.writer.close()


class Authority:
    """Certificates as kvtierd issues them, and as it does not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = trustme.CA()
        folder.mkdir(parents=True, exist_ok=True)

    def issue(
        self,
        node: str,
        ip: str,
        *,
        cluster: str = CLUSTER,
        names: tuple[str, ...] | None = None,
        days: float = 30.0,
        ca: trustme.CA | None = None,
        suffix: str = "",
    ) -> dict[str, str]:
        """Files for this node; ``names`` instead of its own, ``days`` until it expires, ``ca`` instead of this one's."""
        until = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
        since = until - datetime.timedelta(days=60)
        identities = names if names is not None else certificate_names(node, cluster)
        leaf = (ca or self.ca).issue_cert(*identities, ip, not_before=since, not_after=until)
        paths = {kind: self.folder / f"{node}{suffix}.{kind}.pem" for kind in ("ca", "cert", "key")}
        self.ca.cert_pem.write_to_path(paths["ca"])
        leaf.private_key_pem.write_to_path(paths["key"])
        paths["cert"].write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        return {kind: str(path) for kind, path in paths.items()}


class Node:
    """One endpoint process of a cluster; ``node-a`` is 127.0.0.1, ``node-b`` 127.0.0.2, and so on."""

    def __init__(self, cluster: EndpointCluster, letter: str) -> None:
        self.cluster, self.name = cluster, f"node-{letter}"
        self.ip = f"127.0.0.{ord(letter) - ord('a') + 1}"
        self.folder = cluster.folder / self.name
        self.folder.mkdir()
        self.meta, self.store, self.peer_port = free_ports(3)
        self.control = EndpointControl(self.folder / "control.sock")
        self.process: subprocess.Popen[bytes] | None = None
        self.config: dict[str, Any] = {
            "listen": {"meta": f"{self.ip}:{self.meta}", "config_store": f"{self.ip}:{self.store}"},
            "target": None,
            "control_socket": str(self.folder / "control.sock"),
            "state_file": str(self.folder / "state.json"),
            "silence_seconds": 0.8,
            "hold_seconds": 0.3,
            "handshake_seconds": 1.0,
            "cluster": CLUSTER,
            "node": self.name,
            "peer_listen": f"{self.ip}:{self.peer_port}",
            "tls": cluster.authority.issue(self.name, self.ip),
            "hop_seconds": 2.0,
        }

    @property
    def log(self) -> str:
        return (self.folder / "endpoint.log").read_text()

    def write_config(self) -> Path:
        path = self.folder / "endpoint.json"
        path.write_text(json.dumps(self.config))
        return path

    def launch(self) -> subprocess.Popen[bytes]:
        path = self.write_config()
        with (self.folder / "endpoint.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvtierd.endpoint", "--config", str(path)], stderr=log
            )
        return self.process

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None

    async def until(
        self, condition: Callable[[dict[str, Any]], bool], timeout_seconds: float = 25.0
    ) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_seconds
        status: dict[str, Any] = {}
        while time.monotonic() < deadline:
            with contextlib.suppress(EndpointError):
                status = await self.control.status()
                if condition(status):
                    return status
            await asyncio.sleep(0.02)
        raise AssertionError(f"{self.name}, never: {json.dumps(status)}\n{self.log}")

    async def control_ready(self) -> None:
        await self.until(lambda s: True)

    async def client(self, hello: bytes = RANKED) -> Client:
        """A client on this node that has its handshake."""
        client = await Client.connect(self.meta, hello, host=self.ip)
        assert await client.greeted() == framing.HANDSHAKE_ACCEPTED
        return client


class EndpointCluster:
    """Endpoints of several nodes and a fake MetaService on ``node-a``'s loopback, ended with the test."""

    def __init__(self, folder: Path, letters: str) -> None:
        self.folder = folder
        self.authority = Authority(folder / "certificates")
        self.fake = FakeMeta(*free_ports(2))
        self.nodes = {letter: Node(self, letter) for letter in letters}
        peers = [{"name": n.name, "address": f"{n.ip}:{n.peer_port}"} for n in self.nodes.values()]
        for node in self.nodes.values():
            node.config["peers"] = peers

    def __getitem__(self, letter: str) -> Node:
        return self.nodes[letter]

    @property
    def local(self) -> dict[str, str]:
        """The target that node-a has as master."""
        return {"meta": f"127.0.0.1:{self.fake.ports[0]}", "config_store": f"127.0.0.1:{self.fake.ports[1]}"}

    async def start(self, *, epoch: int = 1, master: str = "a") -> None:
        """Everything up: one is master, the others have it as target, everybody may come and read."""
        await self.fake.start()
        for node in self.nodes.values():
            node.launch()
        for letter, node in self.nodes.items():
            await node.until(lambda s: s["inbound"]["listen_error"] == "")
            await node.control.set_target(
                self.local if letter == master else {"peer": f"node-{master}"}, epoch=epoch
            )
        await self.open_up()

    async def open_up(self) -> None:
        """What the daemons do when the pool is purged and all survivors are back."""
        for node in self.nodes.values():
            await node.until(lambda s: bool(s["backend"]["reachable"]))
            await node.control.serve()
            await node.control.admit("all")

    async def close(self) -> None:
        for node in self.nodes.values():
            node.kill()
            await node.control.close()
        self.fake.kill()
