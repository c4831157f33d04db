"""Copies of KV between the device's pool and the host's: here both are plain memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sgl_kernel import absent


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy the tokens at ``src_indices`` of every layer to ``dst_indices``."""
    taken, put = src_indices.cpu().long(), dst_indices.cpu().long()
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[put] = source[taken]


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)
    return absent(f"kvcacheio.{name}")
