"""The L1 cache: a fixed slab of KV blocks with reference counts, found by chained hash, evicted least recently used.

A block is in one of three states. *Owned*: a sequence (or a pending save) holds references. *Cached*: nobody holds it,
but it has a hash and can be found until it is evicted. *Blank*: neither. An owned block with a hash can be shared by
any number of sequences; its contents never change once it has a hash.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
_ALIGNMENT_BYTES: Final = 64


def block_hashes(model_identity: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """One 32-byte hash per full block. Each covers the model and everything before it, not only its own tokens."""
    hashes: list[bytes] = []
    parent = model_identity
    for start in range(0, len(tokens) - block_size + 1, block_size):
        own = np.asarray(tokens[start : start + block_size], dtype="<u2").tobytes()
        parent = hashlib.sha256(parent + own).digest()
        hashes.append(parent)
    return hashes


class BlockPool:
    """``total`` blocks of one shape. Thread-safe: the compute thread and the saver both release blocks.

    Memory is taken from the system only as blocks are first used.
    """

    def __init__(self, total: int, shape: tuple[int, ...]) -> None:
        if total < 1:
            raise ValueError("a block pool needs at least one block")
        self.total = total
        self.block_bytes = int(np.prod(shape)) * 4
        raw = np.empty(total * self.block_bytes + _ALIGNMENT_BYTES, dtype=np.uint8)
        skip = -raw.ctypes.data % _ALIGNMENT_BYTES
        aligned = raw[skip : skip + total * self.block_bytes]
        self._slab: FloatArray = aligned.view(np.float32).reshape(total, *shape)
        self._lock = threading.Lock()
        self._references = [0] * total
        self._hash_of: list[bytes | None] = [None] * total
        self._slot_of: dict[bytes, int] = {}
        self._blank = list(range(total - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # unreferenced, with a hash, oldest first
        self.evictions = 0

    def block(self, slot: int) -> FloatArray:
        """The memory of one block: write it only while it is owned and has no hash."""
        return np.asarray(self._slab[slot])

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The slots of the longest known prefix, each with a new reference."""
        found: list[int] = []
        with self._lock:
            for block_hash in hashes:
                slot = self._slot_of.get(block_hash)
                if slot is None:
                    break
                self._references[slot] += 1
                self._cached.pop(slot, None)
                found.append(slot)
        return found

    def allocate(self, count: int) -> list[int] | None:
        """Slots with one reference each and no hash, evicting the oldest cached ones. All or nothing."""
        with self._lock:
            if count > len(self._blank) + len(self._cached):
                return None
            slots = []
            for _ in range(count):
                if self._blank:
                    slot = self._blank.pop()
                else:
                    slot, _ = self._cached.popitem(last=False)
                    self._forget(slot)
                    self.evictions += 1
                self._references[slot] = 1
                slots.append(slot)
            return slots

    def publish(self, slot: int, block_hash: bytes) -> None:
        """Makes an owned, finished block findable. When another slot already has this hash, that one stays."""
        with self._lock:
            if self._references[slot] < 1:
                raise ValueError(f"block {slot} is not owned")
            if self._hash_of[slot] is None and block_hash not in self._slot_of:
                self._hash_of[slot] = block_hash
                self._slot_of[block_hash] = slot

    def retain(self, slots: Iterable[int]) -> None:
        """One more reference to each, for a second holder of owned blocks."""
        with self._lock:
            for slot in slots:
                if self._references[slot] < 1:
                    raise ValueError(f"block {slot} is not owned")
                self._references[slot] += 1

    def release(self, slots: Iterable[int]) -> None:
        """Gives back one reference each. Pass a sequence's blocks last first: tails are then evicted before heads."""
        with self._lock:
            for slot in slots:
                if self._references[slot] < 1:
                    raise ValueError(f"block {slot} was released once too often")
                self._references[slot] -= 1
                if self._references[slot] == 0:
                    if self._hash_of[slot] is None:
                        self._blank.append(slot)
                    else:
                        self._cached[slot] = None

    def reset(self) -> int:
        """Forgets every hash; blocks in use go on, unseen by others. Returns how many blocks could be found before."""
        with self._lock:
            known = len(self._slot_of)
            self._slot_of.clear()
            self._hash_of = [None] * self.total
            self._blank.extend(self._cached)
            self._cached.clear()
            return known

    @property
    def owned(self) -> int:
        """Blocks that somebody holds."""
        with self._lock:
            return self.total - len(self._blank) - len(self._cached)

    @property
    def findable(self) -> int:
        """Blocks with a hash, owned or not."""
        with self._lock:
            return len(self._slot_of)

    def _forget(self, slot: int) -> None:
        block_hash = self._hash_of[slot]
        self._hash_of[slot] = None
        if block_hash is not None:
            del self._slot_of[block_hash]
