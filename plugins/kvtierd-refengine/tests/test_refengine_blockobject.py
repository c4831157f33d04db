"""Nothing from the pool is used unless it is exactly the block asked for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtierd_refengine.blockobject import (
    HEADER_BYTES,
    ByteArray,
    WrongBytesError,
    object_key,
    seal,
    unseal,
)

MODEL, OTHER_MODEL = b"m" * 32, b"n" * 32
HASH, OTHER_HASH = b"h" * 32, b"i" * 32
BLOCK = np.random.default_rng(1).standard_normal((2, 2, 1, 4, 8), dtype=np.float32)


def sealed() -> ByteArray:
    memory = np.full(HEADER_BYTES + BLOCK.nbytes, 0xEE, dtype=np.uint8)
    seal(memory, MODEL, HASH, BLOCK)
    return memory


def test_what_was_sealed_comes_back() -> None:
    copy = np.empty_like(BLOCK)
    unseal(sealed(), MODEL, HASH, copy)
    assert copy.tobytes() == BLOCK.tobytes()


def test_a_strangers_block_is_refused_by_name() -> None:
    copy = np.empty_like(BLOCK)
    with pytest.raises(WrongBytesError, match="another model"):
        unseal(sealed(), OTHER_MODEL, HASH, copy)
    with pytest.raises(WrongBytesError, match="another block"):
        unseal(sealed(), MODEL, OTHER_HASH, copy)
    with pytest.raises(WrongBytesError, match="not a block"):
        unseal(np.zeros(HEADER_BYTES + BLOCK.nbytes, dtype=np.uint8), MODEL, HASH, copy)
    with pytest.raises(WrongBytesError, match="payload"):
        unseal(sealed()[:-32], MODEL, HASH, copy[..., :-1].copy())


def test_half_of_another_value_is_refused() -> None:
    memory, other = sealed(), sealed()
    seal(other, MODEL, HASH, BLOCK + 1)
    half = len(memory) // 2
    memory[half:] = other[half:]
    with pytest.raises(WrongBytesError, match="checksum"):
        unseal(memory, MODEL, HASH, np.empty_like(BLOCK))


@given(st.integers(0, 88 + BLOCK.nbytes - 1), st.integers(0, 7))
def test_any_flipped_bit_is_noticed(position: int, bit: int) -> None:
    memory = sealed()
    place = (
        position if position < 88 else position + HEADER_BYTES - 88
    )  # the zeros of the header carry nothing
    memory[place] ^= np.uint8(1 << bit)
    with pytest.raises(WrongBytesError):
        unseal(memory, MODEL, HASH, np.empty_like(BLOCK))


def test_the_key_names_namespace_model_and_block() -> None:
    assert object_key("ns", MODEL, HASH) == f"ns@{MODEL.hex()[:32]}@{HASH.hex()}"
    assert object_key("ns", OTHER_MODEL, HASH) != object_key("ns", MODEL, HASH)
