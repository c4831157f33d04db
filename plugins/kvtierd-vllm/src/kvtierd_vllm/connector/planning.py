"""What to look up, load and save: the scheduler's side without vLLM, MemCache or a clock.

Block numbers count a request's blocks from its first token; block ids are places in the engine's KV cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class BlockRef:
    """An object of the pool and the block of the KV cache that it belongs in."""

    key: str
    block_id: int


@dataclasses.dataclass(frozen=True, slots=True)
class LoadJob:
    """Fill these blocks before the request runs; in the order of its tokens."""

    request_id: str
    blocks: tuple[BlockRef, ...]


@dataclasses.dataclass(slots=True)
class StepPlan:
    """What the worker is to do in one step."""

    loads: list[LoadJob] = dataclasses.field(default_factory=list)
    saves: list[BlockRef] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request in one step of the scheduler.

    ``block_ids`` are all its blocks when ``replaces``, else those that were added. ``computed_tokens`` had their KV
    before the step (in the engine's cache or loaded), ``new_tokens`` get it in the step.
    """

    request_id: str
    block_ids: Sequence[int]
    replaces: bool
    computed_tokens: int
    new_tokens: int


@dataclasses.dataclass(slots=True)
class _Track:
    hashes: Sequence[bytes]  # the request's own list: it grows while the request generates
    block_ids: list[int] = dataclasses.field(default_factory=list)
    stored: set[int] = dataclasses.field(
        default_factory=set
    )  # block numbers in the pool, or on their way there
    saved_up_to: int = 0  # every number below it is in `stored`
    may_load: bool = True
    offered_from: int = 0  # number of the first block that was offered
    loading: tuple[BlockRef, ...] = ()


class Planner:
    """Follows all requests from the first look-up to their end."""

    def __init__(self, key: Callable[[bytes], str], block_tokens: int, *, loads: bool, saves: bool) -> None:
        self._key = key
        self._block_tokens = block_tokens
        self._loads = loads
        self._saves = saves
        self._tracks: dict[str, _Track] = {}
        self._pending: list[LoadJob] = []

    def __len__(self) -> int:
        return len(self._tracks)

    def track(self, request_id: str, hashes: Sequence[bytes]) -> None:
        """Begins to follow a request; again for one that is known is fine."""
        self._tracks.setdefault(request_id, _Track(hashes))

    def may_load(self, request_id: str) -> bool:
        """Whether it is worth looking: not after a load of this request has failed."""
        track = self._tracks.get(request_id)
        return self._loads and track is not None and track.may_load

    def keys_to_look_up(self, request_id: str, prompt_tokens: int) -> list[str]:
        """The keys of all blocks of a prompt that could be hits, also those in the engine's own cache.

        The last token is always computed, since its output is what is wanted. Blocks that the engine has and the pool
        lacks are saved then: so the pool fills again after it was lost.
        """
        track = self._tracks[request_id]
        count = min(max(prompt_tokens - 1, 0) // self._block_tokens, len(track.hashes))
        return [self._key(block_hash) for block_hash in track.hashes[:count]]

    def hit_blocks(self, request_id: str, present: Sequence[bool], computed_tokens: int) -> int:
        """How many blocks behind the computed tokens can be loaded: up to the first that is missing."""
        track = self._tracks[request_id]
        track.stored = {number for number, there in enumerate(present) if there}
        track.saved_up_to = 0
        first = end = track.offered_from = computed_tokens // self._block_tokens
        while end < len(present) and present[end]:
            end += 1
        return end - first if end > first else 0

    def allocated(self, request_id: str, block_ids: Sequence[int], external_tokens: int) -> None:
        """The engine took the last offer, or the beginning of it; ``block_ids`` are all blocks of the request."""
        track = self._tracks.get(request_id)
        if track is None or external_tokens <= 0:
            return
        first = track.offered_from
        end = first + external_tokens // self._block_tokens
        track.loading = tuple(BlockRef(self._key(track.hashes[n]), block_ids[n]) for n in range(first, end))
        self._pending.append(LoadJob(request_id, track.loading))

    def loaded(self, request_id: str, invalid_block_ids: Iterable[int]) -> None:
        """A load has ended. After a failed one the request is computed, and not looked up again.

        The blocks that were said to be there are saved again when they have been computed.
        """
        track = self._tracks.get(request_id)
        if track is None:
            return
        invalid = set(invalid_block_ids)
        if any(block.block_id in invalid for block in track.loading):
            track.may_load = False
            track.stored.clear()
            track.saved_up_to = 0
        track.loading = ()

    def step(self, scheduled: Iterable[ScheduledRequest]) -> StepPlan:
        """The plan for a step, in which these requests run."""
        plan = StepPlan(loads=self._pending)
        self._pending = []
        for request in scheduled:
            track = self._tracks.get(request.request_id)
            if track is None:
                continue
            if request.replaces:
                track.block_ids = list(request.block_ids)
            else:
                track.block_ids.extend(request.block_ids)
            if self._saves:
                plan.saves.extend(self._to_save(track, request.computed_tokens + request.new_tokens))
        return plan

    def finished(self, request_id: str) -> None:
        """The request is over."""
        self._tracks.pop(request_id, None)

    def forget_stored(self) -> None:
        """Nothing that is in the pool counts any more (its keys have changed)."""
        for track in self._tracks.values():
            track.stored.clear()
            track.saved_up_to = 0

    def _to_save(self, track: _Track, tokens: int) -> Iterator[BlockRef]:
        full = min(tokens // self._block_tokens, len(track.hashes), len(track.block_ids))
        for number in range(track.saved_up_to, full):
            if number not in track.stored:
                track.stored.add(number)
                yield BlockRef(self._key(track.hashes[number]), track.block_ids[number])
        track.saved_up_to = max(track.saved_up_to, full)
