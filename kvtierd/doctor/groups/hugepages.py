"""Hugepages: who set how many, who has them, and whether more can be had."""

from __future__ import annotations

import re
from typing import NamedTuple

from kvtierd.checks import Group, Outcome, Patient, absent, fail, note, ok, unknown, warn, worst
from kvtierd.plan.inventory import HugepagePool, Inventory
from kvtierd.quantities import format_size

GROUP = Group("hugepages")
DIRECTORIES = (
    "/etc/sysctl.d",
    "/run/sysctl.d",
    "/usr/local/lib/sysctl.d",
    "/usr/lib/sysctl.d",
    "/lib/sysctl.d",
)
KEY = re.compile(r"^\s*-?\s*vm[./]nr_hugepages\s*=\s*(\S+)\s*$", flags=re.MULTILINE)


class _Setting(NamedTuple):
    """A place that sets vm.nr_hugepages, in the order in which they are applied: the last one wins."""

    place: str
    pages: int | None


@GROUP.check(
    "enough",
    title="The planned hugepages are there or can be had",
    why="The kernel grants fewer pages than asked and says nothing. MemCache then fails while it maps the pool, after the"
    " engine has spent minutes on loading its weights.",
    fix="kvtierctl hugepages reserve, early after boot; lower [pool] dram or headroom",
)
async def enough(patient: Patient) -> Outcome:
    """Planned pages against free ones and against the memory from which more could be made."""
    plan = await patient.plan()
    if plan is None or not plan.hugepages.pages:
        return absent("no valid settings" if plan is None else "the plan needs none")
    inventory = await patient.inventory()
    size, wanted = plan.hugepages.page_size_bytes, plan.hugepages.pages
    pool = _pool(inventory, size)
    if pool is None:
        return fail(f"the kernel has no hugepages of {format_size(size)}")
    # Reserved by a mapping that has not touched them yet: free to the eye, and taken.
    usable = max(0, pool.free_pages - pool.reserved_pages)
    found = f"{wanted} pages of {format_size(size)} are planned; {pool.total_pages} are there, {usable} of them free"
    if usable >= wanted:
        return ok(found)
    if (wanted - usable) * size > inventory.memory_available_bytes:
        return fail(
            f"{found}; {format_size(inventory.memory_available_bytes)} of memory are available for more"
        )
    return note(f"{found}; kvtierd reserves the rest when it starts")


@GROUP.check(
    "reserved",
    title="Free hugepages are not promised to somebody else",
    why="A process that has mapped hugepages and not touched them has reserved them: HugePages_Free counts them, and the next"
    " mapping fails (or is killed by SIGBUS later).",
    fix="find who has mapped them: grep -l hugepages /proc/*/maps; end it, or reserve as many more",
)
async def reserved(patient: Patient) -> Outcome:
    """HugePages_Rsvd against HugePages_Free."""
    found = []
    for pool in (await patient.inventory()).hugepages:
        if pool.reserved_pages and pool.free_pages:
            text = f"{pool.reserved_pages} of {pool.free_pages} free pages of {format_size(pool.page_size_bytes)} are promised"
            found.append(warn(text) if pool.reserved_pages * 2 > pool.free_pages else note(text))
    return worst(found, "none is promised")


@GROUP.check(
    "owner",
    title="One place says how many hugepages there are",
    why="systemd-sysctl applies files by name, the last one wins, whatever directory it is in; /etc/sysctl.conf counts as"
    " 99-sysctl.conf. kvtierd reserves what the plan needs on top, so a number left there is memory that nobody uses; and"
    " each sysctl --system takes kvtierd's pages away again.",
    fix="take vm.nr_hugepages out of the files named: kvtierd-hugepages.service reserves the planned number at boot",
)
def owner(patient: Patient) -> Outcome:
    """All files that systemd-sysctl reads, in its order, and the kernel's command line."""
    settings = _settings(patient)
    if not settings:
        return ok("no file sets vm.nr_hugepages")
    told = ", ".join(f"{s.place} ({'?' if s.pages is None else s.pages})" for s in settings)
    if any(s.pages is None for s in settings):
        return warn(f"vm.nr_hugepages is not a number: {told}")
    if len({s.pages for s in settings}) > 1:
        return warn(f"different numbers: {told}; {settings[-1].place} wins")
    return ok(told)


@GROUP.check(
    "granted",
    title="The kernel granted what it was asked for",
    why="vm.nr_hugepages asks; the kernel gives what it can find in one piece and reports no error. 4,096 asked and 3,738 got"
    " is what such a host shows.",
    fix="echo 1 > /proc/sys/vm/compact_memory and ask again, or reserve at boot; kvtierctl hugepages reserve does both",
)
async def granted(patient: Patient) -> Outcome:
    """The winning setting against the pages that are there."""
    settings = _settings(patient)
    asked = settings[-1].pages if settings else None
    inventory = await patient.inventory()
    pool = _pool(inventory, inventory.default_hugepage_size_bytes)
    if not asked or pool is None:
        return absent("nothing was asked for")
    if pool.total_pages < asked:
        return warn(f"{settings[-1].place} asks for {asked}, {pool.total_pages} are there")
    return ok(f"{pool.total_pages} of {asked}")


@GROUP.check(
    "numa",
    title="Hugepages are on every NUMA node",
    why="A pool whose pages all lie on one node is slow for the cards of the others, and a rank bound to an empty node fails.",
    fix='[pool] numa = "spread", or kvtierctl hugepages reserve after compacting; see /sys/devices/system/node/node*/hugepages',
)
async def numa(patient: Patient) -> Outcome:
    """Pages by node."""
    inventory = await patient.inventory()
    size = inventory.default_hugepage_size_bytes
    nodes = [n for n in inventory.numa_nodes if n.memory_total_bytes]
    if size is None or len(nodes) < 2:
        return absent("one NUMA node")
    counts = {n.node: n.hugepages_total.get(size) for n in nodes}
    if any(count is None for count in counts.values()):
        return unknown("the kernel does not say how many pages each node has")
    told = ", ".join(f"node {node}: {count}" for node, count in counts.items())
    if not any(counts.values()):
        return absent("there are no hugepages yet")
    return warn(told) if not all(counts.values()) else ok(told)


@GROUP.check(
    "size",
    title="The default hugepage is the size that is planned",
    why="vm.nr_hugepages counts pages of the default size: with default_hugepagesz=1G a number meant for 2 MiB pages asks for"
    " 512 times as much memory, and the kernel gives a few pages.",
    fix='take default_hugepagesz=1G off the kernel command line, or set [pool] hugepage_size = "2MiB"',
)
async def size(patient: Patient) -> Outcome:
    """The kernel's default, and pages of other sizes that are reserved."""
    inventory = await patient.inventory()
    default = inventory.default_hugepage_size_bytes
    if default is None:
        return unknown("the kernel has no default hugepage size")
    others = [p for p in inventory.hugepages if p.page_size_bytes != default and p.total_pages]
    told = f"{format_size(default)}"
    if others:
        told += "; also reserved: " + ", ".join(
            f"{p.total_pages} x {format_size(p.page_size_bytes)}" for p in others
        )
    if default >= 1024**3:
        return warn(told)
    return note(told) if others else ok(told)


@GROUP.check(
    "fragmentation",
    title="Memory is in pieces large enough for more hugepages",
    why="A hugepage needs one whole piece of memory. On a host that has run for long the pieces are small, and the kernel"
    " grants few pages although memory is free.",
    fix="echo 1 > /proc/sys/vm/compact_memory; if that does not help, reserve at boot (kvtierd-hugepages.service)",
)
async def fragmentation(patient: Patient) -> Outcome:
    """Free pieces of the page's size or larger in /proc/buddyinfo, against what is still missing."""
    plan = await patient.plan()
    if plan is None or not plan.hugepages.pages:
        return absent("no valid settings" if plan is None else "the plan needs no hugepages")
    inventory = await patient.inventory()
    size = plan.hugepages.page_size_bytes
    pool = _pool(inventory, size)
    missing = plan.hugepages.pages - (pool.free_pages if pool else 0)
    if missing <= 0:
        return ok("none is missing")
    text = patient.view.text("/proc/buddyinfo")
    if text is None:
        return unknown("/proc/buddyinfo cannot be read")
    pieces = _pieces(text, inventory.kernel_page_size_bytes, size)
    found = f"{missing} pages are missing, {pieces} pieces of {format_size(size)} are free at once"
    return ok(found) if pieces >= missing else note(f"{found}; the kernel has to move the rest together")


def _pool(inventory: Inventory, size: int | None) -> HugepagePool | None:
    return next((p for p in inventory.hugepages if p.page_size_bytes == size), None)


def _pieces(buddyinfo: str, page_bytes: int, wanted_bytes: int) -> int:
    """How many pieces of ``wanted_bytes`` the free lists hold; a larger piece counts for several."""
    total = 0
    for line in buddyinfo.splitlines():
        counts = re.findall(r"(?<=\s)\d+", line.partition("zone")[2])
        for order, count in enumerate(counts):
            total += int(count) * ((page_bytes << order) // wanted_bytes)
    return total


def _settings(patient: Patient) -> list[_Setting]:
    """Who sets vm.nr_hugepages, in the order of application: kernel command line, then files by name."""
    view = patient.view
    found: list[_Setting] = []
    line = view.text("/proc/cmdline") or ""
    found += [
        _Setting("the kernel command line", int(n)) for n in re.findall(r"(?:^|\s)hugepages=(\d+)", line)
    ]
    files: dict[str, str] = {}
    for directory in DIRECTORIES:  # a file in an earlier directory hides its namesake in a later one
        for name in view.names(directory):
            if name.endswith(".conf"):
                files.setdefault(name, f"{directory}/{name}")
    if "99-sysctl.conf" not in files and view.exists("/etc/sysctl.conf"):
        files["99-sysctl.conf"] = "/etc/sysctl.conf"
    for _, path in sorted(files.items()):
        values = KEY.findall(view.text(path) or "")
        found += [_Setting(path, int(value) if value.isdecimal() else None) for value in values]
    return found
