"""What came of reserving or releasing hugepages, as values and as text."""

from __future__ import annotations

from kvtierd.plan.inventory import Record
from kvtierd.quantities import format_size


class PoolReport(Record):
    """One pool after reserving, in pages. ``node`` is ``None`` for the whole host.

    ``got_pages`` are there for kvtierd's units (in use by them or free); ``others_pages`` are held by others and come
    on top; ``raised_pages`` is what kvtierd added to the pool so far; ``reason`` says why it fell short.
    """

    page_size_bytes: int
    node: int | None = None
    asked_pages: int
    got_pages: int
    others_pages: int = 0
    total_pages: int = 0
    raised_pages: int = 0
    reason: str = ""

    @property
    def short_pages(self) -> int:
        """Pages that are missing."""
        return self.asked_pages - self.got_pages


class ReserveReport(Record):
    """What was asked for, what the kernel gave, and what is missing."""

    page_size_bytes: int
    pools: tuple[PoolReport, ...] = ()
    seconds: float = 0.0

    @property
    def asked_pages(self) -> int:
        """Pages the plan wants, over all pools."""
        return sum(pool.asked_pages for pool in self.pools)

    @property
    def got_pages(self) -> int:
        """Pages that kvtierd's units can use."""
        return sum(pool.got_pages for pool in self.pools)

    @property
    def short_pages(self) -> int:
        """Pages that are missing."""
        return self.asked_pages - self.got_pages

    @property
    def got_bytes(self) -> int:
        """``got_pages`` in bytes."""
        return self.got_pages * self.page_size_bytes

    @property
    def short_bytes(self) -> int:
        """``short_pages`` in bytes."""
        return self.short_pages * self.page_size_bytes

    @property
    def complete(self) -> bool:
        """Whether every pool has what the plan wants."""
        return all(pool.short_pages == 0 for pool in self.pools)

    def ranks_that_fit(self, bytes_per_rank: int) -> int:
        """How many ranks of this size the granted pages hold. A rank bound to a node does not span two.

        Raises:
            ValueError: ``bytes_per_rank`` is not positive.
        """
        if bytes_per_rank <= 0:
            raise ValueError("bytes_per_rank must be positive")
        pages_per_rank = -(-bytes_per_rank // self.page_size_bytes)
        return sum(pool.got_pages // pages_per_rank for pool in self.pools)

    def text(self, bytes_per_rank: int | None = None) -> str:
        """For people: one line when all is there, else also what is missing, where, and why."""
        size = format_size(self.page_size_bytes)
        head = f"hugepages of {size}: asked {self.asked_pages}, got {self.got_pages} ({format_size(self.got_bytes)})"
        if self.complete:
            return head
        lines = [f"{head}, short {self.short_pages} ({format_size(self.short_bytes)})"]
        for pool in self.pools:
            if pool.short_pages == 0:
                continue
            where = "host" if pool.node is None else f"NUMA node {pool.node}"
            line = f"  {where}: asked {pool.asked_pages}, got {pool.got_pages}"
            if pool.others_pages:
                line += f"; others hold {pool.others_pages} of its {pool.total_pages}"
            lines.append(f"{line}: {pool.reason or 'the kernel gave no more'}")
        if bytes_per_rank:
            fit = self.ranks_that_fit(bytes_per_rank)
            lines.append(f"  ranks of {format_size(bytes_per_rank)} that fit: {fit}")
        return "\n".join(lines)


class ReleaseReport(Record):
    """What was given back to the host, and what had to stay because it is in use."""

    given_back_bytes: int = 0
    still_in_use_bytes: int = 0

    def text(self) -> str:
        """For people, one line."""
        line = f"gave back {format_size(self.given_back_bytes)} of hugepages"
        if self.still_in_use_bytes:
            line += f"; {format_size(self.still_in_use_bytes)} are still in use, release again when that has ended"
        return line
