"""The curve as people read it: hit rate against bytes of pool, its knee, and how sure it is."""

from __future__ import annotations

import dataclasses
from typing import Final

from kvtierd.errors import WorkloadError
from kvtierd.workload.needs import need
from kvtierd.workload.sizing.curve import HitCurve

KNEE_SHARE: Final = 0.9
_POINTS: Final = 160


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """``hit_rate``: prompt tokens found in a pool that holds ``pool_bytes`` of KV cache, of all prompt tokens."""

    pool_bytes: int
    hit_rate: float


@dataclasses.dataclass(frozen=True, slots=True)
class HitRates:
    """``points`` by size. ``knee``: the smallest pool with 90 % of the hits that an endless one would have.

    ``max_hit_rate`` is that of the endless pool, reached at ``all_bytes``. ``error`` (of the hit rate, about 95 % sure) is
    ``None`` when every block was looked at.
    """

    points: tuple[Point, ...]
    knee: Point
    max_hit_rate: float
    all_bytes: int
    requests: int
    blocks: int
    distinct_blocks: int
    prompt_tokens: int
    rate: float
    error: float | None


def hit_rates(curve: HitCurve, *, block_tokens: int, bytes_per_token: float) -> HitRates:
    """The curve in bytes and shares of the prompts' tokens.

    Raises:
        WorkloadError: ``sizing.no-blocks``, when no prompt fills a block or all are empty.
    """
    if not curve.references or not curve.prompt_tokens:
        raise WorkloadError(
            f"no prompt fills a block of {block_tokens} tokens",
            why=f"{curve.requests:,} requests have {curve.prompt_tokens:,} tokens together",
            hint="only whole blocks are cached: such requests gain nothing from a pool; or give a smaller --block-size",
            code="sizing.no-blocks",
        )
    block_bytes = block_tokens * bytes_per_token
    share = block_tokens / curve.prompt_tokens

    def at(blocks: float) -> Point:
        rate = min(1.0, float(curve.hits(blocks)) * share)
        return Point(round(blocks * block_bytes), rate)

    sizes = _sizes(curve.most_blocks)
    most = min(1.0, curve.most_hits * share)
    return HitRates(
        points=tuple(at(blocks) for blocks in sizes),
        knee=at(_smallest(curve, KNEE_SHARE * curve.most_hits)),
        max_hit_rate=most,
        all_bytes=round(curve.most_blocks * block_bytes),
        requests=curve.requests,
        blocks=curve.references,
        distinct_blocks=curve.distinct,
        prompt_tokens=curve.prompt_tokens,
        rate=curve.rate,
        error=None if curve.error is None else curve.error * share,
    )


def size_for(curve: HitCurve, share_of_most: float) -> int:
    """Blocks of the smallest pool with this share (0 to 1) of an endless pool's hits."""
    return _smallest(curve, share_of_most * curve.most_hits)


def _smallest(curve: HitCurve, hits: float) -> int:
    low, high = 1, curve.most_blocks
    while low < high:
        middle = (low + high) // 2
        if float(curve.hits(middle)) >= hits * (1 - 1e-12):
            high = middle
        else:
            low = middle + 1
    return low


def _sizes(most: int) -> list[int]:
    """Sizes to draw: half of them even, half of them even on a logarithmic scale."""
    np = need("numpy", "compute hit rates against pool sizes")
    even = np.linspace(1, most, _POINTS // 2)
    logarithmic = np.geomspace(1, most, _POINTS // 2)
    return sorted({round(float(size)) for size in (*even, *logarithmic)})
