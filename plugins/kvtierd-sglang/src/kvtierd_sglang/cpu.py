"""The driver ``sglang-cpu``: the real SGLang on a CPU, for development and tests, with files as L3."""

from __future__ import annotations

import json
from collections.abc import Mapping

from kvtierd.plan.engine import EngineContext, Remarks
from kvtierd.plan.model import FileSpec
from kvtierd_sglang.driver import SglangDriver, Tiers, hosts_spanned
from kvtierd_sglang.flags import Options
from kvtierd_sglang.sizing import ranks_of
from kvtierd_sglang.storage import Rendered


class SglangCpuDriver(SglangDriver):
    """Drives the real SGLang on a CPU, with files as L3: for development and tests, without MemCache."""

    name = "sglang-cpu"
    default_port = 30000
    ready_deadline_seconds = 240.0
    drain_seconds = 60.0
    defaults: Mapping[str, str | bool] = {
        "device": "cpu",
        "attention-backend": "torch_native",
        "sampling-backend": "pytorch",
        "disable-overlap-schedule": True,
        "disable-cuda-graph": True,
    }
    io_backend = "direct"
    backend = "file"
    uses_memcache = False
    one_rank_a_device = False

    def _l3_by_default(self, context: EngineContext) -> bool:
        return False

    def _layout(self, context: EngineContext) -> str:
        return "layer_first"

    def _ranks_here(self, context: EngineContext, options: Options, remarks: Remarks) -> int:
        return max(1, ranks_of(options) // hosts_spanned(options))

    def _l3(
        self, context: EngineContext, options: Options, remarks: Remarks, files: list[FileSpec]
    ) -> list[str]:
        return self._storage_arguments(self._storage(context, options))

    def _storage(self, context: EngineContext, options: Options) -> Rendered:
        return Rendered(json.dumps(dict(options.storage)) if options.storage else None)

    def _env(self, context: EngineContext, tiers: Tiers, remarks: Remarks) -> dict[str, str]:
        own = {"CUDA_VISIBLE_DEVICES": "", "SGLANG_USE_CPU_ENGINE": "1"}
        if tiers.l3:
            own["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = f"{context.work_dir}/hicache"
        plain = context.model_copy(update={"memcache_env": {}, "devices": ()})
        return own | super()._env(plain, Tiers(l2=tiers.l2, l3=False), remarks)

    def _say(self, context: EngineContext, options: Options, tiers: Tiers, remarks: Remarks) -> None:
        super()._say(context, options, Tiers(l2=tiers.l2, l3=False), remarks)
        l3 = f", L3 is files in {context.work_dir}/hicache" if tiers.l3 else ""
        remarks.note(
            "engine.cpu", f"for development and tests: SGLang computes on the CPU{l3}, MemCache is not used"
        )
