"""PURE: which CPUs an engine gets, how much memory at most, and its priority."""

from __future__ import annotations

from kvtierd.plan.inventory import Inventory
from kvtierd.plan.model import Resources
from kvtierd.plan.remarks import Remarks
from kvtierd.quantities import format_cpu_list, parse_cpu_list
from kvtierd.settings import EngineSettings


def engine_resources(engine: EngineSettings, inventory: Inventory, remarks: Remarks) -> Resources:
    """The engine's resources.

    ``cpus = "auto"``: those of the NUMA nodes its cards hang on, so that its threads and, by the kernel's first touch,
    its memory are near them. Nothing is set where a card's node is not known, or where its cards take in all nodes.
    """
    return Resources(
        cpus=_cpus(engine, inventory, remarks), nice=engine.nice, memory_max_bytes=engine.memory_max
    )


def _cpus(engine: EngineSettings, inventory: Inventory, remarks: Remarks) -> str:
    if engine.cpus == "all":
        return ""
    lists = {n.node: n.cpus for n in inventory.numa_nodes if n.cpus}
    if engine.cpus == "auto":
        return _near_devices(engine.devices, inventory, lists)
    wanted = parse_cpu_list(engine.cpus)
    there = {cpu for text in lists.values() for cpu in parse_cpu_list(text)}
    absent = sorted(set(wanted) - there) if there else []
    if absent:
        remarks.refuse(
            "engine.no-cpu",
            f"engine {engine.name}: CPU {absent[0]} does not exist on this host (it has {format_cpu_list(there)})",
            "correct the engine's cpus",
        )
    return format_cpu_list(wanted)


def _near_devices(devices: tuple[int, ...], inventory: Inventory, lists: dict[int, str]) -> str:
    node_of = {npu.device: npu.numa_node for npu in inventory.npus}
    nodes = {node_of.get(device) for device in devices}
    if not nodes or not all(node in lists for node in nodes) or nodes == set(lists):
        return ""
    return format_cpu_list(cpu for node in nodes if node is not None for cpu in parse_cpu_list(lists[node]))
