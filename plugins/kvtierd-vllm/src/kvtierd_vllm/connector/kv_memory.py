"""vLLM's KV cache tensors and the lanes' memory, in torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .lanes import SEALS_BYTES, Lanes, cut_lanes, lane_blocks
from .store import Span

_LOAD_LANES = _SAVE_LANES = 3


class KvMemory:
    """Implements ``BlockCopier`` over tensors in host memory whose first dimension counts blocks.

    Args:
        kv_caches: What vLLM registers: layer name to tensor.
        num_blocks: How many blocks vLLM says there are.
        lane_bytes: About the size of one lane.

    Raises:
        ValueError: The tensors have another shape than the connector can copy.
    """

    def __init__(self, kv_caches: Mapping[str, Any], num_blocks: int, lane_bytes: int) -> None:
        self._layers = _byte_views(kv_caches, num_blocks)
        self.block_bytes = sum(layer.shape[1] for layer in self._layers)
        blocks = lane_blocks(lane_bytes, self.block_bytes)
        size = (_LOAD_LANES + _SAVE_LANES) * blocks * (self.block_bytes + SEALS_BYTES)
        self._lanes = torch.zeros(size, dtype=torch.uint8)
        self.load_lanes: Lanes
        self.save_lanes: Lanes
        self.load_lanes, self.save_lanes = cut_lanes(
            self._lanes.numpy().data.cast("B"),
            self._lanes.data_ptr(),
            self.block_bytes,
            blocks,
            (_LOAD_LANES, _SAVE_LANES),
        )

    @property
    def span(self) -> Span:
        """The memory of all lanes, for MemCache to register."""
        return Span(self._lanes.data_ptr(), self._lanes.numel())

    def copy_out(self, block_id: int, offset: int) -> None:
        """See ``BlockCopier``."""
        for layer in self._layers:
            end = offset + layer.shape[1]
            self._lanes[offset:end].copy_(layer[block_id])
            offset = end

    def copy_in(self, block_id: int, offset: int) -> None:
        """See ``BlockCopier``."""
        for layer in self._layers:
            end = offset + layer.shape[1]
            layer[block_id].copy_(self._lanes[offset:end])
            offset = end


def _byte_views(kv_caches: Mapping[str, Any], num_blocks: int) -> list[Any]:
    """One [blocks, bytes] view per tensor, in the order of the layers; layers that share a tensor count once."""
    views: dict[int, Any] = {}
    for name in sorted(kv_caches, key=lambda layer: (len(layer), layer)):
        tensor = kv_caches[name]
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
            raise ValueError(f"the KV cache of {name} is not one tensor in host memory")
        if tensor.shape[0] != num_blocks or not tensor.is_contiguous():
            raise ValueError(
                f"the KV cache of {name} has shape {tuple(tensor.shape)}: it does not begin with {num_blocks} blocks"
            )
        views.setdefault(tensor.data_ptr(), tensor.view(num_blocks, -1).view(torch.uint8))
    return list(views.values())
