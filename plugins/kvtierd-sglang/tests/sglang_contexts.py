"""What the tests of this plugin share: a context as the planner makes it, and the recorded engine output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvtierd.mmc_conf.model import LocalConf
from kvtierd.plan.engine import EngineContext
from kvtierd.plan.inventory import Inventory, MemcacheInstall
from kvtierd.plan.model import PoolPlan

GIB = 1024**3
PYTHON = "/opt/engine/bin/python"
FIXTURES = Path(__file__).parents[3] / "tests" / "fixtures"
RECORDED = FIXTURES / "engines" / "sglang"


def pool(**changes: Any) -> PoolPlan:
    values: dict[str, Any] = {
        "placement": "engine",
        "protocol": "device_sdma",
        "budget_bytes": 100 * GIB,
        "capacity_bytes": 100 * GIB,
        "providers": 2,
        "dram_bytes_per_provider": 50 * GIB,
        "alignment_bytes": GIB,
        "world_size": 256,
    }
    return PoolPlan(**(values | changes))


def context(**changes: Any) -> EngineContext:
    values: dict[str, Any] = {
        "name": "e1",
        "node": "n1",
        "series": "A3",
        "model": "/data/Qwen3-32B",
        "devices": (0, 1),
        "port": 8869,
        "python": PYTHON,
        "args": {"tp-size": 2},
        "memcache_env": {"LD_LIBRARY_PATH": "/wheel/lib", "ASCEND_HOME_PATH": "/cann"},
        "local_conf_path": "/etc/kvtierd/mmc-local.conf",
        "meta_service_url": "tcp://127.0.0.1:5000",
        "config_store_url": "tcp://127.0.0.1:6000",
        "pool_placement": "engine",
        "pool": pool(),
        "work_dir": "/var/lib/kvtierd/engines/e1",
        "version": "0.5.23",
        "nodes": ("n1",),
        "inventory": Inventory(
            hostname="n1",
            memory_total_bytes=1024 * GIB,
            memory_available_bytes=1000 * GIB,
            memcache=(MemcacheInstall(runtime="wheel", python=PYTHON, memcache_version="1.3.0"),),
        ),
    }
    values |= changes
    planned: PoolPlan = values["pool"]
    conf = LocalConf(
        meta_service_url=values["meta_service_url"],
        config_store_url=values["config_store_url"],
        world_size=planned.world_size,
        protocol=planned.protocol,
        dram_size_bytes=planned.dram_bytes_per_provider if planned.placement == "engine" else 0,
        max_dram_size_bytes=planned.dram_bytes_per_provider,
    )
    return EngineContext(**({"local_conf": conf} | values))


def value_of(argv: tuple[str, ...], flag: str) -> str | None:
    """The argument after a flag; ``None`` when the flag is not there."""
    return argv[argv.index(flag) + 1] if flag in argv else None
