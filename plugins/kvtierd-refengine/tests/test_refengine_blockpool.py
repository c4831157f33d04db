"""The L1 cache: references, eviction order, sharing, hashes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtierd_refengine.blockpool import BlockPool, block_hashes

SHAPE = (1, 2, 1, 4, 8)


def hashes(count: int, first: int = 0) -> list[bytes]:
    return [bytes([first + i]) * 32 for i in range(count)]


def cached(pool: BlockPool, names: list[bytes]) -> list[int]:
    """Blocks with these hashes that nobody holds."""
    slots = pool.allocate(len(names))
    assert slots is not None
    for slot, name in zip(slots, names, strict=True):
        pool.publish(slot, name)
    pool.release(reversed(slots))
    return slots


def test_published_blocks_are_found_as_a_prefix() -> None:
    pool = BlockPool(4, SHAPE)
    slots = cached(pool, hashes(3))
    assert pool.match([*hashes(2), b"?" * 32, hashes(3)[2]]) == slots[:2]
    assert pool.owned == 2
    assert pool.findable == 3


def test_the_least_recently_used_goes_first_and_tails_before_heads() -> None:
    pool = BlockPool(4, SHAPE)
    cached(pool, hashes(2))
    cached(pool, hashes(2, first=10))
    pool.release(reversed(pool.match(hashes(2))))  # used again
    assert pool.allocate(1) is not None
    assert len(pool.match(hashes(2, first=10))) == 1
    assert len(pool.match(hashes(2))) == 2
    assert pool.evictions == 1


def test_owned_blocks_are_never_evicted() -> None:
    pool = BlockPool(3, SHAPE)
    cached(pool, hashes(3))
    held = pool.match(hashes(2))
    assert pool.allocate(2) is None
    assert pool.findable == 3  # all or nothing: the failed attempt evicted nothing
    assert pool.allocate(1) is not None
    assert pool.match(hashes(2)) == held


def test_a_block_is_shared_until_the_last_holder_lets_go() -> None:
    pool = BlockPool(1, SHAPE)
    (slot,) = cached(pool, hashes(1))
    assert pool.match(hashes(1)) == pool.match(hashes(1)) == [slot]
    pool.release([slot])
    assert pool.allocate(1) is None
    pool.release([slot])
    assert pool.allocate(1) == [slot]


def test_the_first_of_two_equal_blocks_is_kept() -> None:
    pool = BlockPool(2, SHAPE)
    slots = pool.allocate(2)
    assert slots is not None
    for slot in slots:
        pool.publish(slot, b"a" * 32)
    pool.release(slots)
    assert pool.match([b"a" * 32]) == slots[:1]
    assert pool.findable == 1


def test_reset_forgets_all_and_leaves_holders_alone() -> None:
    pool = BlockPool(3, SHAPE)
    cached(pool, hashes(2))
    held = pool.match(hashes(1))
    pool.block(held[0])[:] = 7
    assert pool.reset() == 2
    assert pool.match(hashes(2)) == []
    assert pool.owned == 1
    others = pool.allocate(2)
    assert others is not None
    for slot in others:
        pool.block(slot)[:] = 0
    assert (pool.block(held[0]) == 7).all()
    pool.release(held)
    assert pool.owned == 2


def test_misuse_is_an_error() -> None:
    pool = BlockPool(1, SHAPE)
    for misuse in (lambda: pool.release([0]), lambda: pool.retain([0]), lambda: pool.publish(0, b"")):
        with pytest.raises(ValueError, match="block 0"):
            misuse()
    with pytest.raises(ValueError, match="at least one"):
        BlockPool(0, SHAPE)


def test_blocks_do_not_overlap_and_are_aligned() -> None:
    pool = BlockPool(3, SHAPE)
    for slot in range(3):
        pool.block(slot)[:] = slot
    assert [float(pool.block(slot).max()) for slot in range(3)] == [0, 1, 2]
    assert pool.block(0).ctypes.data % 64 == 0
    assert pool.block(0).nbytes == pool.block_bytes == int(np.prod(SHAPE)) * 4


@given(
    st.lists(st.tuples(st.sampled_from(["match", "new", "release", "reset"]), st.integers(0, 9)), max_size=60)
)
def test_no_block_is_ever_lost(steps: list[tuple[str, int]]) -> None:
    pool, held = BlockPool(5, SHAPE), []
    for step, number in steps:
        name = bytes([number]) * 32
        if step == "match":
            held += pool.match([name])
        elif step == "new" and (slots := pool.allocate(1)):
            pool.publish(slots[0], name)
            held += slots
        elif step == "release" and held:
            pool.release([held.pop(number % len(held))])
        elif step == "reset":
            pool.reset()
        assert pool.owned == len(set(held))
        assert pool.findable <= pool.total
    pool.release(held)
    assert pool.owned == 0
    assert sorted(pool.allocate(5) or []) == [0, 1, 2, 3, 4]


def test_hashes_cover_the_model_and_the_whole_prefix() -> None:
    model, tokens = b"m" * 32, list(range(20))
    first = block_hashes(model, tokens, 8)
    assert len(first) == 2  # full blocks only
    assert block_hashes(model, tokens[:16], 8) == first
    assert block_hashes(b"n" * 32, tokens, 8)[0] != first[0]
    early = block_hashes(model, [99, *tokens[1:]], 8)
    assert early[0] != first[0]
    assert early[1] != first[1]  # same tokens, other prefix
    assert block_hashes(model, [*tokens[:15], 99], 8)[0] == first[0]
    assert len({*block_hashes(model, [1] * 64, 8)}) == 8
    assert len({h for pair in ([1, 256], [257, 0]) for h in block_hashes(model, pair, 2)}) == 2
