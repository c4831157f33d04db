"""What each hardware series needs of MemCache: transport, alignment, hugepages, placement.

Source: vllm-ascend's KV pool guide (August 2026) and MemCache's configuration guide. A2 moves KV over
device_rdma and needs hugepages for pooled DRAM; A3 over HCCS uses device_sdma with fabric memory and needs
none; 950 (A5) uses device_urma. Alignment is 1 GB for device_* transports and for everything on A3, 2 MB else.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from kvtierd.errors import PlanError
from kvtierd.plan.inventory import Inventory
from kvtierd.plan.model import Series
from kvtierd.quantities import GIB, MIB

MAX_DRAM_PER_RANK_BYTES = 1024 * GIB  # MemCache's largest dram.size
Placement = Literal["standalone", "engine"]


@dataclasses.dataclass(frozen=True, slots=True)
class SeriesFacts:
    """Defaults of one series. ``hugepages``: pooled DRAM must come from hugepages."""

    protocol: str
    hugepages: bool
    placement: Placement
    protocols: tuple[str, ...]  # that work on it


_HOST = ("host_shm", "host_rdma", "host_urma")
_FACTS: dict[Series, SeriesFacts] = {
    "300I-A2": SeriesFacts("device_rdma", True, "engine", ("device_rdma", "host_rdma", "host_shm")),
    "800I-A2": SeriesFacts("device_rdma", True, "engine", ("device_rdma", "host_rdma", "host_shm")),
    "A3": SeriesFacts("device_sdma", False, "standalone", ("device_sdma", "device_rdma", *_HOST)),
    "A5": SeriesFacts("device_urma", False, "engine", ("device_urma", "device_uboe", *_HOST)),
    "emulated": SeriesFacts("host_shm", False, "standalone", ("host_shm",)),
}


def facts_of(series: Series) -> SeriesFacts:
    """The defaults of a series."""
    return _FACTS[series]


def alignment_bytes(series: Series, protocol: str) -> int:
    """Step that a rank's dram.size must be a multiple of."""
    return GIB if protocol.startswith("device_") or series == "A3" else 2 * MIB


def needs_hugepages(series: Series, protocol: str) -> bool:
    """Whether pooled DRAM must come from hugepages: device_rdma on any series (A3 over RoCE too)."""
    return protocol == "device_rdma" or (facts_of(series).hugepages and protocol.startswith("device_"))


def series_of(inventory: Inventory) -> Series:
    """The series by the chip names that npu-smi printed.

    Raises:
        PlanError: no NPU, or one this table does not know.
    """
    names = {npu.name for npu in inventory.npus if npu.name}
    if not inventory.npus:
        raise PlanError(
            "this host shows no NPU, so the series cannot be found out",
            why="; ".join(inventory.problems[:2]),
            hint='name it: [node] series = "800I-A2", or "emulated" on a machine without NPUs',
            code="plan.no-npu",
        )
    found: set[Series] = set()
    for name in names:
        upper = name.upper().removeprefix("ASCEND")
        if upper.startswith("910B"):
            cards = {npu.card for npu in inventory.npus}
            found.add("800I-A2" if len(cards) >= 8 else "300I-A2")
        elif upper.startswith(("910_93", "9391", "9392", "910C")) or (
            upper == "910" and _two_dies(inventory)
        ):
            found.add("A3")
        elif upper.startswith("950"):
            found.add("A5")
    if len(found) != 1:
        raise PlanError(
            f"the series cannot be told from the chip names {', '.join(sorted(names)) or '(none)'}",
            hint='name it: [node] series = "300I-A2" | "800I-A2" | "A3" | "A5"',
            code="plan.unknown-series",
        )
    return found.pop()


def _two_dies(inventory: Inventory) -> bool:
    return any(npu.chip > 0 for npu in inventory.npus)


def series_env(series: Series, protocol: str) -> dict[str, str]:
    """Environment that MemCache's ranks need on a series (vllm-ascend's KV pool guide, August 2026)."""
    if series == "emulated":
        return {}
    env = {"ACL_OP_INIT_MODE": "1"}
    if protocol == "device_sdma":
        env["ASCEND_ENABLE_USE_FABRIC_MEM"] = "1"
    if protocol == "device_rdma":
        env["HCCL_INTRA_ROCE_ENABLE"] = "1"
    return env
