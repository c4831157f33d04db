"""What each hardware series needs of MemCache: transport, alignment, hugepages, placement.

Source: vllm-ascend's KV pool guide (August 2026) and MemCache's configuration guide. A2 moves KV over
device_rdma and needs hugepages for pooled DRAM; A3 over HCCS uses device_sdma with fabric memory and needs
none; 950 (A5) uses device_urma.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from kvtierd.plan.model import Series

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


def uses_hcom(protocol: str) -> bool:
    """Whether ranks listen at ``hcom_url``: host_rdma and host_urma do, one port a rank."""
    return protocol.startswith("host_") and protocol != "host_shm"


def needs_hugepages(series: Series, protocol: str) -> bool:
    """Whether pooled DRAM must come from hugepages: device_rdma on any series (A3 over RoCE too)."""
    return protocol == "device_rdma" or (facts_of(series).hugepages and protocol.startswith("device_"))


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
