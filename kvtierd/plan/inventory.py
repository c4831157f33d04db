"""What a host has, as values: recorded by ``kvtierd.host``, read by the planner.

Every field that could not be found out is ``None`` (or an empty tuple), never zero: an unknown amount
of memory is not "no memory".
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

INVENTORY_VERSION = 1


class Record(BaseModel):
    """Base of all value types: immutable, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class HugepagePool(Record):
    """One hugepage size of the kernel, host-wide (from ``/sys/kernel/mm/hugepages``)."""

    page_size_bytes: int
    total_pages: int
    free_pages: int
    reserved_pages: int = 0
    surplus_pages: int = 0


class NumaNode(Record):
    """One NUMA node with its memory and its own hugepages, by page size in bytes."""

    node: int
    cpus: str = ""
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    hugepages_total: dict[int, int] = Field(default_factory=dict)
    hugepages_free: dict[int, int] = Field(default_factory=dict)


class Npu(Record):
    """One die (an A2 card has one, an A3 card has two). ``device`` is what ASCEND_RT_VISIBLE_DEVICES counts."""

    device: int
    card: int
    chip: int = 0
    name: str = ""
    health: str | None = None
    bus_id: str | None = None
    hbm_total_bytes: int | None = None
    hbm_used_bytes: int | None = None
    numa_node: int | None = None


class NpuProcess(Record):
    """A process that holds a die, as npu-smi sees it. Processes of other containers may be missing."""

    card: int
    chip: int = 0
    pid: int
    name: str = ""
    memory_bytes: int | None = None
    pid_in_container: int | None = None


class Nic(Record):
    """A network interface and its addresses (without prefix length)."""

    name: str
    addresses: tuple[str, ...] = ()
    up: bool = True
    speed_mbit: int | None = None


class PortOwner(Record):
    """A listening TCP socket and, where we may look, who holds it."""

    address: str
    port: int
    pid: int | None = None
    process: str | None = None


class MemcacheInstall(Record):
    """The MemCache that one interpreter (wheel) or one run package (binary) offers; ``packages``: engine -> version."""

    runtime: str  # "wheel" | "binary"
    python: str | None = None
    home: str | None = None
    memcache_version: str | None = None
    memfabric_version: str | None = None
    executable: str | None = None  # run package: the mmc_meta_service for this machine
    library_dirs: tuple[str, ...] = ()
    packages: dict[str, str] = Field(default_factory=dict)
    problem: str | None = None


class AscendInstall(Record):
    """Driver and CANN as found on the host."""

    driver_home: str | None = None
    driver_version: str | None = None
    driver_inner_version: str | None = None
    cann_home: str | None = None
    cann_version: str | None = None


class Inventory(Record):
    """Everything the planner needs to know about one host.

    ``kvtierctl inventory --json`` writes it; ``kvtierctl plan --inventory`` reads it back, so that a plan for
    any hardware can be made anywhere.
    """

    inventory_version: int = INVENTORY_VERSION
    hostname: str
    machine: str = "x86_64"
    kernel: str = ""
    memory_total_bytes: int
    memory_available_bytes: int
    kernel_page_size_bytes: int = 4096
    default_hugepage_size_bytes: int | None = None
    hugepages: tuple[HugepagePool, ...] = ()
    numa_nodes: tuple[NumaNode, ...] = ()
    npus: tuple[Npu, ...] = ()
    npu_processes: tuple[NpuProcess, ...] = ()
    nics: tuple[Nic, ...] = ()
    ports_in_use: tuple[PortOwner, ...] = ()
    ascend: AscendInstall = AscendInstall()
    memcache: tuple[MemcacheInstall, ...] = ()
    shm_total_bytes: int | None = None
    problems: tuple[str, ...] = ()  # what could not be found out, and why

    def install_in(self, python: str) -> MemcacheInstall | None:
        """What was found in this interpreter."""
        return next((i for i in self.memcache if i.python == python), None)
