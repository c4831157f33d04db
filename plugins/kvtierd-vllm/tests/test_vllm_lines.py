"""Log lines of vLLM: every known shape, and each of them under what a log does to lines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kvtierd_vllm import lines
from kvtierd_vllm.ascend import VllmAscendDriver

from kvtierd.plan.engine import EngineObservation

LOGS = Path(__file__).parents[3] / "tests/fixtures/engines/vllm"
DRIVER = VllmAscendDriver()
GIB = 1024**3


def read(line: str) -> dict[str, Any]:
    """What the driver says about a line, without the unknown."""
    made = DRIVER.read_line(line)
    return {} if made is None else made.model_dump(exclude_none=True)


STATS = (
    "Engine 000: Avg prompt throughput: 12.3 tokens/s, Avg generation throughput: 4.5 tokens/s, "
    "Running: 1 reqs, Waiting: 3 reqs, GPU KV cache usage: 0.3%, Prefix cache hit rate: 41.2%, "
    "External prefix cache hit rate: 12.0%"
)
STATS_SAID = {
    "running": 1,
    "waiting": 3,
    "l1_used_ratio": pytest.approx(0.003),
    "l1_window_rate": pytest.approx(0.412),
    "l3_window_rate": pytest.approx(0.12),
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "two lines, first": ("GPU KV cache size: 2,042,016 tokens", {"kv_tokens": 2_042_016}),
    "two lines, second": (
        "Maximum concurrency for 2,048 tokens per request: 997.08x",
        {"kv_tokens_by_concurrency": 2_042_020},
    ),
    "one line": (
        "GPU KV cache size: 1,234 tokens, Maximum concurrency for 2,048 tokens per request: 1.74x",
        {"kv_tokens": 1234, "kv_tokens_by_concurrency": 3564},
    ),
    "no separators": ("NPU KV cache size: 1048576 tokens", {"kv_tokens": 1_048_576}),
    "hybrid": (
        "GPU KV cache size: 290,864 tokens, Maximum concurrency for 32,768 tokens per request: 33.04x",
        {"kv_tokens": 290_864, "kv_tokens_by_concurrency": 1_082_655},
    ),
    "bytes": (
        "Available memory: 23106324992, total memory: 65452113920",
        {"kv_memory_bytes": 23_106_324_992},
    ),
    "bytes, without the total": ("Available memory: 36408063180,", {"kv_memory_bytes": 36_408_063_180}),
    "blocks of V0": ("# GPU blocks: 507, # CPU blocks: 1024", {"kv_blocks": 507}),
    "GiB": ("Available KV cache memory: 9.25 GiB", {"kv_memory_bytes": round(9.25 * GIB)}),
    "halved": (
        "Available KV cache memory: 9.25 GiB (halved for workspace)",
        {"kv_memory_bytes": round(9.25 * GIB)},
    ),
    "given": (
        "Initial free memory 60.1 GiB, reserved 20.0 GiB for KV Cache as specified by kv_cache_memory_bytes, skipping",
        {"kv_memory_bytes": 20 * GIB},
    ),
    "sparse": (
        "Sparse KV offload is enabled, enlarge total available memory to 12.5 GiB",
        {"kv_memory_bytes": round(12.5 * GIB)},
    ),
    "CPU": ("Explicitly set (1.0/14.96) GiB for KV cache on node 0.", {"kv_memory_bytes": GIB}),
    "statistics": (STATS, STATS_SAID),
    "failed get": (
        "Failed to get 2 keys out of 7. error_codes=[-1, -1]. Check key existence and memory state.",
        {"failed_loads": 2},
    ),
    "recomputed": (
        "Recovered from KV load failure: 3 request(s) rescheduled (2432 tokens affected).",
        {"failed_loads": 3},
    ),
    "died": (
        "ERROR 11-29 16:26:11 [multiproc_executor.py:315] Worker proc VllmWorker-0 died unexpectedly (exit code: 1)",
        {"fatal": "Worker proc VllmWorker-0 died unexpectedly (exit code: 1)"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("line", "said"), SHAPES.values(), ids=list(SHAPES))
def test_every_shape(line: str, said: dict[str, Any]) -> None:
    assert read(line) == said


@pytest.mark.parametrize(
    "line",
    [
        "",
        "INFO 11-29 16:22:11 [launcher.py:186] Available routes are:",
        "Multiplying the GPU KV cache size by the cp_world_size 2 (pcp_world_size 1 * dcp_world_size 2).",
        "Maximum DSA sparse concurrency for 2,048 tokens per request: 12.5x",
        "Using LBHNC KV cache layout.",
        "Layerwise KV cache reuse maps 61 layers onto 4, scale logical KV budget by 15.25",
        # cut inside a number or its unit
        "GPU KV cache size: 1,0",
        "GPU KV cache size: 1,234",
        "Available KV cache memory: 9.2",
        "Available KV cache memory: 9.21 Gi",
        "Available memory: 2310632",
        "Maximum concurrency for 2,048 tokens per request: 99",
        "Engine 000: Avg prompt throughput: 12.3 tokens/s, Avg gen",
        "Engine 000: Running: 1 reqs, Waiting: 1 re",  # no word of the cache yet
        "efix cache hit rate: 41.2",
    ],
)
def test_nothing_is_said_where_nothing_is_known(line: str) -> None:
    assert DRIVER.read_line(line) is None


def test_a_hybrid_model_s_figures_disagree_and_the_one_by_concurrency_counts() -> None:
    hybrid = lines.kv_size(SHAPES["hybrid"][0])
    assert hybrid is not None
    assert hybrid.disagrees
    assert hybrid.usable_tokens() == 1_082_655
    plain = lines.kv_size(
        "CPU KV cache size: 1,048,576 tokens, Maximum concurrency for 8,192 tokens per request: 128.00x"
    )
    assert plain is not None
    assert not plain.disagrees
    assert plain.usable_tokens() == 1_048_576


def test_v0_blocks_need_a_block_size_and_swap_is_not_the_cache() -> None:
    for line, blocks in {
        "# GPU blocks: 507, # CPU blocks: 1024": 507,
        "# cpu blocks: 127626": 127_626,
    }.items():
        size = lines.kv_size(line)
        assert size is not None
        assert size.blocks == blocks
        assert size.usable_tokens() is None
        assert size.usable_tokens(block_size_tokens=128) == blocks * 128
    assert lines.kv_size("# CPU blocks: 1024") is None


def test_several_workers_on_one_line_count_as_the_smallest() -> None:
    line = "GPU KV cache size: 2,000 tokens(Worker_TP1 pid=2) INFO GPU KV cache size: 1,900 tokens"
    assert read(line) == {"kv_tokens": 1900}


@pytest.mark.parametrize("text", ["-0.87 GiB", "-1.33GB", "0.0 GiB", "0 GiB"])
def test_no_memory_left_is_a_fatal_sign(text: str) -> None:
    said = read(f"Available KV cache memory: {text}")
    assert said["kv_memory_bytes"] <= 0
    assert "another process holds the card" in said["fatal"]
    assert "fatal" in read("Available memory: 0, total memory: 65452113920")


def test_the_unit_counts() -> None:
    assert lines.kv_memory_bytes("Available KV cache memory: 1.5GB") == 1_500_000_000
    assert lines.kv_memory_bytes("Available KV cache memory: 512 MiB") == 512 * 1024**2


OPTIONAL: dict[str, dict[str, float]] = {
    "Running: 7 reqs": {"running": 7},
    "Waiting: 2 reqs": {"waiting": 2},
    "Deferred: 2 reqs": {},
    "KV fetch: 3 reqs": {},
    "Preemptions: 1": {},
    "NPU KV cache usage: 50.0%": {"l1_used_ratio": 0.5},
    "Prefix cache hit rate: 25.0%": {"l1_window_rate": 0.25},
    "Corrupted: 0 reqs": {},
    "External prefix cache hit rate: 75.0%": {"l3_window_rate": 0.75},
    "MM cache hit rate: 5.0%": {},
}


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(list(OPTIONAL)), min_size=1, unique=True),
    st.sampled_from(["Engine 000", "2 Engines Aggregated"]),
)
def test_any_fields_in_any_order_say_what_they_say_and_the_rest_is_unknown(
    fields: list[str], start: str
) -> None:
    line = f"{start}: Avg prompt throughput: 0.0 tokens/s, " + ", ".join(fields)
    said = {name: value for field in fields for name, value in OPTIONAL[field].items()}
    record = lines.stats(line)
    if not said:
        assert record is None
        return
    assert record is not None
    assert record.running == said.get("running")
    assert record.waiting == said.get("waiting")
    assert record.used_ratio == said.get("l1_used_ratio")
    assert record.prefix_rate == said.get("l1_window_rate")
    assert record.external_rate == said.get("l3_window_rate")
    assert record.engine == (0 if start == "Engine 000" else None)


def test_a_patched_build_s_label_and_the_external_rate_alone() -> None:
    assert read("Engine 001: External prefix cache hit rate-: 12.0%") == {
        "l3_window_rate": pytest.approx(0.12)
    }
    assert read("Engine 001: Prefix cache hit rate: nan%, GPU KV cache usage: 120.0%") == {}


PREFIXES = [
    "(EngineCore_DP0 pid=1102) INFO 11-29 16:22:21 [loggers.py:335] ",
    "(Worker_DP9_TP1_EP19 pid=88404) ",
    "(VllmWorker rank=0 pid=7) INFO 07-01 10:00:00 ",
    "(ApiServer_0 pid=3) ",
    "vllm-1  | ",
    "Nov 29 16:22:21 host-a vllm[4242]: ",
    "\x1b[0;36m(EngineCore_DP0 pid=3052)\x1b[0;0m ",
    "Loading safetensors:  10%|#   | 1/10\rLoading safetensors: 100%|####| 10/10\r",
    "Engine 000: Avg prompt throughput: 12.3 tokens/s, Avg gen",  # torn: another process wrote in between
]
# Text that looks like a record itself may of course be read as one.
noise = st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=60).filter(
    lambda text: (
        not any(
            piece in text for piece in ("%", "#", ":", "Engine", "died", "front-end", "Received", "Failed")
        )
    )
)


# An escape sequence that the line's own first letter would end, and so belong to.
OPEN_ESCAPE = re.compile(r"\x1b(\[[0-?]*[ -/]*)?$")


@pytest.mark.parametrize("name", SHAPES)
@settings(deadline=None)
@given(
    prefix=st.one_of(st.sampled_from(PREFIXES), noise),
    end=st.sampled_from(["", "\r", "\n", " \r\n", "\x1b[0m"]),
)
def test_what_stands_around_a_record_changes_nothing(name: str, prefix: str, end: str) -> None:
    line, said = SHAPES[name]
    assume(not prefix.endswith(tuple("0123456789,.-")))
    assume(not OPEN_ESCAPE.search(prefix))
    if name == "died":
        prefix, said = f"{prefix} ", {"fatal": said["fatal"]}
    assert read(f"{prefix}{line}{end}") == said


@settings(deadline=None)
@given(st.sampled_from(list(SHAPES)), st.data())
def test_a_torn_line_says_less_but_never_something_else(name: str, data: st.DataObject) -> None:
    line, said = SHAPES[name]
    if name in {"died", "hybrid"}:
        return  # the fatal text is quoted as far as it goes; for hybrid see "one line"
    cut = data.draw(st.integers(0, len(line)))
    for half in (line[:cut], line[cut:]):
        for field, value in read(half).items():
            assert said.get(field) == value


def test_two_records_on_one_line_are_not_mixed() -> None:
    second = STATS.replace("000", "001").replace("41.2%", "5.0%")
    assert read(f"{STATS}(APIServer pid=1) INFO {second}")["l1_window_rate"] == pytest.approx(0.05)
    torn = f"{STATS}(APIServer pid=1) INFO Engine 001: Avg prompt thr"
    assert read(torn) == STATS_SAID
    mixed = f"{STATS[:120]}(APIServer pid=1) INFO Engine 001: GPU KV cache usage: 1.0%"
    assert read(mixed) == {"l1_used_ratio": pytest.approx(0.01)}


def test_a_very_long_line_is_read_up_to_a_limit() -> None:
    assert read("x" * lines.MAX_LINE_CHARACTERS + STATS) == {}
    assert read(STATS + ", " + "x" * 10 * lines.MAX_LINE_CHARACTERS) == STATS_SAID


def test_a_logged_prompt_is_not_taken_for_the_engine() -> None:
    line = f"Received request cmpl-1: prompt: 'ERROR EngineDeadError: {STATS}', params: ..."
    assert DRIVER.read_line(line) is None


@settings(deadline=None)
@given(st.text())
def test_any_text_is_read_without_failing(text: str) -> None:
    assert DRIVER.read_line(text) is None or isinstance(DRIVER.read_line(text), EngineObservation)


def merged(log: str) -> dict[str, Any]:
    said: dict[str, Any] = {}
    for line in (LOGS / log).read_text(encoding="utf-8").splitlines():
        said |= read(line)
    return said


def test_a_real_log_of_a_serving_engine() -> None:
    assert merged("serving.log") == {
        "kv_memory_bytes": GIB,
        "kv_tokens": 1_048_576,
        "kv_tokens_by_concurrency": 1_048_576,
        "running": 0,
        "waiting": 0,
        "l1_used_ratio": 0.0,
        "l1_window_rate": 0.0,
        "l3_window_rate": pytest.approx(0.412),
    }


def test_real_logs_of_engines_that_end() -> None:
    assert "EngineDeadError" in merged("worker-killed.log")["fatal"]
    assert merged("engine-crashed.log")["fatal"]


def test_a_real_log_of_failed_loads() -> None:
    text = (LOGS / "load-failures.log").read_text(encoding="utf-8")
    counts = [read(line).get("failed_loads") for line in text.splitlines()]
    assert sum(c for c in counts if c) == text.count("Recovered from KV load failure") > 0
