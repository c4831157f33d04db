"""Exact hit rates of an LRU cache of prompt blocks, for every size of it at once, from one pass over a trace.

What is modelled. A request first looks up the blocks of its prompt, from the first on, and hits up to the first one that
is not there (a prefix, as engines count). Then all its blocks are used: the hits and those it had to compute, which are
written. Within a request the last block counts as used first and the first block as used last, so that of one prompt the
tail leaves before the head; with that order a block is never there without those before it. The cache evicts one block at
a time, the one that was used longest ago. Two prompts share a block only when everything before it is equal too.

How. Blocks that a request has in common with earlier ones form a few runs, each last used by one earlier request p; a run
begins exactly where p's surviving blocks begin. So the depth of a run's first block in the LRU stack is the number of
blocks last used by requests after p, and the next blocks of the run lie one deeper each. "Blocks used after p" is all
blocks of those requests less what was taken over from them since, which is a sum over earlier runs: counted for all runs
at once, bit by bit of p. The number of runs grows with the requests and not with the blocks (it is that of a
link-cut tree's preferred paths), which is what makes 30 million block references a matter of seconds.

Sampling (SHARDS, Waldspurger et al., FAST 2015): a block is kept when the hash of its prefix is below a threshold, and
depths are scaled up. What the sample has too many or too few references is credited to depth zero, as its authors
propose (SHARDS-adj). The error is estimated from sixteen disjoint parts of the sample.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

from kvtierd.workload.needs import need

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Hashes = NDArray[np.uint64]

MOST_REFERENCES: Final = 36_000_000
"""Block references kept in memory (about 20 bytes each); beyond that the trace is sampled."""

_SAMPLE_BITS: Final = 24
_GROUPS: Final = 16
_T_95: Final = 2.13  # Student's t for 95 % with 15 degrees of freedom
_SPARE: Final = 1 << 21  # a batch comes before it is known to be too much
_PART: Final = 1 << 21  # references that are sorted at a time


def _numpy() -> Any:
    return need("numpy", "compute hit rates against pool sizes")


class BlockTrace:
    """Takes requests in the order in which they came, and keeps what the curve needs.

    Args:
        rate: Share of the blocks to keep, 0 < rate <= 1. ``None``: all, and fewer (a half, a quarter, ...) as soon as
            they are more than ``most_references``.
        most_references: The bound on memory.
    """

    def __init__(self, *, rate: float | None = None, most_references: int = MOST_REFERENCES) -> None:
        self._np = _numpy()
        if rate is not None and not 0 < rate <= 1:
            raise ValueError(f"a sampling rate is above 0 and at most 1, not {rate}")
        self._fixed = rate is not None
        self._threshold = round((rate or 1.0) * (1 << _SAMPLE_BITS)) or 1
        self._most = most_references
        # One place for all, in which a smaller sample is made in place too. What is not written takes no memory.
        self._hashes: Hashes = self._np.empty(min(most_references, MOST_REFERENCES) + _SPARE, self._np.uint64)
        self._lengths: list[Any] = []
        self._countable: list[Any] = []
        self._held = 0
        self.requests = 0
        self.references = 0
        self.countable_references = 0
        self.prompt_tokens = 0

    @property
    def rate(self) -> float:
        """Share of the blocks that is kept now."""
        return self._threshold / (1 << _SAMPLE_BITS)

    def add(self, ids: Hashes, lengths: Ints, countable: Ints, prompt_tokens: int) -> None:
        """More requests.

        Args:
            ids: Content of the blocks, one number each, of all these requests one after the other.
            lengths: How many blocks each request has.
            countable: How many of them, from the first, could be hits: not those that hold the last token of the prompt,
                since an engine computes at least one token.
            prompt_tokens: Tokens of all these prompts.
        """
        hashes = _prefix_hashes(self._np, ids, lengths)
        self.requests += len(lengths)
        self.references += len(ids)
        self.countable_references += int(countable.sum())
        self.prompt_tokens += prompt_tokens
        kept = self._sampled(hashes, lengths, countable)
        self._keep(*kept)
        while not self._fixed and self._held > self._most:
            self._threshold //= 2
            chunks = list(zip(self._lengths, self._countable, strict=True))
            self._lengths, self._countable, self._held, at = [], [], 0, 0
            for held_lengths, held_countable in chunks:
                end = at + int(held_lengths.sum(dtype=self._np.int64))
                self._keep(*self._sampled(self._hashes[at:end], held_lengths, held_countable))
                at = end

    def _keep(self, hashes: Hashes, lengths: Any, countable: Any) -> None:
        end = self._held + len(hashes)
        if end > len(self._hashes):
            larger = self._np.empty(end + end // 2, self._np.uint64)
            larger[: self._held] = self._hashes[: self._held]
            self._hashes = larger
        self._hashes[self._held : end] = hashes
        self._held = end
        self._lengths.append(lengths)
        self._countable.append(countable)

    def _sampled(self, hashes: Hashes, lengths: Any, countable: Any) -> tuple[Hashes, Any, Any]:
        np = self._np
        if self._threshold >= 1 << _SAMPLE_BITS:
            return hashes, lengths.astype(np.int32), countable.astype(np.int32)
        chosen = (hashes >> np.uint64(64 - _SAMPLE_BITS)) < np.uint64(self._threshold)
        return _only(np, chosen, hashes, lengths, countable)

    def curve(self) -> HitCurve:
        """The hit rate as a function of the size. The trace is used up: its memory is given back on the way."""
        np = self._np
        lengths = np.concatenate(self._lengths) if self._lengths else np.zeros(0, np.int32)
        countable = np.concatenate(self._countable) if self._countable else np.zeros(0, np.int32)
        hashes = self._hashes[: self._held]
        self._hashes, self._lengths, self._countable, self._held = np.empty(0, np.uint64), [], [], 0
        rate = self.rate
        scatter = self._scatter(hashes, lengths, countable) if rate < 1 else None
        before = _last_users(np, hashes, lengths)
        del hashes  # what follows needs their room
        whole = _depths(np, before, lengths, countable, rate, self.countable_references)
        return HitCurve(
            requests=self.requests,
            references=self.references,
            prompt_tokens=self.prompt_tokens,
            rate=rate,
            whole=whole,
            error=None if scatter is None else scatter + abs(whole.missing) / rate,
        )

    def _scatter(self, hashes: Hashes, lengths: Any, countable: Any) -> float:
        """How far off the hits of the sample may be by chance at the worst of many sizes (95 %), in blocks."""
        np, rate = self._np, self.rate / _GROUPS
        most = max(2.0, len(hashes) / self.rate)
        sizes = np.concatenate((np.geomspace(1, most, 200), np.linspace(1, most, 200)))
        group_of = (hashes & np.uint64(_GROUPS - 1)).astype(np.uint8)
        hits = []
        for group in range(_GROUPS):
            some, some_lengths, some_countable = _only(np, group_of == group, hashes, lengths, countable)
            before = _last_users(np, some, some_lengths)
            depths = _depths(np, before, some_lengths, some_countable, rate, self.countable_references)
            hits.append(depths.hits(sizes))
        return float(_T_95 * (np.stack(hits).std(axis=0, ddof=1) / _GROUPS**0.5).max())


@dataclasses.dataclass(frozen=True)
class HitCurve:
    """Hits against size. ``distinct`` and sizes are in blocks, of the whole trace also when it was sampled.

    ``error``: how far off the hits may be at the worst size (95 %), in blocks: the scatter of the sample's parts, and what
    was credited to depth zero, since how deep those references really were is not known. ``None``: nothing was sampled.
    """

    requests: int
    references: int
    prompt_tokens: int
    rate: float
    whole: _Depths
    error: float | None = None

    @property
    def distinct(self) -> int:
        """Different blocks."""
        return round(self.whole.distinct / self.rate)

    @property
    def most_blocks(self) -> int:
        """The smallest size that has all the hits that an endless pool would have; at least 1."""
        return max(1, round(self.whole.deepest / self.rate))

    @property
    def most_hits(self) -> float:
        """Blocks that an endless pool would have hit."""
        return float(self.whole.hits((self.whole.deepest + 1) / self.rate))

    def hits(self, sizes: Any) -> Any:
        """Blocks hit with each of these sizes (blocks)."""
        return self.whole.hits(sizes)


class _Depths:
    """Runs of hits by their depth in the LRU stack: hits(C) = sum over runs of min(length, blocks of it above C)."""

    def __init__(
        self, np: Any, first: Ints, length: Ints, rate: float, missing: float, distinct: int
    ) -> None:
        self._np = np
        self._rate = rate
        self.missing = missing  # references that the sample has too few, all taken for hits at depth zero
        self.distinct = distinct
        ends = first + length
        self.deepest = int(ends.max()) if len(ends) else 0
        self._begins = np.sort(first)
        self._ends = np.sort(ends)
        zero = np.zeros(1, np.int64)
        self._begin_sums = np.concatenate((zero, np.cumsum(self._begins)))
        self._end_sums = np.concatenate((zero, np.cumsum(self._ends)))

    def hits(self, sizes: Any) -> Any:
        """Blocks hit with caches of these sizes (blocks of the whole trace)."""
        np = self._np
        scaled = np.asarray(sizes, dtype=np.float64) * self._rate
        total = np.zeros_like(scaled)
        for values, sums, sign in ((self._begins, self._begin_sums, 1), (self._ends, self._end_sums, -1)):
            count = np.searchsorted(values, scaled, side="left")
            total += sign * (count * scaled - sums[count])
        return np.maximum(total + self.missing, 0.0) / self._rate


def _only(np: Any, chosen: Any, hashes: Hashes, lengths: Any, countable: Any) -> tuple[Hashes, Any, Any]:
    """The chosen blocks of each request: a chain of fewer blocks in the same order."""
    counts = np.zeros(len(chosen) + 1, np.int32)
    np.cumsum(chosen, out=counts[1:])
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)))
    begin, end = counts[offsets[:-1]], counts[offsets[1:]]
    could_hit = counts[offsets[:-1] + countable] - begin
    return hashes[chosen], (end - begin).astype(np.int32), could_hit.astype(np.int32)


def _mixed(np: Any, values: Hashes) -> Hashes:
    """Finalizer of SplitMix64: every bit of the result depends on every bit of the value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Hashes = values ^ (values >> np.uint64(31))
    return mixed


def _prefix_hashes(np: Any, ids: Hashes, lengths: Ints) -> Hashes:
    """For each block a hash over it and all blocks before it in its request."""
    mixed = _mixed(np, ids + np.uint64(0x9E3779B97F4A7C15))
    starts = np.cumsum(lengths) - lengths
    longest_first = np.argsort(-lengths, kind="stable")
    starts, sorted_lengths = starts[longest_first], lengths[longest_first]
    state = np.full(len(lengths), 0x243F6A8885A308D3, np.uint64)
    # How many requests have more than j blocks, for each j.
    longest = int(sorted_lengths[0]) if len(lengths) else 0
    active = len(lengths) - np.searchsorted(sorted_lengths[::-1], np.arange(longest), side="right")
    for j in range(longest):
        some = int(active[j])
        where = starts[:some] + j
        state[:some] = _mixed(np, state[:some] * np.uint64(0xD1342543DE82EF95) + mixed[where])
        mixed[where] = state[:some]
    return mixed


def _depths(
    np: Any, before: Any, lengths: Any, countable: Any, rate: float, countable_references: int
) -> _Depths:
    """From the last user of each block reference to the depths of runs of hits."""
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)))
    distinct = int((before < 0).sum())
    # Runs: neighbours in one request that were last used by the same earlier one.
    changes = np.empty(len(before), bool)
    changes[:1] = True
    np.not_equal(before[1:], before[:-1], out=changes[1:])
    changes[offsets[:-1][lengths > 0]] = True
    begins = np.flatnonzero(changes)
    del changes
    run_lengths = np.diff(np.append(begins, len(before)))
    earlier = before[begins]
    known = earlier >= 0
    begins, run_lengths, earlier = begins[known], run_lengths[known], earlier[known].astype(np.int64)
    del before
    request = np.searchsorted(offsets, begins, side="right") - 1
    position = begins - offsets[request]
    taken_over = _sum_of_larger_before(np, earlier, run_lengths) - position
    first = offsets[request] - offsets[earlier + 1] - taken_over
    length = np.clip(countable[request] - position, 0, run_lengths)
    counted = length > 0
    missing = countable_references * rate - int(countable.sum(dtype=np.int64)) if rate < 1 else 0.0
    return _Depths(np, first[counted], length[counted], rate, missing, distinct)


def _last_users(np: Any, hashes: Hashes, lengths: Any) -> Any:
    """For each block reference the number of the last earlier request that had this block, else -1 (int32)."""
    count = len(hashes)
    requests = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    before = np.full(count, -1, np.int32)
    parts = 1
    while parts < 256 and parts * _PART < count:
        parts *= 2
    part_of = np.empty(count, np.uint8)
    for start in range(0, count, _PART):
        piece = slice(start, start + _PART)
        part_of[piece] = (hashes[piece] >> np.uint64(8)) & np.uint64(parts - 1)
    for part in range(parts):
        where = np.flatnonzero(part_of == part)
        some = hashes[where]
        order = np.argsort(some, kind="stable")
        some, where = some[order], where[order]
        same = np.flatnonzero(some[1:] == some[:-1])
        before[where[same + 1]] = requests[where[same]]
    return before


def _sum_of_larger_before(np: Any, keys: Ints, weights: Ints) -> Ints:
    """For each i the sum of ``weights[j]`` over j < i with ``keys[j] > keys[i]``.

    From the highest bit down: among entries that agree in all higher bits, those with a 0 get the weights of those with a
    1 before them; then the zeros go in front of the ones, in order.
    """
    count = len(keys)
    sums: Ints = np.zeros(count, np.int64)
    if not count:
        return sums
    place = np.arange(count, dtype=np.int64)  # where each entry of the present order was at first
    keys, weights = keys.astype(np.int32), weights.astype(np.int64)
    index = np.arange(count, dtype=np.int64)
    for bit in range(int(keys.max()).bit_length() - 1, -1, -1):
        high = keys >> (bit + 1)
        is_first = np.empty(count, bool)
        is_first[0] = True
        np.not_equal(high[1:], high[:-1], out=is_first[1:])
        group_begins = np.flatnonzero(is_first)
        group_sizes = np.diff(np.append(group_begins, count))
        one = (keys >> bit & 1).astype(bool)
        weight_before = np.cumsum(np.where(one, weights, 0)) - np.where(one, weights, 0)
        ones_before = np.cumsum(one, dtype=np.int64) - one
        ones_at_begin = ones_before[group_begins]
        ones_in_group = np.append(ones_at_begin[1:], ones_before[-1] + one[-1]) - ones_at_begin
        weight_in_group = weight_before - np.repeat(weight_before[group_begins], group_sizes)
        zero = ~one
        sums[place[zero]] += weight_in_group[zero]
        ones_here = ones_before - np.repeat(ones_at_begin, group_sizes)
        zeros_in_group = np.repeat(group_begins + group_sizes - ones_in_group, group_sizes)
        target = np.where(one, zeros_in_group + ones_here, index - ones_here)
        for values in (keys, weights, place):
            values[target] = values.copy()
    return sums
