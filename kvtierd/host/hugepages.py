"""Reserves hugepages for the plan and gives them back, beside others who use hugepages too.

The pool of a host belongs to everybody. So kvtierd computes what must exist in all: the pages its plan wants plus
the pages others hold (in use or promised). It only ever raises a count to that, reads back what the kernel really
gave, and notes in the ledger how much of the count is its own. Only that is given back, and never below
what is in use. Reserving the same plan twice changes nothing.

The calls block, each within its deadline plus one step of the kernel; run them in a thread from asyncio.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from kvtierd.errors import HugepageError
from kvtierd.host.hugepage_files import HugepageFiles, PoolCounts
from kvtierd.host.hugepage_report import PoolReport, ReleaseReport, ReserveReport
from kvtierd.host.ledger import Entry, Intent, Ledger, settle
from kvtierd.plan.model import HugepagePlan
from kvtierd.quantities import GIB

# One write can hold the kernel for a while (it clears every page), and cannot be interrupted: the deadline is
# looked at between steps of this size.
STEP_BYTES = 8 * GIB
# A count that was verified fine has starved hosts before; the last of the memory is not ours to take.
DEFAULT_KEEP_AVAILABLE_BYTES = 2 * GIB
_ROUNDS_WITHOUT_PROGRESS = 2
_PAUSE_SECONDS = 0.1

OwnUse = Mapping[int | None, int]


_Result = TypeVar("_Result")


class Hugepages:
    """Reserve and release against one kernel and one ledger.

    Args:
        files: The kernel's files.
        ledger: What kvtierd raised so far.
        keep_available_bytes: Growing stops before ``MemAvailable`` falls below this.
        clock, sleep: Replaceable for tests.
    """

    def __init__(
        self,
        files: HugepageFiles,
        ledger: Ledger,
        *,
        keep_available_bytes: int = DEFAULT_KEEP_AVAILABLE_BYTES,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._files = files
        self._ledger = ledger
        self._keep_available_bytes = keep_available_bytes
        self._clock = clock
        self._sleep = sleep

    def reserve(
        self,
        plan: HugepagePlan,
        *,
        own_use_pages: OwnUse | None = None,
        deadline_seconds: float | None = None,
    ) -> ReserveReport:
        """Makes the plan's pages available to kvtierd's units, as far as the kernel can give them.

        Pools that an earlier plan used and this one does not are given back first; a plan that wants fewer pages
        than the last one gives the difference back.

        Args:
            plan: ``per_numa_node`` when it is set (its sum must be ``pages``), else ``pages`` host-wide.
            own_use_pages: How many pages kvtierd's own units use now, by node (``None`` for the host). Where it is not
                given, use that came up since the first reservation counts as kvtierd's own, up to what was asked. Give it
                when a plan moves between host-wide and per node while units run, and when the ledger was lost.
            deadline_seconds: How long it may take with compacting and trying again; by default
                ``default_deadline_seconds(plan)``.

        Returns:
            What was asked for and what is there now. Fewer pages than asked is not an exception: see ``complete``.

        Raises:
            HugepageError: the kernel refuses outright (read-only, not root, no such size or node).
            StateError: the ledger cannot be used; the kernel was not touched.
        """
        wanted = _pools(plan)
        started = self._clock()
        limit = default_deadline_seconds(plan) if deadline_seconds is None else deadline_seconds
        deadline = started + limit
        reports: list[PoolReport] = []
        with self._ledger.locked():
            # All pools are looked at before the first is changed: an unknown node must not leave half a plan.
            for size, node in wanted:
                self._files.read(size, node)
            for entry in self._ledger.entries():
                if entry.key not in wanted:
                    self._give_back(entry)
            for (size, node), pages in wanted.items():
                own = None if own_use_pages is None else own_use_pages.get(node, 0)
                reports.append(self._reserve_pool(size, node, pages, own, deadline))
        return ReserveReport(
            page_size_bytes=plan.page_size_bytes, pools=tuple(reports), seconds=self._clock() - started
        )

    def release(self) -> ReleaseReport:
        """Gives back what the ledger says kvtierd raised, never below what is in use.

        Pages that are still in use stay in the ledger: release again when their users have ended.

        Raises:
            HugepageError, StateError: as ``reserve``.
        """
        given = kept = 0
        with self._ledger.locked():
            for entry in self._ledger.entries():
                pool_given, pool_kept = self._give_back(entry)
                given += pool_given * entry.page_size_bytes
                kept += pool_kept * entry.page_size_bytes
        return ReleaseReport(given_back_bytes=given, still_in_use_bytes=kept)

    def raised(self) -> tuple[Entry, ...]:
        """What the ledger says, brought in line with the kernel; nothing is changed.

        Raises:
            HugepageError, StateError: as ``reserve``.
        """
        with self._ledger.locked():
            return tuple(
                settle(entry, self._files.read(*entry.key).persistent) for entry in self._ledger.entries()
            )

    def own_pages(self, page_size_bytes: int) -> int:
        """Pages of this size that are kvtierd's: raised by it, or in the use of its units since it first reserved.

        Raises:
            HugepageError, StateError: as ``reserve``.
        """
        own = 0
        with self._ledger.locked():
            for entry in self._ledger.entries():
                if entry.page_size_bytes == page_size_bytes:
                    counts = self._files.read(*entry.key)
                    settled = settle(entry, counts.persistent)
                    in_use = max(0, counts.committed - settled.others_pages)
                    own += max(settled.raised_pages, min(settled.asked_pages, in_use))
        return own

    def _reserve_pool(
        self, size: int, node: int | None, pages: int, own_use: int | None, deadline: float
    ) -> PoolReport:
        counts = self._read(size, node)
        entry = self._ledger.get(size, node)
        if entry is None:
            first_others = max(0, counts.committed - (own_use or 0))
            entry = Entry(
                page_size_bytes=size, node=node, before_pages=counts.persistent, asked_pages=pages, raised_pages=0,
                others_pages=first_others,
            )  # fmt: skip
        entry = settle(entry, counts.persistent)
        others = _others(entry, counts, own_use)
        # A smaller plan: the difference to the last plan goes back, as far as it is ours and not in use. What cannot
        # go back yet stays in asked_pages, so that the next call tries again.
        surrender = min(entry.raised_pages, max(0, entry.asked_pages - pages))
        floor = max(counts.committed, others + pages, counts.persistent - surrender)
        kept = max(0, surrender - max(0, counts.persistent - floor))
        entry = entry.model_copy(
            update={
                "asked_pages": pages + kept,
                "others_pages": entry.others_pages if own_use is None else others,
            }
        )
        reason = ""
        if floor < counts.persistent:
            entry = self._change(entry, counts.persistent, floor)
        elif others + pages > counts.total:
            entry, reason = self._grow(entry, others + pages, deadline)
        if entry != self._ledger.get(size, node):
            self._ledger.put(entry)
        after = self._read(size, node)
        return PoolReport(
            page_size_bytes=size,
            node=node,
            asked_pages=pages,
            got_pages=max(0, min(pages, after.total - others)),
            others_pages=others,
            total_pages=after.total,
            raised_pages=entry.raised_pages,
            reason=reason if after.total < others + pages else "",
        )

    def _grow(self, entry: Entry, target: int, deadline: float) -> tuple[Entry, str]:
        """Raises the count towards ``target``. Returns the settled entry and, when it fell short, why."""
        size, node = entry.key
        start = self._read(size, node).persistent
        return self._with_intent(
            entry, start, target, lambda: self._grow_by_steps(size, node, target, deadline)
        )

    def _grow_by_steps(self, size: int, node: int | None, target: int, deadline: float) -> str:
        step = max(1, STEP_BYTES // size)
        fruitless = 0
        missed = ""
        while True:
            before = self._read(size, node)
            if before.total >= target:
                return ""
            room = self._room_pages(size)
            if room <= 0:
                keep = self._keep_available_bytes // (1024 * 1024)
                return f"taking more would leave the host less than {keep} MiB of available memory"
            # Surplus pages become persistent first, so the step counts from the total.
            goal = min(target, before.total + min(step, room))
            self._files.write(size, node, goal)
            after = self._read(size, node)
            if after.total >= goal:
                fruitless = 0
            elif after.total > before.total:
                step = max(1, step // 2)
                fruitless = 0
            else:
                fruitless += 1
                step = max(1, step // 8)
            if self._clock() >= deadline:
                why = "free memory is too fragmented, or there is too little of it"
                return f"time was up; {why}" + (f" ({missed})" if missed else "")
            if after.total >= goal:
                continue
            if fruitless > _ROUNDS_WITHOUT_PROGRESS:
                why = "the kernel finds no more free memory in one piece, also after compacting"
                return why + (f" ({missed})" if missed else "")
            missed = self._files.make_room(max(0.0, min(5.0, deadline - self._clock())))
            self._sleep(max(0.0, min(_PAUSE_SECONDS, deadline - self._clock())))

    def _give_back(self, entry: Entry) -> tuple[int, int]:
        """Lowers one pool by what is ours. Returns (pages given back, pages kept because they are in use)."""
        size, node = entry.key
        try:
            counts = self._read(size, node)
        except HugepageError:
            # The pool is gone (a node went offline): nothing of ours is left in it.
            self._ledger.remove(entry)
            return 0, 0
        # asked_pages stays: units that still run may go on using that much.
        settled = settle(entry, counts.persistent)
        target = max(counts.persistent - settled.raised_pages, min(counts.persistent, counts.committed))
        given = counts.persistent - target
        if given:
            settled = self._change(settled, counts.persistent, target)
        if settled.raised_pages:
            self._ledger.put(settled)
        else:
            self._ledger.remove(settled)
        return given, settled.raised_pages

    def _change(self, entry: Entry, current: int, target: int) -> Entry:
        size, node = entry.key
        return self._with_intent(entry, current, target, lambda: self._files.write(size, node, target))[0]

    def _with_intent(
        self, entry: Entry, current: int, target: int, change: Callable[[], _Result]
    ) -> tuple[Entry, _Result]:
        """A change with its intent noted before and its outcome after. Returns the settled entry too."""
        intended = entry.model_copy(update={"intent": Intent(from_pages=current, to_pages=target)})
        self._ledger.put(intended)
        try:
            result = change()
        finally:
            # Also when the kernel refused half way: what it did give must be known.
            settled = settle(intended, self._read(*entry.key).persistent)
            self._ledger.put(settled)
        return settled, result

    def _read(self, size: int, node: int | None) -> PoolCounts:
        """A pool; on a node with its share of the host's reserved pages, which the kernel counts host-wide only."""
        counts = self._files.read(size, node)
        if node is None:
            return counts
        nodes = self._files.nodes()
        reserved = self._files.read(size, None).reserved
        share, rest = divmod(reserved, max(1, len(nodes)))
        extra = 1 if node in nodes[:rest] else 0
        return counts.model_copy(update={"reserved": min(counts.free, share + extra)})

    def _room_pages(self, size: int) -> int:
        available = self._files.available_bytes()
        if available is None:
            return STEP_BYTES // size + 1
        return (available - self._keep_available_bytes) // size


def default_deadline_seconds(plan: HugepagePlan) -> float:
    """30 s, and 1 s for each 2 GiB: the kernel clears every page, at several GiB a second on most hosts."""
    return 30.0 + plan.pages * plan.page_size_bytes / (2 * GIB)


def _others(entry: Entry, counts: PoolCounts, own_use: int | None) -> int:
    """How many pages others hold now. Growth since the first reservation is ours, up to what we asked for."""
    if own_use is not None:
        return max(0, counts.committed - own_use)
    ours = min(entry.asked_pages, max(0, counts.committed - entry.others_pages))
    return counts.committed - ours


def _pools(plan: HugepagePlan) -> dict[tuple[int, int | None], int]:
    """The pools a plan wants pages in."""
    if any(pages < 0 for pages in (plan.pages, *plan.per_numa_node.values())):
        raise HugepageError("a number of hugepages cannot be negative", code="hugepages.plan")
    if plan.per_numa_node:
        total = sum(plan.per_numa_node.values())
        if total != plan.pages:
            raise HugepageError(
                f"the plan wants {plan.pages} pages but {total} over the NUMA nodes", code="hugepages.plan"
            )
        pairs = sorted(plan.per_numa_node.items())
        return {(plan.page_size_bytes, node): pages for node, pages in pairs if pages}
    return {(plan.page_size_bytes, None): plan.pages} if plan.pages else {}
