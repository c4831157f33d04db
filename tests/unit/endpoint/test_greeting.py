from __future__ import annotations

import pytest

from kvtierd.endpoint.greeting import StoreGreeting
from kvtierd.memcache import framing

# As recorded when rank 1 connected again: the question for its role, 67 bytes.
QUESTION = framing.HEADER.pack(0, 0, 51, 0, 0) + bytes(4) + b"\x01" + bytes(46)
ANSWER = b"\x00\x00"


@pytest.mark.parametrize(
    "chunks",
    [
        [ANSWER + QUESTION],
        [QUESTION + ANSWER],
        [ANSWER, QUESTION],
        [QUESTION, ANSWER],
        [QUESTION[:9], QUESTION[9:], ANSWER],
        [(QUESTION + ANSWER)[:30], (QUESTION + ANSWER)[30:]],
    ],
)
def test_the_answer_comes_first_in_every_recorded_order(chunks: list[bytes]) -> None:
    greeting = StoreGreeting()
    now = b"".join(greeting.feed(chunk) for chunk in chunks)
    assert now == ANSWER
    assert greeting.answered
    assert greeting.finish() == QUESTION
    assert greeting.finish() == b""


def test_a_refusal_passes_at_once() -> None:
    greeting = StoreGreeting()
    assert greeting.feed(b"\xff\xff") == b"\xff\xff"
    assert greeting.finish() == b""


def test_no_byte_of_something_unknown_is_lost() -> None:
    greeting = StoreGreeting()
    assert greeting.feed(b"HTTP") + greeting.feed(b"/1.1") + greeting.finish() == b"HTTP/1.1"
    greeting = StoreGreeting()
    assert greeting.feed(QUESTION) + greeting.finish() == QUESTION  # the answer never came
