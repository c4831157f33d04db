"""The dead client's questions are answered in its place."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from kvtierd.endpoint.actions import RetireServer
from kvtierd.endpoint.retirement import MOST_ANSWERS, RETIREMENT_SECONDS, Retirement, retire
from kvtierd.memcache import framing
from kvtierd.memcache.framing import FrameDecoder, Opcode

NOTHING: frozenset[tuple[int, int]] = frozenset()


def answered(data: bytes) -> list[tuple[int, int]]:
    return [(frame.sequence, frame.opcode) for frame in FrameDecoder().feed(data)]


def asks(sequence: int, opcode: int = Opcode.REPLICATE) -> bytes:
    return framing.encode_frame(opcode, sequence, bytes(40))


def test_open_questions_are_answered_with_an_error_at_once() -> None:
    retirement = Retirement(RetireServer(b"", frozenset({(7, 7), (3, 17)}), NOTHING))
    assert answered(retirement.first) == [(3, 17), (7, 7)]
    (frame, *_) = FrameDecoder().feed(retirement.first)
    assert int.from_bytes(frame.body[8:12], "little", signed=True) == framing.RESULT_NOT_LINKED


def test_questions_that_still_come_are_answered_and_answers_are_dropped() -> None:
    retirement = Retirement(RetireServer(b"", NOTHING, frozenset({(5, int(Opcode.IS_EXIST))})))
    assert retirement.first == b""
    assert answered(retirement.feed(asks(1) + asks(5, Opcode.IS_EXIST) + asks(2))) == [(1, 7), (2, 7)]


def test_half_a_question_at_the_death_counts_when_its_rest_comes() -> None:
    whole = asks(9)
    retirement = Retirement(RetireServer(whole[:20], NOTHING, NOTHING))
    assert retirement.first == b""
    assert answered(retirement.feed(whole[20:])) == [(9, 7)]


def test_there_is_an_end_to_it() -> None:
    retirement = Retirement(RetireServer(b"", NOTHING, NOTHING))
    with pytest.raises(framing.FramingError):
        retirement.feed(b"".join(asks(n) for n in range(MOST_ANSWERS + 1)))
    with pytest.raises(framing.FramingError):
        Retirement(RetireServer(b"\x16\x03\x01" + bytes(40), NOTHING, NOTHING))


async def _served(start: RetireServer, then: bytes) -> tuple[bytes, float]:
    """What a MetaService reads after the client's death, and how long until the connection closes."""
    done = asyncio.get_running_loop().create_future()

    async def meta(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(then)
        got = b""
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(4096):
                got += data
        done.set_result(got)
        writer.close()

    server = await asyncio.start_server(meta, "127.0.0.1", 0)
    loop = asyncio.get_running_loop()
    async with server:
        transport, _ = await loop.create_connection(asyncio.Protocol, *server.sockets[0].getsockname())
        transport.pause_reading()
        began = loop.time()
        retire(transport, start)
        return await asyncio.wait_for(done, 5), loop.time() - began


def test_on_a_connection() -> None:
    start = RetireServer(b"", frozenset({(1, 7)}), NOTHING)
    got, took = asyncio.run(_served(start, asks(2)))
    assert answered(got) == [(1, 7), (2, 7)]
    assert took >= RETIREMENT_SECONDS * 0.9


def test_what_is_no_protocol_closes_it_early() -> None:
    got, took = asyncio.run(_served(RetireServer(b"", NOTHING, NOTHING), b"\xff" * 64))
    assert got == b""
    assert took < RETIREMENT_SECONDS
