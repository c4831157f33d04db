"""Events out of bytes cut anywhere, and what one event says."""

import itertools
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtierd.workload.load.events import EventParser, read_chunk

TEXT = "缓存 café 🚀"
STREAM = (
    b": ping\n\n"
    b'data: {"a": 1}\n\n'
    b"event: message\r\ndata: two\r\n\r\n"
    b"data: first\ndata: second\n\n" + f"data: {TEXT}\n\n".encode() + b"data:no blank\n\n\n\n"
    b"id: 7\n\n"
    b"data: [DONE]\n\n"
)
EVENTS = [b'{"a": 1}', b"two", b"first\nsecond", TEXT.encode(), b"no blank", b"[DONE]"]


CUTS = st.sets(st.integers(1, len(STREAM) - 1), max_size=12)
slow = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


def parse(pieces):
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)]


def test_one_piece():
    assert parse([STREAM]) == EVENTS


@slow
@given(CUTS)
def test_cut_anywhere_gives_the_same_events(cuts):
    at = [0, *sorted(set(cuts)), len(STREAM)]
    assert parse([STREAM[a:b] for a, b in itertools.pairwise(at)]) == EVENTS


@slow
@given(CUTS)
def test_every_line_ending(cuts):
    for ending in (b"\r\n", b"\r"):
        text = STREAM.replace(b"\r\n", b"\n").replace(b"\n", ending)
        at = [0, *sorted({c for c in cuts if c < len(text)}), len(text)]
        pieces = [text[a:b] for a, b in itertools.pairwise(at)]
        parser = EventParser()
        found = [event for piece in pieces for event in parser.feed(piece)] + parser.end()
        assert found == EVENTS


def test_an_end_without_a_blank_line():
    parser = EventParser()
    assert parser.feed(b"data: last") == []
    assert parser.end() == [b"last"]


def test_an_event_without_end_is_bounded():
    parser = EventParser()
    with pytest.raises(ValueError, match="longer than"):
        for _ in range(20):
            parser.feed(b"data: " + b"x" * 1024 * 1024)


@pytest.mark.parametrize(
    ("value", "content", "reasoning"),
    [
        ({"choices": [{"delta": {"role": "assistant"}}]}, "", ""),
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, "", ""),
        ({"choices": [{"delta": {"content": None, "reasoning_content": "hm"}}]}, "", "hm"),
        ({"choices": [{"delta": {"reasoning": "hm"}}]}, "", "hm"),
        ({"choices": [{"delta": {"content": "a"}, "finish_reason": None}]}, "a", ""),
        ({"choices": [{"text": "a"}]}, "a", ""),
        ({"choices": [], "usage": {"prompt_tokens": 3}}, "", ""),
    ],
)
def test_what_counts_as_text(value, content, reasoning):
    chunk = read_chunk(json.dumps(value).encode())
    assert (chunk.content, chunk.reasoning, chunk.error) == (content, reasoning, "")


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"error": {"message": "out of memory", "code": 500}}, "out of memory"),
        ({"error": "broken"}, "broken"),
        ({"object": "error", "message": "old form", "code": 400}, "old form"),
    ],
)
def test_an_error_is_an_error_and_no_text(value, told):
    assert told in read_chunk(json.dumps(value).encode()).error


@pytest.mark.parametrize(
    "data", [b"[]", b"{}", b"no json", b'"text"', b'{"choices": [5]}', b'{"choices": {"a": 1}}']
)
def test_what_is_no_event_of_theirs(data):
    with pytest.raises(ValueError):
        read_chunk(data)
