"""PURE: what kvtierd's own actions have changed beside the settings: thresholds, and pool holders that were added.

An input of the plan like settings and inventory, so that there is one plan and one loop that makes it true. It is kept
in the state directory and outlives the daemon; ``kvtierctl policy reset`` takes it all back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from kvtierd.errors import PlanError
from kvtierd.plan.inventory import Record
from kvtierd.plan.model import PoolPlan
from kvtierd.plan.remarks import Remarks
from kvtierd.quantities import align_down, format_size

ADDED = "added-"
MOST_HOLDERS = 64


class AddedHolder(Record):
    """One more pool holder of this node: ``dram_bytes`` of memory, under the unit name ``added-<index>``."""

    index: Annotated[int, Field(ge=0, lt=MOST_HOLDERS)]
    dram_bytes: Annotated[int, Field(gt=0)]

    @property
    def name(self) -> str:
        """Of its unit, without ``kvtier-pool-``."""
        return f"{ADDED}{self.index}"


class Adjustments(Record):
    """Everything that was changed. ``None``: as the settings say."""

    evict_high: Annotated[int, Field(ge=1, le=99)] | None = None
    evict_low: Annotated[int, Field(ge=1, le=98)] | None = None
    holders: tuple[AddedHolder, ...] = ()

    @property
    def added_bytes(self) -> int:
        """Memory of all added holders."""
        return sum(h.dram_bytes for h in self.holders)

    def with_holder(self, dram_bytes: int) -> tuple[Adjustments, AddedHolder]:
        """One more, under the lowest free number. Raises ``PlanError``: there is none."""
        used = {h.index for h in self.holders}
        index = next((i for i in range(MOST_HOLDERS) if i not in used), None)
        if index is None:
            raise PlanError(f"{MOST_HOLDERS} pool holders were added already", code="plan.too-many-holders")
        holder = AddedHolder(index=index, dram_bytes=dram_bytes)
        return self.model_copy(update={"holders": (*self.holders, holder)}), holder

    def without_holder(self, name: str) -> Adjustments:
        """All but the one of this name."""
        return self.model_copy(update={"holders": tuple(h for h in self.holders if h.name != name)})

    @property
    def thresholds(self) -> tuple[int, int] | None:
        """Both or none: half a pair says nothing."""
        if self.evict_high is None or self.evict_low is None or self.evict_low >= self.evict_high:
            return None
        return self.evict_high, self.evict_low


NOTHING = Adjustments()


def check_holders(
    holders: Iterable[AddedHolder], pool: PoolPlan, devices: int | None, remarks: Remarks
) -> tuple[AddedHolder, ...]:
    """Those that this plan can have; the others are left out and named.

    Args:
        holders: That were added.
        pool: The plan without them.
        devices: Dies of this node; ``None``: any number, as in emulation.
        remarks: Where the notes go.
    """
    kept = []
    for holder in holders:
        why = ""
        if pool.placement != "standalone":
            why = "the engines hold the pool here"
        elif devices is not None and pool.providers + holder.index >= devices:
            why = f"it needs a die of its own, and this node has {devices}"
        elif align_down(min(holder.dram_bytes, pool.dram_bytes_per_provider), pool.alignment_bytes or 1) == 0:
            why = f"{format_size(holder.dram_bytes)} is less than one alignment unit"
        if why:
            remarks.note("pool.added-left-out", f"the added pool holder {holder.name} is left out: {why}")
            continue
        # MemCache wants max.dram.size alike on all ranks, and no rank may bring more.
        fits = align_down(min(holder.dram_bytes, pool.dram_bytes_per_provider), pool.alignment_bytes or 1)
        kept.append(holder.model_copy(update={"dram_bytes": fits}))
    return tuple(kept)


def room_for_holder(
    pool: PoolPlan,
    *,
    devices: int | None,
    added: int,
    available_bytes: int,
    keep_free_bytes: int,
    shm_free_bytes: int | None,
) -> int:
    """How much one more pool holder of this node could take now, in bytes, aligned.

    Args:
        pool: As planned, added holders included.
        devices: As in ``check_holders``.
        added: Holders that were added already.
        available_bytes: Memory of the host that is available now.
        keep_free_bytes: What must be left of it.
        shm_free_bytes: Room in /dev/shm, where the pool's memory goes there; ``None``: it does not.
    """
    if pool.placement != "standalone" or (devices is not None and pool.providers + added >= devices):
        return 0
    limits = [pool.dram_bytes_per_provider, available_bytes - keep_free_bytes]
    if shm_free_bytes is not None:
        limits.append(shm_free_bytes)
    return align_down(max(0, min(limits)), pool.alignment_bytes or 1)
