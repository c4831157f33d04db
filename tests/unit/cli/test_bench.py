"""kvtierctl bench: exact forms and exit codes."""

import json

import pytest

from kvtierd.cli import main

from ..workload.load.fake_openai import FakeOpenAi, serving


@pytest.fixture
def run(capsys, monkeypatch):
    for name in ("KVTIERD_SETTINGS", "KVTIERD_SOCKET", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["bench", *map(str, arguments)])
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return call


@pytest.fixture
def dataset(tmp_path):
    path = tmp_path / "qa.jsonl"
    path.write_text(
        "".join(json.dumps({"question": f"question {i}", "answer": ""}) + "\n" for i in range(10))
    )
    return path


def form(url, dataset, tmp_path, *more):
    return (
        "run", "--url", url, "--model", "fake", "--dataset", dataset, "--output", tmp_path / "out", "--concurrency", 2,
        "--max-tokens", 4, *more,
    )  # fmt: skip


def test_the_exact_form(run, dataset, tmp_path):
    with serving(FakeOpenAi()) as url:
        code, out, err = run(*form(url, dataset, tmp_path, "--json"))
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["complete"] is True
    assert result["summary"]["output_tokens"] == 40
    assert result["label"] == "out"


def test_for_people(run, dataset, tmp_path):
    with serving(FakeOpenAi()) as url:
        code, out, _ = run(*form(url, dataset, tmp_path, "--engine-kind", "vllm"))
    assert code == 0
    assert "10 of 10 requests succeeded" in out
    assert "TTFT" in out
    assert "L1" in out


@pytest.mark.parametrize(
    ("every", "more", "expected"), [(2, (), 1), (2, ("--max-error-share", "0.8"), 0), (1, (), 1)]
)
def test_failures_over_a_share_exit_1(run, dataset, tmp_path, every, more, expected):
    server = FakeOpenAi(fault="429", every=every)
    server.after = 3
    with serving(server) as url:
        code, out, _ = run(*form(url, dataset, tmp_path, *more))
    assert code == expected
    assert "rate-limited: status 429: too many requests" in out


def test_a_dead_server_is_an_error_with_a_code(run, dataset, tmp_path):
    code, out, _ = run(*form("http://127.0.0.1:9", dataset, tmp_path, "--json"))
    assert code == 1
    assert json.loads(out)["error"]["code"] == "load.unreachable"


@pytest.mark.parametrize(
    "more",
    [
        ("--arrival", "sometimes"),
        ("--arrival", "poisson"),
        ("--rate", "5", "--arrival", "closed"),
        ("--api", "batch"),
        ("--extra", "[1]"),
        ("--extra", '{"stream": false}'),
        ("--extra", "{"),
        ("--engine", "also"),
        ("--concurrency", "0"),
    ],
)
def test_wrong_usage(run, dataset, tmp_path, more):
    code, _, err = run(*form("http://127.0.0.1:9", dataset, tmp_path, *more))
    assert code == 2
    assert "Traceback" not in err


def test_no_server_is_wrong_usage(run, dataset, tmp_path):
    code, _, _ = run("run", "--dataset", dataset, "--output", tmp_path / "out")
    assert code == 2


def test_an_engine_needs_a_daemon(run, dataset, tmp_path):
    code, _, _ = run(
        "run",
        "--engine",
        "qwen3",
        "--dataset",
        dataset,
        "--output",
        tmp_path / "o",
        "--socket",
        tmp_path / "s",
    )
    assert code == 3


def test_no_key_on_the_command_line(run):
    _, out, _ = run("run", "--help")
    assert "--api-key-file" in out.replace("\n", "")
    assert "--api-key " not in out


def test_a_report(run, dataset, tmp_path):
    with serving(FakeOpenAi()) as url:
        run(*form(url, dataset, tmp_path))
    code, out, _ = run("report", tmp_path / "out", "--json")
    assert code == 0
    made = json.loads(out)
    assert made["runs"][0]["requests"] == 10
    assert str(tmp_path / "out" / "report.html") in made["files"]
    code, _, _ = run("report", tmp_path / "out", tmp_path / "out")
    assert code == 2


def test_aisbench_files(run, dataset, tmp_path):
    code, out, _ = run(
        "aisbench-config", "--url", "http://127.0.0.1:8113/v1", "--model", "q\"wen'3", "--dataset", dataset, "--output",
        tmp_path / "ais", "--tokenizer", tmp_path, "--concurrency", 32, "--max-tokens", 1024, "--salt", "s", "--json",
    )  # fmt: skip
    assert code == 0
    made = json.loads(out)
    assert made["command"][0] == "ais_bench"
    model = (tmp_path / "ais" / "models" / "kvtierd_model.py").read_text()
    values = evaluated(model)["models"][0]
    assert (values["host_ip"], values["host_port"], values["model"]) == ("127.0.0.1", 8113, "q\"wen'3")
    assert (values["max_out_len"], values["batch_size"], values["stream"]) == (1024, 32, True)
    assert values["generation_kwargs"] == {"temperature": 0, "ignore_eos": True}
    assert values["retry"] == 1
    assert values["api_key"] == ""
    data = evaluated((tmp_path / "ais" / "datasets" / "kvtierd_dataset.py").read_text())["kvtierd_datasets"][
        0
    ]
    rows = [json.loads(line) for line in open(data["path"])]
    assert rows[0] == {"question": "[run s] question 0", "answer": ""}
    assert data["infer_cfg"]["prompt_template"]["template"]["round"][0]["prompt"] == "{question}"


def test_aisbench_chats(run, tmp_path):
    chats = tmp_path / "chats.json"
    turns = [
        {"from": w, "value": v}
        for w, v in (("system", "s"), ("human", "q1"), ("gpt", "long answer"), ("human", "q2"))
    ]
    chats.write_text(json.dumps([{"id": "a", "conversations": turns}]))
    code, out, _ = run(
        "aisbench-config", "--url", "http://h:1", "--model", "m", "--dataset", chats, "--output", tmp_path / "ais",
        "--tokenizer", tmp_path, "--salt", "", "--json",
    )  # fmt: skip
    assert code == 0
    assert any("system" in note for note in json.loads(out)["notes"])
    (chat,) = json.loads((tmp_path / "ais" / "chat.json").read_text())
    assert [(t["from"], t["value"]) for t in chat["conversations"]] == [
        ("human", "s\n\nq1"), ("gpt", ""), ("human", "q2"), ("gpt", ""),
    ]  # fmt: skip


def evaluated(text):
    """A file of AISBench's, without AISBench: its imports are names only."""
    lines = text.splitlines()
    names = [
        name for line in lines if line.startswith("from ") for name in line.split(" import ")[1].split(", ")
    ]
    space = {name: name for name in names}
    exec("\n".join(line for line in lines if not line.startswith("from ")), space)
    return space
