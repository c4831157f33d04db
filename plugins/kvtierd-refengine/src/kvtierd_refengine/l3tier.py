"""L3 for the engine: loads prefixes from the pool before prefill, saves full blocks to it afterwards.

Two threads, one for loads and one for saves, take jobs from bounded queues; every MemCache call of theirs goes through
the guard. Bytes pass through registered *lanes* of a few blocks each and are copied on: a call that hangs keeps its
lane, never a block of the L1 cache or of a running request.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from kvtierd_refengine.blockobject import HEADER_BYTES, WrongBytesError, object_key, seal, unseal
from kvtierd_refengine.l3attach import Attachment, AttachState
from kvtierd_refengine.l3guard import CallGuard, TierUnavailableError
from kvtierd_refengine.l3store import KEY_GONE, SIZE_DIFFERS, BlockStore, Span

FloatArray = npt.NDArray[np.float32]
FailedLoad = Literal["wrong-bytes", "gone", "error", "timeout"]
_log = logging.getLogger(__name__)
_LANES: Final = CallGuard.MOST_STUCK + 1
_LANE_BLOCKS: Final = 8
_MOST_LOADS: Final = 64
_CLOSE_SECONDS: Final = 5.0


class TierBusyError(Exception):
    """The tier cannot be taken off or on just now; nothing has changed. Another try may do."""


class TierEvents(Protocol):
    """What the tier reports to whoever counts. Called from the tier's threads."""

    def failed_load(self, reason: FailedLoad, blocks: int) -> None:
        """Blocks that the pool said it had and that could not be used; they are computed instead."""

    def failed_lookup(self) -> None:
        """A lookup that timed out or answered an error; nothing was loaded for that request."""

    def saved(self, blocks: int) -> None:
        """Blocks that the pool took."""

    def not_saved(self, blocks: int) -> None:
        """Blocks that did not get there: queue full, tier skipped, or refused by the pool."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoadJob:
    """Fill ``blocks`` (memory nobody else looks at) with the blocks of ``hashes``, from the first on."""

    hashes: Sequence[bytes]
    blocks: Sequence[FloatArray]
    done: Callable[[int], None]  # called once, with the length of the usable prefix in blocks


@dataclasses.dataclass(frozen=True, slots=True)
class SaveJob:
    """Put these blocks; ``release`` is called once for each index as soon as its memory is no longer needed."""

    hashes: Sequence[bytes]
    blocks: Sequence[FloatArray]
    release: Callable[[int], None]


@dataclasses.dataclass(frozen=True, slots=True)
class TierOptions:
    """Limits of the tier; see the server's ``--help``."""

    namespace: str
    call_limit_seconds: float = 1.0
    cooldown_seconds: float = 5.0
    init_deadline_seconds: float = 10.0
    most_pending_saves: int = 128  # blocks


class L3Tier:
    """The pool as a tier. All methods return at once, except ``close``."""

    def __init__(
        self,
        store: BlockStore,
        options: TierOptions,
        *,
        model_identity: bytes,
        block_bytes: int,
        events: TierEvents,
    ) -> None:
        self._store = store
        self._options = options
        self._identity = model_identity
        self._object_bytes = HEADER_BYTES + block_bytes
        self._events = events
        self._lane_memory = np.zeros((_LANES, _LANE_BLOCKS, self._object_bytes), dtype=np.uint8)
        self._free_lanes: queue.SimpleQueue[int] = queue.SimpleQueue()
        for lane in range(_LANES):
            self._free_lanes.put(lane)
        span = Span(self._lane_memory.ctypes.data, self._lane_memory.nbytes)
        self._guard = CallGuard(
            limit_seconds=options.call_limit_seconds,
            cooldown_seconds=options.cooldown_seconds,
            on_trip=self._tripped,
        )
        self._span = span
        self._attachment = self._new_attachment()
        self._switching = threading.Lock()
        self._loads: queue.Queue[LoadJob] = queue.Queue(_MOST_LOADS)
        self._saves: queue.SimpleQueue[SaveJob] = queue.SimpleQueue()
        self._pending_lock = threading.Lock()
        self._pending_saves: set[bytes] = set()
        self._closed = False

    def _new_attachment(self) -> Attachment:
        return Attachment(self._store, [self._span], deadline_seconds=self._options.init_deadline_seconds)

    @property
    def state(self) -> AttachState:
        """Whether the pool has been joined."""
        return self._attachment.state

    @property
    def problem(self) -> str:
        """Why the last attempt to join failed, if it did."""
        return self._attachment.problem

    @property
    def skipping(self) -> bool:
        """Whether the breaker keeps requests away from the pool at the moment."""
        return self._guard.skipping

    @property
    def usable(self) -> bool:
        """Attached and not being skipped."""
        return self.state == "attached" and not self.skipping and not self._closed

    def start(self) -> None:
        """Begins to join the pool and to take jobs."""
        self._attachment.start()
        threading.Thread(target=self._serve_loads, name="l3-loads", daemon=True).start()
        threading.Thread(target=self._serve_saves, name="l3-saves", daemon=True).start()

    @property
    def settled(self) -> bool:
        """Whether the first attempt to join has an outcome, or has passed its deadline."""
        return self._attachment.settled

    def close(self, timeout_seconds: float = _CLOSE_SECONDS) -> bool:
        """Takes no more jobs and leaves the pool. False when MemCache did not finish in time.

        A client that is closed under a call of its own can crash: with a call stuck there is no goodbye.
        """
        self._closed = True
        self._guard.shut()
        if not self._calls_end(timeout_seconds):
            _log.warning(
                "L3 left without closing: %d MemCache calls have not returned", self._guard.in_flight
            )
            return False
        return self._attachment.close(timeout_seconds)

    def _calls_end(self, timeout_seconds: float) -> bool:
        deadline = time.monotonic() + min(timeout_seconds, self._options.call_limit_seconds)
        while self._guard.in_flight:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        return True

    def detach(self, timeout_seconds: float = _CLOSE_SECONDS) -> None:
        """Leaves the pool; requests are computed without it until :meth:`attach`. Off already, nothing happens.

        Raises:
            TierBusyError: a MemCache call has not returned, so the client cannot be closed; it goes on as before.
        """
        with self._switching:
            if self.state == "closed":
                return
            if self.state in {"attaching", "hung"}:
                raise TierBusyError("MemCache's init has not returned")
            self._guard.shut()
            if not self._calls_end(timeout_seconds):
                self._guard.reopen()
                raise TierBusyError(f"{self._guard.in_flight} MemCache calls have not returned")
            if not self._attachment.close(timeout_seconds):
                _log.warning("L3 is off; MemCache's close has not returned yet")
            _log.info("L3 detached: requests are computed without the pool")

    def attach(self) -> None:
        """Begins to join the pool again; ``state`` tells how it ends. On already, nothing happens.

        Raises:
            TierBusyError: MemCache has not let go of the client that was detached.
        """
        with self._switching:
            if self._closed or self.state != "closed":
                return
            if self._attachment.busy:
                raise TierBusyError("MemCache has not closed its client yet")
            self._attachment = self._new_attachment()
            self._guard.reopen()
            self._attachment.start()

    def submit_load(self, job: LoadJob) -> bool:
        """Queues a load. False, and ``done`` is never called, when the tier cannot be used now."""
        if not job.hashes or not self.usable:
            return False
        try:
            self._loads.put_nowait(job)
        except queue.Full:
            return False
        return True

    def submit_save(self, job: SaveJob) -> None:
        """Queues a save. What does not fit, or is under way already, is released at once."""
        room = self._options.most_pending_saves if self.usable else 0
        taken: list[int] = []
        dropped: list[int] = []
        with self._pending_lock:
            known = {i for i, h in enumerate(job.hashes) if h in self._pending_saves}
            for index, block_hash in enumerate(job.hashes):
                if index in known:
                    continue
                if len(self._pending_saves) < room:
                    self._pending_saves.add(block_hash)
                    taken.append(index)
                else:
                    dropped.append(index)
        for index in (*known, *dropped):
            job.release(index)
        if dropped:
            self._events.not_saved(len(dropped))
        if taken:
            self._saves.put(
                SaveJob(
                    [job.hashes[i] for i in taken],
                    [job.blocks[i] for i in taken],
                    lambda index: job.release(taken[index]),
                )
            )

    def drained(self) -> bool:
        """Whether every accepted save has ended one way or the other."""
        with self._pending_lock:
            return not self._pending_saves

    # --- loads -----------------------------------------------------------------------------------------------------

    def _serve_loads(self) -> None:
        while True:
            job = self._loads.get()
            usable = 0
            try:
                usable = self._load(job)
            except TierUnavailableError as error:
                _log.info("L3 load: %s", error)
            except Exception:  # noqa: BLE001 - a fault here must cost a cache hit, not the engine
                _log.exception("L3 load failed unexpectedly")
            job.done(usable)

    def _load(self, job: LoadJob) -> int:
        keys = [object_key(self._options.namespace, self._identity, h) for h in job.hashes]
        try:
            present = self._exists(keys)
        except TierUnavailableError as error:
            if error.reason != "skipped":
                self._events.failed_lookup()
            raise
        wanted = present.index(False) if False in present else len(present)
        # All calls of one load share a deadline: the request could have been computing meanwhile.
        deadline = time.monotonic() + 2 * self._options.call_limit_seconds
        loaded = 0
        while loaded < wanted and time.monotonic() < deadline:
            end = min(loaded + _LANE_BLOCKS, wanted)
            good = self._load_batch(keys[loaded:end], job.hashes[loaded:end], job.blocks[loaded:end])
            loaded += good
            if loaded < end:
                break
        return loaded

    def _exists(self, keys: Sequence[str]) -> list[bool]:
        codes = self._guard.call("exist", lambda: self._store.exists(keys))
        failed = [code for code in codes if code < 0]
        if failed or len(codes) != len(keys):
            message = f"exist answered {failed[0] if failed else 'too little'}"
            self._guard.trip(message)
            raise TierUnavailableError("error", message)
        return [code == 1 for code in codes]

    def _load_batch(self, keys: Sequence[str], hashes: Sequence[bytes], blocks: Sequence[FloatArray]) -> int:
        """Loads up to one lane of blocks; returns how many from the first on are good."""
        lane = self._take_lane()
        spans = self._spans(lane, len(keys))
        try:
            codes = self._call_with_lane("get", lane, lambda: self._store.get(keys, spans))
        except TierUnavailableError as error:
            if error.reason != "skipped":
                self._events.failed_load("timeout" if error.reason == "timeout" else "error", len(keys))
            raise
        good = 0
        try:
            for index, (key, block_hash, block) in enumerate(zip(keys, hashes, blocks, strict=True)):
                code = codes[index] if index < len(codes) else -1
                if code != 0:
                    self._report_bad_code(code, key)
                    break
                try:
                    unseal(self._lane_memory[lane, index], self._identity, block_hash, block)
                except WrongBytesError as error:
                    self._reject(key, str(error))
                    break
                good += 1
        finally:
            self._free_lanes.put(lane)
        return good

    def _report_bad_code(self, code: int, key: str) -> None:
        if code == SIZE_DIFFERS:
            self._reject(key, "the stored size differs")
        elif code == KEY_GONE:
            # Evicted between the lookup and the get: normal life of a cache, no reason to skip the tier.
            self._events.failed_load("gone", 1)
        else:
            self._events.failed_load("error", 1)
            self._guard.trip(f"get answered {code}")

    def _reject(self, key: str, why: str) -> None:
        """Counts a wrong object and removes it: a put would leave the old value in place."""
        self._events.failed_load("wrong-bytes", 1)
        _log.error(
            "L3 returned wrong bytes for %s: %s. The block is computed instead, the object removed.", key, why
        )
        try:
            self._guard.call("remove", lambda: self._store.remove([key]))
        except TierUnavailableError as error:
            _log.warning("L3 could not remove the wrong object: %s", error)

    # --- saves -----------------------------------------------------------------------------------------------------

    def _serve_saves(self) -> None:
        while True:
            job = self._saves.get()
            for first in range(0, len(job.hashes), _LANE_BLOCKS):
                indexes = range(first, min(first + _LANE_BLOCKS, len(job.hashes)))
                saved: int | None = 0
                try:
                    saved = self._save_batch(job, indexes)
                except TierUnavailableError as error:
                    _log.info("L3 save: %s", error)
                except Exception:  # noqa: BLE001 - as for loads
                    _log.exception("L3 save failed unexpectedly")
                with self._pending_lock:
                    self._pending_saves.difference_update(job.hashes[i] for i in indexes)
                if saved is not None and saved < len(indexes):
                    self._events.not_saved(len(indexes) - saved)

    def _save_batch(self, job: SaveJob, indexes: range) -> int | None:
        """Saves one lane of blocks: how many the pool has now, or None when it had them all before."""
        unreleased = set(indexes)
        lane: int | None = None
        try:
            keys = {i: object_key(self._options.namespace, self._identity, job.hashes[i]) for i in indexes}
            present = self._exists(list(keys.values()))
            missing = [i for i, there in zip(indexes, present, strict=True) if not there]
            if not missing:
                return None
            lane = self._take_lane()
            for position, index in enumerate(missing):
                seal(self._lane_memory[lane, position], self._identity, job.hashes[index], job.blocks[index])
            for index in indexes:
                unreleased.discard(index)
                job.release(index)
            spans = self._spans(lane, len(missing))
            missing_keys = [keys[i] for i in missing]
            used, lane = lane, None
            codes = self._call_with_lane("put", used, lambda: self._store.put(missing_keys, spans))
            self._free_lanes.put(used)
            stored = sum(code == 0 for code in codes)
            self._events.saved(stored)
            if stored == 0:
                self._guard.trip(f"put answered {codes[0] if codes else 'nothing'}")
            return stored + len(indexes) - len(missing)
        finally:
            if lane is not None:
                self._free_lanes.put(lane)
            for index in unreleased:
                job.release(index)

    # --- shared ----------------------------------------------------------------------------------------------------

    def _take_lane(self) -> int:
        try:
            return self._free_lanes.get_nowait()
        except queue.Empty:
            raise TierUnavailableError(
                "skipped", "every lane is held by a call that has not returned"
            ) from None

    def _call_with_lane(self, what: str, lane: int, function: Callable[[], list[int]]) -> list[int]:
        """The call's codes; the lane is then still the caller's. After an exception it is not."""
        try:
            return self._guard.call(what, function, on_late=lambda: self._free_lanes.put(lane))
        except TierUnavailableError as error:
            if error.reason != "timeout":
                self._free_lanes.put(lane)
            raise

    def _spans(self, lane: int, count: int) -> list[Span]:
        base = self._lane_memory[lane].ctypes.data
        return [Span(base + i * self._object_bytes, self._object_bytes) for i in range(count)]

    def _tripped(self, reason: str) -> None:
        _log.warning("L3 is skipped for %.0f s: %s", self._options.cooldown_seconds, reason)
