"""One request to an engine, with a key that goes nowhere else."""

import asyncio

import pytest

from kvtierd.engines.talk import EngineRefusedError, ask
from kvtierd.errors import UnitError
from kvtierd.plan.model import EngineTalk, HttpCall, UnitSpec

KEY = "kSecretSecretSecretSecret"


@pytest.fixture
async def engine():
    """An HTTP server whose answer the test sets; keeps the heads of requests."""

    class Server:
        status, body, heads = 200, b"ok", []

    async def serve(reader, writer):
        Server.heads = [*Server.heads, (await reader.readuntil(b"\r\n\r\n")).decode()]
        head = f"HTTP/1.1 {Server.status} X\r\nContent-Length: {len(Server.body)}\r\n\r\n"
        writer.write(head.encode() + Server.body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    Server.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield Server
    server.close()


def unit(engine):
    talk = EngineTalk(base_url=engine.url)
    return UnitSpec(id="kvtier-engine-e", kind="engine", name="e", argv=("x",), talk=talk)


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "key.yaml"
    path.write_text(f"admin-api-key: {KEY}\n")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
async def test_method_and_key_arrive(engine, key_file, method):
    call = HttpCall(method=method, path="/l3", bearer_file=str(key_file))
    assert await ask(unit(engine), call, timeout_seconds=5) == b"ok"
    (head,) = engine.heads
    assert head.startswith(f"{method} /l3 HTTP/1.1\r\n")
    assert f"\r\nAuthorization: Bearer {KEY}\r\n" in head


async def test_the_key_is_read_at_the_moment_of_the_request(engine, key_file):
    call = HttpCall(path="/l3", bearer_file=str(key_file))
    await ask(unit(engine), call, timeout_seconds=5)
    key_file.write_text("admin-api-key: kAnotherAnotherAnother\n")
    await ask(unit(engine), call, timeout_seconds=5)
    assert "Bearer kAnotherAnotherAnother\r\n" in engine.heads[1]


async def test_without_a_key_file_no_key_is_sent(engine):
    await ask(unit(engine), HttpCall(path="/l3"), timeout_seconds=5)
    assert "authorization" not in engine.heads[0].lower()


@pytest.mark.parametrize("damage", ["absent", "open", "no secret"])
async def test_a_key_that_cannot_be_read_is_said_and_nothing_is_sent(engine, key_file, damage):
    if damage == "absent":
        key_file.unlink()
    elif damage == "open":
        key_file.chmod(0o644)
    else:
        key_file.write_text("admin-api-key: x\r\nHost: y")
    with pytest.raises(UnitError) as refused:
        await ask(unit(engine), HttpCall(path="/l3", bearer_file=str(key_file)), timeout_seconds=5)
    assert refused.value.stable_code == "engine.no-key"
    assert str(key_file) in refused.value.message
    assert KEY not in str(refused.value)
    assert engine.heads == []


async def test_an_engine_that_repeats_the_key_does_not_get_it_into_the_error(engine, key_file):
    engine.status, engine.body = 401, f"bad key {KEY}".encode()
    with pytest.raises(EngineRefusedError) as refused:
        await ask(unit(engine), HttpCall(path="/l3", bearer_file=str(key_file)), timeout_seconds=5)
    error = refused.value
    assert (error.status, error.stable_code, error.why) == (401, "engine.refused", "bad key ***")
    assert "restart" in error.hint
