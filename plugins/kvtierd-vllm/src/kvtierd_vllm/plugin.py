"""The entry point: kvtierd's drivers for vLLM."""

from __future__ import annotations

from collections.abc import Sequence

from kvtierd.hookspecs import hookimpl
from kvtierd.plan.engine import EngineDriver
from kvtierd_vllm.ascend import VllmAscendDriver
from kvtierd_vllm.cpu import VllmCpuDriver


@hookimpl
def kvtierd_engine_drivers() -> Sequence[EngineDriver]:
    """The drivers ``vllm-ascend`` and ``vllm-cpu``."""
    return [VllmAscendDriver(), VllmCpuDriver()]
