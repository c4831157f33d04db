"""A valid EngineContext for tests, on a small recorded host."""

from __future__ import annotations

from typing import Any

from kvtierd.plan.engine import EngineContext
from kvtierd.plan.inventory import Inventory, MemcacheInstall, Nic, Npu, NumaNode

_GIB = 1024**3
PYTHON = "/opt/engine/bin/python"


def small_inventory(*, npus: int = 2) -> Inventory:
    """A host with 64 GiB of memory, one NUMA node, one interface, and this many cards of 64 GiB HBM."""
    return Inventory(
        hostname="node-a",
        memory_total_bytes=64 * _GIB,
        memory_available_bytes=60 * _GIB,
        numa_nodes=(NumaNode(node=0, cpus="0-7", memory_total_bytes=64 * _GIB, memory_free_bytes=60 * _GIB),),
        npus=tuple(
            Npu(device=n, card=n, name="910B3", health="OK", hbm_total_bytes=64 * _GIB, numa_node=0)
            for n in range(npus)
        ),
        nics=(
            Nic(name="lo", addresses=("127.0.0.1", "::1")),
            Nic(name="eth0", addresses=("192.0.2.10",), speed_mbit=100_000),
        ),
        memcache=(
            MemcacheInstall(
                runtime="wheel",
                python=PYTHON,
                memcache_version="1.3.0",
                memfabric_version="1.3.0",
                library_dirs=("/opt/engine/lib/memcache",),
            ),
        ),
    )


def engine_context(**changes: Any) -> EngineContext:
    """A context as the planner would make it: one engine, two devices of an A2 host, a pool on the same host.

    Args:
        changes: Fields of :class:`~kvtierd.plan.engine.EngineContext` that should differ.

    Raises:
        pydantic.ValidationError: A field that does not exist, or a value of the wrong type.
    """
    values: dict[str, Any] = {
        "name": "e0",
        "node": "node-a",
        "series": "800I-A2",
        "model": "/models/example",
        "devices": (0, 1),
        "port": 18113,
        "python": PYTHON,
        "memcache_env": {"LD_LIBRARY_PATH": "/opt/engine/lib/memcache"},
        "local_conf_path": "/var/lib/kvtierd/conf/mmc-local.conf",
        "meta_service_url": "tcp://127.0.0.1:5000",
        "config_store_url": "tcp://127.0.0.1:6000",
        "pool_placement": "engine",
        "work_dir": "/var/lib/kvtierd/engines/e0",
        "inventory": small_inventory(),
        "nodes": ("node-a",),
        "addresses": {"node-a": "192.0.2.10"},
        "nic": "eth0",
    }
    return EngineContext(**(values | changes))
