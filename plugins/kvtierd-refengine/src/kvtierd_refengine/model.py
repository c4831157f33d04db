"""A small decoder-only transformer in numpy: RMSNorm, RoPE, grouped-query attention, gated MLP, float32.

The weights come from a fixed seed, so two processes with the same configuration are the same model. Keys and values
live outside, in the blocks of a :class:`~kvtierd_refengine.blockpool.BlockPool`.

**Why the numbers are reproducible to the bit.** Prefill runs in chunks that start at block boundaries, attention is
computed block by block, and the requests of a batch never share a matrix product. Every product therefore has
a shape that depends only on a token's position, never on how much of the prefix was cached or on who else is running.
A block computed cold, found in L1 or loaded from L3 gives the same logits.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtierd_refengine.tokenizer import VOCABULARY_SIZE

FloatArray = npt.NDArray[np.float32]

# Part of the model's identity: raise it when a change of this file changes the numbers that come out.
NUMERICS_VERSION: Final = 1
_EPSILON: Final = np.float32(1e-5)
_ROPE_BASE: Final = 10_000.0


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a model. ``width`` = heads x head size; ``kv_heads`` divides ``heads``; head sizes are even."""

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    mlp_width: int
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.layers, self.heads, self.kv_heads, self.head_size, self.mlp_width) < 1:
            raise ValueError("every dimension of a model must be at least 1")
        if self.heads % self.kv_heads or self.head_size % 2:
            raise ValueError("kv_heads must divide heads, and head_size must be even")

    @property
    def width(self) -> int:
        """Elements of the residual stream."""
        return self.heads * self.head_size

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers, float32."""
        return self.layers * 2 * self.kv_heads * self.head_size * 4

    def with_seed(self, seed: int) -> ModelConfig:
        """The same shape with other weights."""
        return dataclasses.replace(self, seed=seed)

    def identity(self, block_size: int) -> bytes:
        """32 bytes that differ whenever KV blocks of one model must not be used by another."""
        parts = dataclasses.asdict(self) | {
            "vocabulary": VOCABULARY_SIZE,
            "dtype": "float32",
            "block_size": block_size,
            "numerics": NUMERICS_VERSION,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


PRESETS: Final[dict[str, ModelConfig]] = {
    # About 11 million parameters: a cold prompt of 2,000 tokens takes one to two seconds on one core.
    "base": ModelConfig(layers=5, heads=8, kv_heads=2, head_size=64, mlp_width=1024),
    # For unit tests: everything is the same but the size.
    "tiny": ModelConfig(layers=2, heads=4, kv_heads=2, head_size=16, mlp_width=96),
}


@dataclasses.dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights. ``qkv`` and ``gate_up`` hold several projections side by side, for fewer products."""

    qkv: FloatArray
    out: FloatArray
    gate_up: FloatArray
    down: FloatArray


class Model:
    """Weights plus the forward pass of one chunk of one sequence. Not thread-safe: it owns scratch memory."""

    def __init__(self, config: ModelConfig, *, block_size: int, max_tokens: int) -> None:
        self.config = config
        self.block_size = block_size
        self.max_tokens = max_tokens
        random = np.random.default_rng(config.seed)

        def matrix(rows: int, columns: int, gain: float = 1.0) -> FloatArray:
            weights = random.standard_normal((rows, columns), dtype=np.float32)
            weights *= np.float32(gain / rows**0.5)
            return weights

        width, kv_width = config.width, config.kv_heads * config.head_size
        self._embedding = random.standard_normal((VOCABULARY_SIZE, width), dtype=np.float32)
        # Queries and keys with some gain: attention that looks somewhere, so that a wrong block shows in the output.
        self._layers = [
            _Layer(
                qkv=matrix(width, width + 2 * kv_width, gain=1.5),
                out=matrix(width, width, gain=2.0),
                gate_up=matrix(width, 2 * config.mlp_width),
                down=matrix(config.mlp_width, width),
            )
            for _ in range(config.layers)
        ]
        self._head = matrix(width, VOCABULARY_SIZE)
        half = config.head_size // 2
        angles = np.outer(np.arange(max_tokens), _ROPE_BASE ** (-np.arange(half) / half))
        self._cos = np.cos(angles).astype(np.float32)[:, None, :]
        self._sin = np.sin(angles).astype(np.float32)[:, None, :]
        blocks = -(-max_tokens // block_size)
        group_rows = (config.heads // config.kv_heads) * block_size
        self._scores = np.empty(config.kv_heads * group_rows * blocks * block_size, dtype=np.float32)

    def forward(self, tokens: Sequence[int], start: int, blocks: Sequence[FloatArray]) -> FloatArray:
        """Runs tokens at positions ``start ...`` and returns the logits of the last one.

        Args:
            tokens: At most one block's worth; they may not cross a block boundary.
            start: Position of the first token. Everything before it must be in ``blocks`` already.
            blocks: The sequence's KV blocks in order, each shaped (layers, 2, kv_heads, block_size, head_size),
                up to and including the one these tokens belong to, which is written.
        """
        count, end = len(tokens), start + len(tokens)
        last = start // self.block_size
        if not count or end > min((last + 1) * self.block_size, self.max_tokens) or len(blocks) != last + 1:
            raise ValueError(f"tokens {start} to {end} do not fit one block of the {len(blocks)} given")
        config = self.config
        offset = start - last * self.block_size
        cos, sin = self._cos[start:end], self._sin[start:end]
        kv_width = config.kv_heads * config.head_size
        x = self._embedding[np.asarray(tokens, dtype=np.intp)]
        for index, layer in enumerate(self._layers):
            qkv = _rms_norm(x) @ layer.qkv
            queries = _rotate(qkv[:, : config.width].reshape(count, config.heads, -1), cos, sin)
            keys = _rotate(qkv[:, config.width : -kv_width].reshape(count, config.kv_heads, -1), cos, sin)
            values = qkv[:, -kv_width:].reshape(count, config.kv_heads, -1)
            own = blocks[last][index]
            own[0, :, offset : offset + count] = keys.transpose(1, 0, 2)
            own[1, :, offset : offset + count] = values.transpose(1, 0, 2)
            x = x + self._attend(queries, index, blocks, offset) @ layer.out
            gate_up = _rms_norm(x) @ layer.gate_up
            gate, up = gate_up[:, : config.mlp_width], gate_up[:, config.mlp_width :]
            # SiLU by tanh, which cannot overflow.
            x = (
                x
                + (gate * (np.float32(0.5) + np.float32(0.5) * np.tanh(np.float32(0.5) * gate)) * up)
                @ layer.down
            )
        return np.asarray((_rms_norm(x[-1:]) @ self._head)[0])

    def _attend(
        self, queries: FloatArray, layer: int, blocks: Sequence[FloatArray], offset: int
    ) -> FloatArray:
        """Causal attention of (count, heads, head_size) queries over the blocks; returns (count, width)."""
        config, size = self.config, self.block_size
        count = queries.shape[0]
        group = config.heads // config.kv_heads
        rows = group * count
        filled = offset + count  # tokens in the last block
        context = (len(blocks) - 1) * size + filled
        scale = np.float32(config.head_size**-0.5)
        # (kv_heads, group x count, head_size): all queries that share a key head in one product.
        grouped = queries.reshape(count, config.kv_heads, group, config.head_size).transpose(1, 2, 0, 3)
        grouped = np.ascontiguousarray(grouped).reshape(config.kv_heads, rows, config.head_size) * scale
        scores = self._scores[: config.kv_heads * rows * context].reshape(config.kv_heads, rows, context)
        for index, block in enumerate(blocks):
            first = index * size
            used = size if index + 1 < len(blocks) else filled
            keys = block[layer, 0, :, :used]
            np.matmul(grouped, keys.transpose(0, 2, 1), out=scores[:, :, first : first + used])
        if count > 1:
            future = np.triu(np.ones((count, count), dtype=bool), k=1)
            tail = scores.reshape(config.kv_heads, group, count, context)[..., context - count :]
            tail[..., future] = -np.inf
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        total = scores.sum(axis=-1, keepdims=True)
        mixed = np.zeros((config.kv_heads, rows, config.head_size), dtype=np.float32)
        for index, block in enumerate(blocks):
            first = index * size
            used = size if index + 1 < len(blocks) else filled
            mixed += scores[:, :, first : first + used] @ block[layer, 1, :, :used]
        mixed /= total
        heads = mixed.reshape(config.kv_heads, group, count, config.head_size).transpose(2, 0, 1, 3)
        return heads.reshape(count, config.width)


def _rms_norm(x: FloatArray) -> FloatArray:
    mean_square = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
    return np.asarray(x / np.sqrt(mean_square + _EPSILON), dtype=np.float32)


def _rotate(x: FloatArray, cos: FloatArray, sin: FloatArray) -> FloatArray:
    """Rotary position embedding of (count, heads, head_size), halves layout."""
    half = x.shape[-1] // 2
    low, high = x[..., :half], x[..., half:]
    return np.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1)
