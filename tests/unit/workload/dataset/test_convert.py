import gzip
import json
import os
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.errors import StateError, WorkloadError
from kvtierd.workload.dataset.conversations import read_conversations
from kvtierd.workload.dataset.convert import ConvertOptions, convert
from kvtierd.workload.dataset.records import Skips

DATA = Path(__file__).parents[3] / "fixtures" / "dataset"


def options(tmp_path, *inputs, **more):
    defaults = {"output_format": "qa", "min_length": 0, "max_length": 9, "repeat": 1}
    return ConvertOptions(inputs=inputs, output=tmp_path / "out.jsonl", **{**defaults, **more})


def write(tmp_path, *records, name="in.jsonl"):
    path = tmp_path / name
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def questions(path):
    return [json.loads(line)["question"] for line in path.read_bytes().split(b"\n") if line]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1))
def test_texts_are_written_as_pythons_json_writes_them(tmp_path_factory, texts):
    directory = tmp_path_factory.mktemp("d")
    source = write(directory, *({"context": text, "length": 1} for text in texts))
    convert(options(directory, source))
    lines = [json.dumps({"question": text, "answer": ""}, ensure_ascii=False) + "\n" for text in texts]
    assert (directory / "out.jsonl").read_bytes() == "".join(lines).encode()


def test_every_second_pass_runs_backwards(tmp_path):
    source = write(tmp_path, *({"context": f"Q{n}", "length": 1} for n in range(3)))
    convert(options(tmp_path, source, repeat=3))
    assert questions(tmp_path / "out.jsonl") == ["Q0", "Q1", "Q2", "Q2", "Q1", "Q0", "Q0", "Q1", "Q2"]


def test_openai_messages_are_read_back_as_conversations(tmp_path):
    source = write(tmp_path, *({"context": f"Q{n}", "length": 1} for n in range(5)))
    result = convert(options(tmp_path, source, output_format="openai", rounds=2))
    got = list(read_conversations(tmp_path / "out.jsonl", skips=Skips()))
    assert [c.questions for c in got] == [("Q0", "Q1"), ("Q2", "Q3")]
    assert (result.conversations, result.written, result.left_over) == (2, 4, 1)


def test_multi_turn_is_read_back_as_conversations(tmp_path):
    convert(ConvertOptions(inputs=(DATA / "first.jsonl",), output=tmp_path / "out.json", rounds=3))
    got = list(read_conversations(tmp_path / "out.json", skips=Skips()))
    assert got
    assert all(len(c.questions) == 3 for c in got)


@pytest.mark.parametrize(
    "pack", [gzip.compress, zstandard.compress, lambda data: b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n")]
)
def test_packed_input_gives_the_same_output(tmp_path, pack):
    packed = tmp_path / "packed"
    packed.write_bytes(pack((DATA / "first.jsonl").read_bytes()))
    for source, out in ((DATA / "first.jsonl", "a"), (packed, "b")):
        convert(ConvertOptions(inputs=(source,), output=tmp_path / out))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_what_is_left_out_is_counted_by_reason(tmp_path):
    source = write(
        tmp_path,
        {"context": "kept", "length": 5},
        {"context": "short", "length": 1},
        {"context": "long", "length": 99},
        {"context": "no length"},
        {"context": "text length", "length": "5"},
        {"context": "true", "length": True},
        {"context": "nan", "length": float("nan")},
        {"context": None, "length": 5},
        {"other": "no field", "length": 5},
        "nonsense",
        "[1]",
        '{"context": "half \\ud83d pair", "length": 5}',
        {"context": "float", "length": 5.5},
    )
    result = convert(options(tmp_path, source, min_length=2))
    assert questions(tmp_path / "out.jsonl") == ["kept", "half \ufffd pair", "float"]
    assert {reason: entry["count"] for reason, entry in result.skips.as_dict().items()} == {
        "too short": 2,
        "too long": 1,
        "has no length, taken as 0": 1,
        "length is not a number": 3,
        "has no context": 2,
        "not JSON": 1,
        "not a JSON object": 1,
        "half a surrogate pair was replaced by U+FFFD": 1,
    }
    assert (result.shortest, result.longest) == (5, 5.5)


def test_all_lines_counts_lines_that_cannot_be_used_too_and_over_all_files(tmp_path):
    one = write(tmp_path, "nonsense", "", {"context": "a", "length": 1}, name="one")
    two = write(tmp_path, {"context": "b", "length": 99}, {"context": "c", "length": 1}, name="two")
    for top_n, kept in ((2, ["a"]), (3, ["a"]), (4, ["a", "c"]), (9, ["a", "c"])):
        convert(options(tmp_path, one, two, count_mode="all-lines", top_n=top_n))
        assert questions(tmp_path / "out.jsonl") == kept


def test_lengths_can_be_those_of_a_tokenizer(tmp_path):
    source = write(tmp_path, {"context": "a b c"}, {"context": "a b c d e f g h i j k", "length": 2})
    result = convert(options(tmp_path, source), encode=lambda text: [0] * len(text.split()))
    assert questions(tmp_path / "out.jsonl") == ["a b c"]
    assert result.skips.count("too long") == 1
    assert result.longest == 3


def test_nothing_that_fits_is_an_error_that_names_the_lengths_and_leaves_the_old_output(tmp_path):
    (tmp_path / "out.jsonl").write_text("old")
    with pytest.raises(WorkloadError) as caught:
        convert(options(tmp_path, write(tmp_path, {"context": "x", "length": 50})))
    assert caught.value.stable_code == "dataset.nothing-selected"
    assert "50 to 50" in caught.value.why
    assert (tmp_path / "out.jsonl").read_text() == "old"


def test_too_few_for_one_conversation(tmp_path):
    with pytest.raises(WorkloadError) as caught:
        convert(
            options(
                tmp_path, write(tmp_path, {"context": "x", "length": 1}), output_format="multi-turn", rounds=2
            )
        )
    assert caught.value.stable_code == "dataset.too-few-for-a-conversation"


def test_an_input_is_not_overwritten(tmp_path):
    source = write(tmp_path, {"context": "x", "length": 1}, name="out.jsonl")
    with pytest.raises(WorkloadError) as caught:
        convert(options(tmp_path, source))
    assert caught.value.stable_code == "dataset.would-overwrite-input"


def test_a_full_disk_leaves_the_old_output_and_nothing_else(tmp_path, monkeypatch):
    source = write(tmp_path, {"context": "x", "length": 1})
    (tmp_path / "out.jsonl").write_text("old")

    def full(_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("kvtierd.files.os.fsync", full)
    with pytest.raises(StateError):
        convert(options(tmp_path, source))
    assert (tmp_path / "out.jsonl").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_notes_name_a_surprising_suffix_and_too_few_records(tmp_path):
    source = write(tmp_path, {"context": "x", "length": 1})
    result = convert(options(tmp_path, source, output_format="openai", rounds=1))
    assert result.notes == ("64 records were asked for, 1 are there",)
    result = convert(options(tmp_path, source, output_format="multi-turn", rounds=1, top_n=1))
    assert "expect .json" in result.notes[0]


def test_progress_names_each_file(tmp_path):
    told = []
    sources = [write(tmp_path, {"context": "x", "length": 1}, name=name) for name in ("one", "two")]
    convert(options(tmp_path, *sources), progress=lambda path, size: told.append((path.name, size)))
    assert told == [(p.name, p.stat().st_size) for p in sources]
    assert Path(sources[0]).exists()
