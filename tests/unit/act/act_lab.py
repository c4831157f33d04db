"""A node that remembers what is done to it, and a record of actions in memory."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from kvtierd.act import executor, holders
from kvtierd.act.hands import UnitNow
from kvtierd.decide.proposals import Action, Proposal
from kvtierd.errors import KvtierError, UnitError
from kvtierd.observe.picture import Picture, PoolPicture
from kvtierd.plan.adjustments import NOTHING, Adjustments
from kvtierd.plan.units import pool_id

GIB = 1024**3


def fault(text: str, code: str = "") -> UnitError:
    return UnitError(text, why="as it is here", code=code)


def proposal(action: Action, **changes: Any) -> Proposal:
    return Proposal(
        **{"rule": "pool-small", "target": "pool", "action": action, "reason": "why not", "id": 7, **changes}
    )


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting takes a moment, not minutes."""
    for name, seconds in (("LIVE_SECONDS", 0.1), ("CAPACITY_SECONDS", 0.1), ("RESTART_SECONDS", 0.3)):
        monkeypatch.setattr(executor, name, seconds)
    for module in (executor, holders):
        monkeypatch.setattr(module, "POLL_SECONDS", 0.005)
    monkeypatch.setattr(holders, "ADJUST_SECONDS", 0.3)


class FakeHands:
    """``Hands``. ``fails``: name of a call -> what it raises. ``hangs``: calls that never end."""

    def __init__(self) -> None:
        self.node = "a"
        self.calls: list[tuple[Any, ...]] = []
        self.kept = NOTHING
        self.units: dict[str, UnitNow] = {}
        self.fails: dict[str, KvtierError] = {}
        self.hangs: set[str] = set()
        self.short = ""
        self.starts_as = UnitNow("ready", "1")
        self.stops = True
        self.room = True
        self.rolls: list[str] = []
        self.elsewhere: tuple[str, int] = ("kvtier-pool-added-0", 4 * GIB)
        self.pool: PoolPicture | None = PoolPicture(
            0.0, "1", capacity_bytes=64 * GIB, used_bytes=32 * GIB, stored_keys=1000, evict_high_percent=90,
            evict_low_percent=80,
        )  # fmt: skip
        self.react: Callable[[tuple[Any, ...]], None] = lambda call: None
        self.no_picture = False
        self._clock = itertools.count(1)

    async def _called(self, *call: Any) -> None:
        self.calls.append(call)
        if call[0] in self.hangs:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        if call[0] in self.fails:
            raise self.fails[call[0]]
        self.react(call)

    def show(self, **changes: Any) -> None:
        """The pool from now on."""
        assert self.pool is not None
        self.pool = dataclasses.replace(self.pool, **changes)

    def picture(self) -> Picture | None:
        """Newer with every look."""
        if self.no_picture:
            return None
        now = float(next(self._clock))
        pool = dataclasses.replace(self.pool, at_seconds=now) if self.pool is not None else None
        return Picture(now, "a", "a", is_master=True, pool=pool)

    def adjustments(self) -> Adjustments:
        return self.kept

    async def adjust(self, change: Callable[[Adjustments], Adjustments]) -> None:
        after = change(self.kept)
        await self._called("adjust", after)
        gone = {h.name for h in self.kept.holders} - {h.name for h in after.holders}
        for name in gone:
            self.units.pop(pool_id(name), None)
        for holder in after.holders:
            if self.room:
                self.units.setdefault(pool_id(holder.name), self.starts_as)
        self.kept = after

    def shortage(self) -> str:
        return self.short

    def planned_bytes(self, unit: str) -> int | None:
        found = next((h for h in self.kept.holders if pool_id(h.name) == unit), None)
        return found.dram_bytes if found is not None and self.room else None

    def unit(self, unit: str) -> UnitNow | None:
        return self.units.get(unit)

    async def stop_unit(self, unit: str) -> None:
        await self._called("stop", unit)
        self.units[unit] = UnitNow("stopped")

    async def restart_unit(self, unit: str, reason: str) -> None:
        await self._called("restart", unit, reason)

    async def roll_engine(self, unit: str, reason: str) -> None:
        await self._called("roll", unit, reason)
        self.rolls.append(unit)

    def call_off_roll(self, unit: str) -> None:
        if unit in self.rolls:
            self.rolls.remove(unit)

    async def switch_l3(self, unit: str, *, on: bool) -> str:
        await self._called("l3", unit, on)
        return "as was wanted"

    async def purge(self) -> float:
        await self._called("purge")
        return 1.5

    async def holder_elsewhere(
        self, node: str, token: str, reason: str, *, add_bytes: int = 0, remove_unit: str = ""
    ) -> tuple[str, int]:
        await self._called(
            "remove there" if remove_unit else "add there", node, token, add_bytes or remove_unit
        )
        return self.elsewhere


class FakeRecord:
    """What was written down."""

    def __init__(self) -> None:
        self.begun: list[tuple[Proposal, str]] = []
        self.ended: list[tuple[int, str, str]] = []

    def begin(self, proposal: Proposal, *, precondition: str = "") -> int:
        self.begun.append((proposal, precondition))
        return len(self.begun)

    def end(self, entry_id: int, state: str, outcome: str) -> None:
        self.ended.append((entry_id, state, outcome))
