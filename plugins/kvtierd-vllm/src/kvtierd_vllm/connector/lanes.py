"""Transfer buffers beside the KV cache, and the form of an object in them.

An object is ``seal, block of layer 0, block of layer 1, ..., seal``. A lane holds a few objects one behind the other. A
call that hangs keeps its lane, and the KV cache never sees what it does in the end.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Final, Protocol

from .keys import SEAL_BYTES, seal
from .store import Span

SEALS_BYTES: Final = 2 * SEAL_BYTES


class BlockCopier(Protocol):
    """Copies blocks between the KV cache and the memory of the lanes."""

    block_bytes: int  # of all layers

    def copy_out(self, block_id: int, offset: int) -> None:
        """From the KV cache to the lanes, at this offset in bytes."""
        ...

    def copy_in(self, block_id: int, offset: int) -> None:
        """From the lanes to the KV cache."""
        ...


class Lane:
    """A row of objects. ``offset`` is its place in the memory of all lanes, in bytes."""

    def __init__(self, memory: memoryview, address: int, offset: int, block_bytes: int, blocks: int) -> None:
        self._memory = memory
        self._address = address
        self._offset = offset
        self._block_bytes = block_bytes
        self.blocks = blocks

    def spans(self, count: int) -> list[Span]:
        """The memory of the first objects."""
        size = self._block_bytes + SEALS_BYTES
        return [Span(self._address + self._offset + i * size, size) for i in range(count)]

    def block_offset(self, index: int) -> int:
        """Where the block of this object begins."""
        return self._offset + index * (self._block_bytes + SEALS_BYTES) + SEAL_BYTES

    def close_object(self, index: int, key: str) -> None:
        """Puts the seals around a block."""
        mark = seal(key)
        for place in self._seals(index):
            self._memory[place] = mark

    def is_object_of(self, index: int, key: str) -> bool:
        """Whether both seals are this key's."""
        expected = seal(key)
        return all(self._memory[place] == expected for place in self._seals(index))

    def break_object(self, index: int) -> None:
        """Makes sure that an object which is not written does not look like the one before."""
        for place in self._seals(index):
            self._memory[place] = bytes(SEAL_BYTES)

    def _seals(self, index: int) -> Iterator[slice]:
        start = self.block_offset(index)
        yield slice(start - SEAL_BYTES, start)
        yield slice(start + self._block_bytes, start + self._block_bytes + SEAL_BYTES)


class Lanes:
    """A fixed number of lanes. Thread-safe."""

    def __init__(self, lanes: list[Lane]) -> None:
        self._free: queue.SimpleQueue[Lane] = queue.SimpleQueue()
        self.blocks = lanes[0].blocks
        for lane in lanes:
            self._free.put(lane)

    def take(self, timeout_seconds: float) -> Lane | None:
        """A free lane, or None when there is none for so long."""
        try:
            return self._free.get(timeout=max(0.0, timeout_seconds))
        except queue.Empty:
            return None

    def give_back(self, lane: Lane) -> None:
        """The lane is nobody's again."""
        self._free.put(lane)


def lane_blocks(lane_bytes: int, block_bytes: int) -> int:
    """How many blocks a lane of about this size holds, at least one."""
    return max(1, lane_bytes // (block_bytes + SEALS_BYTES))


def cut_lanes(
    memory: memoryview, address: int, block_bytes: int, blocks: int, counts: tuple[int, ...]
) -> list[Lanes]:
    """Cuts memory (flat, bytes, at this address) into groups of lanes."""
    size = blocks * (block_bytes + SEALS_BYTES)
    if memory.nbytes != size * sum(counts):
        raise ValueError(f"{sum(counts)} lanes of {size} bytes do not make {memory.nbytes}")
    groups, position = [], 0
    for count in counts:
        lanes = [Lane(memory, address, (position + i) * size, block_bytes, blocks) for i in range(count)]
        groups.append(Lanes(lanes))
        position += count
    return groups
