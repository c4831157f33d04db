"""The plugin's entry point: the drivers it brings."""

from __future__ import annotations

from collections.abc import Sequence

from kvtierd.hookspecs import hookimpl
from kvtierd.plan.engine import EngineDriver
from kvtierd_sglang.cpu import SglangCpuDriver
from kvtierd_sglang.driver import SglangDriver

__all__ = ["SglangCpuDriver", "SglangDriver", "kvtierd_engine_drivers"]


@hookimpl
def kvtierd_engine_drivers() -> Sequence[EngineDriver]:
    """The drivers ``sglang`` and ``sglang-cpu``."""
    return [SglangDriver(), SglangCpuDriver()]
