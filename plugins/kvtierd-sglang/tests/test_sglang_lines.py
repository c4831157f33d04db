"""Log lines: real ones, the shapes of other releases, and whatever stands around them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtierd_sglang.lines import LISTENS, host_pools, is_ready, kv_pools, read_line
from sglang_contexts import GIB, RECORDED

from kvtierd.plan.engine import EngineObservation

ROOM = "max_total_num_tokens=65536, chunked_prefill_size=4096, max_prefill_tokens=16384, context_len=8192"
PREFILL = (
    "Prefill batch, #new-seq: 1, #new-token: 4, #cached-token: 2496, token usage: 0.04, "
    "#running-req: 3, #queue-req: 12, #pending-token: 0, cpu graph: False, input throughput (token/s): 2.59"
)
DECODE = (
    "Decode batch, #running-req: 2, #token: 2240, token usage: 0.03, cpu graph: False, "
    "gen throughput (token/s): 83.32, #queue-req: 7"
)
POOL = "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 387968, K size: 5.92 GB, V size: 5.92 GB"
PORT = "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 16121): address already in use"
BODIES = {
    ROOM: EngineObservation(kv_tokens=65536, l1_capacity_tokens=65536),
    PREFILL: EngineObservation(running=3, waiting=12, l1_used_ratio=0.04),
    DECODE: EngineObservation(running=2, waiting=7, l1_used_ratio=0.03),
    POOL: EngineObservation(kv_memory_bytes=round(11.84 * GIB), kv_pool_tokens=387_968),
    PORT: EngineObservation(fatal=PORT[PORT.index("[") :]),
}
PREFIXES = st.one_of(
    st.sampled_from(
        [
            "",
            "[2026-07-01 15:19:55 TP10] ",
            "[2026-07-01 15:19:55 DP0 TP0 EP0] ",
            "\x1b[0;36m[2026-07-01 15:19:55]\x1b[0;0m ",
            "sglang-1  | [2026-07-01 15:19:55] ",
            "Jul 01 15:19:55 host python[77]: ",
            "Loading: 100%|####| 1/1 [00:00<00:00]\r[2026-07-01 15:19:55] ",
        ]
    ),
    st.text(alphabet=st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=40).filter(
        lambda text: "obj=" not in text
    ),
)


@given(
    prefix=PREFIXES, body=st.sampled_from(sorted(BODIES)), end=st.sampled_from(["", "\r", "\n", "\x1b[0m"])
)
def test_what_stands_around_a_record_changes_nothing(prefix: str, body: str, end: str) -> None:
    assert read_line(f"{prefix}{body}{end}") == BODIES[body]


def test_a_cut_line_gives_less_and_never_something_else() -> None:
    for body in (ROOM, PREFILL, POOL):
        for cut in range(len(body)):
            for name, value in (read_line(body[:cut]) or EngineObservation()).model_dump().items():
                assert value in (None, getattr(BODIES[body], name)), body[:cut]


@given(st.text(max_size=200))
def test_any_text_is_survived(text: str) -> None:
    read_line(text)


@given(st.sampled_from(sorted(BODIES)), st.integers(0, 120), st.binary(min_size=1, max_size=3))
def test_damaged_bytes_are_survived(body: str, at: int, junk: bytes) -> None:
    damaged = body.encode()[:at] + junk + body.encode()[at:]
    read_line(damaged.decode(errors="replace"))


def test_two_records_on_one_line() -> None:
    assert read_line(f"[t TP0] {ROOM}[t TP1] {ROOM.replace('65536', '61000')}") == EngineObservation(
        kv_tokens=61000, l1_capacity_tokens=61000
    )
    assert read_line(f"[t] {PREFILL}[t] {DECODE}") == BODIES[DECODE]


def test_hybrid_models_have_labels_of_their_own() -> None:
    line = PREFILL.replace(
        "token usage: 0.04", "full token usage: 0.11, swa token usage: 0.92, mamba usage: 0.5"
    )
    found = read_line(line)
    assert found is not None
    assert found.l1_used_ratio == 0.11
    swa_only = read_line(PREFILL.replace("token usage: 0.04", "swa token usage: 0.92"))
    assert swa_only is not None
    assert swa_only.l1_used_ratio is None


@pytest.mark.parametrize(
    ("line", "name", "tokens", "gib"),
    [
        ("KV Cache is allocated. #tokens: 371661, K size: 12.74 GB, V size: 12.74 GB", "", 371661, 25.48),
        (f"[2026-07-01 15:19:55 TP10] {POOL}", "", 387968, 11.84),
        ("KV Cache is allocated. dtype: torch.bfloat16, #tokens: 9, KV size: 10.1 GB", "", 9, 10.1),
        (
            "[t] SWA KV Cache is allocated. dtype: torch.bfloat16, #tokens: 64, KV size: 1.00 GB",
            "SWA",
            64,
            1.0,
        ),
        (
            "Post-capture KV sizing: KV cache allocated. #tokens: 8, K size: 1.00 GB, V size: 1.00 GB",
            "",
            8,
            2.0,
        ),
    ],
)
def test_pools_of_l1(line: str, name: str, tokens: int, gib: float) -> None:
    (pool,) = kv_pools(line)
    assert (pool.name, pool.tokens, pool.size_bytes) == (name, tokens, round(gib * GIB))
    found = read_line(line)
    assert found is not None
    assert found.kv_tokens is None  # max_total_num_tokens is the authority


def test_pools_of_l2() -> None:
    (pool,) = host_pools("[t] Allocating kv hierarchical KV host pool: 976576 tokens, 1.00 GB host memory.")
    assert pool == ("kv", 976576, 10**9)
    assert host_pools("Allocating kv hierarchical KV host pool: 9765") == ()


@pytest.mark.parametrize(
    "line",
    [
        'INFO:     127.0.0.1:47120 - "GET /health HTTP/1.1" 503 Service Unavailable',
        "server_args={'max_total_tokens': 65536, 'log_level': 'error'}",
        "Receive: obj=GenerateReqInput(text='[Errno 98] error while attempting to bind on address')",
        "Finish: obj=GenerateReqInput(text='Scheduler hit an exception: Traceback')",
        "max_total_num_tokens=655",
        "Prefill batch, ",
        "",
    ],
)
def test_lines_that_say_nothing(line: str) -> None:
    assert read_line(line) is None


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: Not enough host memory available. Requesting 40.00 GB but only have 44.87 GB free. Please reduce",
        "[t] Ascend MemCache store initialization failed: memcache_hybrid.DistributedObjectStore.init failed",
        "[t TP0] Scheduler hit an exception: Traceback (most recent call last):",
        "sglang serve: error: unrecognized arguments: --nonsense",
    ],
)
def test_signs_that_it_cannot_go_on(line: str) -> None:
    found = read_line(line)
    assert found is not None
    assert found.fatal
    assert found.fatal in line


def test_the_recorded_runs() -> None:
    start = (RECORDED / "hicache.log").read_text().splitlines()
    seen = [found for line in start if (found := read_line(line)) is not None]
    assert [found.kv_tokens for found in seen if found.kv_tokens] == [65536]
    assert [found.kv_memory_bytes for found in seen if found.kv_memory_bytes] == [round(0.06 * GIB)]
    assert not [found for found in seen if found.fatal]
    assert sum(found.running is not None for found in seen) == sum(" batch, " in line for line in start)
    assert sum(map(is_ready, start)) == 1
    assert sum(LISTENS in line for line in start) == 1
    assert sum(len(host_pools(line)) for line in start) == 1
    for name, text in (("port-in-use", "Errno 98"), ("bad-model", "couldn't connect")):
        lines = (RECORDED / f"{name}.log").read_text().splitlines()
        fatal = [found.fatal for line in lines if (found := read_line(line)) is not None and found.fatal]
        assert fatal
        assert any(text in sign for sign in fatal)
        assert not any(LISTENS in line for line in lines)
