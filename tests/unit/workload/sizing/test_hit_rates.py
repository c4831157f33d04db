"""The curve in bytes, its knee, and its picture."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from kvtierd.errors import WorkloadError
from kvtierd.workload.sizing.curve import BlockTrace, HitCurve
from kvtierd.workload.sizing.hit_rates import HitRates, hit_rates, size_for
from kvtierd.workload.sizing.plot import plot


def loop(documents: int, rounds: int, *, rate: float | None = None, blocks: int = 2) -> HitCurve:
    """Documents of some blocks of 100 tokens and one token more, read round and round."""
    trace = BlockTrace(rate=rate)
    ids = np.tile(np.arange(documents * blocks, dtype=np.uint64), rounds)
    lengths = np.full(documents * rounds, blocks, np.int64)
    trace.add(ids, lengths, lengths, documents * rounds * (100 * blocks + 1))
    return trace.curve()


def rates_of(curve: HitCurve) -> HitRates:
    return hit_rates(curve, block_tokens=100, bytes_per_token=10.0)


def test_bytes_and_shares_of_tokens() -> None:
    rates = rates_of(loop(10, 5))
    assert rates.max_hit_rate == pytest.approx(4 / 5 * 200 / 201)
    assert rates.all_bytes == 20 * 1000
    assert (rates.requests, rates.blocks, rates.distinct_blocks, rates.error) == (50, 100, 20, None)
    assert rates.points[-1].pool_bytes == rates.all_bytes
    assert rates.points[-1].hit_rate == rates.max_hit_rate
    sizes = [point.pool_bytes for point in rates.points]
    assert sizes == sorted(set(sizes))
    shares = [point.hit_rate for point in rates.points]
    assert shares == sorted(shares)


def test_the_knee_is_the_smallest_pool_with_90_percent_of_the_hits() -> None:
    curve = loop(10, 5)
    rates = rates_of(curve)
    blocks = rates.knee.pool_bytes // 1000
    assert curve.hits(blocks) >= 0.9 * curve.most_hits > curve.hits(blocks - 1)
    assert rates.knee.hit_rate >= 0.9 * rates.max_hit_rate
    assert size_for(curve, 1.0) == curve.most_blocks == 20


def test_a_trace_without_repetition_has_a_flat_curve_and_one_without_blocks_is_refused() -> None:
    assert rates_of(loop(10, 1)).max_hit_rate == 0
    empty = BlockTrace()
    empty.add(np.zeros(0, np.uint64), np.zeros(3, np.int64), np.zeros(3, np.int64), 60)
    with pytest.raises(WorkloadError) as error:
        rates_of(empty.curve())
    assert error.value.stable_code == "sizing.no-blocks"


def test_a_sampled_curve_says_its_error() -> None:
    rates = rates_of(loop(4000, 3, rate=0.5))
    assert rates.error is not None
    assert (
        0 < rates.error < 0.3
    )  # at the cliff of a loop a small error of the size is a large one of the rate
    assert rates.max_hit_rate == pytest.approx(2 / 3 * 200 / 201, abs=rates.error)


def test_pictures(tmp_path: Path) -> None:
    rates = rates_of(loop(4000, 3, rate=0.5))
    plot(rates, tmp_path / "curve.png", title="a title")
    png = (tmp_path / "curve.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert struct.unpack(">II", png[16:24]) == (960, 540)
    plot(rates, tmp_path / "curve.svg", title="a title")
    svg = (tmp_path / "curve.svg").read_text()
    assert "<svg" in svg
    for bad in ("curve.pdf", "curve", "missing/curve.png"):
        with pytest.raises(WorkloadError) as error:
            plot(rates, tmp_path / bad, title="")
        assert error.value.stable_code == "sizing.plot"
