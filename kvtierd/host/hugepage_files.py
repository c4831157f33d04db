"""The kernel's hugepage files: reading pools, writing counts, freeing memory. A thin shell around sysfs and /proc.

Errors come out as ``HugepageError`` with the reason an operator can act on.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

from kvtierd.errors import HugepageError
from kvtierd.host.memory import HUGEPAGES, NODES, parse_meminfo
from kvtierd.host.view import HostView
from kvtierd.plan.inventory import Record
from kvtierd.quantities import KIB, format_size


class PoolCounts(Record):
    """One pool of the kernel, in pages. ``total`` includes ``surplus``; per-node pools know no ``reserved``."""

    total: int
    free: int
    reserved: int = 0
    surplus: int = 0

    @property
    def persistent(self) -> int:
        """What was written to ``nr_hugepages``: surplus pages go away by themselves when their user ends."""
        return self.total - self.surplus

    @property
    def committed(self) -> int:
        """In use, or promised to a mapping that has not touched them yet (those still count as free)."""
        return min(self.total, self.total - self.free + self.reserved)


class HugepageFiles:
    """Reads and writes hugepage counts below ``root``."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._view = HostView(root)

    @property
    def boot_id(self) -> str:
        """Names this boot of the kernel; empty when it cannot be read."""
        return self._view.text("/proc/sys/kernel/random/boot_id") or ""

    def sizes_bytes(self) -> tuple[int, ...]:
        """The page sizes this kernel has, smallest first."""
        names = self._view.names(HUGEPAGES)
        digits = (name.removeprefix("hugepages-").removesuffix("kB") for name in names)
        return tuple(sorted(int(digit) * KIB for digit in digits if digit.isdecimal()))

    def nodes(self) -> tuple[int, ...]:
        """The NUMA nodes."""
        names = self._view.names(NODES)
        return tuple(
            sorted(int(name[4:]) for name in names if name.startswith("node") and name[4:].isdecimal())
        )

    def available_bytes(self) -> int | None:
        """``MemAvailable``, or ``None`` when it is unknown."""
        return parse_meminfo(self._view.text("/proc/meminfo") or "").get("MemAvailable")

    def read(self, page_size_bytes: int, node: int | None) -> PoolCounts:
        """The counts of one pool.

        Raises:
            HugepageError: ``hugepages.no-size`` or ``hugepages.no-node``: this kernel does not have it.
        """
        here = self._directory(page_size_bytes, node)
        total = self._view.integer(f"{here}/nr_hugepages")
        free = self._view.integer(f"{here}/free_hugepages")
        if total is None or free is None:
            raise self._missing(page_size_bytes, node)
        return PoolCounts(
            total=total,
            free=free,
            reserved=self._view.integer(f"{here}/resv_hugepages") or 0,
            surplus=self._view.integer(f"{here}/surplus_hugepages") or 0,
        )

    def write(self, page_size_bytes: int, node: int | None, pages: int) -> None:
        """Asks the kernel for this many persistent pages. It may grant fewer without a word: read back.

        Raises:
            HugepageError: the kernel refuses; the code says why.
        """
        path = self._view.path(f"{self._directory(page_size_bytes, node)}/nr_hugepages")
        try:
            self._put(path, str(pages))
        except OSError as exc:
            raise self._refused(path, page_size_bytes, node, exc) from exc

    def make_room(self, timeout_seconds: float) -> str:
        """Writes out dirty pages, drops clean caches and compacts memory, so that huge pages can be found.

        Returns:
            What could not be done; empty when all was. It never fails: it only improves the odds.
        """
        # sync waits for every file system, also for a dead network mount: not without a limit.
        syncing = threading.Thread(target=self._sync, daemon=True, name="hugepages-sync")
        syncing.start()
        syncing.join(timeout_seconds)
        missed = ["sync did not end in time"] if syncing.is_alive() else []
        for name, value in (("drop_caches", "3"), ("compact_memory", "1")):
            try:
                self._put(self._view.path(f"/proc/sys/vm/{name}"), value)
            except OSError as exc:
                missed.append(f"{name}: {exc.strerror or exc}")
        return "; ".join(missed)

    def _put(self, path: Path, value: str) -> None:
        """One write to one existing file. Tests put their kernel here."""
        handle = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        try:
            os.write(handle, value.encode())
        finally:
            os.close(handle)

    def _sync(self) -> None:
        os.sync()

    def _directory(self, page_size_bytes: int, node: int | None) -> str:
        base = HUGEPAGES if node is None else f"{NODES}/node{node}/hugepages"
        return f"{base}/hugepages-{page_size_bytes // KIB}kB"

    def _missing(self, page_size_bytes: int, node: int | None) -> HugepageError:
        sizes = self.sizes_bytes()
        size = format_size(page_size_bytes)
        if not sizes:
            return HugepageError(
                "this kernel has no hugepages of any size",
                why=f"{HUGEPAGES} is missing or empty (a kernel without CONFIG_HUGETLBFS, or a container without /sys)",
                hint='use a kernel with hugepages, or set [pool] hugepages = "off" where the protocol allows it',
                code="hugepages.no-size",
            )
        if page_size_bytes not in sizes:
            return HugepageError(
                f"this kernel has no hugepages of {size}",
                why=f"it has {', '.join(format_size(other) for other in sizes)}",
                hint="choose one of these sizes, or boot with hugepagesz= for the one you want",
                code="hugepages.no-size",
            )
        nodes = ", ".join(str(number) for number in self.nodes()) or "none"
        return HugepageError(
            f"NUMA node {node} has no hugepages of {size}",
            why=f"the NUMA nodes of this host are: {nodes}",
            hint="reserve without a node, or correct the node numbers",
            code="hugepages.no-node",
        )

    def _refused(self, path: Path, page_size_bytes: int, node: int | None, exc: OSError) -> HugepageError:
        message = f"{path} cannot be written"
        if exc.errno == errno.EROFS:
            return HugepageError(
                message,
                why="the unit has ProtectKernelTunables=yes, or /proc/sys and /sys are mounted read-only "
                "(an unprivileged container)",
                hint="let kvtierd-hugepages.service reserve, which has no such protection, or reserve on the host",
                code="hugepages.read-only",
            )
        if exc.errno in (errno.EACCES, errno.EPERM):
            return HugepageError(
                message,
                why=f"{exc.strerror}: only root may change the kernel's hugepages (this process has uid {os.geteuid()})",
                hint="run it as root, or let kvtierd-hugepages.service reserve at boot",
                code="hugepages.permission",
            )
        if exc.errno == errno.ENOENT:
            return self._missing(page_size_bytes, node)
        if exc.errno == errno.EINVAL:
            kib = page_size_bytes // KIB
            return HugepageError(
                message,
                why=f"this kernel cannot make pages of {format_size(page_size_bytes)} while it runs",
                hint=f"reserve them at boot: hugepagesz={kib}K hugepages=N on the kernel's command line",
                code="hugepages.not-at-runtime",
            )
        return HugepageError(message, why=exc.strerror or str(exc))
