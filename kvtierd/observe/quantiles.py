"""PURE: quantiles of a histogram, as Prometheus' ``histogram_quantile`` makes them."""

from __future__ import annotations

import math
from collections.abc import Mapping


def quantile(buckets: Mapping[float, float], share: float) -> float | None:
    """The value below which ``share`` of the observations are, by linear interpolation within a bucket.

    Args:
        buckets: Upper bound -> how many were at most that, from whatever was observed in a window. Counts that fall from
            a bound to the next (a scrape that was not of one moment) count as the highest before them.
        share: 0 to 1.

    Returns:
        ``None`` without observations or without a finite bound. In the last, infinite bucket it is the highest finite
        bound: all that is known is that it was more.
    """
    bounds = sorted(b for b in buckets if not math.isnan(b))
    counts: list[float] = []
    for bound in bounds:
        counts.append(max(buckets[bound], counts[-1] if counts else 0.0))
    if not counts or counts[-1] <= 0 or bounds[0] == math.inf:
        return None
    wanted = min(1.0, max(0.0, share)) * counts[-1]
    lower, before = 0.0, 0.0
    for bound, count in zip(bounds, counts, strict=True):
        if count >= wanted and count > before:
            if bound == math.inf:
                return lower
            start = min(lower, bound)
            return min(bound, start + (bound - start) * max(0.0, wanted - before) / (count - before))
        lower, before = bound, count
    return bounds[-1] if bounds[-1] != math.inf else lower
