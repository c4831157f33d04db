"""Stands in for SGLang's compiled kernels where there is no build of them for a CPU.

Only for development and tests: SGLang's scheduler, HTTP server and HiCache then run unchanged, and the few kernels
they need on the way are written in plain PyTorch. Everything else can be imported and fails when it is called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__version__ = "0.0.0+cpu.standin"


def absent(name: str) -> Callable[..., Any]:
    """A kernel that nobody wrote: its name is found, calling it is an error that says which one it was."""

    def call(*arguments: Any, **_: Any) -> Any:
        shapes = ", ".join(type(argument).__name__ for argument in arguments)
        raise NotImplementedError(f"the stand-in for sgl_kernel has no {name}({shapes})")

    call.__name__ = name
    return call


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)
    return absent(name)


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    places: torch.Tensor,
    *_: Any,
) -> None:
    """Write each request's new KV places into its row of the table, one request after the other."""
    taken = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        count = end - start
        table[row, start:end] = places[taken : taken + count].to(table.dtype)
        taken += count


class _HostMemory:
    """The two calls of the CUDA runtime that pin memory: on a CPU there is nothing to pin."""

    @staticmethod
    def cudaHostRegister(address: int, size_bytes: int, flags: int = 0) -> int:  # noqa: N802 - CUDA's name
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:  # noqa: N802 - CUDA's name
        return 0


def _without_pinning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*arguments: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        return make(*arguments, **named)

    return made


def _adapt_torch() -> None:
    """Make PyTorch's CPU streams and pinned memory look like what HiCache expects of a device."""
    torch.cuda.cudart = lambda: _HostMemory
    if not hasattr(torch.cpu.Stream, "synchronize"):
        torch.cpu.Stream.synchronize = lambda self: None
    torch.cpu.Stream.query = lambda self: True
    for name in ("empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like"):
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_, **__: self


if not torch.cuda.is_available():
    _adapt_torch()
