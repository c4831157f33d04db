from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.memcache import framing
from kvtierd.memcache.framing import FrameDecoder, FramingError, Opcode

RECORDED = json.loads((Path(__file__).parents[2] / "fixtures/frames/memcache-1.3.0.json").read_text())
EXCHANGES: list[dict[str, Any]] = RECORDED["exchanges"]
STREAM = b"".join(bytes.fromhex(e["request"]) for e in EXCHANGES)
CLIENT_OPCODES = [e["opcode"] for e in EXCHANGES if e["from"] == "client"]


def exchange(opcode: int, *, answer_bytes: int | None = None) -> tuple[bytes, bytes]:
    for e in EXCHANGES:
        request, answer = bytes.fromhex(e["request"]), bytes.fromhex(e["answer"])
        if e["opcode"] == opcode and answer_bytes in (None, len(answer)):
            return request, answer
    raise AssertionError(f"no recorded exchange with opcode {opcode}")


def test_recorded_stream_decodes_to_the_recorded_frames() -> None:
    frames = FrameDecoder().feed(STREAM)
    assert [frame.raw.hex() for frame in frames] == [e["request"] for e in EXCHANGES]
    assert all(frame.opcode in list(Opcode) for frame in frames)


@given(st.lists(st.integers(1, len(STREAM) - 1), max_size=30))
def test_any_split_gives_the_same_frames(cuts: list[int]) -> None:
    decoder, raws = FrameDecoder(), []
    edges = [0, *sorted(set(cuts)), len(STREAM)]
    for start, end in itertools.pairwise(edges):
        raws += [frame.raw for frame in decoder.feed(STREAM[start:end])]
    assert b"".join(raws) == STREAM
    assert decoder.pending_bytes == 0


@given(st.binary(max_size=400))
def test_garbage_loses_no_byte(garbage: bytes) -> None:
    decoder, out = FrameDecoder(), b""
    try:
        for start in range(0, len(garbage), 7):
            out += b"".join(frame.raw for frame in decoder.feed(garbage[start : start + 7]))
    except FramingError:
        consumed = len(out) + decoder.pending_bytes
        assert out + decoder.rest == garbage[:consumed]
    else:
        assert out + decoder.rest == garbage


@pytest.mark.parametrize(
    "header",
    [
        (1, 9, 0, 1, 0),
        (-1, 9, 0, 1, 0),
        (0, -9, 0, 1, 0),
        (0, 9, framing.MAX_BODY_BYTES + 1, 1, 0),
        (0, 9, 0xFFFFFFFF, 1, 0),
    ],
)
def test_headers_that_break_the_rules_are_refused(header: tuple[int, ...]) -> None:
    decoder = FrameDecoder()
    raw = framing.HEADER.pack(*header)
    with pytest.raises(FramingError, match="not a MetaService frame"):
        decoder.feed(raw + b"tail")
    assert decoder.rest == raw + b"tail"


def test_good_frames_before_a_bad_one_are_handed_out_first() -> None:
    good, _ = exchange(Opcode.IS_EXIST)
    decoder = FrameDecoder()
    assert [f.raw for f in decoder.feed(good + b"\x16\x03" + bytes(20))] == [good]
    with pytest.raises(FramingError):
        decoder.feed(b"")
    assert decoder.rest == b"\x16\x03" + bytes(20)


def test_largest_body_dribbling_in_is_decoded() -> None:
    raw = framing.encode_frame(Opcode.BATCH_IS_EXIST, 7, bytes(framing.MAX_BODY_BYTES))
    decoder, frames = FrameDecoder(), []
    for start in range(0, len(raw), 65536):
        frames += decoder.feed(raw[start : start + 65536])
    assert [len(frame.raw) for frame in frames] == [len(raw)]


def test_handshakes() -> None:
    hellos = RECORDED["handshakes"]
    assert framing.parse_client_handshake(bytes.fromhex(hellos["ranked"])) == 0
    assert framing.parse_client_handshake(bytes.fromhex(hellos["anonymous"])) is None
    assert bytes.fromhex(hellos["anonymous"]) == framing.ANONYMOUS_HANDSHAKE
    for wrong in (b"", framing.ANONYMOUS_HANDSHAKE[:15], b"\x16\x03\x01" + bytes(13)):
        with pytest.raises(FramingError, match="not a MetaService handshake"):
            framing.parse_client_handshake(wrong)


@pytest.mark.parametrize("opcode", CLIENT_OPCODES)
def test_key_count_matches_the_recorded_answers(opcode: int) -> None:
    request, answer = exchange(opcode)
    keys = framing.key_count(opcode, request)
    if opcode in (Opcode.BATCH_IS_EXIST, Opcode.BATCH_REMOVE, Opcode.BATCH_QUERY, Opcode.BATCH_UPDATE):
        assert keys == struct.unpack_from("<Q", answer, framing.HEADER_BYTES + 8)[0]
    elif opcode in (Opcode.BATCH_GET, Opcode.BATCH_ALLOC):
        assert keys == 2
    else:
        assert keys == 1


@given(st.sampled_from(sorted(set(CLIENT_OPCODES))), st.integers(0, 2**64 - 1), st.binary(max_size=60))
def test_a_lying_key_count_is_bounded_by_the_body(opcode: int, count: int, tail: bytes) -> None:
    offset = framing._COUNT_OFFSET.get(Opcode(opcode), 8)
    raw = framing.encode_frame(opcode, 1, bytes(offset) + struct.pack("<Q", count) + tail)
    assert framing.key_count(opcode, raw) <= max(1, len(tail))


@pytest.mark.parametrize("opcode", CLIENT_OPCODES)
def test_error_answers_have_the_shape_of_the_real_ones(opcode: int) -> None:
    """Same message id as the recorded answer, header field = opcode, never an empty body."""
    request, answer = exchange(opcode)
    keys = framing.key_count(opcode, request)
    (made,) = FrameDecoder().feed(framing.error_answer(opcode, 0x40000009, keys))
    assert (made.opcode, made.sequence) == (opcode, 0x40000009)
    assert len(made.body) > 8
    message_id = struct.unpack_from("<h", made.body, 2)[0]
    real_id = struct.unpack_from("<h", answer, framing.HEADER_BYTES + 2)[0]
    if opcode == Opcode.BATCH_UPDATE_LEASE:
        assert message_id == 2  # the plain response
    else:
        assert message_id == real_id


def test_error_answers_carry_the_result_for_each_key() -> None:
    raw = framing.error_answer(Opcode.BATCH_IS_EXIST, 1, 3, -3004)
    assert struct.unpack_from("<Q3i", raw, framing.HEADER_BYTES + 8) == (3, -3004, -3004, -3004)
    raw = framing.error_answer(Opcode.ALLOC, 1, 1)
    assert struct.unpack_from("<i", raw, len(raw) - 4)[0] == framing.RESULT_NOT_LINKED


def test_real_misses_and_our_misses_are_the_same_bytes() -> None:
    """The shapes are not guessed: our miss for these calls equals a recorded miss."""
    for opcode, miss_bytes in ((Opcode.QUERY, 44), (Opcode.IS_EXIST, 28)):
        for e in EXCHANGES:
            answer = bytes.fromhex(e["answer"])
            if e["opcode"] == opcode and len(answer) == miss_bytes:
                sequence = framing.HEADER.unpack_from(answer)[3]
                if framing.lookup_hits(opcode, answer, 1) == 0:
                    assert framing.miss_answer(opcode, sequence, 1) == answer


def test_an_answer_for_absurdly_many_keys_stays_within_a_frame() -> None:
    for opcode in (Opcode.BATCH_QUERY, Opcode.BATCH_GET, Opcode.BATCH_IS_EXIST):
        assert len(framing.error_answer(opcode, 1, 2_600_000)) < framing.MAX_BODY_BYTES


def test_hits_in_recorded_answers() -> None:
    hits = {}
    for e in EXCHANGES:
        if e["opcode"] in framing.LOOKUP_OPCODES:
            request, answer = bytes.fromhex(e["request"]), bytes.fromhex(e["answer"])
            keys = framing.key_count(e["opcode"], request)
            hits.setdefault(e["opcode"], []).append((keys, framing.lookup_hits(e["opcode"], answer, keys)))
    assert sorted(hits[Opcode.BATCH_QUERY]) == [(2, 1), (3, 2)]
    assert {h for _, h in hits[Opcode.QUERY]} == {0, 1}


def test_writes_in_recorded_answers() -> None:
    request, answer = exchange(Opcode.ALLOC, answer_bytes=80)
    assert framing.granted_keys(Opcode.ALLOC, answer, framing.key_count(Opcode.ALLOC, request)) == 1
    assert framing.granted_keys(Opcode.ALLOC, framing.error_answer(Opcode.ALLOC, 1, 1, -3006), 1) == 0
    request, answer = exchange(Opcode.BATCH_GET)  # of a key that was there and one that was not
    assert framing.granted_keys(Opcode.BATCH_GET, answer, framing.key_count(Opcode.BATCH_GET, request)) == 1
    request, answer = exchange(Opcode.BATCH_ALLOC)
    assert (
        framing.granted_keys(Opcode.BATCH_ALLOC, answer, framing.key_count(Opcode.BATCH_ALLOC, request)) == 2
    )


@given(st.sampled_from(sorted(framing.LOOKUP_OPCODES)), st.binary(max_size=80), st.integers(0, 100))
def test_damaged_answers_never_raise(opcode: int, body: bytes, keys: int) -> None:
    raw = framing.encode_frame(opcode, 1, body)
    assert 0 <= framing.lookup_hits(opcode, raw, keys) <= max(keys, 1)
    assert 0 <= framing.granted_keys(Opcode.BATCH_ALLOC, raw, keys) <= keys
