"""Whole runs against a server with known delays and every fault."""

import dataclasses
import itertools
import json
import os
import signal
import socket
import threading
import time

import pytest

from kvtierd.errors import KvtierError, WorkloadError
from kvtierd.workload.load.results import read_requests, read_result
from kvtierd.workload.load.runner import LoadSettings
from kvtierd.workload.load.start import RunRequest, read_api_key, run_load
from kvtierd.workload.load.target import address_target

from .fake_openai import FakeOpenAi, serving

QA = [f"question {i} " + "alpha beta gamma " * 5 for i in range(12)]


def write(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def qa_file(tmp_path, questions=QA):
    return write(tmp_path / "qa.jsonl", [{"question": q, "answer": ""} for q in questions])


def load_settings(**more):
    return LoadSettings(
        **{"model": "fake", "concurrency": 4, "max_tokens": 6, "warm_up": 2, "request_seconds": 5.0} | more
    )


def go(tmp_path, server, *, dataset=None, kind=None, key=None, extra=None, salt=None, **load):
    request = RunRequest(
        dataset=dataset or qa_file(tmp_path),
        output=tmp_path / "out",
        load=load_settings(**load),
        salt=salt,
        extra=extra or {},
    )
    with serving(server) as url:
        return run_load(request, address_target(url, None, kind), api_key=key)


def sent(server, count):
    """The bodies of the last ``count`` requests: without the first and the warm-up."""
    return server.bodies[-count:]


def prompt(body):
    return body["messages"][0]["content"]


def test_a_run_measures_what_the_server_did(tmp_path):
    server = FakeOpenAi(ttft=0.08, gap=0.01)
    result, problem = go(tmp_path, server)
    assert problem is None
    assert result["complete"] is True
    summary = result["summary"]
    assert (summary["requests"], summary["failed"]) == (12, 0)
    assert 0.08 <= summary["ttft_seconds"]["min"]
    assert summary["ttft_seconds"]["p50"] < 0.12
    assert 0.009 <= summary["tpot_seconds"]["p50"] < 0.02
    assert summary["inter_token_seconds"]["count"] == 12 * 5  # from all gaps, not from means
    assert summary["e2e_seconds"]["min"] >= 0.13
    assert summary["output_tokens"] == 72
    assert server.most_running == 4
    assert result == read_result(tmp_path / "out")
    records = read_requests(tmp_path / "out")
    assert len(records) == 12
    assert all(r.output_tokens == 6 and r.ok and r.tokens_from == "usage" for r in records)


def test_the_salt_keeps_runs_apart_and_not_the_prompts_of_one_run(tmp_path):
    server = FakeOpenAi()
    first, _ = go(tmp_path, server, dataset=qa_file(tmp_path, QA + QA[::-1]), kind="vllm")
    assert first["tiers"]["hit_rate"] == pytest.approx(0.5, abs=0.01)
    (tmp_path / "out").rename(tmp_path / "first")
    second, _ = go(tmp_path, server, kind="vllm")
    assert second["tiers"]["hit_rate"] == 0
    assert second["salt"] != first["salt"]
    (tmp_path / "out").rename(tmp_path / "second")
    warm, _ = go(tmp_path, server, kind="vllm", salt=second["salt"])
    assert warm["tiers"]["hit_rate"] == 1


def test_no_salt_sends_the_dataset_as_it_is(tmp_path):
    server = FakeOpenAi()
    go(tmp_path, server, salt="")
    assert sorted(prompt(b) for b in sent(server, 12)) == sorted(QA)


def test_the_warm_up_uses_other_prompts_and_is_not_counted(tmp_path):
    server = FakeOpenAi()
    result, _ = go(tmp_path, server, warm_up=3, kind="vllm")
    assert len(server.bodies) == 1 + 3 + 12
    warm = [prompt(b) for b in server.bodies[:4]]
    assert not any("question" in w for w in warm)
    assert len(set(warm)) == 4
    assert result["tiers"]["looked_up_tokens"] == result["summary"]["prompt_tokens"]


def test_turns_wait_and_carry_the_real_answers(tmp_path):
    turns = [
        {"from": "system", "value": "be brief"},
        {"from": "human", "value": "q1"}, {"from": "gpt", "value": "an answer that must not be sent"},
        {"from": "human", "value": "q2"}, {"from": "gpt", "value": " "},
        {"from": "human", "value": "q3"},
    ]  # fmt: skip
    dataset = write(tmp_path / "chat.jsonl", [{"id": str(i), "conversations": turns} for i in range(3)])
    server = FakeOpenAi(ttft=0.02)
    result, _ = go(tmp_path, server, dataset=dataset, concurrency=3, max_tokens=2)
    assert result["summary"]["requests"] == 9
    longest = max(sent(server, 9), key=lambda b: len(b["messages"]))["messages"]
    assert [m["role"] for m in longest] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert [m["content"] for m in longest[2::2]] == ["w0 w1 ", "w0 w1 "]
    assert longest[0]["content"].endswith("] be brief")
    assert [m["content"] for m in longest[1::2]] == ["q1", "q2", "q3"]
    records = read_requests(tmp_path / "out")
    for identity in "012":
        mine = sorted((r for r in records if r.conversation == identity), key=lambda r: r.turn)
        for before, after in itertools.pairwise(mine):
            assert after.started_seconds >= before.started_seconds + before.e2e_seconds


def test_a_failed_turn_ends_its_conversation_only(tmp_path):
    turns = [
        {"from": "human", "value": f"q{n}"} if n % 2 else {"from": "gpt", "value": ""}
        for n in (1, 2, 3, 4, 5)
    ]
    dataset = write(tmp_path / "chat.jsonl", [{"id": str(i), "conversations": turns} for i in range(4)])
    server = FakeOpenAi(fault="429", every=4)
    server.after = 1
    result, _ = go(tmp_path, server, dataset=dataset, concurrency=1, warm_up=0)
    summary = result["summary"]
    assert summary["failed"] > 0
    assert summary["requests"] + result["requests_not_sent"] == 12
    assert result["complete"] is True


def test_a_fixed_length_is_asked_for(tmp_path):
    server = FakeOpenAi()
    go(tmp_path, server, max_tokens=7)
    body = server.bodies[-1]
    assert (body["max_tokens"], body["ignore_eos"], body["min_tokens"]) == (7, True, 7)
    assert body["stream_options"] == {"include_usage": True}


def test_the_dataset_says_how_long_answers_are(tmp_path):
    dataset = write(tmp_path / "m.jsonl", [{"messages": [{"role": "user", "content": "q"}], "max_tokens": 3}])
    server = FakeOpenAi()
    result, _ = go(tmp_path, server, dataset=dataset, max_tokens=None)
    assert server.bodies[-1]["max_tokens"] == 3
    assert result["summary"]["output_tokens"] == 3


def test_further_fields(tmp_path):
    server = FakeOpenAi()
    go(tmp_path, server, extra={"top_k": 1})
    assert all(b["top_k"] == 1 for b in server.bodies)


# -- what is no token, and what is a failure


@pytest.mark.parametrize("fault", ["reasoning", "utf8"])
def test_other_ways_to_send_a_token(tmp_path, fault):
    server = FakeOpenAi(ttft=0.05, fault=fault)
    result, _ = go(tmp_path, server)
    assert result["summary"]["failed"] == 0
    assert (
        result["summary"]["ttft_seconds"]["min"] >= 0.05
    )  # neither the ping nor the role was taken for a token
    assert result["summary"]["output_tokens"] == 72


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("429", "rate-limited", "too many requests"),
        ("500", "http-500", "Internal Server Error"),
        ("cut", "cut", "in the middle"),
        ("short", "cut", "without an end"),
        ("error-event", "server-error", "KV load failed"),
        ("whole", "not-a-stream", "whole answer"),
        ("empty", "empty", "no token"),
    ],
)
def test_a_failed_request_is_counted_by_kind_and_is_in_no_latency(tmp_path, fault, kind, words):
    server = FakeOpenAi(ttft=0.03, fault=fault, every=5)
    server.after = 3
    result, problem = go(tmp_path, server)
    assert problem is None
    summary = result["summary"]
    (error,) = summary["errors"]
    assert error["kind"] == kind
    assert words in error["example"]
    assert summary["succeeded"] == 12 - error["count"] == summary["ttft_seconds"]["count"]
    assert summary["ttft_seconds"]["min"] >= 0.03
    failed = [r for r in read_requests(tmp_path / "out") if not r.ok]
    assert len(failed) == error["count"] > 0


def test_every_request_has_a_deadline(tmp_path):
    server = FakeOpenAi(fault="hang", every=6)
    server.after = 3
    result, _ = go(tmp_path, server, request_seconds=0.4)
    (error,) = result["summary"]["errors"]
    assert error["kind"] == "timeout"
    assert "0.4 s" in error["example"]


def test_no_request_is_tried_twice(tmp_path):
    server = FakeOpenAi(fault="429", every=2)
    server.after = 1
    go(tmp_path, server, warm_up=0)
    assert len(server.bodies) == 13


# -- servers with tastes


def test_a_server_without_chat(tmp_path):
    server = FakeOpenAi(fault="no-chat")
    result, _ = go(tmp_path, server)
    assert result["server"]["api"] == "completions"
    assert any("no chat" in note for note in result["notes"])
    assert result["summary"]["failed"] == 0


def test_a_server_that_refuses_unknown_fields(tmp_path):
    server = FakeOpenAi(fault="strict")
    result, _ = go(tmp_path, server)
    assert "ignore_eos" not in server.bodies[-1]
    assert any("ignore_eos" in note for note in result["notes"])


def test_a_server_without_usage_is_counted_by_events(tmp_path):
    result, _ = go(tmp_path, FakeOpenAi(fault="no-usage"))
    assert result["summary"]["output_tokens"] == 72
    assert result["summary"]["output_tokens_from"] == "events"
    assert result["summary"]["prompt_tokens"] is None
    assert any("events" in note for note in result["notes"])


def test_a_server_without_a_list_of_models(tmp_path):
    result, _ = go(tmp_path, FakeOpenAi(fault="no-models"))
    assert result["summary"]["failed"] == 0


def test_the_only_model_need_not_be_named(tmp_path):
    result, _ = go(tmp_path, FakeOpenAi(), model="")
    assert result["settings"]["model"] == "fake"


# -- nothing can be measured


def refused(tmp_path, server, **more):
    with pytest.raises(KvtierError) as caught:
        go(tmp_path, server, **more)
    assert not (tmp_path / "out").exists()  # the next try may use it
    return caught.value


def test_an_html_page(tmp_path):
    error = refused(tmp_path, FakeOpenAi(fault="html"))
    assert error.stable_code == "load.not-openai"
    assert "HTML" in error.message
    assert "nginx" in error.why


def test_a_model_that_is_not_served(tmp_path):
    error = refused(tmp_path, FakeOpenAi(models=("other", "third")), model="fake")
    assert error.stable_code == "load.model"
    assert "other, third" in error.why


def test_a_server_that_limits_the_first_request(tmp_path):
    error = refused(tmp_path, FakeOpenAi(fault="429"))
    assert error.stable_code == "load.rate-limited"


def test_counters_that_cannot_be_read(tmp_path):
    with pytest.raises(WorkloadError) as caught:
        go(tmp_path, FakeOpenAi(metrics=False), kind="vllm")
    assert caught.value.stable_code == "load.metrics"
    assert not (tmp_path / "out").exists()


def test_a_dead_server(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    request = RunRequest(qa_file(tmp_path), tmp_path / "out", load_settings())
    with pytest.raises(WorkloadError) as caught:
        run_load(request, address_target(f"http://127.0.0.1:{port}", None, None))
    assert caught.value.stable_code == "load.unreachable"
    assert str(port) in caught.value.message


def test_what_does_not_speak_http(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            connection, _ = listener.accept()
            connection.recv(65536)
            connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
            time.sleep(0.5)
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        request = RunRequest(qa_file(tmp_path), tmp_path / "out", load_settings())
        with pytest.raises(WorkloadError, match="does not speak HTTP"):
            run_load(request, address_target(f"http://127.0.0.1:{listener.getsockname()[1]}", None, None))


def test_an_empty_dataset(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(WorkloadError) as caught:
        go(tmp_path, FakeOpenAi(), dataset=empty)
    assert caught.value.stable_code == "dataset.empty"


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:80", "ftp://host", "http://", "http://user:secret@host", "http://host:port", "http://h/?a=1"],
)
def test_addresses_that_are_none(tmp_path, url):
    with pytest.raises(WorkloadError) as caught:
        run_load(
            RunRequest(qa_file(tmp_path), tmp_path / "out", load_settings()), address_target(url, None, None)
        )
    assert caught.value.stable_code == "load.url"
    assert "secret" not in str(caught.value)


def test_an_output_that_is_taken(tmp_path):
    go(tmp_path, FakeOpenAi())
    before = (tmp_path / "out" / "result.json").read_bytes()
    with pytest.raises(WorkloadError) as caught:
        go(tmp_path, FakeOpenAi())
    assert caught.value.stable_code == "load.output-taken"
    assert (tmp_path / "out" / "result.json").read_bytes() == before


# -- runs that end early keep what they have


def test_ctrl_c_keeps_what_was_measured(tmp_path):
    server = FakeOpenAi(ttft=0.1)
    request = RunRequest(qa_file(tmp_path, QA * 20), tmp_path / "out", load_settings(concurrency=2))

    def press():
        while len(server.bodies) < 10:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    with serving(server) as url:
        threading.Thread(target=press, daemon=True).start()
        result, _ = run_load(request, address_target(url, None, None))
    assert (result["complete"], result["ended"]) == (False, "interrupted")
    assert 2 <= result["summary"]["requests"] < 100
    assert result["sessions"]["cut_off"] == 2
    assert result == read_result(tmp_path / "out")
    assert len(read_requests(tmp_path / "out")) == result["summary"]["requests"]


def test_a_deadline_for_the_whole_run(tmp_path):
    result, _ = go(tmp_path, FakeOpenAi(ttft=1.0), concurrency=1, deadline_seconds=3.5)
    assert (result["complete"], result["ended"]) == (False, "deadline")
    assert 1 <= result["summary"]["requests"] <= 4


def test_a_server_that_dies_in_the_middle_is_given_up(tmp_path):
    server = FakeOpenAi(fault="500")
    server.after = 20
    result, _ = go(tmp_path, server, dataset=qa_file(tmp_path, QA * 20))
    assert (result["complete"], result["ended"]) == (False, "gave-up")
    assert result["summary"]["succeeded"] == 17
    assert 20 <= result["summary"]["failed"] < 60
    assert any("gave up" in note for note in result["notes"])


def test_a_killed_run_is_marked(tmp_path):
    """result.json says "running" from the start, and requests.jsonl has what was done."""
    from kvtierd.workload.load.results import RunFiles

    files = RunFiles(tmp_path / "out")
    files.begin({"kind": "kvtierd-bench-run", "complete": False, "ended": "running", "notes": []})
    assert read_result(tmp_path / "out")["complete"] is False
    assert read_requests(tmp_path / "out") == []
    (tmp_path / "out" / "requests.jsonl").write_text('{"number": 1, "conv')
    assert read_requests(tmp_path / "out") == []


class FullDisk:
    """A file on a disk that has room for ``room`` characters."""

    def __init__(self, stream, room):
        self.stream, self.room = stream, room

    def write(self, text):
        self.room -= len(text)
        if self.room < 0:
            raise OSError(28, "No space left on device")
        return self.stream.write(text)

    def __getattr__(self, name):
        return getattr(self.stream, name)


def test_a_disk_that_fills_up_loses_no_figures(tmp_path, monkeypatch):
    from kvtierd.workload.load.results import RunFiles

    begin = RunFiles.begin

    def full(self, result):
        begin(self, result)
        self._requests = FullDisk(self._requests, 2000)

    monkeypatch.setattr(RunFiles, "begin", full)
    result, problem = go(tmp_path, FakeOpenAi())
    assert problem.stable_code == "load.results-not-written"
    assert "No space left" in problem.message
    assert result["summary"]["requests"] == 12  # as printed
    assert (result["complete"], result["ended"]) == (False, "disk")
    assert 0 < len(read_requests(tmp_path / "out")) < 12


def test_a_disk_that_is_full_at_the_end(tmp_path, monkeypatch):
    from kvtierd.errors import StateError
    from kvtierd.workload.load import results

    real, calls = results.write_atomic, []

    def write_atomic(path, data):
        calls.append(path)
        if len(calls) > 1:
            raise StateError(f"no space to write {path}", code="state.full")
        real(path, data)

    monkeypatch.setattr(results, "write_atomic", write_atomic)
    result, problem = go(tmp_path, FakeOpenAi())
    assert problem.stable_code == "state.full"
    assert result["summary"]["requests"] == 12
    assert read_result(tmp_path / "out")["ended"] == "running"  # what is there does not pass for a whole run
    assert len(read_requests(tmp_path / "out")) == 12


# -- arrivals


def starts(tmp_path):
    return sorted(r.started_seconds for r in read_requests(tmp_path / "out"))


def test_a_rate_does_not_wait_for_answers(tmp_path):
    server = FakeOpenAi(ttft=0.5)
    result, _ = go(tmp_path, server, concurrency=None, arrival="constant", rate=40.0)
    assert server.most_running > 8
    at = starts(tmp_path)
    assert at[-1] == pytest.approx(11 / 40, abs=0.1)
    assert result["summary"]["start_lag_seconds"]["max"] < 0.1


def test_a_bound_on_what_is_under_way_shows_as_lag(tmp_path):
    server = FakeOpenAi(ttft=0.1)
    result, _ = go(tmp_path, server, concurrency=2, arrival="constant", rate=100.0)
    assert server.most_running == 2
    assert result["summary"]["start_lag_seconds"]["max"] > 0.3


def test_a_burst(tmp_path):
    go(tmp_path, FakeOpenAi(), concurrency=None, arrival="burst", rate=20.0, burst_size=6)
    at = starts(tmp_path)
    assert at[5] < 0.1
    assert at[6] == pytest.approx(0.3, abs=0.08)


def test_a_trace_is_replayed_at_its_times(tmp_path):
    trace = [
        {"timestamp": 1000 + 200 * i, "input_length": 40, "output_length": 4, "hash_ids": [1, 2, i + 3]}
        for i in range(4)
    ]
    dataset = write(tmp_path / "trace.jsonl", trace)
    server = FakeOpenAi()
    request = RunRequest(
        dataset, tmp_path / "out", load_settings(arrival="trace", concurrency=None, max_tokens=None, speed=2.0),
        trace_block_tokens=16,
    )  # fmt: skip
    with serving(server) as url:
        result, _ = run_load(request, address_target(url, None, None))
    assert result["dataset"]["form"] == "mooncake"
    assert starts(tmp_path) == pytest.approx([0, 0.1, 0.2, 0.3], abs=0.06)
    prompts = [prompt(b) for b in sent(server, 4)]
    assert len({" ".join(p.split()[:34]) for p in prompts}) == 1  # the salt and two shared blocks
    assert len(set(prompts)) == 4
    assert server.bodies[-1]["max_tokens"] == 4


def test_a_dataset_without_times_cannot_be_replayed(tmp_path):
    with pytest.raises(WorkloadError) as caught:
        go(tmp_path, FakeOpenAi(), arrival="trace")
    assert caught.value.stable_code == "load.no-times"


# -- keys


def test_a_key_comes_from_a_file_and_is_shown_nowhere(tmp_path):
    file = tmp_path / "key"
    file.write_text("right-key-of-many-letters\n")
    key = read_api_key(file, {})
    result, _ = go(tmp_path, FakeOpenAi(fault="key"), key=key)
    assert key not in json.dumps(result)
    assert all(key not in f.read_text() for f in (tmp_path / "out").iterdir())


def test_a_wrong_key(tmp_path):
    error = refused(tmp_path, FakeOpenAi(fault="key"), key="wrong")
    assert error.stable_code == "load.key"
    assert "wrong" not in str(error).replace("wants another key", "")


def test_keys_that_are_none(tmp_path):
    assert read_api_key(None, {}) is None
    assert read_api_key(None, {"OPENAI_API_KEY": "abc"}) == "abc"
    (tmp_path / "two").write_text("a b")
    for name in ("two", "missing"):
        with pytest.raises(WorkloadError) as caught:
            read_api_key(tmp_path / name, {})
        assert "a b" not in str(caught.value)


def test_settings_are_in_the_result(tmp_path):
    result, _ = go(tmp_path, FakeOpenAi())
    assert result["settings"] == dataclasses.asdict(load_settings())
