"""The host's L2 budget becomes --hicache-size: GB of 10^9 bytes, whole, for each rank."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtierd_sglang.flags import Options, read_options
from kvtierd_sglang.sizing import GB, is_hybrid, ranks_of, size_l2, version_of
from sglang_contexts import GIB, context, pool


def options(args: dict[str, Any]) -> Options:
    return read_options(args, ready_deadline_seconds=1, drain_seconds=1)


@pytest.mark.parametrize(
    ("args", "ranks"),
    [
        ({}, 1),
        ({"tp-size": 8}, 8),
        ({"tp": "8"}, 8),
        ({"tensor-parallel-size": 4, "pipeline-parallel-size": 2}, 8),
        ({"tp-size": 4, "dp-size": 2}, 8),
        ({"tp-size": 8, "dp-size": 8, "enable-dp-attention": True}, 8),
        ({"tp-size": 8, "attn-dp-size": 4}, 8),
        ({"tp-size": 0}, 1),
    ],
)
def test_ranks(args: dict[str, Any], ranks: int) -> None:
    assert ranks_of(options(args)) == ranks


@pytest.mark.parametrize(
    ("l2_bytes", "ranks", "model", "version", "per_rank_gb"),
    [
        (600 * GB, 4, "Qwen3-32B", "0.5.23", 150),  # 4 x 150 GB are 600 GB, not 150
        (128 * GIB, 8, "Qwen3-32B", "0.5.23", 17),
        (128 * GIB, 8, "Qwen3-Next-80B", "0.5.22", 8),  # two pools of the whole size each
        (128 * GIB, 8, "Qwen3-Next-80B", None, 8),
        (128 * GIB, 8, "Qwen3-Next-80B", "0.5.23", 17),  # splits the figure
        (16 * GB, 16, "Qwen3-32B", "0.5.23", 1),
    ],
)
def test_sizes(l2_bytes: int, ranks: int, model: str, version: str | None, per_rank_gb: int) -> None:
    size = size_l2(context(l2_bytes=l2_bytes, model=model, version=version), options({}), ranks)
    assert size.refusals == ()
    assert size.per_rank_gb == per_rank_gb
    (note,) = size.notes
    assert f"--hicache-size {per_rank_gb} " in note.message


@given(
    l2_bytes=st.integers(1, 4 * 1024 * GIB),
    ranks=st.integers(1, 64),
    version=st.sampled_from([None, "0.5.22", "0.5.23"]),
    model=st.sampled_from(["Qwen3-32B", "gpt-oss-120b"]),
)
def test_never_more_than_the_budget(l2_bytes: int, ranks: int, version: str | None, model: str) -> None:
    size = size_l2(context(l2_bytes=l2_bytes, version=version, model=model), options({}), ranks)
    if size.per_rank_gb is None:
        assert [refusal.code for refusal in size.refusals] == ["engine.l2-too-small"]
        return
    copies = 2 if is_hybrid(model) and version != "0.5.23" else 1
    taken = size.per_rank_gb * GB * ranks * copies
    assert taken <= l2_bytes < taken + GB * ranks * copies


def test_the_whole_host_is_checked() -> None:
    beside = context(l2_bytes=920 * GIB)  # + 100 GiB pool + 10 GiB: more than 1 TiB
    assert [r.code for r in size_l2(beside, options({}), 8).refusals] == ["engine.l2-too-big"]
    tight = context(l2_bytes=900 * GIB)
    size = size_l2(tight, options({}), 8)
    assert size.refusals == ()
    assert [note.code for note in size.notes] == ["engine.l2-size", "engine.l2-memory-now"]
    alone = context(l2_bytes=920 * GIB, pool=pool(capacity_bytes=0))
    assert size_l2(alone, options({}), 8).refusals == ()


def test_without_a_budget_it_is_said_that_nothing_bounds_l2() -> None:
    assert [n.code for n in size_l2(context(), options({}), 8).notes] == ["engine.l2-unbounded"]
    assert size_l2(context(), options({"hicache-ratio": 2}), 8).notes == ()
    twice = size_l2(context(l2_bytes=GIB), options({"hicache-ratio": 2}), 1)
    assert [refusal.code for refusal in twice.refusals] == ["engine.l2-twice"]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.5.23", (0, 5, 23)),
        ("0.5.23.post1", (0, 5, 23)),
        ("0.6.0rc1", (0, 6, 0)),
        (None, None),
        ("main", None),
    ],
)
def test_versions(text: str | None, version: tuple[int, ...] | None) -> None:
    assert version_of(text) == version
