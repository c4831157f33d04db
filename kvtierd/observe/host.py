"""The host's memory at every look, and its NPUs seldom.

Files of /proc and /sys only, under a movable root, so that a fixture tree is any host. npu-smi is another matter: it can
hang for good in a broken driver, where nothing can kill it, so it runs beside everything else and less and less often.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import Final

from kvtierd.host.inventory import read_npus
from kvtierd.host.memory import SHM, parse_meminfo, read_nodes, read_pools
from kvtierd.host.view import HostView
from kvtierd.observe.picture import HostPicture, NpuPicture, NumaPicture

NPU_SECONDS: Final = 60.0
NPU_MOST_SECONDS: Final = 3600.0
NPU_TIMEOUT_SECONDS: Final = 10.0
NO_NUMA: Final = 0


def read_host(
    view: HostView,
    node: str,
    at_seconds: float,
    *,
    headroom_bytes: int = 0,
    free_bytes: Callable[[str], int | None] | None = None,
) -> HostPicture:
    """The host's memory now. Blocking, some dozens of small files; raises nothing: what cannot be read is unknown.

    Args:
        view: The host.
        node: Its name.
        at_seconds: The time, for the picture.
        headroom_bytes: What the settings keep free.
        free_bytes: The room left at a path; by default of the file system there.
    """
    meminfo = parse_meminfo(view.text("/proc/meminfo") or "")
    room = free_bytes or _free_bytes
    try:
        shm = str(view.path(SHM))
    except OSError:
        shm = ""
    return HostPicture(
        node=node,
        at_seconds=at_seconds,
        available_bytes=meminfo.get("MemAvailable"),
        total_bytes=meminfo.get("MemTotal"),
        headroom_bytes=headroom_bytes,
        hugepages=_hugepages(view),
        shm_free_bytes=room(shm) if shm else None,
    )


def _hugepages(view: HostView) -> tuple[NumaPicture, ...]:
    """By NUMA node where the kernel has such; else all of the host under node 0. Nodes without any are left out."""
    pictures = [
        NumaPicture(
            node.node,
            sum(size * pages for size, pages in node.hugepages_total.items()),
            sum(size * node.hugepages_free.get(size, 0) for size in node.hugepages_total),
        )
        for node in read_nodes(view)
        if node.hugepages_total
    ]
    if not pictures:
        pools = read_pools(view)
        total = sum(p.page_size_bytes * p.total_pages for p in pools)
        pictures = [NumaPicture(NO_NUMA, total, sum(p.page_size_bytes * p.free_pages for p in pools))]
    return tuple(picture for picture in pictures if picture.total_bytes)


def _free_bytes(path: str) -> int | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


class NpuWatch:
    """Health and memory of the NPUs, asked for every minute, and less often while npu-smi does not answer.

    Attributes:
        npus: As last listed; an answer that lists none leaves them and their age.
        at_seconds: When that was.
        problem: What was wrong the last time; "" for nothing, also where there is no npu-smi.
    """

    def __init__(self, view: HostView, *, timeout_seconds: float = NPU_TIMEOUT_SECONDS) -> None:
        self.npus: tuple[NpuPicture, ...] = ()
        self.at_seconds: float | None = None
        self.problem = ""
        self._view = view
        self._timeout_seconds = timeout_seconds
        self._pause_seconds = NPU_SECONDS
        self._next_seconds = float("-inf")
        self._task: asyncio.Task[None] | None = None

    def step(self, now_seconds: float) -> None:
        """Begins to ask if it is time and nothing is under way. Returns at once."""
        if now_seconds < self._next_seconds or (self._task is not None and not self._task.done()):
            return
        self._next_seconds = now_seconds + self._pause_seconds
        self._task = asyncio.create_task(self._ask(now_seconds), name="npu-smi")

    async def close(self) -> None:
        """Ends what is under way."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _ask(self, now_seconds: float) -> None:
        try:
            npus, problems, _ = await read_npus(self._view, timeout_seconds=self._timeout_seconds)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not end the watching
            npus, problems = (), (f"npu-smi cannot be asked: {type(error).__name__}: {error}",)
        absent = any("is not installed" in problem for problem in problems)
        self.problem = "" if absent else "; ".join(problems)[:500]
        if npus:
            self.at_seconds = now_seconds
            self.npus = tuple(
                NpuPicture(n.device, n.card, n.name, n.health, n.hbm_total_bytes, n.hbm_used_bytes)
                for n in npus
            )
        # A hung one leaves a process behind that nothing can end: asking again every minute would pile them up.
        longer = NPU_MOST_SECONDS if absent else min(NPU_MOST_SECONDS, 2 * self._pause_seconds)
        self._pause_seconds = NPU_SECONDS if npus else longer
        self._next_seconds = now_seconds + self._pause_seconds
