"""The worker's side: loads and saves in the background, over lanes.

A load is announced as finished exactly once, with the blocks that it could not fill. The engine holds the request and
its blocks back until then, so nothing is ever computed from a failed load, and no other request waits for it. A save
copies its blocks before it returns; the pool gets them afterwards.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from .guard import TierGuard, TierUnavailableError
from .keys import rank_key
from .lanes import BlockCopier, Lane, Lanes
from .planning import BlockRef, LoadJob
from .store import KEY_GONE, SIZE_DIFFERS, BlockStore

_log = logging.getLogger(__name__)
# How long one step of the engine waits for a free lane, altogether. A healthy pool empties one in 20 ms.
_SAVE_PATIENCE_SECONDS: Final = 0.1
# How long nothing is saved after the pool has refused everything, as it does while it comes back.
_SAVE_PAUSE_SECONDS: Final = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class FinishedLoad:
    """A load that has ended. ``failed_block_ids`` hold nothing useful."""

    request_id: str
    failed_block_ids: frozenset[int]


class Transfers:
    """Moves blocks between the engine and the pool.

    Args:
        store: The pool.
        guard: Limits every call.
        joined: Whether the pool can be used at all.
        copier: The KV cache.
        load_lanes: Lanes that only loads use.
        save_lanes: Lanes that only saves use.
        rank: This worker's place among the ranks that share every block.
        ranks: How many they are.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        store: BlockStore,
        guard: TierGuard,
        joined: Callable[[], bool],
        copier: BlockCopier,
        load_lanes: Lanes,
        save_lanes: Lanes,
        *,
        rank: int = 0,
        ranks: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._guard = guard
        self._joined = joined
        self._copier = copier
        self._load_lanes = load_lanes
        self._save_lanes = save_lanes
        self._rank, self._ranks = rank, ranks
        self._clock = clock
        self._loads: queue.SimpleQueue[tuple[LoadJob, float]] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[FinishedLoad] = queue.SimpleQueue()
        self._saves: queue.SimpleQueue[tuple[Lane, list[str]]] = queue.SimpleQueue()
        self._save_pause_ends = float("-inf")
        self._saves_refused = False

    def start(self) -> None:
        """Begins to work. The threads live as long as the process: the lanes do as well."""
        threading.Thread(target=self._serve_loads, name="kvtierd-loads", daemon=True).start()
        threading.Thread(target=self._serve_saves, name="kvtierd-saves", daemon=True).start()

    def submit_load(self, job: LoadJob) -> None:
        """Takes a load. It ends within the guard's limit from now on, one way or the other."""
        self._loads.put((job, self._clock() + self._guard.limit_seconds))

    def finished_loads(self) -> list[FinishedLoad]:
        """Those that have ended since the last call."""
        finished = []
        while not self._finished.empty():
            finished.append(self._finished.get())
        return finished

    def save(self, blocks: Sequence[BlockRef]) -> int:
        """Copies blocks and sees to it that the pool gets them. How many there was no room for; they are dropped."""
        if not self._joined() or self._guard.skipping or self._clock() < self._save_pause_ends:
            return len(blocks)
        patience_ends = self._clock() + _SAVE_PATIENCE_SECONDS
        for first in range(0, len(blocks), self._save_lanes.blocks):
            batch = blocks[first : first + self._save_lanes.blocks]
            lane = self._save_lanes.take(patience_ends - self._clock())
            if lane is None:
                return len(blocks) - first
            keys = [rank_key(block.key, self._rank, self._ranks) for block in batch]
            for index, (block, key) in enumerate(zip(batch, keys, strict=True)):
                self._copier.copy_out(block.block_id, lane.block_offset(index))
                lane.close_object(index, key)
            self._saves.put((lane, keys))
        return 0

    # --- loads -------------------------------------------------------------------------------------------------------

    def _serve_loads(self) -> None:
        while True:
            job, deadline = self._loads.get()
            good, why = 0, ""
            started = self._clock()
            try:
                good, why = self._load(job, deadline)
            except Exception as error:  # noqa: BLE001 - a fault here must cost a cache hit, not the engine
                _log.exception("kvtierd: a load failed unexpectedly")
                good, why = 0, str(error)
            failed = frozenset(block.block_id for block in job.blocks[good:])
            if failed:
                _log.warning(
                    "kvtierd: %d of %d blocks of request %s could not be loaded (%s); they are computed instead",
                    len(failed), len(job.blocks), job.request_id, why,
                )  # fmt: skip
            else:
                _log.debug("kvtierd: loaded %d blocks in %.1f ms", good, 1e3 * (self._clock() - started))
            self._finished.put(FinishedLoad(job.request_id, failed))

    def _load(self, job: LoadJob, deadline: float) -> tuple[int, str]:
        """How many blocks from the first on are in place, and why not all."""
        good = 0
        while good < len(job.blocks):
            if not self._joined():
                return good, "not in the pool"
            lane = self._load_lanes.take(deadline - self._clock())
            remaining = deadline - self._clock()
            if lane is None or remaining <= 0:
                if lane is not None:
                    self._load_lanes.give_back(lane)
                return good, "no time left"
            batch = job.blocks[good : good + lane.blocks]
            try:
                filled, why = self._fill(lane, batch, remaining)
            except TierUnavailableError as error:
                return good, str(error)
            good += filled
            if filled < len(batch):
                return good, why
        return good, ""

    def _fill(self, lane: Lane, batch: Sequence[BlockRef], limit_seconds: float) -> tuple[int, str]:
        """Gets these blocks over this lane, which is given back in any case, and copies the good ones in."""
        keys = [rank_key(block.key, self._rank, self._ranks) for block in batch]
        for index in range(len(batch)):
            lane.break_object(index)
        spans = lane.spans(len(batch))
        codes = self._call("get", lambda: self._store.get(keys, spans), limit_seconds, lane, self._load_lanes)
        try:
            for index, block in enumerate(batch):
                code = codes[index] if index < len(codes) else -1
                if code == 0 and not lane.is_object_of(index, keys[index]):
                    return index, self._reject(keys[index], "its bytes belong to another key")
                if code == SIZE_DIFFERS:
                    return index, self._reject(keys[index], "its size is another")
                if code == KEY_GONE:
                    # Evicted between the lookup and the get: everyday life of a cache, no reason to skip the tier.
                    return index, "evicted meanwhile"
                if code != 0:
                    self._guard.trip(f"get answered {code}")
                    return index, f"get answered {code}"
                self._copier.copy_in(block.block_id, lane.block_offset(index))
        finally:
            self._load_lanes.give_back(lane)
        return len(batch), ""

    def _reject(self, key: str, why: str) -> str:
        """Removes a wrong object: a put would leave it in place."""
        _log.error("kvtierd: object %s is wrong: %s; it is removed", key, why)
        try:
            self._guard.call("remove", lambda: self._store.remove([key]))
        except TierUnavailableError as error:
            _log.warning("kvtierd: the wrong object could not be removed: %s", error)
        return "wrong object"

    # --- saves -------------------------------------------------------------------------------------------------------

    def _serve_saves(self) -> None:
        while True:
            lane, keys = self._saves.get()
            try:
                self._put(lane, keys)
            except TierUnavailableError as error:
                _log.debug("kvtierd: %d blocks not saved: %s", len(keys), error)
            except Exception:  # noqa: BLE001 - as for loads
                _log.exception("kvtierd: a save failed unexpectedly")

    def _put(self, lane: Lane, keys: Sequence[str]) -> None:
        spans = lane.spans(len(keys))
        codes = self._call("put", lambda: self._store.put(keys, spans), None, lane, self._save_lanes)
        self._save_lanes.give_back(lane)
        stored = sum(code == 0 for code in codes)
        _log.debug("kvtierd: saved %d of %d blocks", stored, len(keys))
        if stored == 0:
            # Loads may well work: the tier as a whole is not skipped for this.
            self._save_pause_ends = self._clock() + _SAVE_PAUSE_SECONDS
            if not self._saves_refused:
                _log.warning(
                    "kvtierd: the pool takes no blocks: put answered %s", codes[0] if codes else "nothing"
                )
        elif self._saves_refused:
            _log.info("kvtierd: the pool takes blocks again")
        self._saves_refused = stored == 0

    def _call(
        self,
        what: str,
        function: Callable[[], list[int]],
        limit_seconds: float | None,
        lane: Lane,
        lanes: Lanes,
    ) -> list[int]:
        """The call's codes; the lane is then still the caller's. After an exception it is not."""
        try:
            return self._guard.call(
                what, function, limit_seconds=limit_seconds, on_late=lambda: lanes.give_back(lane)
            )
        except TierUnavailableError as error:
            if not error.late:
                lanes.give_back(lane)
            raise
