"""The scheduler: one thread that computes, a few sequences in turn, in steps of one chunk or one token.

A sequence passes through *waiting* (no room yet), *loading* (L3 fills its first blocks), *running* and the end. Its
blocks are reserved when it leaves waiting, for its whole length, so nothing is ever preempted. Loading happens in the
tier's thread; the others compute on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Literal

import numpy as np

from kvtierd_refengine.blockpool import BlockPool, block_hashes
from kvtierd_refengine.l3tier import L3Tier, LoadJob, SaveJob
from kvtierd_refengine.model import FloatArray, Model
from kvtierd_refengine.stats import EngineStats, Load, PromptTokens
from kvtierd_refengine.tokenizer import END_OF_TEXT, SPEAKABLE

FinishReason = Literal["stop", "length", "abort", "error"]
_log = logging.getLogger(__name__)
_SPEAKABLE: Final = np.array(SPEAKABLE)
# Random weights fall into loops. A token may not come again this soon, so that the text depends on all of the prompt.
_NO_REPEAT_TOKENS: Final = 12
_IDLE_SECONDS: Final = 0.5
_NO_ROOM_SECONDS: Final = 0.02


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """What a finished request used. ``logits_digest`` covers every step's logits to the bit."""

    prompt_tokens: int
    completion_tokens: int
    l1_tokens: int
    l3_tokens: int
    logits_digest: str

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that had to be computed."""
        return self.prompt_tokens - self.l1_tokens - self.l3_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Token:
    """One generated token."""

    token: int


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """The end of a request; nothing follows. ``usage`` is of what was done until then."""

    reason: FinishReason
    usage: Usage


Event = Token | Finished


class QueueFullError(Exception):
    """Too many requests are waiting."""


class StoppingError(Exception):
    """The engine takes no more requests."""


@dataclasses.dataclass(slots=True, eq=False)
class _Sequence:
    """One request. Only the compute thread changes it, except ``cancelled``."""

    prompt: list[int]
    max_tokens: int
    ignore_eos: bool
    sink: Callable[[Event], None]
    hashes: list[bytes]
    arrived_seconds: float
    slots: list[int] = dataclasses.field(default_factory=list)
    blocks: list[FloatArray] = dataclasses.field(default_factory=list)
    position: int = 0  # tokens whose keys and values are in the blocks
    output: list[int] = dataclasses.field(default_factory=list)
    l1_blocks: int = 0
    l3_blocks: int = 0
    digest: hashlib._Hash = dataclasses.field(default_factory=hashlib.sha256)
    cancelled: bool = False


class EngineCore:
    """Computes requests. ``submit`` and ``cancel`` may be called from any thread; sinks run in the compute thread."""

    def __init__(
        self,
        model: Model,
        pool: BlockPool,
        *,
        max_sequences: int,
        max_queue: int,
        prefix_cache: bool = True,
    ) -> None:
        self._prefix_cache = prefix_cache
        self.model = model
        self.pool = pool
        self.identity = model.config.identity(model.block_size)
        self._max_sequences = max_sequences
        self._max_queue = max_queue
        self._tier: L3Tier | None = None
        self._stats: EngineStats | None = None
        self._changed = threading.Condition()
        self._waiting: deque[_Sequence] = deque()
        self._loading: list[_Sequence] = []
        self._loaded: deque[tuple[_Sequence, int]] = deque()
        self._running: deque[_Sequence] = deque()
        self._stepping: _Sequence | None = None  # in no queue meanwhile
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)

    def start(self, stats: EngineStats, tier: L3Tier | None) -> None:
        """Begins to compute, with L3 when a tier is given."""
        self._stats, self._tier = stats, tier
        self._thread.start()

    def stop(self, timeout_seconds: float) -> bool:
        """Ends every request with ``abort``, then the thread. False when it did not end in time."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def load(self) -> Load:
        """The load now. Requests that wait for L3 count as running."""
        with self._changed:
            running, waiting = self._count_running(), len(self._waiting)
        return Load(running, waiting, self.pool.owned / self.pool.total)

    def refusal(self, prompt_tokens: int, max_tokens: int) -> str | None:
        """Why a request of this size can never be computed, or None."""
        if not prompt_tokens:
            return "The prompt is empty."
        total, limit = prompt_tokens + max_tokens, self.model.max_tokens
        if total > limit:
            return (
                f"This model's maximum context length is {limit} tokens. However, you requested {total} tokens "
                f"({prompt_tokens} in the prompt, {max_tokens} in the completion)."
            )
        if self._blocks_for(total) > self.pool.total:
            return f"The request needs {self._blocks_for(total)} KV blocks; the cache has {self.pool.total} in all."
        return None

    def submit(
        self, prompt: Sequence[int], max_tokens: int, *, ignore_eos: bool, sink: Callable[[Event], None]
    ) -> Callable[[], None]:
        """Queues a request that ``refusal`` has nothing against; returns what cancels it.

        Raises:
            QueueFullError, StoppingError: it was not taken; the sink will not be called.
        """
        sequence = _Sequence(
            prompt=list(prompt),
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            sink=sink,
            hashes=block_hashes(self.identity, prompt, self.model.block_size),
            arrived_seconds=time.monotonic(),
        )
        with self._changed:
            if self._stopping:
                raise StoppingError
            if len(self._waiting) >= self._max_queue:
                raise QueueFullError
            self._waiting.append(sequence)
            self._changed.notify_all()

        def cancel() -> None:
            with self._changed:
                sequence.cancelled = True
                self._changed.notify_all()

        return cancel

    # --- the compute thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._stopping:
                    break
                self._drop_cancelled()
                self._take_loaded()
                started = self._admit()
                sequence = self._stepping = self._running.popleft() if self._running else None
                if sequence is None and not started:
                    self._changed.wait(_NO_ROOM_SECONDS if self._waiting else _IDLE_SECONDS)
            for each in started:
                self._begin(each)
            # In turns: a long prefill slows the others' tokens down, but does not stop them.
            goes_on = sequence is not None and self._step(sequence)
            with self._changed:
                self._stepping = None
                if sequence is not None and goes_on:
                    self._running.append(sequence)
        with self._changed:
            rest = [*self._waiting, *self._loading, *self._running]
            self._waiting.clear()
            self._running.clear()
            self._loading.clear()
        for each in rest:
            self._finish(each, "abort", keep_blocks=True)

    def _drop_cancelled(self) -> None:
        """A loading sequence is left until the tier is done with its blocks."""
        for queue in (self._waiting, self._running):
            for sequence in [s for s in queue if s.cancelled]:
                queue.remove(sequence)
                self._finish(sequence, "abort")

    def _take_loaded(self) -> None:
        while self._loaded:
            sequence, blocks = self._loaded.popleft()
            self._loading.remove(sequence)
            self._enter(sequence, blocks)

    def _admit(self) -> list[_Sequence]:
        """Gives blocks to waiting sequences, first come first served. They count as loading until they run."""
        admitted: list[_Sequence] = []
        while self._waiting and self._count_running() < self._max_sequences:
            sequence = self._waiting[0]
            # The last token is always computed: its logits are needed.
            usable = (len(sequence.prompt) - 1) // self.model.block_size
            slots = self.pool.match(sequence.hashes[:usable]) if self._prefix_cache else []
            total = self._blocks_for(len(sequence.prompt) + sequence.max_tokens)
            fresh = self.pool.allocate(total - len(slots))
            if fresh is None:
                self.pool.release(reversed(slots))
                break
            self._waiting.popleft()
            sequence.l1_blocks = len(slots)
            sequence.slots = slots + fresh
            sequence.blocks = [self.pool.block(slot) for slot in sequence.slots]
            self._loading.append(sequence)
            admitted.append(sequence)
        return admitted

    def _begin(self, sequence: _Sequence) -> None:
        """Asks L3 for what L1 does not have. Runs without the lock: the tier calls back with it."""
        usable = (len(sequence.prompt) - 1) // self.model.block_size
        job = LoadJob(
            sequence.hashes[sequence.l1_blocks : usable],
            sequence.blocks[sequence.l1_blocks : usable],
            lambda blocks: self._on_loaded(sequence, blocks),
        )
        if self._tier is None or not self._tier.submit_load(job):
            self._on_loaded(sequence, 0)

    def _on_loaded(self, sequence: _Sequence, blocks: int) -> None:
        with self._changed:
            self._loaded.append((sequence, blocks))
            self._changed.notify_all()

    def _enter(self, sequence: _Sequence, loaded: int) -> None:
        """The cached part is known: from here on the sequence computes."""
        assert self._stats is not None
        size = self.model.block_size
        sequence.l3_blocks = loaded
        for index in range(sequence.l1_blocks, sequence.l1_blocks + loaded):
            self.pool.publish(sequence.slots[index], sequence.hashes[index])
        sequence.position = (sequence.l1_blocks + loaded) * size
        l1_tokens, total = sequence.l1_blocks * size, len(sequence.prompt)
        queried = total - l1_tokens if self._tier is not None and self._tier.state != "closed" else None
        self._stats.prompt_started(PromptTokens(total, l1_tokens, loaded * size, queried))
        self._running.append(sequence)

    def _step(self, sequence: _Sequence) -> bool:
        """One chunk or one token; False when the sequence has ended."""
        try:
            if sequence.position < len(sequence.prompt):
                return self._prefill_chunk(sequence)
            logits = self._forward(sequence, sequence.output[-1:])
            return self._emit(sequence, logits)
        except Exception:  # noqa: BLE001 - one request's fault must not end the engine
            _log.exception("a request failed; the others go on")
            self._finish(sequence, "error")
            return False

    def _prefill_chunk(self, sequence: _Sequence) -> bool:
        size, start = self.model.block_size, sequence.position
        chunk = sequence.prompt[start : start + size]
        logits = self._forward(sequence, chunk)
        if len(chunk) == size:
            index = start // size
            self.pool.publish(sequence.slots[index], sequence.hashes[index])
        if sequence.position < len(sequence.prompt):
            return True
        self._save(sequence)
        assert self._stats is not None
        self._stats.first_token(len(sequence.prompt), time.monotonic() - sequence.arrived_seconds)
        return self._emit(sequence, logits)

    def _forward(self, sequence: _Sequence, tokens: Sequence[int]) -> FloatArray:
        last = sequence.position // self.model.block_size
        logits = self.model.forward(tokens, sequence.position, sequence.blocks[: last + 1])
        sequence.position += len(tokens)
        return logits

    def _emit(self, sequence: _Sequence, logits: FloatArray) -> bool:
        """Chooses a token from the logits, hands it out, and ends the sequence when it is the last."""
        assert self._stats is not None
        sequence.digest.update(logits.tobytes())
        scores = logits[_SPEAKABLE]
        barred = sequence.output[-_NO_REPEAT_TOKENS:]
        scores[np.isin(_SPEAKABLE, [*barred, END_OF_TEXT] if sequence.ignore_eos else barred)] = -np.inf
        token = int(_SPEAKABLE[scores.argmax()])
        sequence.output.append(token)
        self._stats.token()
        if token == END_OF_TEXT:
            self._finish(sequence, "stop")
            return False
        self._send(sequence, Token(token))
        if len(sequence.output) >= sequence.max_tokens:
            self._finish(sequence, "length")
            return False
        return True

    def _save(self, sequence: _Sequence) -> None:
        """Offers the prompt's full blocks to L3, also those found in L1: the pool may have lost them since."""
        if self._tier is None:
            return
        came_from_l3 = range(sequence.l1_blocks, sequence.l1_blocks + sequence.l3_blocks)
        indexes = [i for i in range(len(sequence.hashes)) if i not in came_from_l3]
        slots = [sequence.slots[i] for i in indexes]
        if not slots:
            return
        self.pool.retain(slots)
        self._tier.submit_save(
            SaveJob(
                [sequence.hashes[i] for i in indexes],
                [sequence.blocks[i] for i in indexes],
                lambda index: self.pool.release([slots[index]]),
            )
        )

    def _finish(self, sequence: _Sequence, reason: FinishReason, *, keep_blocks: bool = False) -> None:
        assert self._stats is not None
        if not keep_blocks:
            self.pool.release(reversed(sequence.slots))
        sequence.slots, sequence.blocks = [], []
        size = self.model.block_size
        usage = Usage(
            prompt_tokens=len(sequence.prompt),
            completion_tokens=len(sequence.output),
            l1_tokens=sequence.l1_blocks * size,
            l3_tokens=sequence.l3_blocks * size,
            logits_digest=sequence.digest.hexdigest()[:16],
        )
        self._stats.finished(reason)
        if self._stepping is sequence:
            self._stepping = None  # whoever hears of the end may look at the load at once
        self._send(sequence, Finished(reason, usage))

    def _send(self, sequence: _Sequence, event: Event) -> None:
        try:
            sequence.sink(event)
        except Exception as error:  # noqa: BLE001 - the receiver's fault must not end the engine
            _log.warning("a request's receiver failed: %s", error)

    def _count_running(self) -> int:
        return len(self._running) + len(self._loading) + (self._stepping is not None)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.model.block_size)


def build(
    config_model: Model, *, l1_bytes: int, max_sequences: int, max_queue: int, prefix_cache: bool = True
) -> EngineCore:
    """An engine core whose L1 cache takes at most ``l1_bytes``. Raises ValueError when not one block fits."""
    config, size = config_model.config, config_model.block_size
    shape = (config.layers, 2, config.kv_heads, size, config.head_size)
    block_bytes = config.kv_bytes_per_token * size
    blocks = l1_bytes // block_bytes
    if blocks < 1:
        raise ValueError(f"an L1 cache of {l1_bytes} bytes does not hold one block of {block_bytes} bytes")
    return EngineCore(
        config_model,
        BlockPool(blocks, shape),
        max_sequences=max_sequences,
        max_queue=max_queue,
        prefix_cache=prefix_cache,
    )
