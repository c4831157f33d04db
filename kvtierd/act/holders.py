"""Adding a pool holder to this node, and taking an added one away: reserved, started and seen, or undone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kvtierd.act.hands import Hands
from kvtierd.errors import ActionError, KvtierError
from kvtierd.plan.adjustments import ADDED, AddedHolder, Adjustments
from kvtierd.plan.units import pool_id
from kvtierd.quantities import format_size

JOIN_SECONDS = (
    360.0  # registering hundreds of GiB takes its time on hardware; the unit's own deadline is 300 s
)
POLL_SECONDS = 0.1


class Holders:
    """This node's added pool holders; one change at a time."""

    def __init__(self, hands: Hands, *, join_seconds: float = JOIN_SECONDS) -> None:
        self._hands = hands
        self._join_seconds = join_seconds
        self._lock = asyncio.Lock()

    async def add(self, dram_bytes: int) -> tuple[str, int]:
        """One more holder, ready; its unit and its memory. Raises ``KvtierError``; then all is as before."""
        async with self._lock:
            added: list[AddedHolder] = []

            def more(before: Adjustments) -> Adjustments:
                after, holder = before.with_holder(dram_bytes)
                added[:] = [holder]
                return after

            await self._hands.adjust(more)
            holder = added[0]
            unit = pool_id(holder.name)
            try:
                memory_bytes = self._hands.planned_bytes(unit)
                if memory_bytes is None:
                    raise ActionError(
                        "the plan of this node has no room for one more pool holder",
                        hint="kvtierctl plan says why", code="act.no-room",
                    )  # fmt: skip
                if shortage := self._hands.shortage():
                    raise ActionError(f"not enough hugepages: {shortage}", code="act.hugepages")
                await self._until_ready(unit)
            except BaseException:
                # Whatever it was, the caller going away too: nothing of it stays.
                await asyncio.shield(asyncio.ensure_future(self._take_away(holder.name)))
                raise
            return unit, memory_bytes

    async def remove(self, unit: str) -> tuple[str, int]:
        """Takes an added holder away; what it had in memory is lost to the pool. Its unit and its memory.

        Raises:
            ActionError: ``act.not-added``: it is none of those that were added.
            KvtierError: it could not be stopped; then it is still there.
        """
        async with self._lock:
            holder = next((h for h in self._hands.adjustments().holders if pool_id(h.name) == unit), None)
            if holder is None:
                raise ActionError(
                    f"{unit} is no pool holder that kvtierd has added",
                    hint=f"only units named {pool_id(ADDED)}N are; the others are in the settings",
                    code="act.not-added",
                )
            memory_bytes = self._hands.planned_bytes(unit) or holder.dram_bytes
            await self._take_away(holder.name)
            return unit, memory_bytes

    async def _take_away(self, name: str) -> None:
        unit = pool_id(name)
        if self._hands.unit(unit) is not None:
            await self._hands.stop_unit(unit)  # first: hugepages that are in use cannot be given back
        await self._hands.adjust(lambda before: before.without_holder(name))

    async def _until_ready(self, unit: str) -> None:
        deadline = time.monotonic() + self._join_seconds
        while (now := self._hands.unit(unit)) is None or now.state != "ready":
            if now is not None and now.state == "failed":
                raise ActionError(f"{unit} has failed", why=now.reason, code="act.holder-failed")
            if time.monotonic() >= deadline:
                why = f"it is {now.state}: {now.reason}" if now is not None else "it was not started"
                raise ActionError(
                    f"{unit} did not join within {self._join_seconds:.0f} s", why=why, code="act.holder-late"
                )
            await asyncio.sleep(POLL_SECONDS)


class Requests:
    """Changes that a master asks for, each once: one that is repeated gets the answer of the first."""

    MOST_KEPT = 32

    def __init__(self, holders: Holders) -> None:
        self._holders = holders
        self._answers: dict[str, asyncio.Task[tuple[str, int]]] = {}

    async def take(
        self, token: str, *, add_bytes: int, remove_unit: str, told: Callable[[str], None]
    ) -> tuple[str, int]:
        """Does it, or waits for the one under way. Raises ``KvtierError``."""
        task = self._answers.get(token)
        if task is None:
            while len(self._answers) >= self.MOST_KEPT:
                done = next((t for t, w in self._answers.items() if w.done()), None)
                if done is None:
                    raise ActionError("too many changes are under way", code="act.busy")
                del self._answers[done]
            task = asyncio.ensure_future(self._do(add_bytes, remove_unit, told))
            self._answers[token] = task
        return await asyncio.shield(task)

    async def _do(self, add_bytes: int, remove_unit: str, told: Callable[[str], None]) -> tuple[str, int]:
        try:
            if remove_unit:
                unit, memory_bytes = await self._holders.remove(remove_unit)
                told(f"{unit} was removed ({format_size(memory_bytes)})")
            else:
                unit, memory_bytes = await self._holders.add(add_bytes)
                told(f"{unit} was added ({format_size(memory_bytes)})")
        except KvtierError as error:
            told(f"that did not work and was undone: {error}")
            raise
        return unit, memory_bytes
