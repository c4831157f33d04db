"""Memory of a host: totals, NUMA nodes, hugepage pools, page sizes, /dev/shm. Reads files only."""

from __future__ import annotations

import os
import re

from kvtierd.errors import HostError
from kvtierd.host.view import HostView
from kvtierd.plan.inventory import HugepagePool, NumaNode, Record
from kvtierd.quantities import KIB

HUGEPAGES = "/sys/kernel/mm/hugepages"
NODES = "/sys/devices/system/node"
SHM = "/dev/shm"  # noqa: S108 - only measured
_SIZE_DIRECTORY = re.compile(r"hugepages-(\d{1,12})kB")
_DEFAULT_PAGE_SIZE_BYTES = 4096


class MemoryFindings(Record):
    """Everything this module finds, ready for the inventory."""

    total_bytes: int
    available_bytes: int
    kernel_page_size_bytes: int
    default_hugepage_size_bytes: int | None
    hugepages: tuple[HugepagePool, ...]
    numa_nodes: tuple[NumaNode, ...]
    shm_total_bytes: int | None
    problems: tuple[str, ...] = ()


def read_memory(view: HostView) -> MemoryFindings:
    """The host's memory.

    Raises:
        HostError: ``/proc/meminfo`` cannot be read or has no total: without it no plan can be made.
    """
    problems: list[str] = []
    try:
        meminfo = parse_meminfo(view.read("/proc/meminfo"))
    except OSError as exc:
        raise HostError(
            f"/proc/meminfo cannot be read ({exc.strerror or exc})",
            why="the amount of memory is not known without it",
            hint="mount /proc, or use a recorded inventory",
            code="host.meminfo",
        ) from exc
    total = meminfo.get("MemTotal")
    if not total:
        raise HostError("/proc/meminfo has no MemTotal", hint="use a recorded inventory", code="host.meminfo")
    available = meminfo.get("MemAvailable")
    if available is None:
        problems.append("the kernel does not say how much memory is available; free memory is taken instead")
        available = meminfo.get("MemFree", 0)
    pools = read_pools(view)
    if not pools:
        problems.append(f"the kernel has no hugepages: {HUGEPAGES} is missing or empty")
    return MemoryFindings(
        total_bytes=total,
        available_bytes=available,
        kernel_page_size_bytes=_kernel_page_size(view),
        default_hugepage_size_bytes=meminfo.get("Hugepagesize"),
        hugepages=pools,
        numa_nodes=read_nodes(view),
        shm_total_bytes=_shm_total(view, total),
        problems=tuple(problems),
    )


def parse_meminfo(text: str) -> dict[str, int]:
    """``/proc/meminfo`` or a node's ``meminfo``: sizes in bytes, counts (``HugePages_Total``) as they are."""
    values: dict[str, int] = {}
    for match in re.finditer(r"^(?:Node +\d+ +)?([\w()]+): +(\d{1,18})( kB)?\s*$", text, flags=re.MULTILINE):
        values[match[1]] = int(match[2]) * (KIB if match[3] else 1)
    return values


def read_pools(view: HostView) -> tuple[HugepagePool, ...]:
    """The hugepage sizes this kernel has, smallest first."""
    pools = []
    for size_bytes, name in _sizes(view, HUGEPAGES):
        here = f"{HUGEPAGES}/{name}"
        total, free = view.integer(f"{here}/nr_hugepages"), view.integer(f"{here}/free_hugepages")
        if total is None or free is None:
            continue
        pools.append(
            HugepagePool(
                page_size_bytes=size_bytes,
                total_pages=total,
                free_pages=free,
                reserved_pages=view.integer(f"{here}/resv_hugepages") or 0,
                surplus_pages=view.integer(f"{here}/surplus_hugepages") or 0,
            )
        )
    return tuple(pools)


def read_nodes(view: HostView) -> tuple[NumaNode, ...]:
    """The NUMA nodes that have memory or CPUs, in order; empty on a kernel without NUMA."""
    nodes = []
    for number in sorted(int(name[4:]) for name in view.names(NODES) if re.fullmatch(r"node\d{1,4}", name)):
        here = f"{NODES}/node{number}"
        meminfo = parse_meminfo(view.text(f"{here}/meminfo") or "")
        totals: dict[int, int] = {}
        frees: dict[int, int] = {}
        for size_bytes, name in _sizes(view, f"{here}/hugepages"):
            total = view.integer(f"{here}/hugepages/{name}/nr_hugepages")
            free = view.integer(f"{here}/hugepages/{name}/free_hugepages")
            if total is not None and free is not None:
                totals[size_bytes], frees[size_bytes] = total, free
        nodes.append(
            NumaNode(
                node=number,
                cpus=view.text(f"{here}/cpulist") or "",
                memory_total_bytes=meminfo.get("MemTotal"),
                memory_free_bytes=meminfo.get("MemFree"),
                hugepages_total=totals,
                hugepages_free=frees,
            )
        )
    return tuple(nodes)


def _sizes(view: HostView, directory: str) -> list[tuple[int, str]]:
    matches = (_SIZE_DIRECTORY.fullmatch(name) for name in view.names(directory))
    return sorted((int(match[1]) * KIB, match[0]) for match in matches if match)


def _kernel_page_size(view: HostView) -> int:
    """4096 on most hosts, 65536 on some aarch64 kernels."""
    if view.live:
        return os.sysconf("SC_PAGE_SIZE")
    sizes = parse_meminfo(view.text("/proc/self/smaps") or "")
    return sizes.get("KernelPageSize", _DEFAULT_PAGE_SIZE_BYTES)


def _shm_total(view: HostView, memory_total_bytes: int) -> int | None:
    """The size of /dev/shm: containers often have 64 MB, which is too little for engines."""
    if view.live:
        try:
            stat = os.statvfs(SHM)
        except OSError:
            return None
        return stat.f_blocks * stat.f_frsize
    for line in (view.text("/proc/mounts") or "").splitlines():
        fields = line.split()
        if len(fields) >= 4 and fields[1] == SHM and fields[2] == "tmpfs":
            size = re.search(r"(?:^|,)size=(\d{1,15})k(?:,|$)", fields[3])
            # tmpfs takes half of the memory when no size is given.
            return int(size[1]) * KIB if size else memory_total_bytes // 2
    return None
