from __future__ import annotations

from pathlib import Path

import pytest

from kvtierd.errors import HostError
from kvtierd.host.memory import parse_meminfo, read_memory
from kvtierd.host.view import HostView
from kvtierd.plan.inventory import HugepagePool

from .tree import plant

MIB2 = 2 * 1024 * 1024
MEMINFO = """MemTotal:       1056561984 kB
MemFree:        900000000 kB
MemAvailable:   950000000 kB
HugePages_Total:    4096
Hugepagesize:       2048 kB
Hugetlb:         8388608 kB
Active(anon):         12 kB
"""


def pool(base: str, total: int, free: int, **more: int) -> dict[str, str]:
    values = {"nr_hugepages": total, "free_hugepages": free, **more}
    return {f"{base}/hugepages-2048kB/{name}": f"{value}\n" for name, value in values.items()}


HOST = {
    "/proc/meminfo": MEMINFO,
    "/proc/self/smaps": "KernelPageSize:       64 kB\n",
    "/proc/mounts": "proc /proc proc rw 0 0\ntmpfs /dev/shm tmpfs rw,nosuid,size=65536k 0 0\n",
    **pool("/sys/kernel/mm/hugepages", 4096, 3738, resv_hugepages=20, surplus_hugepages=3),
    "/sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:       500 kB\nNode 0 MemFree:         400 kB\n",
    "/sys/devices/system/node/node0/cpulist": "0-23\n",
    **pool("/sys/devices/system/node/node0/hugepages", 4096, 3738),
    "/sys/devices/system/node/node10/cpulist": "24-47\n",
    "/sys/devices/system/node/node2/cpulist": "48\n",
    "/sys/devices/system/node/online": "0,2,10\n",
}


def test_a_host_in_full(tmp_path: Path) -> None:
    found = read_memory(HostView(plant(tmp_path, HOST)))
    assert found.total_bytes == 1056561984 * 1024
    assert found.available_bytes == 950000000 * 1024
    assert found.default_hugepage_size_bytes == MIB2
    assert found.kernel_page_size_bytes == 65536
    assert found.shm_total_bytes == 64 * 1024 * 1024
    assert found.hugepages == (
        HugepagePool(
            page_size_bytes=MIB2, total_pages=4096, free_pages=3738, reserved_pages=20, surplus_pages=3
        ),
    )
    assert [node.node for node in found.numa_nodes] == [0, 2, 10]
    assert found.numa_nodes[0].memory_total_bytes == 500 * 1024
    assert found.numa_nodes[0].hugepages_free == {MIB2: 3738}
    assert found.numa_nodes[1].memory_total_bytes is None
    assert found.problems == ()


def test_shm_without_a_size_is_half_of_the_memory(tmp_path: Path) -> None:
    files = {**HOST, "/proc/mounts": "tmpfs /dev/shm tmpfs rw 0 0\n"}
    assert read_memory(HostView(plant(tmp_path, files))).shm_total_bytes == 1056561984 * 512


def test_a_kernel_without_hugepages_numa_and_available(tmp_path: Path) -> None:
    view = HostView(plant(tmp_path, {"/proc/meminfo": "MemTotal: 100 kB\nMemFree: 40 kB\n"}))
    found = read_memory(view)
    assert found.available_bytes == 40 * 1024
    assert (found.hugepages, found.numa_nodes, found.default_hugepage_size_bytes) == ((), (), None)
    assert found.shm_total_bytes is None
    assert len(found.problems) == 2


@pytest.mark.parametrize("text", [None, "", "MemTotal: x kB\n"])
def test_without_a_total_there_is_no_plan(tmp_path: Path, text: str | None) -> None:
    view = HostView(plant(tmp_path, {} if text is None else {"/proc/meminfo": text}))
    with pytest.raises(HostError) as caught:
        read_memory(view)
    assert caught.value.stable_code == "host.meminfo"


def test_meminfo_units() -> None:
    values = parse_meminfo(MEMINFO)
    assert values["HugePages_Total"] == 4096
    assert values["Active(anon)"] == 12 * 1024


def test_this_host() -> None:
    found = read_memory(HostView())
    assert found.total_bytes > found.available_bytes > 0
    assert found.kernel_page_size_bytes in (4096, 16384, 65536)
