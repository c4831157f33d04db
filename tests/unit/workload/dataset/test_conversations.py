import json

import pytest

from kvtierd.errors import WorkloadError
from kvtierd.workload.dataset.conversations import (
    Conversation,
    TraceRequest,
    Turn,
    dataset_form,
    read_conversations,
    read_mooncake,
)
from kvtierd.workload.dataset.records import Skips


def write(tmp_path, *objects):
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(o) + "\n" for o in objects))
    return path


def read(tmp_path, *objects, skips=None):
    return list(read_conversations(write(tmp_path, *objects), skips=skips or Skips()))


def sharegpt(*pairs, **more):
    return {"conversations": [{"from": who, "value": text} for who, text in pairs], **more}


def turns(*pairs):
    return tuple(Turn(*pair) for pair in pairs)


def test_qa(tmp_path):
    got = read(tmp_path, {"question": "Q1", "answer": ""}, {"prompt": "Q2", "answer": "A"})
    assert got == [
        Conversation("1", turns(("user", "Q1"))),
        Conversation("2", turns(("user", "Q2"), ("assistant", "A"))),
    ]
    assert got[0].questions == ("Q1",)


def test_sharegpt_keeps_all_turns_and_maps_the_roles(tmp_path):
    pairs = [
        ("system", "S"),
        ("human", "Q1"),
        ("gpt", " "),
        ("user", "Q2"),
        ("chatgpt", "A2"),
        ("human", "Q3"),
        ("bing", "A3"),
    ]
    skips = Skips()
    (got,) = read(tmp_path, sharegpt(*pairs, id="id1"), skips=skips)
    assert got.id == "id1"
    assert got.turns == turns(
        ("system", "S"),
        ("user", "Q1"),
        ("assistant", ""),
        ("user", "Q2"),
        ("assistant", "A2"),
        ("user", "Q3"),
        ("assistant", "A3"),
    )
    assert skips.total == 0


def test_what_is_wrong_in_sharegpt_is_counted(tmp_path):
    skips = Skips()
    got = read(
        tmp_path,
        sharegpt(
            ("gpt", "early"), ("human", "Q1"), ("human", "Q2"), ("gpt", None), ("human", None), ("tool", "x")
        ),
        {"id": "no conversations", "conversations": None},
        {"something": 1},
        sharegpt(("gpt", "only")),
        sharegpt(("human", "Q"), id="twice"),
        sharegpt(("human", "Q"), id="twice"),
        {"conversations": ["text"]},
        skips=skips,
    )
    assert got[0].turns == turns(("user", "Q1\n\nQ2"), ("assistant", ""))
    assert [c.id for c in got] == ["1", "twice", "twice#2"]
    assert {reason: entry["count"] for reason, entry in skips.as_dict().items()} == {
        "an answer before the first question was left out": 2,
        "two messages of one side were joined": 1,
        "an empty message was left out": 1,
        "a message from 'tool' was left out": 1,
        "a message that is not an object was left out": 1,
        "no text of a user": 3,
        "no question, conversations or messages": 1,
    }


def test_openai_messages_and_batch_files(tmp_path):
    parts = [{"type": "text", "text": "look "}, {"type": "image_url"}, {"type": "text", "text": "here"}]
    skips = Skips()
    got = read(
        tmp_path,
        {"messages": [{"role": "user", "content": parts}], "max_tokens": 7, "timestamp": 1500},
        {
            "custom_id": "r1",
            "body": {"messages": [{"role": "user", "content": "Q"}], "max_completion_tokens": 9},
        },
        skips=skips,
    )
    assert got == [
        Conversation("1", turns(("user", "look here")), 1.5, 7),
        Conversation("r1", turns(("user", "Q")), None, 9),
    ]
    assert skips.count("a part of a message that is not text was left out") == 1


def test_mooncake(tmp_path):
    good = {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}
    skips = Skips()
    path = write(tmp_path, good, {**good, "hash_ids": "46"}, {**good, "timestamp": None})
    assert list(read_mooncake(path, skips=skips)) == [TraceRequest(27.482, 6955, 52, (46, 47))]
    assert skips.total == 2


@pytest.mark.parametrize(
    ("record", "form"),
    [
        ({"question": "q"}, "qa"),
        ({"conversations": []}, "sharegpt"),
        ({"messages": []}, "openai"),
        ({"body": {"messages": []}}, "openai"),
        ({"hash_ids": []}, "mooncake"),
        ({"x": 1}, None),
    ],
)
def test_the_form_is_told_by_the_first_record_that_has_one(tmp_path, record, form):
    assert dataset_form(write(tmp_path, {"comment": "none"}, record)) == form


def test_nothing_usable_is_an_error_with_the_reasons(tmp_path):
    with pytest.raises(WorkloadError) as caught:
        read(tmp_path, {"x": 1})
    assert caught.value.stable_code == "dataset.empty"
    assert "no question" in caught.value.why
    with pytest.raises(WorkloadError) as caught:
        list(read_mooncake(write(tmp_path), skips=Skips()))
    assert caught.value.why == "it is empty"
