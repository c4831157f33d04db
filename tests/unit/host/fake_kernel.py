"""A kernel's hugepage files in a directory, whose writes clamp as the real ones do."""

from __future__ import annotations

import errno
from pathlib import Path

from kvtierd.host.hugepage_files import HugepageFiles

MIB2 = 2 * 1024 * 1024
GIB1 = 1024**3


class FakeKernel(HugepageFiles):
    """One NUMA node or several; ``capacity`` is how many pages (per node and size) free memory can become.

    ``fragmented`` pages of it can only be had after compaction. ``use(pages, size, node)`` plays a program.
    """

    def __init__(
        self,
        root: Path,
        *,
        nodes: int = 1,
        sizes: tuple[int, ...] = (MIB2,),
        capacity: int = 10_000,
        fragmented: int = 0,
        available_bytes: int = 1 << 50,
        boot_id: str = "boot-1",
    ) -> None:
        super().__init__(root)
        self.root = root
        self.node_count = nodes
        self.sizes = sizes
        self.capacity = capacity
        self.fragmented = fragmented
        self.total = {(size, node): 0 for size in sizes for node in range(nodes)}
        self.used = dict.fromkeys(self.total, 0)
        self.surplus = dict.fromkeys(self.total, 0)
        self.reserved = dict.fromkeys(sizes, 0)
        self.writes: list[tuple[str, str]] = []
        self.refuse: dict[str, int] = {}  # part of a path -> errno
        self.compactions = 0
        self.boot(boot_id)
        self.available = available_bytes
        for name in ("drop_caches", "compact_memory"):
            self._text(f"/proc/sys/vm/{name}", "0\n")
        self.publish()

    def boot(self, boot_id: str) -> None:
        """A new boot forgets all pages."""
        self._text("/proc/sys/kernel/random/boot_id", boot_id + "\n")
        for key in self.total:
            self.total[key] = self.used[key] = self.surplus[key] = 0

    def use(self, pages: int, size: int = MIB2, node: int = 0) -> None:
        """A program takes (or with a negative number gives up) pages."""
        key = (size, node)
        self.used[key] += pages
        assert 0 <= self.used[key] <= self.total[key]
        gone = min(self.surplus[key], max(0, self.total[key] - self.used[key]))
        self.surplus[key] -= gone
        self.total[key] -= gone
        self.publish()

    def admin_sets(self, pages: int, size: int = MIB2, node: int = 0) -> None:
        self._set(size, node, pages)
        self.publish()

    def publish(self) -> None:
        left = self.available - sum(size * pages for (size, _), pages in self.total.items())
        self._text("/proc/meminfo", f"MemTotal: {1 << 40} kB\nMemAvailable: {left // 1024} kB\n")
        for size in self.sizes:
            keys = [(size, node) for node in range(self.node_count)]
            self._pool("/sys/kernel/mm/hugepages", size, keys, self.reserved[size])
            for key in keys:
                self._pool(f"/sys/devices/system/node/node{key[1]}/hugepages", size, [key], None)

    def _pool(self, base: str, size: int, keys: list[tuple[int, int]], reserved: int | None) -> None:
        here = f"{base}/hugepages-{size // 1024}kB"
        total = sum(self.total[key] for key in keys)
        self._text(f"{here}/nr_hugepages", f"{total}\n")
        self._text(f"{here}/free_hugepages", f"{total - sum(self.used[key] for key in keys)}\n")
        self._text(f"{here}/surplus_hugepages", f"{sum(self.surplus[key] for key in keys)}\n")
        if reserved is not None:
            self._text(f"{here}/resv_hugepages", f"{reserved}\n")

    def _text(self, name: str, text: str) -> None:
        path = self.root / name.lstrip("/")
        if not path.parent.exists():
            path.parent.mkdir(parents=True)
        path.write_text(text)

    def _sync(self) -> None:
        pass

    def _put(self, path: Path, value: str) -> None:
        name = "/" + str(path.relative_to(self.root))
        for part, number in self.refuse.items():
            if part in name:
                raise OSError(number, errno.errorcode[number])
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, "gone")
        self.writes.append((name, value))
        if name.endswith("compact_memory"):
            self.compactions += 1
            self.fragmented //= 2
        if name.endswith("nr_hugepages"):
            size = int(path.parent.name.removeprefix("hugepages-").removesuffix("kB")) * 1024
            parts = name.split("/")
            if "node" in parts:
                self._set(size, int(parts[5].removeprefix("node")), int(value))
            else:
                self._set_everywhere(size, int(value))
        self.publish()

    def _set_everywhere(self, size: int, pages: int) -> None:
        """Raising goes round the nodes, lowering takes from those with free pages."""
        want = pages - sum(self.total[size, n] - self.surplus[size, n] for n in range(self.node_count))
        for node in range(self.node_count):
            share = want // self.node_count + (1 if node < want % self.node_count else 0)
            self._set(size, node, self.total[size, node] - self.surplus[size, node] + share)

    def _set(self, size: int, node: int, pages: int) -> None:
        key = (size, node)
        now = self.total[key]
        if pages >= now:
            self.surplus[key] = 0
            self.total[key] = max(now, min(pages, self.capacity - self.fragmented))
        else:
            # Pages in use cannot go: they become surplus.
            self.total[key] = max(pages, self.used[key])
            self.surplus[key] = self.total[key] - max(0, pages)
