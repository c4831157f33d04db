"""The same numbers come out, to the bit, wherever a prefix came from."""

from __future__ import annotations

import numpy as np
import pytest
from kvtierd_refengine.model import PRESETS, FloatArray, Model, ModelConfig
from kvtierd_refengine.tokenizer import END_OF_TEXT, SPEAKABLE, VOCABULARY_SIZE, chat_prompt, decode, encode

BLOCK = 16
PROMPT = encode("It was the best of times, it was the worst of times, it was the age of wisdom. " * 2)


def make_model(seed: int = 0) -> Model:
    return Model(PRESETS["tiny"].with_seed(seed), block_size=BLOCK, max_tokens=512)


def make_blocks(count: int, fill: float = np.nan) -> list[FloatArray]:
    """Memory as it may be found: what is not written must never matter."""
    config = PRESETS["tiny"]
    shape = (config.layers, 2, config.kv_heads, BLOCK, config.head_size)
    return [np.full(shape, fill, dtype=np.float32) for _ in range(count)]


def prefill(model: Model, tokens: list[int], blocks: list[FloatArray], start: int = 0) -> FloatArray:
    logits = np.empty(0, dtype=np.float32)
    for first in range(start, len(tokens), BLOCK):
        logits = model.forward(tokens[first : first + BLOCK], first, blocks[: first // BLOCK + 1])
    return logits


def needed(tokens: int) -> int:
    return -(-tokens // BLOCK)


@pytest.mark.parametrize("cached_blocks", [1, 4, len(PROMPT) // BLOCK])
def test_a_cached_prefix_gives_bit_identical_logits(cached_blocks: int) -> None:
    model, cold = make_model(), make_blocks(needed(len(PROMPT)))
    expected = prefill(model, PROMPT, cold)
    warm = make_blocks(needed(len(PROMPT)), fill=np.inf)
    for index in range(cached_blocks):
        warm[index][:] = cold[index]
    logits = prefill(model, PROMPT, warm, start=cached_blocks * BLOCK)
    assert logits.tobytes() == expected.tobytes()
    for index in range(len(PROMPT) // BLOCK):
        assert warm[index].tobytes() == cold[index].tobytes()


def test_another_process_is_the_same_model() -> None:
    first, second = make_model(), make_model()
    a, b = make_blocks(needed(len(PROMPT))), make_blocks(needed(len(PROMPT)))
    assert prefill(first, PROMPT, a).tobytes() == prefill(second, PROMPT, b).tobytes()


def test_other_work_in_between_changes_nothing() -> None:
    model = make_model()
    alone = prefill(model, PROMPT, make_blocks(needed(len(PROMPT))))
    blocks, others = make_blocks(needed(len(PROMPT))), make_blocks(needed(len(PROMPT)))
    other = [token ^ 1 for token in PROMPT]
    logits = np.empty(0, dtype=np.float32)
    for first in range(0, len(PROMPT), BLOCK):
        used = first // BLOCK + 1
        logits = model.forward(PROMPT[first : first + BLOCK], first, blocks[:used])
        model.forward(other[first : first + BLOCK], first, others[:used])
    assert logits.tobytes() == alone.tobytes()


def test_attention_is_causal_and_reaches_the_first_token() -> None:
    model = make_model()
    blocks, changed = make_blocks(needed(len(PROMPT))), make_blocks(needed(len(PROMPT)))
    before = prefill(model, PROMPT, blocks)
    late = [*PROMPT[:-1], PROMPT[-1] ^ 1]
    prefill(model, late, changed)
    assert changed[0].tobytes() == blocks[0].tobytes()  # the future does not change the past
    early = [PROMPT[0] ^ 1, *PROMPT[1:]]
    after = prefill(model, early, changed)
    assert not np.allclose(before, after)  # the past does change the future


def test_token_by_token_agrees_with_chunks() -> None:
    model = make_model()
    chunked = prefill(model, PROMPT, make_blocks(needed(len(PROMPT))))
    blocks = make_blocks(needed(len(PROMPT)))
    single = np.empty(0, dtype=np.float32)
    for position, token in enumerate(PROMPT):
        single = model.forward([token], position, blocks[: position // BLOCK + 1])
    np.testing.assert_allclose(single, chunked, rtol=1e-3, atol=1e-4)


def test_numbers_stay_finite() -> None:
    model = make_model()
    logits = prefill(model, [END_OF_TEXT] * 512, make_blocks(32))
    assert np.isfinite(logits).all()
    assert logits.shape == (VOCABULARY_SIZE,)


@pytest.mark.parametrize(
    ("tokens", "start", "blocks"),
    [
        ([], 0, 1),
        ([1] * (BLOCK + 1), 0, 1),
        ([1] * 2, BLOCK - 1, 1),
        ([1], BLOCK, 1),
        ([1], 0, 2),
        ([1], 512, 33),
    ],
    ids=["nothing", "too-many", "crosses", "block-missing", "block-too-many", "too-long"],
)
def test_wrong_chunks_are_refused(tokens: list[int], start: int, blocks: int) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        make_model().forward(tokens, start, make_blocks(blocks))


def test_identity_changes_with_everything_that_changes_keys_and_values() -> None:
    config = PRESETS["tiny"]
    identities = {
        config.identity(16),
        config.identity(32),
        config.with_seed(1).identity(16),
        PRESETS["base"].identity(16),
    }
    assert len(identities) == 4
    assert ModelConfig(2, 4, 2, 16, 96).identity(16) == config.identity(16)


def test_a_shape_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="divide"):
        ModelConfig(layers=1, heads=3, kv_heads=2, head_size=4, mlp_width=8)
    with pytest.raises(ValueError, match="at least 1"):
        ModelConfig(layers=0, heads=2, kv_heads=2, head_size=4, mlp_width=8)


def test_one_byte_is_one_token_and_text_survives() -> None:
    text = "naïve – 你好"
    assert len(encode(text)) == len(text.encode())
    assert decode(encode(text)) == text
    assert decode([72, 105, END_OF_TEXT]) == "Hi"
    assert decode([0xE4]) == "\N{REPLACEMENT CHARACTER}"
    assert encode("\ud800") == [ord("?")]
    assert all(decode([token]).isascii() for token in SPEAKABLE)


def test_a_longer_chat_starts_with_the_shorter_one() -> None:
    first = chat_prompt([("user", "hello")])
    longer = chat_prompt([("user", "hello"), ("assistant", "hi"), ("user", "again")])
    assert longer.startswith(first)
