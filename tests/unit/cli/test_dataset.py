"""kvtierctl dataset: the options of the published script, byte for byte what it writes, and what is said."""

import json
from pathlib import Path

import pytest

from kvtierd.cli import main

DATA = Path(__file__).parents[2] / "fixtures" / "dataset"
CASES = json.loads((DATA / "converted" / "options.json").read_text())


def run(capsys, *argv):
    with pytest.raises(SystemExit) as ended:
        main(["dataset", *map(str, argv)])
    out, err = capsys.readouterr()
    return ended.value.code, out, err


@pytest.mark.parametrize("case", CASES)
def test_the_bytes_are_those_of_the_published_script(tmp_path, capsys, case):
    (golden,) = (DATA / "converted").glob(f"{case}.json*")
    output = tmp_path / golden.name
    inputs = [DATA / "first.jsonl", DATA / "second.jsonl"]
    code, _, err = run(capsys, "convert", "--input", *inputs, "--output", output, *CASES[case])
    assert (code, err) == (0, "")
    assert output.read_bytes() == golden.read_bytes()


def test_it_says_what_was_chosen_and_what_was_not(tmp_path, capsys):
    code, out, _ = run(
        capsys,
        "convert",
        "--input",
        DATA / "first.jsonl",
        "--output",
        tmp_path / "out.json",
        "--rounds",
        4,
        "--top-n",
        50,
    )
    assert code == 0
    assert "records chosen, lengths 1024 to 3000.5 (as the records say)" in out
    assert "conversations of" in out
    assert "left over: 2 questions" in out
    assert "skipped or changed: 4 x too short (first: first.jsonl:" in out
    assert "note: 50 records were asked for" in out


def test_json(tmp_path, capsys):
    code, out, _ = run(
        capsys,
        "convert",
        "--input",
        DATA / "first.jsonl",
        "--output",
        tmp_path / "o.jsonl",
        "--output-format",
        "qa",
        "--json",
    )
    assert code == 0
    document = json.loads(out)
    assert document["format"] == "qa"
    assert document["conversations"] is None
    assert document["questions"] == 2 * document["selected"]
    assert document["skipped"]["too short"]["count"] == 4


@pytest.mark.parametrize(
    "wrong",
    [
        ["--top", "5"],
        ["--top-n", "0"],
        ["--top-n", "x"],
        ["--alternate-order", "yes"],
        ["--output-format", "csv"],
        ["--min-length", "9", "--max-length", "8"],
        ["stray"],
    ],
)
def test_wrong_options_are_usage_errors(tmp_path, capsys, wrong):
    code, _, err = run(capsys, "convert", *wrong, "--output", tmp_path / "x")
    assert code == 2
    assert err
    assert not (tmp_path / "x").exists()


def test_the_default_input_is_the_scripts(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, "convert")
    assert code == 1
    assert "multi_news.jsonl" in err


def test_lengths_by_a_tokenizer_that_is_not_there(tmp_path, capsys):
    code, out, _ = run(capsys, "convert", "--input", DATA / "first.jsonl", "--tokenizer", tmp_path, "--json")
    assert code == 1
    assert json.loads(out)["error"]["code"] == "workload.tokenizer"


def test_lengths_by_a_real_tokenizer(tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers", reason="the extra workload is not installed")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    source = tmp_path / "in.jsonl"
    source.write_text('{"context": "one two three"}\n{"context": "one two"}\n')
    code, out, _ = run(
        capsys, "convert", "--input", source, "--output", tmp_path / "out.jsonl", "--output-format", "qa",
        "--tokenizer", tmp_path, "--min-length", 3, "--json",
    )  # fmt: skip
    assert code == 0
    assert json.loads(out)["selected"] == 1
    assert json.loads(out)["length"] == {"min": 3, "max": 3, "unit": "tokens"}


def test_a_sample_can_be_converted(tmp_path, capsys):
    code, out, _ = run(
        capsys,
        "sample",
        "--output",
        tmp_path / "s.jsonl",
        "--records",
        10,
        "--min-length",
        20,
        "--max-length",
        40,
    )
    assert code == 0
    assert "10 records of 20 to 40 words" in out
    code, out, _ = run(
        capsys,
        "convert",
        "--input",
        tmp_path / "s.jsonl",
        "--output",
        tmp_path / "c.json",
        "--min-length",
        20,
        "--max-length",
        40,
        "--json",
    )
    assert json.loads(out)["selected"] == 10
