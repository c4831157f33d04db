"""Hit rates of an LRU cache of prompt blocks: against a cache that is really kept, block by block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.workload.sizing.curve import BlockTrace, HitCurve, _sum_of_larger_before

Request = tuple[list[int], int]  # content of its blocks, how many could be hits


def curve_of(requests: Sequence[Request], *, batch: int = 1000, **options: float) -> HitCurve:
    trace = BlockTrace(**options)  # type: ignore[arg-type]
    for start in range(0, len(requests), batch):
        some = requests[start : start + batch]
        ids = np.array([number for blocks, _ in some for number in blocks], np.uint64)
        lengths = np.array([len(blocks) for blocks, _ in some], np.int64)
        trace.add(ids, lengths, np.array([countable for _, countable in some], np.int64), 128 * len(ids))
    return trace.curve()


def kept(requests: Sequence[Request], size: int) -> int:
    """Hits of a cache of ``size`` blocks, kept in the plainest way."""
    cache: OrderedDict[tuple[int, ...], None] = OrderedDict()
    hits = 0
    for blocks, countable in requests:
        chain = [tuple(blocks[: end + 1]) for end in range(len(blocks))]
        for block in chain[:countable]:
            if block not in cache:
                break
            hits += 1
        for block in reversed(chain):  # the first block was used last
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > size:
            cache.popitem(last=False)
    return hits


@st.composite
def traces(draw: st.DrawFn) -> list[Request]:
    """Requests that share beginnings with earlier ones, and content elsewhere."""
    made: list[Request] = []
    for _ in range(draw(st.integers(0, 25))):
        base: list[int] = []
        if made and draw(st.booleans()):
            base = draw(st.sampled_from(made))[0]
            base = base[: draw(st.integers(0, len(base)))]
        blocks = [*base, *draw(st.lists(st.integers(0, 3), max_size=6))]
        made.append((blocks, draw(st.integers(max(0, len(blocks) - 2), len(blocks)))))
    return made


@given(requests=traces(), batch=st.integers(1, 30))
def test_every_size_has_the_hits_of_a_real_lru_cache(requests: list[Request], batch: int) -> None:
    curve = curve_of(requests, batch=batch)
    sizes = np.arange(1, 80)
    assert curve.hits(sizes).tolist() == [kept(requests, size) for size in sizes]
    chains = {tuple(blocks[: end + 1]) for blocks, _ in requests for end in range(len(blocks))}
    assert curve.distinct == len(chains)
    assert curve.most_hits == kept(requests, 10_000)
    assert curve.hits(curve.most_blocks) == curve.most_hits
    assert curve.error is None


@given(
    entries=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=80),
)
def test_sums_of_weights_with_a_larger_key_before(entries: list[tuple[int, int]]) -> None:
    keys = np.array([key for key, _ in entries], np.int64)
    weights = np.array([weight for _, weight in entries], np.int64)
    expected = [
        sum(weight for before, weight in entries[:index] if before > key)
        for index, (key, _) in enumerate(entries)
    ]
    assert _sum_of_larger_before(np, keys, weights).tolist() == expected


def test_a_block_counts_as_the_same_only_behind_the_same_blocks() -> None:
    assert curve_of([([1, 2], 2), ([3, 2], 2)]).most_hits == 0
    assert curve_of([([1, 2], 2), ([1, 2], 2)]).most_hits == 2


def test_the_tail_of_a_prompt_leaves_before_its_head() -> None:
    requests: list[Request] = [([1, 2, 3, 4], 4), ([1, 2, 3, 4], 4)]
    assert [float(curve_of(requests).hits(size)) for size in range(1, 6)] == [1, 2, 3, 4, 4]


def test_documents_read_in_turns_hit_only_when_all_fit() -> None:
    """LRU's cliff: a pool one block too small for what goes round has fewer hits, and half of it has none."""
    requests: list[Request] = [([document], 1) for _ in range(5) for document in range(10)]
    curve = curve_of(requests)
    assert [float(curve.hits(size)) for size in (5, 9, 10)] == [0, 0, 40]


def popular(count: int) -> list[Request]:
    rng = np.random.default_rng(3)
    families = (rng.pareto(0.8, count) * 40).astype(np.int64) % 100_000
    return [
        ([int(family) * 100 + j for j in range(4)] + rng.integers(1 << 40, 1 << 50, 6).tolist(), 9)
        for family in families
    ]


@pytest.mark.parametrize("rate", [0.1, 0.3])
def test_a_sample_is_within_its_stated_error_of_the_whole(rate: float) -> None:
    requests = popular(8000)
    whole, sampled = curve_of(requests), curve_of(requests, rate=rate)
    sizes = np.geomspace(1, whole.most_blocks, 60)
    error = sampled.error
    assert error is not None
    off = np.abs(sampled.hits(sizes) - whole.hits(sizes)).max()
    assert off <= error
    assert error < 0.2 * whole.references
    assert sampled.rate == pytest.approx(rate, rel=1e-3)
    assert sampled.distinct == pytest.approx(whole.distinct, rel=0.05)


def test_a_trace_that_outgrows_memory_is_sampled_as_if_it_had_been_from_the_start() -> None:
    requests = popular(3000)
    grown = curve_of(requests, batch=100, most_references=8000)
    assert grown.rate in {0.25, 0.125}
    assert grown.references == 30_000
    direct = curve_of(requests, rate=grown.rate)
    sizes = np.geomspace(1, direct.most_blocks, 40)
    assert grown.hits(sizes).tolist() == direct.hits(sizes).tolist()


def test_nothing_is_no_error() -> None:
    empty = curve_of([])
    assert (empty.references, empty.distinct, empty.most_hits, empty.most_blocks) == (0, 0, 0, 1)
    assert curve_of([([], 0), ([], 0)]).most_hits == 0


@pytest.mark.parametrize("rate", [0, -0.5, 1.5])
def test_a_rate_that_is_none(rate: float) -> None:
    with pytest.raises(ValueError, match="sampling rate"):
        BlockTrace(rate=rate)
