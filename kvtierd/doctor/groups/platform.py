"""The machine and its kernel: what every later failure would be blamed on."""

from __future__ import annotations

import re

from kvtierd.checks import (
    Group,
    Outcome,
    Patient,
    absent,
    fail,
    note,
    ok,
    unknown,
    warn,
    worst,
)
from kvtierd.doctor.looking import container_mark
from kvtierd.host.memory import parse_meminfo
from kvtierd.quantities import format_size

GROUP = Group("platform")
GIB = 1024**3
SMALL_SHM_BYTES = 4 * GIB
LOW_SHARE = 0.05


@GROUP.check(
    "machine",
    title="The processor is one that MemCache has wheels for",
    why="memcache-hybrid and memfabric-hybrid exist for aarch64 and x86_64 with glibc 2.28 or later, and for nothing else.",
    fix="run kvtierd on an aarch64 or x86_64 host",
)
def machine(patient: Patient) -> Outcome:
    """By the kernel's own word: ``uname -i`` is ``unknown`` on many systems."""
    name = patient.view.machine
    return ok(name) if name in {"aarch64", "x86_64"} else fail(f"the machine is {name}")


@GROUP.check(
    "page-size",
    title="The kernel's pages are 4 KiB",
    why="Kernels with 64 KiB pages (some aarch64 builds of openEuler and RHEL) have hugepages of 512 MiB by default: a plan"
    " in pages of 2 MiB does not fit them, and small pools round up to whole pages.",
    fix='boot a kernel with 4 KiB pages, or set [pool] hugepage_size = "2MiB" where the kernel has that size',
)
async def page_size(patient: Patient) -> Outcome:
    """From the kernel's page size and its default hugepage."""
    inventory = await patient.inventory()
    page, huge = inventory.kernel_page_size_bytes, inventory.default_hugepage_size_bytes
    found = f"pages of {format_size(page)}, hugepages of {format_size(huge) if huge else 'unknown size'} by default"
    return ok(found) if page == 4096 else warn(found)


@GROUP.check(
    "cgroup",
    title="Control groups are version 2",
    why="A unit's processes are ended as one group (cgroup.kill) and its memory is bounded there. Under version 1 systemd does"
    " it process by process, and a worker that forks meanwhile can survive and keep its card.",
    fix="boot with systemd.unified_cgroup_hierarchy=1",
)
def cgroup(patient: Patient) -> Outcome:
    """By the files of the mounted hierarchy."""
    view = patient.view
    if view.exists("/sys/fs/cgroup/cgroup.controllers"):
        return ok("version 2")
    if view.names("/sys/fs/cgroup"):
        return note("version 1, or both")
    return unknown("/sys/fs/cgroup is not mounted")


@GROUP.check(
    "memory",
    title="There is memory left on the host",
    why="A host that is short of memory kills the largest process, which is an engine.",
    fix="find what holds it (ps aux --sort -rss); lower [pool] dram or the engines' l2",
)
def memory(patient: Patient) -> Outcome:
    """MemAvailable against MemTotal. Hugepages that are reserved already are not in it."""
    values = parse_meminfo(patient.read("/proc/meminfo"))
    total, free = values.get("MemTotal"), values.get("MemAvailable")
    if not total or free is None:
        return unknown("/proc/meminfo does not say how much memory is available")
    found = f"{format_size(free)} of {format_size(total)} are available"
    return warn(found) if free < total * LOW_SHARE else ok(found)


@GROUP.check(
    "numa",
    title="Every NUMA node has memory, and each card's node is known",
    why="A node without memory makes hugepages uneven; a card whose node is unknown cannot be given CPUs near it.",
    fix="look at the firmware's memory settings (numactl -H); a card without a node is a matter of the driver or of a"
    " virtual machine's topology",
)
async def numa(patient: Patient) -> Outcome:
    """From sysfs, by node and by card."""
    inventory = await patient.inventory()
    nodes = inventory.numa_nodes
    bad = [warn(f"node {n.node} has no memory") for n in nodes if n.memory_total_bytes == 0 and n.cpus]
    lost = [str(npu.device) for npu in inventory.npus if npu.numa_node is None]
    if lost and len(nodes) > 1:
        bad.append(note(f"the NUMA node of device {', '.join(lost)} is unknown"))
    return worst(bad, f"{len(nodes)} node(s)") if nodes else unknown("the kernel lists no NUMA nodes")


@GROUP.check(
    "overcommit",
    title="The kernel lends memory as it does by default",
    why="With vm.overcommit_memory = 2 the large mappings of engines and of MemCache's pool are refused (ENOMEM) although"
    " memory is free; with too few mappings allowed, loading a model fails half way.",
    fix="sysctl vm.overcommit_memory=0 vm.max_map_count=262144, and the same in /etc/sysctl.d",
)
def overcommit(patient: Patient) -> Outcome:
    """vm.overcommit_memory and vm.max_map_count."""
    mode = patient.view.integer("/proc/sys/vm/overcommit_memory")
    maps = patient.view.integer("/proc/sys/vm/max_map_count")
    if mode is None or maps is None:
        return unknown("/proc/sys/vm cannot be read")
    found = f"vm.overcommit_memory = {mode}, vm.max_map_count = {maps}"
    return warn(found) if mode == 2 or maps < 65530 else ok(found)


@GROUP.check(
    "shm",
    title="/dev/shm is large enough",
    why="Engines pass tensors between their processes there, and protocol host_shm keeps the pool there. Docker gives a"
    " container 64 MiB unless told otherwise: long prompts then crash the engine.",
    fix="docker run --shm-size 32g (or --ipc=host); on a host: mount -o remount,size=50% /dev/shm",
)
async def shm(patient: Patient) -> Outcome:
    """Its size; 4 GiB are few for engines with several workers."""
    size = (await patient.inventory()).shm_total_bytes
    if size is None:
        return unknown("the size of /dev/shm cannot be read")
    settings = patient.settings
    needs = settings is None or settings.node.series != "emulated"
    return warn(f"{format_size(size)}") if size < SMALL_SHM_BYTES and needs else ok(format_size(size))


@GROUP.check(
    "selinux",
    title="SELinux does not forbid what kvtierd does",
    why="Enforcing, it can refuse hugepages, device files and the engines' sockets, and says so in the audit log only.",
    fix="ausearch -m avc -ts recent shows refusals; audit2allow makes a module of them",
)
def selinux(patient: Patient) -> Outcome:
    """Whether it enforces. Its policy is not read."""
    mode = patient.view.integer("/sys/fs/selinux/enforce")
    if mode is None:
        return ok("not there")
    return note("enforcing") if mode == 1 else ok("permissive")


@GROUP.check(
    "time",
    title="The clock is kept by a time service",
    why="Elections do not depend on the clock, but certificates do, and events of several nodes are put in order by it.",
    fix="systemctl enable --now chronyd (or systemd-timesyncd)",
)
async def time(patient: Patient) -> Outcome:
    """What timedatectl says, else the mark of systemd-timesyncd."""
    result = await patient.run("timedatectl", "show", "--property=NTPSynchronized", "--value")
    said = result.stdout.strip() if result.ok else ""
    if said in {"yes", "no"}:
        return ok("synchronised") if said == "yes" else warn("not synchronised")
    if patient.view.exists("/run/systemd/timesync/synchronized"):
        return ok("synchronised by systemd-timesyncd")
    return unknown(result.describe() or f"timedatectl said {said!r}")


@GROUP.check(
    "firewall",
    title="The peers' ports are not filtered",
    why="A port that is dropped, not refused, makes every call last its whole time limit: elections are late and switchovers"
    " fail, with nothing in any log.",
    fix="firewall-cmd --permanent --add-port=5500-5501/tcp && firewall-cmd --reload, or the like in nftables, between the peers",
)
async def firewall(patient: Patient) -> Outcome:
    """Rules of nftables that drop or reject by default, and whether they name our ports."""
    settings = patient.settings
    if settings is None or settings.cluster.mode == "standalone":
        return absent("no peers")
    ports = [settings.cluster.port, settings.cluster.endpoint_port]
    result = await patient.run("nft", "list", "ruleset")
    if not result.ok:
        return unknown(result.describe())
    rules = result.stdout
    closed = re.search(r"hook input priority[^;]*; policy (drop|reject)", rules) or re.search(
        r"chain \S*INPUT\S* \{[^}]*\breject with\b", rules, flags=re.IGNORECASE
    )
    if not closed:
        return ok("nothing filters by default")
    numbers = [range(int(a), int(b or a) + 1) for a, b in re.findall(r"\b(\d{1,5})(?:-(\d{1,5}))?\b", rules)]
    missing = [str(port) for port in ports if not any(port in r for r in numbers)]
    if missing:
        return warn(f"the firewall drops by default and names no port {', '.join(missing)}")
    return ok(f"the firewall names {', '.join(map(str, ports))}")


@GROUP.check(
    "container",
    title="kvtierd runs on the host itself",
    why="In a container the driver, hccn.conf, hugepages and the host's processes are only there as far as they are mounted:"
    " what is missing shows as an unknown card, a wrong first token or a held card that nobody owns.",
    fix="run kvtierd on the host and the engines by runner = docker; or mount /etc/ascend_install.info, /usr/local/Ascend/driver,"
    " /etc/hccn.conf, /usr/local/bin/npu-smi, /dev/davinci* and /dev/hugepages",
)
def container(patient: Patient) -> Outcome:
    """By the marks of docker and podman."""
    mark = container_mark(patient.view)
    return ok("no mark of a container") if mark is None else note(f"this is a container ({mark})")
