"""Contexts as the planner makes them, and what a launch says, for the driver tests."""

from __future__ import annotations

import json
from typing import Any

from kvtierd.plan.engine import EngineContext, EngineLaunch
from kvtierd.plan.inventory import AscendInstall, Inventory

TWO_NODES = {
    "node": "a",
    "nodes": ("a", "b"),
    "addresses": {"a": "10.1.0.1", "b": "10.1.0.2"},
    "nic": "enp1s0",
}


def context(**changes: Any) -> EngineContext:
    """A context on an NPU host; ``args`` without anything gets a split that fits the two devices."""
    values: dict[str, Any] = {
        "name": "e1",
        "node": "n1",
        "series": "800I-A2",
        "model": "/data/weights/Qwen3-32B",
        "devices": (0, 1),
        "port": 8113,
        "python": "/venv/bin/python",
        "args": {"tensor-parallel-size": 2},
        "memcache_env": {"LD_LIBRARY_PATH": "/wheel/lib", "PATH": "/usr/bin:/bin"},
        "local_conf_path": "/var/lib/kvtierd/conf/mmc-local.conf",
        "meta_service_url": "tcp://127.0.0.1:5000",
        "config_store_url": "tcp://127.0.0.1:6000",
        "pool_placement": "engine",
        "work_dir": "/var/lib/kvtierd/engines/e1",
        "inventory": Inventory(
            hostname="n1",
            machine="aarch64",
            memory_total_bytes=1,
            memory_available_bytes=1,
            ascend=AscendInstall(cann_home="/usr/local/Ascend/ascend-toolkit/latest"),
        ),
        "version": "0.23.0",
    }
    return EngineContext(**(values | changes))


def option(launch: EngineLaunch, name: str) -> str:
    """The value behind an option."""
    return launch.argv[launch.argv.index(name) + 1]


def transfer(launch: EngineLaunch) -> dict[str, Any]:
    """--kv-transfer-config, parsed back."""
    value: dict[str, Any] = json.loads(option(launch, "--kv-transfer-config"))
    return value


def refused(launch: EngineLaunch) -> list[str]:
    """Codes of the refusals."""
    return [r.code for r in launch.refusals]


def noted(launch: EngineLaunch) -> list[str]:
    """Codes of the notes."""
    return [n.code for n in launch.notes]
