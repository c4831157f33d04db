"""kvtierctl size: the exact forms, what is said to people, and what is refused."""

from __future__ import annotations

import http.server
import json
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtierd.cli import main

GB = 1000**3
GIB = 1024**3
GIB_FORM = "Available KV cache memory: 9.21 GiB\nGPU KV cache size: 150,800 tokens\n"
BYTES_FORM = "Available memory: 36408063180,\nGPU KV cache size: 277,760 tokens\n"
CONFIG = {
    "model_type": "qwen3", "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
    "hidden_size": 5120, "torch_dtype": "bfloat16",
}  # fmt: skip
DEMAND = ("--requests", "100", "--input", "4000", "--output", "1000", "--gb-per-1k", "0.25", "--cards", "2")


class Ctl:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object, code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["size", *map(str, arguments)])
        out, err = self._capsys.readouterr()
        assert ended.value.code == code, out + err
        return out + err

    def json(self, *arguments: object, code: int = 0) -> Any:
        return json.loads(self(*arguments, "--json", code=code))

    def error(self, *arguments: object, code: int = 1) -> str:
        error = self.json(*arguments, code=code)["error"]
        assert error["message"]
        assert error["hint"]
        return str(error["code"])


@pytest.fixture
def ctl(capsys: pytest.CaptureFixture[str]) -> Ctl:
    return Ctl(capsys)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "vllm.log"
    path.write_text(GIB_FORM)
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    with path.open("w") as file:
        for n in range(60):
            ids = [n % 6 * 10 + j for j in range(8)]
            record = {
                "timestamp": n,
                "input_length": 8 * 128 + 1,
                "output_length": 9,
                "hash_ids": [*ids, 1000 + n],
            }
            file.write(json.dumps(record) + "\n")
    return path


def test_the_log_of_four_cards(ctl: Ctl, log: Path) -> None:
    said = ctl.json("--log", log, "--cards", 4)
    assert said["bytes_per_token"] == round(4 * 9.21 * GIB / 150_800) == 262_312
    assert said["gb_per_1k_tokens"] == pytest.approx(0.262312, abs=1e-6)
    assert (said["kv_tokens"], said["kv_bytes"], said["source"]) == (150_800, 4 * round(9.21 * GIB), "log")


def test_the_log_of_two_cards_in_bytes(ctl: Ctl, log: Path) -> None:
    log.write_text(BYTES_FORM)
    said = ctl.json("--log", log, "--cards", 2)
    assert said["bytes_per_token"] == 262_155
    assert said["gb_per_1k_tokens"] == pytest.approx(0.25, rel=0.05)


def test_a_configuration(ctl: Ctl, config: Path) -> None:
    said = ctl.json("--config", config, "--tp", 4, "--dtype", "bf16")
    assert (said["bytes_per_token"], said["kv_tokens"], said["kv_bytes"], said["source"]) == (
        262_144,
        None,
        None,
        "config",
    )
    assert ctl.json("--config", config.parent, "--dtype", "int8")["bytes_per_token"] == 131_072


def test_sources_that_disagree_are_said_so(ctl: Ctl, log: Path, config: Path) -> None:
    assert ctl.json("--log", log, "--config", config, "--tp", 4)["disagreements"] == []
    said = ctl.json("--log", log, "--config", config, "--tp", 2)
    assert said["source"] == "log"
    assert "config 262,144" in said["disagreements"][0]
    assert [source["source"] for source in said["sources"]] == ["log", "config"]
    assert "THEY DISAGREE" in ctl("--log", log, "--config", config, "--tp", 2)


@pytest.fixture
def engine() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = Path("tests/fixtures/engines/vllm/metrics.txt").read_bytes()
            self.send_response(200 if self.path == "/metrics" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(5)


def test_a_running_engine_s_metrics(ctl: Ctl, engine: str) -> None:
    said = ctl.json("--metrics", engine, "--cards", 2)
    assert (said["bytes_per_token"], said["kv_tokens"], said["source"]) == (2048, 1_048_576, "metrics")
    assert ctl.json("--metrics", f"{engine}/metrics", "--cards", 2)["kv_bytes"] == 2 * GIB
    assert ctl.error("--metrics", f"{engine}/other") == "sizing.metrics"


def test_an_engine_that_does_not_answer(ctl: Ctl) -> None:
    assert ctl.error("--metrics", "http://127.0.0.1:1") == "http.unreachable"
    assert ctl.error("--metrics", "no-such-file") == "sizing.unreadable"


def test_a_demand(ctl: Ctl) -> None:
    said = ctl.json(*DEMAND)
    assert said["pool_bytes"] == 125 * GB
    assert said["demand_tokens"] == 500_000
    assert said["dram_size_per_card"] == 65 * GIB
    assert said["hugepages"] * said["hugepage_bytes"] == (130 + 4) * GIB
    pool = tomllib.loads(said["settings"])["pool"]
    assert pool == {"dram": "130GiB", "evict_high": 90, "evict_low": 80}
    assert said["dram_size_per_card"] * 2 * pool["evict_high"] / 100 >= said["pool_bytes"]
    tight = ctl.json(*DEMAND, "--evict-high", 99, "--evict-low", 90)
    assert tight["dram_size_per_card"] == 59 * GIB


def test_a_demand_for_people_fits_80_columns(ctl: Ctl) -> None:
    said = ctl(*DEMAND)
    assert all(len(line) <= 80 for line in said.splitlines())
    for text in (
        "125.00 GB",
        "65 GiB for each of 2 cards",
        'dram = "130GiB"',
        "68,608 x 2 MiB",
        "kvtierctl plan",
    ):
        assert text in said


def test_prompts_below_a_block_cannot_hit(ctl: Ctl) -> None:
    said = ctl.json("--requests", 5, "--input", 100, "--bytes-per-token", 1000)
    assert any("cannot hit" in note for note in said["notes"])


def test_a_trace(ctl: Ctl, trace: Path, tmp_path: Path) -> None:
    picture = tmp_path / "curve.png"
    said = ctl.json("--trace", trace, "--block-size", 128, "--bytes-per-token", 1000, "--plot", picture)
    assert (said["requests"], said["blocks"], said["distinct_blocks"]) == (60, 480, 48)
    assert said["max_hit_rate"] == pytest.approx(54 * 8 * 128 / (60 * 1025))
    assert said["curve"][-1] == {"pool_bytes": 48 * 128_000, "hit_rate": said["max_hit_rate"]}
    assert set(said["knee"]) == {"pool_bytes", "hit_rate"}
    assert said["knee"]["hit_rate"] >= 0.9 * said["max_hit_rate"]
    assert said["pool_bytes"] == said["knee"]["pool_bytes"]
    assert said["expected_hit_rate"]["least"] <= said["expected_hit_rate"]["most"] <= said["max_hit_rate"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_trace_for_people(ctl: Ctl, trace: Path) -> None:
    said = ctl("--trace", trace, "--bytes-per-token", 1000)
    assert "<- knee" in said
    assert all(len(line) <= 80 for line in said.splitlines() if str(trace) not in line)


def test_a_trace_sized_for_all_of_its_hits(ctl: Ctl, trace: Path) -> None:
    said = ctl.json("--trace", trace, "--bytes-per-token", 1000, "--share", 1.0)
    assert said["pool_bytes"] == 48 * 128_000


def test_a_trace_without_repetition_gets_no_pool(ctl: Ctl, tmp_path: Path) -> None:
    path = tmp_path / "qa.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n}" * 300, "answer": ""}) + "\n" for n in range(1, 5)))
    said = ctl.json("--trace", path, "--bytes-per-token", 1000)
    assert said["max_hit_rate"] == 0
    assert "pool_bytes" not in said
    assert any("no block comes twice" in note for note in said["notes"])
    assert "no block comes twice" in ctl("--trace", path, "--bytes-per-token", 1000)


def test_files_that_are_not_what_they_should_be(ctl: Ctl, tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\x7fELF\x00\x01\x02" * 100)
    empty = tmp_path / "empty"
    empty.touch()
    assert ctl.error("--log", binary, "--cards", 1) == "dataset.encoding"
    assert ctl.error("--log", empty, "--cards", 1) == "sizing.log-no-lines"
    assert ctl.error("--log", tmp_path / "missing", "--cards", 1) == "dataset.unreadable"
    assert ctl.error("--config", binary) == "sizing.config"
    assert ctl.error("--config", tmp_path / "missing") == "sizing.unreadable"
    assert ctl.error("--trace", binary, "--bytes-per-token", 1) == "dataset.encoding"
    assert ctl.error("--trace", empty, "--bytes-per-token", 1) == "dataset.empty"


def test_no_memory_left_says_where_to_look(ctl: Ctl, log: Path) -> None:
    log.write_text("Available KV cache memory: -0.87 GiB\n")
    said = ctl("--log", log, "--cards", 4, code=1)
    assert "no memory is left" in said
    assert "npu-smi" in said


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--requests", "5", "--gb-per-1k", "0.25"),
        ("--input", "5", "--gb-per-1k", "0.25"),
        ("--output", "5", "--gb-per-1k", "0.25"),
        ("--gb-per-1k", "0.25", "--bytes-per-token", "1"),
        ("--gb-per-1k", "0.25", "--plot", "x.png"),
        ("--trace", "x", "--requests", "1", "--input", "1", "--gb-per-1k", "0.25"),
        ("--log", "x"),
        ("--metrics", "tests/fixtures/engines/vllm/metrics-none.txt", "--requests", "1"),
    ],
)
def test_what_does_not_go_together(ctl: Ctl, arguments: tuple[str, ...]) -> None:
    assert ctl.error(*arguments, code=2) == "usage"


def test_a_demand_that_is_none(ctl: Ctl) -> None:
    assert ctl.error("--requests", -1, "--input", 5, "--gb-per-1k", 0.25) == "sizing.demand"
    assert ctl.error(*DEMAND, "--evict-high", 100) == "sizing.thresholds"


def test_a_package_that_is_missing_is_named(ctl: Ctl, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert ctl.error("--trace", trace, "--bytes-per-token", 1000) == "workload.missing-package"
    assert ctl.json(*DEMAND)["pool_bytes"] == 125 * GB  # needs none of them
