"""Carries proposals out: a precondition, a bounded time, a look whether it worked, and the way back when it did not.

Every action is written down before it begins and when it has ended. What verifies it is the next pictures, not the answer
of the call: a pool that did not grow has not grown, whatever was answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Literal, Protocol

import structlog

from kvtierd.act.hands import HalfDoneError, Hands, UndoneError, UnitNow, told
from kvtierd.act.holders import Holders
from kvtierd.decide.proposals import (
    AddHolder,
    AttachL3,
    DetachL3,
    Proposal,
    Purge,
    Rebalance,
    RemoveHolder,
    RestartUnit,
    SetThresholds,
)
from kvtierd.errors import ActionError, KvtierError
from kvtierd.observe.picture import Picture, PoolPicture
from kvtierd.plan.adjustments import Adjustments
from kvtierd.quantities import format_size

log = structlog.get_logger(__name__)

State = Literal["done", "failed", "undone", "half done"]

LIVE_SECONDS = 20.0  # MemCache reads its thresholds every 5 s, and a look at it is some seconds old
CAPACITY_SECONDS = 60.0  # until the MetaService tells of a segment that has come or gone
RESTART_SECONDS = 1800.0  # an engine loads for many minutes
POLL_SECONDS = 0.25
NEARLY = 0.9  # of a holder's memory, by which the capacity must have changed
ANSWER_LOST = frozenset({"cluster.unreachable", "cluster.malformed"})
EMPTY_KEYS = 0.1  # of the keys before, which may be there again after a purge


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """How an action ended. ``done``: and seen to work; ``undone``: all is as before; ``half done``: see the text."""

    state: State
    text: str

    @property
    def ok(self) -> bool:
        """Whether it was done and seen to work."""
        return self.state == "done"


class Record(Protocol):
    """What is written down of an action; the journal does."""

    def begin(self, proposal: Proposal, *, precondition: str = "") -> int:
        """It is about to begin; its number."""
        ...

    def end(self, entry_id: int, state: State, outcome: str) -> None:
        """It has ended."""
        ...


class Executor:
    """One node's. ``carry_out`` never raises for an action that did not work.

    Args:
        hands: The node.
        holders: Its added pool holders.
        record: Where it is written down.
        deadline_seconds: Of one action; the restart of a unit has at least ``RESTART_SECONDS``.
    """

    def __init__(
        self, hands: Hands, holders: Holders, record: Record, *, deadline_seconds: float = 900.0
    ) -> None:
        self._hands = hands
        self._holders = holders
        self._record = record
        self.deadline_seconds = deadline_seconds

    async def carry_out(self, proposal: Proposal) -> Outcome:
        """Does it and looks whether it worked."""
        precondition = _precondition(self._hands.picture(), self._hands.adjustments())
        # In a thread: a disk that hangs must not hang the daemon's loop.
        entry = await asyncio.to_thread(self._record.begin, proposal, precondition=precondition)
        seconds = self.deadline_seconds
        if isinstance(proposal.action, RestartUnit):
            seconds = max(seconds, RESTART_SECONDS)
        try:
            async with asyncio.timeout(seconds):
                text = await self._do(proposal)
            outcome = Outcome("done", text)
        except UndoneError as error:
            outcome = Outcome("undone", told(error))
        except HalfDoneError as error:
            outcome = Outcome("half done", told(error))
        except TimeoutError:  # before OSError, of which it is one
            outcome = Outcome("half done", f"it did not end within {seconds:.0f} s")
        except (KvtierError, OSError) as error:
            outcome = Outcome("failed", told(error))
        except asyncio.CancelledError:
            self._record.end(entry, "half done", "kvtierd was stopped meanwhile")
            raise
        except Exception as error:  # a fault of ours: how far it came is not known
            log.exception("act.failed", action=proposal.action.text)
            outcome = Outcome("half done", f"internal error: {type(error).__name__}: {error}")
        await asyncio.to_thread(self._record.end, entry, outcome.state, outcome.text)
        return outcome

    async def _do(self, proposal: Proposal) -> str:
        action = proposal.action
        match action:
            case SetThresholds():
                return await self._set_thresholds(action)
            case AddHolder():
                return await self._add(action, proposal)
            case RemoveHolder():
                return await self._remove(action, proposal)
            case Rebalance():
                return await self._rebalance(action, proposal)
            case RestartUnit():
                return await self._restart(action, proposal.reason)
            case DetachL3():
                return await self._hands.switch_l3(action.engine, on=False)
            case AttachL3():
                return await self._hands.switch_l3(action.engine, on=True)
            case Purge():
                return await self._purge()
            case _:
                raise ActionError(f"{action!r} is nothing to carry out", code="act.advice")

    # -- thresholds

    async def _set_thresholds(self, wanted: SetThresholds) -> str:
        before = self._hands.adjustments()
        high, low = wanted.high_percent, wanted.low_percent
        if not 0 < low < high < 100:
            raise ActionError(f"{high}/{low} are no thresholds", code="act.thresholds")
        seen = self._pool()
        await self._hands.adjust(lambda a: a.model_copy(update={"evict_high": high, "evict_low": low}))
        # What it said before may be of a run before this one, and proves nothing.
        told_before = seen is not None and seen.told_thresholds == (high, low)
        # It says in its log what it took, and what it did not take, which would also kill its next start.
        answer = await self._until(
            lambda pool: (
                (pool.told_thresholds == (high, low) and not told_before) or _refusals(pool) > _refusals(seen)
            ),
            LIVE_SECONDS,
            after=seen,
        )
        if answer is not None and not told_before and answer.told_thresholds == (high, low):
            return f"in force: the MetaService took {high}/{low} over, as its log says"
        back = {"evict_high": before.evict_high, "evict_low": before.evict_low}
        if answer is not None:
            await self._take_back(back, f"the MetaService refused the thresholds {high}/{low}")
            raise UndoneError(f"the MetaService refused the thresholds {high}/{low}")
        was, use = _use_percent(seen), _use_percent(self._pool())
        if use is None or was is None:
            return f"written; that {high}/{low} are in force cannot be seen: the use of the pool is not known"
        if use > high + 1:
            # It should evict now. Undone: what does not work must not stand in the file as if it did.
            problem = f"the pool is still {use:.0f} % full {LIVE_SECONDS:.0f} s after {high}/{low}"
            await self._take_back(back, problem)
            raise UndoneError(problem)
        if was > high:
            return f"in force: the pool has gone from {was:.0f} to {use:.0f} % of use"
        return f"written; at {use:.0f} % of use nothing shows yet that {high}/{low} are in force"

    async def _take_back(self, before: dict[str, int | None], problem: str) -> None:
        try:
            await self._hands.adjust(lambda a: a.model_copy(update=before))
        except (KvtierError, OSError) as error:
            raise HalfDoneError(f"{problem}, and they could not be taken back: {told(error)}") from error

    # -- pool holders

    async def _add(self, action: AddHolder, proposal: Proposal) -> str:
        before = self._pool()
        unit, memory_bytes = await self._add_on(action, proposal)
        if before is None or before.capacity_bytes is None:
            return f"{unit} holds {format_size(memory_bytes)}; the pool's capacity cannot be seen from here"
        wanted = before.capacity_bytes + int(memory_bytes * NEARLY)
        grown = await self._until(
            lambda pool: (pool.capacity_bytes or 0) >= wanted, CAPACITY_SECONDS, after=before
        )
        if grown is None:
            problem = f"the pool did not grow within {CAPACITY_SECONDS:.0f} s though {unit} said it was ready"
            try:
                await self._remove_on(RemoveHolder(action.node, unit, memory_bytes), proposal)
            except (KvtierError, OSError) as error:
                raise HalfDoneError(f"{problem}, and it could not be removed: {told(error)}") from error
            raise UndoneError(f"{problem}; it was removed")
        return f"{unit} on {action.node} holds {format_size(memory_bytes)}; the pool has {_size(grown)}"

    async def _remove(self, action: RemoveHolder, proposal: Proposal) -> str:
        before = self._pool()
        unit, memory_bytes = await self._remove_on(action, proposal)
        if before is None or before.capacity_bytes is None:
            return f"{unit} is gone; the pool's capacity cannot be seen from here"
        wanted = before.capacity_bytes - int(memory_bytes * NEARLY)
        smaller = await self._until(
            lambda pool: pool.capacity_bytes is not None and pool.capacity_bytes <= wanted,
            CAPACITY_SECONDS,
            after=before,
        )
        if smaller is None:
            raise HalfDoneError(f"{unit} is gone, but the MetaService still counts its memory")
        return f"{unit} on {action.node} is gone; the pool has {_size(smaller)}"

    async def _rebalance(self, action: Rebalance, proposal: Proposal) -> str:
        added = await self._add(action.add, proposal)
        try:
            removed = await self._remove(action.remove, proposal)
        except (KvtierError, OSError) as error:
            raise HalfDoneError(f"{added}; but {action.remove.unit} is not gone: {told(error)}") from error
        return f"{added}; {removed}"

    async def _add_on(self, action: AddHolder, proposal: Proposal) -> tuple[str, int]:
        if action.node == self._hands.node:
            try:
                return await self._holders.add(action.bytes)
            except HalfDoneError:
                raise
            except KvtierError as error:
                raise UndoneError(told(error)) from error
        with _asked_of(action.node):
            return await self._hands.holder_elsewhere(
                action.node, f"add-{proposal.id}", proposal.reason, add_bytes=action.bytes
            )

    async def _remove_on(self, action: RemoveHolder, proposal: Proposal) -> tuple[str, int]:
        if action.node == self._hands.node:
            return await self._holders.remove(action.unit)
        with _asked_of(action.node):
            return await self._hands.holder_elsewhere(
                action.node, f"remove-{proposal.id}-{action.unit}", proposal.reason, remove_unit=action.unit
            )

    # -- units

    async def _restart(self, action: RestartUnit, reason: str) -> str:
        before = self._hands.unit(action.unit)
        if before is None:
            raise ActionError(f"there is no unit {action.unit}", code="act.no-unit")
        try:
            if action.drained or action.rolling:
                await self._hands.roll_engine(action.unit, reason)
            else:
                await self._hands.restart_unit(action.unit, reason)
            return await self._come_back(action, before)
        except BaseException:
            # It must not be restarted later, when nobody knows why any more.
            self._hands.call_off_roll(action.unit)
            raise

    async def _come_back(self, action: RestartUnit, before: UnitNow) -> str:
        began = time.monotonic()
        had_failed = before.state == "failed"  # then that says nothing of this restart
        while True:
            now = self._hands.unit(action.unit)
            had_failed = had_failed and now is not None and now.state == "failed"
            if now is not None and now.instance not in {None, before.instance} and now.state == "ready":
                return f"{action.unit} is ready again after {time.monotonic() - began:.0f} s"
            if now is None or (now.state == "failed" and not had_failed):
                raise HalfDoneError(f"{action.unit} does not come back: {_reason(now)}")
            await asyncio.sleep(POLL_SECONDS)

    async def _purge(self) -> str:
        before = self._pool()
        seconds = await self._hands.purge()
        if before is None or before.stored_keys is None:
            return f"the pool was emptied ({seconds:.1f} s)"
        most = int(before.stored_keys * EMPTY_KEYS)
        empty = await self._until(
            lambda pool: pool.stored_keys is not None and pool.stored_keys <= most,
            CAPACITY_SECONDS,
            after=before,
        )
        if empty is None:
            raise HalfDoneError("the purge ended, but most keys are there again")
        return f"the pool was emptied ({seconds:.1f} s); {before.stored_keys} keys before"

    # -- looking

    def _pool(self) -> PoolPicture | None:
        picture = self._hands.picture()
        return picture.pool if picture is not None else None

    async def _until(
        self, condition: Callable[[PoolPicture], bool], seconds: float, *, after: PoolPicture | None
    ) -> PoolPicture | None:
        """A look at the pool, later than ``after``, at which this holds; ``None``: none within the time."""
        deadline = time.monotonic() + seconds
        since = after.at_seconds if after is not None else float("-inf")
        while True:
            pool = self._pool()
            if pool is not None and pool.at_seconds > since and condition(pool):
                return pool
            if time.monotonic() >= deadline:
                return None
            await asyncio.sleep(POLL_SECONDS)


def _precondition(picture: Picture | None, adjustments: Adjustments) -> str:
    """What was the case before, for whoever reads the journal and wants to take something back."""
    pool = picture.pool if picture is not None else None
    parts = []
    if pool is not None:
        use = _use_percent(pool)
        parts.append(
            f"pool {_size(pool)}, {'an unknown part' if use is None else f'{use:.0f} %'} used, evicts at"
            f" {pool.evict_high_percent}/{pool.evict_low_percent} %"
        )
    if adjustments.holders:
        parts.append(f"added holders {', '.join(h.name for h in adjustments.holders)}")
    return "; ".join(parts)


@contextlib.contextmanager
def _asked_of(node: str) -> Iterator[None]:
    """What a failed request to another node means: it refused, it got half of it done, or nobody knows.

    An answer that was lost is not asked for again: a kvtierd that was restarted there would do it a second time.
    """
    try:
        yield
    except KvtierError as error:
        if error.stable_code == HalfDoneError.code:
            raise HalfDoneError(f"on {node}: {told(error)}") from error
        if error.stable_code in ANSWER_LOST:
            raise HalfDoneError(f"what became of it on {node} is not known: {told(error)}") from error
        raise


def _size(pool: PoolPicture) -> str:
    return format_size(pool.capacity_bytes) if pool.capacity_bytes is not None else "an unknown capacity"


def _use_percent(pool: PoolPicture | None) -> float | None:
    if pool is None or not pool.capacity_bytes or pool.used_bytes is None:
        return None
    return 100.0 * pool.used_bytes / pool.capacity_bytes


def _refusals(pool: PoolPicture | None) -> int:
    """How many values of its configuration the MetaService has refused, by its log."""
    return pool.log_errors.get("config", 0) if pool is not None else 0


def _reason(now: UnitNow | None) -> str:
    return f"it is {now.state}: {now.reason}" if now is not None else "it is not there any more"
