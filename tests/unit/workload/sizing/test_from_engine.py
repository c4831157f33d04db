"""Bytes per token out of logs and metrics, read by the drivers that the plugins bring."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.errors import WorkloadError
from kvtierd.plan.engine import EngineDriver
from kvtierd.plugins import load_plugins
from kvtierd.workload.sizing.figures import TokenFigure
from kvtierd.workload.sizing.from_engine import engine_log, figure_of_metrics

GIB = 1024**3
FIXTURES = Path("tests/fixtures/engines")
DRIVERS: Mapping[str, EngineDriver] = load_plugins().drivers


def figure(text: str, cards: int = 1, block_tokens: int | None = None) -> TokenFigure:
    return engine_log(text.splitlines(), DRIVERS).figure(cards=cards, block_tokens=block_tokens)


def code_of(text: str) -> str:
    with pytest.raises(WorkloadError) as error:
        figure(text)
    assert error.value.hint
    return error.value.stable_code


GIB_FORM = "Available KV cache memory: 9.21 GiB\nGPU KV cache size: 150,800 tokens"
BYTES_FORM = "Available memory: 36408063180,\nGPU KV cache size: 277,760 tokens"


def test_the_two_forms_of_the_line() -> None:
    four = figure(GIB_FORM, cards=4)
    assert four.bytes_per_token == pytest.approx(4 * 9.21 * GIB / 150_800)
    assert (four.kv_tokens, four.kv_bytes) == (150_800, 4 * round(9.21 * GIB))
    two = figure(BYTES_FORM, cards=2)
    assert two.bytes_per_token == pytest.approx(2 * 36_408_063_180 / 277_760)
    for found in (four, two):
        assert found.gb_per_1k_tokens == pytest.approx(0.25, rel=0.05)
        assert found.source == "log"


@pytest.mark.parametrize(
    ("text", "memory_bytes", "tokens"),
    [
        (
            "Available memory: 23106324992, total memory: 65452113920\n# GPU blocks: 507, # CPU blocks: 1024",
            23_106_324_992,
            507 * 128,
        ),
        (
            (
                "Available KV cache memory: 9.25 GiB (halved for workspace)\n"
                "GPU KV cache size: 1,000 tokens, Maximum concurrency for 500 tokens per request: 2.00x"
            ),
            round(9.25 * GIB),
            1000,
        ),
        (
            (
                "Initial free memory 60.1 GiB, reserved 20.0 GiB for KV Cache as specified by kv_cache_memory_bytes\n"
                "GPU KV cache size: 1000 tokens"
            ),
            20 * GIB,
            1000,
        ),
        (
            (
                "Available KV cache memory: 2.0 GiB\n"
                "Sparse KV offload is enabled, enlarge total available memory to 12.5 GiB\nNPU KV cache size: 7,000 tokens"
            ),
            round(12.5 * GIB),
            7000,
        ),
        (
            (
                "Multiplying the GPU KV cache size by the cp_world_size 2 (pcp_world_size 1 * dcp_world_size 2).\n"
                "Available KV cache memory: 1.5GB\nGPU KV cache size: 2,000 tokens"
            ),
            1_500_000_000,
            2000,
        ),
        (
            "Explicitly set (1.0/14.96) GiB for KV cache on node 0.\nCPU KV cache size: 1,024 tokens",
            GIB,
            1024,
        ),
    ],
)
def test_every_shape(text: str, memory_bytes: int, tokens: int) -> None:
    found = figure(text, cards=2, block_tokens=128)
    assert (found.kv_tokens, found.kv_bytes) == (tokens, 2 * memory_bytes)
    assert found.bytes_per_token == pytest.approx(2 * memory_bytes / tokens)


def test_a_hybrid_model_goes_by_its_concurrency_and_both_figures_are_said() -> None:
    found = figure(
        "Available KV cache memory: 10.0 GiB\nGPU KV cache size: 290,864 tokens\n"
        "Maximum concurrency for 32,768 tokens per request: 33.04x"
    )
    assert found.kv_tokens == 1_082_655
    assert "290,864" in found.notes[0]
    assert "1,082,655" in found.notes[0]


def test_workers_of_one_engine_count_once_and_the_smallest_counts() -> None:
    found = figure(
        "(Worker_TP0 pid=7) INFO Available KV cache memory: 9.50 GiB\n"
        "(Worker_TP1 pid=8) INFO Available KV cache memory: 9.00 GiB\n"
        "(EngineCore pid=5) INFO GPU KV cache size: 2,000 tokens\n"
        "(EngineCore pid=5) INFO GPU KV cache size: 1,900 tokens",
        cards=2,
    )
    assert (found.kv_tokens, found.kv_bytes) == (1900, 2 * 9 * GIB)
    assert not found.notes


def test_data_parallel_engines_are_kept_apart_and_not_added_up() -> None:
    found = figure(
        "(Worker_DP0_TP0 pid=1) Available KV cache memory: 8.00 GiB\n"
        "(Worker_DP1_TP0 pid=2) Available KV cache memory: 6.00 GiB\n"
        "(EngineCore_DP1 pid=4) GPU KV cache size: 600 tokens\n"
        "(EngineCore_DP0 pid=3) GPU KV cache size: 800 tokens\n"
    )
    assert (found.kv_tokens, found.kv_bytes) == (600, 6 * GIB)
    assert "2 data-parallel engines" in found.notes[0]


def test_workers_that_do_not_name_their_engine_belong_to_each() -> None:
    found = figure(
        "(VllmWorker rank=0 pid=1) Available KV cache memory: 8.00 GiB\n"
        "(EngineCore_DP0 pid=3) GPU KV cache size: 800 tokens\n"
    )
    assert (found.kv_tokens, found.kv_bytes) == (800, 8 * GIB)


def test_the_last_of_several_starts_counts() -> None:
    start = (
        "(Worker_TP0 pid=1) Available KV cache memory: {} GiB\n(Worker_TP1 pid=2) Available KV cache memory: {} GiB\n"
        "(EngineCore pid=3) GPU KV cache size: {} tokens\n"
    )
    found = figure(start.format(4, 4, 400) + start.format(8, 8, 790), cards=2)
    assert (found.kv_tokens, found.kv_bytes) == (790, 16 * GIB)
    assert "2 starts" in found.notes[0]


def test_sglang_ranks_and_its_pools() -> None:
    lines = [
        f"[2026-07-01 15:19:55 TP{rank}] {text}"
        for rank, tokens in ((0, 1000), (1, 900))
        for text in (
            f"KV Cache is allocated. dtype: torch.bfloat16, #tokens: {tokens}, K size: 1.00 GB, V size: 1.00 GB",
            f"max_total_num_tokens={tokens}, chunked_prefill_size=4096",
        )
    ]
    found = figure("\n".join(lines), cards=2)
    assert (found.kv_tokens, found.kv_bytes) == (900, 4 * GIB)
    hybrid = figure(
        "KV Cache is allocated. #tokens: 1000, KV size: 1.00 GB\nSWA KV Cache is allocated. #tokens: 100, KV size: 0.50 GB\n"
        "max_total_num_tokens=1000, chunked_prefill_size=4096"
    )
    assert hybrid.bytes_per_token == pytest.approx(GIB / 1000 + GIB / 200)
    assert "2 pools" in hybrid.notes[0]


@pytest.mark.parametrize(
    ("name", "memory_bytes", "tokens"),
    [("vllm/serving.log", GIB, 1_048_576), ("sglang/hicache.log", round(0.06 * GIB), 65_536)],
)
def test_recorded_logs(name: str, memory_bytes: int, tokens: int) -> None:
    found = figure((FIXTURES / name).read_text())
    assert (found.kv_tokens, found.kv_bytes) == (tokens, memory_bytes)


NOISE = st.text(
    alphabet=st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="0123456789-.,"), max_size=30
)


@given(before=st.tuples(NOISE, NOISE), colour=st.booleans(), end=st.sampled_from(["", "\r", "\x1b[0m"]))
def test_whatever_stands_in_front_changes_nothing(before: tuple[str, str], colour: bool, end: str) -> None:
    esc = "\x1b[0;36m(EngineCore_DP0 pid=3052)\x1b[0;0m " if colour else ""
    text = GIB_FORM.splitlines()
    log = engine_log([f"{b}{esc}{line}{end}" for b, line in zip(before, text, strict=True)], DRIVERS)
    assert log.figure(cards=4).bytes_per_token == pytest.approx(4 * 9.21 * GIB / 150_800, rel=1e-6)


@pytest.mark.parametrize(
    "text",
    [
        "Available KV cache memory: -0.87 GiB",
        "Available KV cache memory: -1.33GB",
        "Available memory: 0, total memory: 9",
    ],
)
def test_no_memory_left_is_an_error_and_never_a_figure(text: str) -> None:
    assert code_of(f"{text}\nGPU KV cache size: 1,000 tokens") == "sizing.no-memory"
    assert code_of(text) == "sizing.no-memory"
    better = figure(f"{text}\nGPU KV cache size: 1,000 tokens\n{GIB_FORM}")
    assert better.kv_tokens == 150_800


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "sizing.log-no-lines"),
        ("INFO nothing of the kind\n\x00\x01", "sizing.log-no-lines"),
        ("GPU KV cache size: 1,000 tokens", "sizing.log-no-memory"),
        ("Available KV cache memory: 9.21 GiB", "sizing.log-no-room"),
        ("Available KV cache memory: 9.21 GiB\nGPU KV cache size: 1,0", "sizing.log-no-room"),
        ("Available KV cache memory: 9.21 GiB\nGPU KV cache size: 0 tokens", "sizing.no-memory"),
        ("Available KV cache memory: 9.21 GiB\n# GPU blocks: 507, # CPU blocks: 1024", "sizing.log-blocks"),
    ],
)
def test_what_a_log_does_not_say_is_said(text: str, code: str) -> None:
    assert code_of(text) == code


def test_a_driver_that_raises_is_left_out() -> None:
    class Broken:
        def read_line(self, line: str) -> None:
            raise RuntimeError(line)

    log = engine_log(GIB_FORM.splitlines(), {"a": Broken(), **DRIVERS})  # type: ignore[dict-item]
    assert log.figure(cards=1).kv_tokens == 150_800


def test_recorded_metrics() -> None:
    vllm = figure_of_metrics((FIXTURES / "vllm/metrics.txt").read_text(), DRIVERS, cards=2)
    assert (vllm.kv_tokens, vllm.kv_bytes, vllm.bytes_per_token) == (1_048_576, 2 * GIB, 2048)
    sglang = figure_of_metrics((FIXTURES / "sglang/metrics-storage-hit.txt").read_text(), DRIVERS, cards=1)
    assert sglang.kv_tokens == 65_536
    assert sglang.bytes_per_token == pytest.approx(65_600 * 1024 / 65_536)


def test_metrics_without_memory_say_only_tokens_and_data_parallel_engines_are_taken_apart() -> None:
    info = 'vllm:cache_config_info{{block_size="128",engine="{}",num_gpu_blocks="100",kv_cache_memory_bytes="None"}} 1.0\n'
    found = figure_of_metrics(info.format(0) + info.format(1), DRIVERS, cards=1, replicas=2)
    assert (found.kv_tokens, found.bytes_per_token, found.kv_bytes) == (12_800, None, None)
    assert found.notes


@pytest.mark.parametrize("text", ["", "<html>", "up 1\n", "vllm:num_requests_running 1\n"])
def test_metrics_that_say_nothing(text: str) -> None:
    with pytest.raises(WorkloadError) as error:
        figure_of_metrics(text, DRIVERS, cards=1)
    assert error.value.stable_code == "sizing.metrics"
    assert "--enable-metrics" in error.value.hint
