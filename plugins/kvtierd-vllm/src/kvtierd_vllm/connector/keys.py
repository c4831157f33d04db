"""Names of the objects in the pool.

A key is ``namespace@identity@block size@block hash``, and ``@rank.size`` behind it when tensor parallelism splits a
block. The identity is a hash over everything that decides what the bytes of a block mean: two engines that differ in
any of it never see each other's blocks. vLLM's block hash covers the tokens and all tokens before them; it is the same
in two processes only when ``PYTHONHASHSEED`` is.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Final

# Part of every identity: change it whenever the form of an object changes (the order of layers, the seals).
OBJECT_FORM: Final = 1
SEAL_BYTES: Final = 32


@dataclasses.dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What the bytes of a block depend on, besides the tokens.

    ``kv_bytes`` is the size of one block of all layers on one rank. ``extra`` holds whatever else the engine knows:
    revision, quantization, the type of the KV cache.
    """

    model: str
    dtype: str
    layers: int
    kv_heads: int
    head_size: int
    tensor_parallel_size: int
    hash_algorithm: str
    kv_bytes: int
    extra: tuple[str, ...] = ()

    def digest(self) -> str:
        """24 hexadecimal digits."""
        text = json.dumps([OBJECT_FORM, dataclasses.asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:24]


class KeyMaker:
    """Makes keys from block hashes."""

    def __init__(self, namespace: str, identity: ModelIdentity, block_tokens: int) -> None:
        self._prefix = f"{namespace}@{identity.digest()}@{block_tokens}@"
        self._generation = ""

    @property
    def prefix(self) -> str:
        """What all keys begin with at the moment."""
        return self._prefix + self._generation

    def renew(self, token: str) -> None:
        """Makes other keys from now on: what is in the pool is not found any more, by this engine until it ends."""
        self._generation = f"{token}@"

    def key(self, block_hash: bytes) -> str:
        """The key of one block, without the rank."""
        return self.prefix + block_hash.hex()


def rank_key(key: str, rank: int, size: int) -> str:
    """The key of this rank's part of a block."""
    return key if size == 1 else f"{key}@{rank}.{size}"


def all_rank_keys(keys: Sequence[str], size: int) -> list[str]:
    """The keys of all parts of these blocks: block by block, rank by rank."""
    return [rank_key(key, rank, size) for key in keys for rank in range(size)]


def seal(key: str) -> bytes:
    """What stands before and behind a block's bytes in its object.

    A MetaService killed under load has come back with keys that named other keys' bytes. The seal notices: it is a
    hash of the key (``SEAL_BYTES`` long).
    """
    return hashlib.blake2b(key.encode(), digest_size=SEAL_BYTES).digest()
