"""The endpoint as a process, between scripted clients and a fake MetaService that speaks the recorded frames."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from endpoint_lab import Client, FakeMeta, answer_of, exist

from kvtierd.endpoint.control import EndpointControl
from kvtierd.errors import EndpointError
from kvtierd.memcache import framing
from kvtierd.memcache.framing import Opcode
from kvtierd.workload.demo import free_ports


class Rig:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta, self.store, meta_target, store_target = free_ports(4)
        self.fake = FakeMeta(meta_target, store_target)
        self.config: dict[str, Any] = {
            "listen": {"meta": f"127.0.0.1:{self.meta}", "config_store": f"127.0.0.1:{self.store}"},
            "target": {"meta": f"127.0.0.1:{meta_target}", "config_store": f"127.0.0.1:{store_target}"},
            "control_socket": str(folder / "control.sock"),
            "state_file": str(folder / "state.json"),
            "silence_seconds": 0.4,
            "hold_seconds": 0.3,
            "handshake_seconds": 0.5,
        }
        self.control = EndpointControl(folder / "control.sock")
        self.process: subprocess.Popen[bytes] | None = None

    def launch(self) -> subprocess.Popen[bytes]:
        path = self.folder / "endpoint.json"
        path.write_text(json.dumps(self.config))
        with (self.folder / "endpoint.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvtierd.endpoint", "--config", str(path)], stderr=log
            )
        return self.process

    async def start(self, *, reachable: bool = True) -> None:
        self.launch()
        await self.until(lambda s: s["backend"]["reachable"] or not reachable)

    async def until(
        self, condition: Callable[[dict[str, Any]], bool], timeout_seconds: float = 8.0
    ) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_seconds
        status: dict[str, Any] = {}
        while time.monotonic() < deadline:
            with contextlib.suppress(EndpointError):
                status = await self.control.status()
                if condition(status):
                    return status
            await asyncio.sleep(0.02)
        raise AssertionError(f"never: {json.dumps(status)}\n{(self.folder / 'endpoint.log').read_text()}")

    async def die_and_return(self) -> None:
        self.fake.kill()
        await self.until(lambda s: s["backend"]["deaths"] == 1)
        await self.fake.start()
        await self.until(lambda s: s["backend"]["reachable"])


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path)
    await rig.fake.start()
    yield rig
    await rig.control.close()
    rig.fake.kill()
    if rig.process is not None:
        rig.process.kill()
        rig.process.wait(10)


async def test_relays_counts_and_ends_in_time(rig: Rig) -> None:
    await rig.start()
    client = await Client.connect(rig.meta)
    assert await client.greeted() == framing.HANDSHAKE_ACCEPTED
    for sequence in range(1, 21):
        assert answer_of(await client.ask(exist(sequence))) == 0
    store_reader, store_writer = await asyncio.open_connection("127.0.0.1", rig.store)
    store_writer.write(b"hello")
    assert await asyncio.wait_for(store_reader.read(100), 5) == b"HELLO"
    status = await rig.control.status()
    (row,) = status["clients"]
    assert (row["pid"], row["kind"], row["links"]) == (os.getpid(), "F", 2)
    assert (row["lookups"], row["lookup_hits"], row["synthetic_answers"]) == (20, 20, 0)
    assert status["totals"]["lookups"] == 20
    assert rig.process is not None
    started = time.monotonic()
    rig.process.send_signal(signal.SIGTERM)
    await client.ended()
    store_writer.close()
    assert await asyncio.to_thread(rig.process.wait, 5) == 0
    assert time.monotonic() - started < 2.0
    assert not (rig.folder / "control.sock").exists()


async def test_a_death_in_mid_call(rig: Rig) -> None:
    await rig.start()
    client = await Client.connect(rig.meta)
    await client.greeted()
    await client.ask(exist(1))
    rig.fake.frozen = True
    client.writer.write(exist(2))
    await asyncio.sleep(0.05)
    started = time.monotonic()
    rig.fake.kill()
    rig.fake.frozen = False
    assert answer_of(await client.frame()) == framing.RESULT_NOT_LINKED
    assert time.monotonic() - started < 0.3
    await rig.until(lambda s: s["mode"] == "recover" and s["admission"] == "survivors")
    assert answer_of(await client.ask(exist(3))) == framing.RESULT_NOT_FOUND
    await rig.fake.start()
    await client.ended()  # sent away only now that there is somewhere to go
    again = await Client.connect(rig.meta)
    await again.greeted()
    assert answer_of(await again.ask(exist(4))) == framing.RESULT_NOT_FOUND
    rig.fake.seen.clear()
    register = framing.encode_frame(Opcode.REGISTER, 5, struct.pack("<hhI", 0, 5, 0))
    assert (await again.ask(register)).opcode == Opcode.REGISTER
    assert rig.fake.seen == [Opcode.REGISTER]
    await rig.control.serve()
    assert answer_of(await again.ask(exist(6))) == 0
    again.writer.close()


async def test_silence_is_noticed(rig: Rig) -> None:
    await rig.start()
    client = await Client.connect(rig.meta)
    await client.greeted()
    rig.fake.frozen = True
    started = time.monotonic()
    assert answer_of(await client.ask(exist(1))) == framing.RESULT_NOT_LINKED
    assert 0.3 < time.monotonic() - started < 0.8
    status = await rig.until(lambda s: not s["backend"]["reachable"])
    assert (status["mode"], status["silent"]) == ("serve", 1)  # silent is not dead
    assert answer_of(await client.ask(exist(2))) == framing.RESULT_NOT_FOUND  # at once
    rig.fake.frozen = False
    await rig.until(lambda s: s["backend"]["reachable"] and s["silent"] == 0)
    assert answer_of(await client.ask(exist(3))) == 0  # on the same connection
    status = await rig.control.status()
    assert (status["survivors"], status["backend"]["deaths"]) == ({"expected": 1, "back": 1}, 0)
    client.writer.close()


async def test_quiesce_holds_then_serves(rig: Rig) -> None:
    await rig.start()
    client = await Client.connect(rig.meta)
    await client.greeted()
    took = await rig.control.quiesce(2.0, quiet_seconds=0.1)
    assert took < 0.5
    client.writer.write(exist(1))
    with pytest.raises(TimeoutError):
        await client.frame(0.15)
    await rig.control.serve()
    assert answer_of(await client.frame()) == 0
    await rig.control.quiesce(2.0, quiet_seconds=0.1)
    started = time.monotonic()
    assert answer_of(await client.ask(exist(2))) == framing.RESULT_NOT_FOUND
    assert 0.2 < time.monotonic() - started < 0.6
    rig.fake.kill()
    status = await rig.until(lambda s: s["backend"]["deaths"] == 1)
    assert (status["mode"], status["quiesced"], status["admission"]) == ("quiesce", True, "survivors")
    client.writer.close()


async def test_quiesce_gives_up_and_serves_again(rig: Rig) -> None:
    rig.config["silence_seconds"] = 5.0
    await rig.start()
    client = await Client.connect(rig.meta)
    await client.greeted()
    rig.fake.frozen = True
    client.writer.write(exist(1))
    await asyncio.sleep(0.05)
    with pytest.raises(EndpointError, match="1 requests in flight") as caught:
        await rig.control.quiesce(0.3)
    assert caught.value.stable_code == "endpoint.not-quiet"
    assert (await rig.control.status())["mode"] == "serve"
    client.writer.close()


JOINER = """
import socket, sys, time
meta, store = int(sys.argv[1]), int(sys.argv[2])
s = socket.create_connection(("127.0.0.1", store)); s.sendall(b"rank?"); s.settimeout(20)
print("store", s.recv(10), flush=True)
m = socket.create_connection(("127.0.0.1", meta)); m.sendall(bytes.fromhex("1b0f0100" + "00" * 12)); m.settimeout(20)
print("meta", m.recv(2), flush=True)
sys.stdin.read()
"""


async def joiner(rig: Rig) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        JOINER,
        str(rig.meta),
        str(rig.store),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


async def lines(process: asyncio.subprocess.Process, count: int) -> list[bytes]:
    assert process.stdout is not None
    return [await asyncio.wait_for(process.stdout.readline(), 10) for _ in range(count)]


async def test_newcomers_wait_until_admitted_and_survivors_do_not(rig: Rig) -> None:
    await rig.start()
    survivor = await Client.connect(rig.meta)
    await survivor.greeted()
    await rig.die_and_return()
    await survivor.ended()
    new = await joiner(rig)
    status = await rig.until(lambda s: s["waiting"] == 1)
    assert status["survivors"] == {"expected": 1, "back": 0}
    survivor = await Client.connect(rig.meta)
    assert await survivor.greeted() == framing.HANDSHAKE_ACCEPTED
    assert (await rig.control.status())["survivors"] == {"expected": 1, "back": 1}
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(new.stdout.readline(), 0.3)  # type: ignore[union-attr]
    await rig.control.admit("all")
    assert await lines(new, 2) == [b"store b'RANK?'\n", b"meta b'\\x00\\x00'\n"]
    new.kill()
    await new.wait()
    survivor.writer.close()


async def test_waiting_is_bounded_in_number_and_time(rig: Rig) -> None:
    rig.config |= {"waiting_room": 1, "waiting_seconds": 0.8}
    await rig.start()
    await rig.control.admit("survivors")
    first = await joiner(rig)
    await rig.until(lambda s: s["waiting"] == 1)
    second = await joiner(rig)
    assert await lines(second, 1) == [b"store b''\n"]
    assert (await rig.control.status())["waiting"] == 1
    assert await lines(first, 1) == [b"store b''\n"]
    for process in (first, second):
        process.kill()
        await process.wait()


async def test_a_restarted_endpoint_knows_the_survivors(rig: Rig) -> None:
    await rig.start()
    client = await Client.connect(rig.meta)
    await client.greeted()
    await rig.control.recover()
    await asyncio.sleep(0.7)  # the state is saved in the background
    assert rig.process is not None
    rig.process.kill()
    rig.process.wait(10)
    await client.ended()
    await rig.start()
    status = await rig.control.status()
    assert (status["mode"], status["admission"], status["survivors"]["expected"]) == (
        "recover",
        "survivors",
        1,
    )
    client = await Client.connect(rig.meta)
    assert await client.greeted() == framing.HANDSHAKE_ACCEPTED
    client.writer.close()


async def test_cut_sends_everyone_to_connect_anew(rig: Rig) -> None:
    await rig.start()
    client = await Client.connect(rig.meta)
    await client.greeted()
    _, store_writer = await asyncio.open_connection("127.0.0.1", rig.store)
    await rig.until(lambda s: s["connections"] == 2 and s["clients"][0]["links"] == 2)
    await asyncio.sleep(0.05)
    assert await rig.control.cut() == 2
    await client.ended()
    store_writer.close()
    await rig.until(lambda s: s["connections"] == 0)


async def test_set_target_moves_new_connections(rig: Rig) -> None:
    await rig.start()
    other = FakeMeta(*free_ports(2))
    await other.start()
    try:
        await rig.control.set_target(
            {"meta": f"127.0.0.1:{other.ports[0]}", "config_store": f"127.0.0.1:{other.ports[1]}"}
        )
        await rig.until(lambda s: s["backend"]["reachable"] and s["backend"]["deaths"] == 0)
        client = await Client.connect(rig.meta)
        await client.greeted()
        await client.ask(exist(1))
        assert (other.seen, rig.fake.seen) == ([Opcode.IS_EXIST], [])
        client.writer.close()
        with pytest.raises(EndpointError, match="the endpoint itself"):
            await rig.control.set_target({"meta": f"127.0.0.1:{rig.meta}", "config_store": "127.0.0.1:1"})
    finally:
        other.kill()


async def test_an_unknown_protocol_is_relayed_as_it_is(rig: Rig) -> None:
    await rig.start()
    client = await Client.connect(rig.meta, b"\x16\x03\x01hello")
    assert await asyncio.wait_for(client.reader.readexactly(8), 5) == b"olleh\x01\x03\x16"
    status = await rig.control.status()
    assert status["plain_relay"]["count"] == 1
    assert "not a MetaService handshake" in status["plain_relay"]["reasons"][0]
    client.writer.close()


async def test_hostile_clients_are_bounded(rig: Rig) -> None:
    rig.config |= {"max_connections": 20}
    await rig.start()
    crowd = [await asyncio.open_connection("127.0.0.1", rig.meta) for _ in range(60)]
    status = await rig.until(lambda s: s["refused"] >= 40)
    assert status["connections"] <= 20
    for _, writer in crowd[:30]:
        writer.write(b"\x1b")  # a handshake that never ends
    await rig.until(lambda s: s["connections"] == 0)
    for _, writer in crowd:
        writer.close()
    bomb = await Client.connect(rig.meta)
    await bomb.greeted()
    bomb.writer.write(framing.HEADER.pack(0, 9, 0xFFFFFFFF, 1, 0))
    await rig.until(lambda s: s["plain_relay"]["count"] == 1)
    bomb.writer.close()
    client = await Client.connect(rig.meta)
    await client.greeted()
    assert answer_of(await client.ask(exist(1))) == 0
    client.writer.close()
    log = (rig.folder / "endpoint.log").read_text()
    assert 1 <= log.count("refused a connection") <= 5


async def test_a_client_that_does_not_read_stops_being_read(rig: Rig) -> None:
    await rig.start()
    client = await Client.connect(rig.meta)
    await client.greeted()
    client.writer.transport.pause_reading()
    keys = 100_000
    body = struct.pack("<hhIQ", 0, Opcode.BATCH_IS_EXIST, 0, keys) + bytes(4 * keys)
    await rig.control.recover()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            for sequence in range(200):
                client.writer.write(framing.encode_frame(Opcode.BATCH_IS_EXIST, sequence, body))
                await client.writer.drain()
    assert rig.process is not None
    resident = int(Path(f"/proc/{rig.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    assert resident < 80e6
    client.writer.transport.abort()
    assert (await rig.control.status())["mode"] == "recover"


async def test_a_taken_port_names_its_owner(rig: Rig) -> None:
    with socket.create_server(("127.0.0.1", rig.meta)):
        process = rig.launch()
        assert await asyncio.to_thread(process.wait, 10) == 69
    log = (rig.folder / "endpoint.log").read_text()
    assert f"port 127.0.0.1:{rig.meta} is taken by" in log
    assert f"(pid {os.getpid()})" in log
    assert "Traceback" not in log


async def test_a_second_endpoint_on_one_control_socket_is_refused(rig: Rig) -> None:
    await rig.start()
    first = rig.process
    rig.config |= {
        "listen": dict(zip(("meta", "config_store"), (f"127.0.0.1:{p}" for p in free_ports(2)), strict=True))
    }
    try:
        second = rig.launch()
        assert await asyncio.to_thread(second.wait, 10) == 1
        assert "another endpoint serves" in (rig.folder / "endpoint.log").read_text()
    finally:
        rig.process = first


async def raw_control(rig: Rig, data: bytes) -> dict[str, Any]:
    reader, writer = await asyncio.open_unix_connection(str(rig.folder / "control.sock"))
    writer.write(data)
    answer: dict[str, Any] = json.loads(await asyncio.wait_for(reader.readline(), 5))
    writer.close()
    return answer


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"nonsense\n", "not JSON"),
        (b"[" * 60_000 + b"\n", "not JSON"),
        (b"[]\n", '"command"'),
        (b'{"command": "explode"}\n', "unknown command"),
        (b'{"command": "serve", "now": 1}\n', "takes no 'now'"),
        (b'{"command": "admit", "who": "me"}\n', "survivors"),
        (b'{"command": "quiesce"}\n', "timeout_seconds"),
        (b'{"command": "quiesce", "timeout_seconds": 1e99}\n', "timeout_seconds"),
        (b'{"command": "set_target", "meta": "x"}\n', "target"),
        (b"x" * 70_000 + b"\n", "longer than"),
    ],
)
async def test_bad_commands_are_refused(rig: Rig, line: bytes, message: str) -> None:
    await rig.start(reachable=False)
    answer = await raw_control(rig, line)
    assert answer["ok"] is False
    assert message in answer["error"]["message"]
    assert (await raw_control(rig, b'{"id": "a", "command": "status"}\n'))["id"] == "a"


async def test_control_without_an_endpoint(tmp_path: Path) -> None:
    control = EndpointControl(tmp_path / "none.sock")
    with pytest.raises(EndpointError, match="does not answer 'status'") as caught:
        await control.status()
    assert caught.value.stable_code == "endpoint.unreachable"


async def test_control_has_a_deadline(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await gate.wait()
        writer.close()

    server = await asyncio.start_unix_server(mute, str(tmp_path / "mute.sock"))
    control = EndpointControl(tmp_path / "mute.sock", timeout_seconds=0.2)
    calls: list[Callable[[], Awaitable[object]]] = [control.status, control.cut]
    for call in calls:
        with pytest.raises(EndpointError, match="does not answer"):
            await call()
    gate.set()
    server.close()
