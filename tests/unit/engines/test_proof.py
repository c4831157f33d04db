import asyncio
import json

import pytest

from kvtierd.engines.proof import GenerationProof
from kvtierd.plan.model import EngineTalk, HttpCall, UnitSpec
from kvtierd.units.backend import UnitProcess


class Driver:
    def generated(self, body):
        text = json.loads(body)["text"]
        if not text:
            raise ValueError("no text")
        return text


@pytest.fixture
async def engine():
    """An HTTP server whose answer the test sets; counts requests."""

    class Server:
        status, body, delay, asked = 200, b'{"text": "x"}', 0.0, 0

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        Server.asked += 1
        await asyncio.sleep(Server.delay)
        head = f"HTTP/1.1 {Server.status} X\r\nContent-Length: {len(Server.body)}\r\n\r\n"
        writer.write(head.encode() + Server.body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    Server.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield Server
    server.close()


def unit(engine, call=HttpCall(path="/v1/completions", body={"max_tokens": 1})):
    return UnitSpec(
        id="kvtier-engine-e", kind="engine", name="e", argv=("x",), plugin="p",
        talk=EngineTalk(base_url=engine.url, generation=call),
    )  # fmt: skip


def process(instance="one"):
    return UnitProcess("kvtier-engine-e", instance, 5, 1.0, "d")


@pytest.fixture
async def proof():
    made = GenerationProof(lambda _name: Driver())
    yield made
    await made.close()


async def test_a_generated_token_proves_it_once_a_run(engine, proof):
    assert await proof.check(unit(engine), process()) is None
    assert await proof.check(unit(engine), process()) is None
    assert engine.asked == 1
    assert await proof.check(unit(engine), process("two")) is None
    assert engine.asked == 2


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (500, b"EngineDeadError", "500: EngineDeadError"),
        (200, b'{"text": ""}', "no text"),
        (200, b"<html>", "JSONDecode"),
    ],
)
async def test_an_engine_that_answers_but_does_not_generate_is_not_ready(engine, proof, status, body, why):
    engine.status, engine.body = status, body
    told = await proof.check(unit(engine), process())
    assert "has not generated a token" in told
    assert why in told


async def test_a_slow_first_token_is_waited_for_without_holding_anybody_up(engine, proof):
    engine.delay = 0.6
    started = asyncio.get_running_loop().time()
    assert await proof.check(unit(engine), process()) == "waits for its first generated token"
    assert asyncio.get_running_loop().time() - started < 0.5
    await asyncio.sleep(0.7)
    assert await proof.check(unit(engine), process()) is None
    assert engine.asked == 1


async def test_a_failed_try_is_not_repeated_at_once(engine, proof):
    engine.status = 503
    for _ in range(5):
        assert await proof.check(unit(engine), process()) is not None
    assert engine.asked == 1


async def test_an_engine_without_an_api_needs_no_proof(engine, proof):
    assert await proof.check(unit(engine, call=None), process()) is None
    assert engine.asked == 0
