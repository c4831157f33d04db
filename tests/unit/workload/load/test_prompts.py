"""What is sent: salt, turns, and texts for traces without any."""

import pytest

from kvtierd.workload.dataset.conversations import Conversation, TraceRequest, Turn
from kvtierd.workload.load.client import as_text
from kvtierd.workload.load.prompts import (
    block_text,
    filler,
    from_conversation,
    from_trace,
    salt_text,
    warm_up_text,
)


def chat(*turns, **more):
    return Conversation("c", tuple(Turn(role, text) for role, text in turns), **more)


def test_the_answers_of_the_dataset_are_not_sent():
    session = from_conversation(chat(("user", "q1"), ("assistant", "a1"), ("user", "q2")), "")
    assert session.questions() == ("q1", "q2")


def test_the_salt_stands_at_the_head_of_what_comes_first():
    salt = salt_text("77")
    plain = from_conversation(chat(("user", "q1"), ("user", "q2")), salt)
    assert plain.questions() == (salt + "q1", "q2")
    system = from_conversation(chat(("system", "be brief"), ("user", "q1")), salt)
    assert system.system == salt + "be brief"
    assert system.questions() == ("q1",)
    assert salt_text("") == ""


def texts(requests, **more):
    options = {"block_tokens": 8, "chars_per_token": None} | more
    return [s.questions()[0] for s in from_trace(requests, "", **options)]


def test_equal_hash_ids_give_equal_beginnings_and_nothing_else_is_shared():
    first, second, third = texts(
        [
            TraceRequest(0, 24, 5, (1, 2, 3)),
            TraceRequest(1, 24, 5, (1, 2, 9)),
            TraceRequest(2, 24, 5, (4, 2, 3)),
        ]
    )
    shared = block_text(1, 8, 8, None) + block_text(2, 8, 8, None)
    assert first.startswith(shared)
    assert second.startswith(shared)
    assert first != second
    assert not third.startswith(block_text(1, 8, 8, None))


@pytest.mark.parametrize("tokens", [1, 7, 8, 20, 24])
def test_a_trace_prompt_is_as_long_as_it_says(tokens):
    (text,) = texts([TraceRequest(0, tokens, 5, (1, 2, 3))])
    assert len(text.split()) == tokens


def test_a_prompt_longer_than_its_ids():
    (text,) = texts([TraceRequest(0, 30, 5, (1,))])
    assert len(text.split()) == 30


def test_bytes_as_tokens():
    (text,) = texts([TraceRequest(0, 20, 5, (1, 2, 3))], chars_per_token=1.0)
    assert len(text) == 20


def test_fillers_are_the_same_for_the_same_seed_only():
    assert filler("a", 50) == filler("a", 50) != filler("b", 50)
    assert len(warm_up_text("x", 333)) == 333


def test_a_chat_as_text_only_grows():
    first = [{"role": "user", "content": "q1"}]
    turns = [*first, {"role": "assistant", "content": "a1"}, {"role": "user", "content": "q2"}]
    assert as_text(first) == "q1"
    longer = [*turns, {"role": "assistant", "content": "a2"}, {"role": "user", "content": "q3"}]
    assert as_text(longer).startswith(as_text(turns) + "a2")
