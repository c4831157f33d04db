"""Adding a pool holder to this node, and taking an added one away: reserved, started and seen, or undone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kvtierd.act.hands import HalfDoneError, Hands, told
from kvtierd.errors import ActionError, KvtierError
from kvtierd.plan.adjustments import ADDED, AddedHolder, Adjustments
from kvtierd.plan.units import pool_id
from kvtierd.quantities import format_size

JOIN_SECONDS = (
    360.0  # registering hundreds of GiB takes its time on hardware; the unit's own deadline is 300 s
)
ADJUST_SECONDS = (
    300.0  # for a plan that is being taken over when it is not wanted any more: hugepages take minutes
)
POLL_SECONDS = 0.1


class Holders:
    """This node's added pool holders; one change at a time."""

    def __init__(self, hands: Hands, *, join_seconds: float = JOIN_SECONDS) -> None:
        self._hands = hands
        self._join_seconds = join_seconds
        self._lock = asyncio.Lock()
        self.closing = False  # the daemon ends: no unit would stop any more, so what is half there is left to the next one

    async def add(self, dram_bytes: int) -> tuple[str, int]:
        """One more holder, ready; its unit and its memory.

        Raises:
            HalfDoneError: it did not work, and could not be undone.
            KvtierError: it did not work; all is as before.
        """
        async with self._lock:
            added: list[AddedHolder] = []

            def more(before: Adjustments) -> Adjustments:
                after, holder = before.with_holder(dram_bytes)
                added[:] = [holder]
                return after

            adjusting = asyncio.ensure_future(self._hands.adjust(more))
            try:
                await asyncio.shield(adjusting)
                unit = pool_id(added[0].name)
                memory_bytes = self._hands.planned_bytes(unit)
                if memory_bytes is None:
                    raise ActionError(
                        "the plan of this node has no room for one more pool holder",
                        hint="kvtierctl plan says why", code="act.no-room",
                    )  # fmt: skip
                if shortage := self._hands.shortage():
                    raise ActionError(f"not enough hugepages: {shortage}", code="act.hugepages")
                await self._until_ready(unit)
            except BaseException as error:
                # Whatever it was, the caller going away too: nothing of it stays.
                if not self.closing:
                    await asyncio.shield(asyncio.ensure_future(self._undo(adjusting, added, error)))
                raise
            return unit, memory_bytes

    async def _undo(
        self, adjusting: asyncio.Future[None], added: list[AddedHolder], error: BaseException
    ) -> None:
        done, _ = await asyncio.wait([adjusting], timeout=ADJUST_SECONDS)
        if not done:
            raise HalfDoneError(
                "the plan with one more pool holder is still being taken over", why=told(error)
            )
        if not added or added[0] not in self._hands.adjustments().holders:
            return  # it never became part of the plan
        try:
            await self._take_away(added[0].name)
        except (KvtierError, OSError) as stays:
            raise HalfDoneError(
                f"{pool_id(added[0].name)} could not be undone: {told(stays)}",
                why=f"it was to go because {told(error)}" if isinstance(error, KvtierError) else "",
            ) from stays

    async def remove(self, unit: str) -> tuple[str, int]:
        """Takes an added holder away; what it had in memory is lost to the pool. Its unit and its memory.

        Raises:
            ActionError: ``act.not-added``: it is none of those that were added.
            HalfDoneError: it was told to stop, and has not ended or is still part of the plan.
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
            try:
                await self._take_away(holder.name)
            except (KvtierError, OSError) as error:
                raise HalfDoneError(f"{unit} was told to stop, but it is not gone: {told(error)}") from error
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
        self, token: str, *, add_bytes: int, remove_unit: str, say: Callable[[str], None]
    ) -> tuple[str, int]:
        """Does it, or waits for the one under way. Raises ``KvtierError``."""
        task = self._answers.get(token)
        if task is None:
            while len(self._answers) >= self.MOST_KEPT:
                done = next((t for t, w in self._answers.items() if w.done()), None)
                if done is None:
                    raise ActionError("too many changes are under way", code="act.busy")
                del self._answers[done]
            task = asyncio.ensure_future(self._do(add_bytes, remove_unit, say))
            self._answers[token] = task
        return await asyncio.shield(task)

    async def _do(self, add_bytes: int, remove_unit: str, say: Callable[[str], None]) -> tuple[str, int]:
        try:
            if remove_unit:
                unit, memory_bytes = await self._holders.remove(remove_unit)
                say(f"{unit} was removed ({format_size(memory_bytes)})")
            else:
                unit, memory_bytes = await self._holders.add(add_bytes)
                say(f"{unit} was added ({format_size(memory_bytes)})")
        except KvtierError as error:
            half = isinstance(error, HalfDoneError)
            say(f"that did not work and {'is half done' if half else 'has changed nothing'}: {told(error)}")
            raise
        return unit, memory_bytes
