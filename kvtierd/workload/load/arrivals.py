"""PURE: when requests (or conversations) start, in seconds since the run's start, never going back."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator


def constant(rate: float) -> Iterator[float]:
    """One every ``1 / rate`` seconds, for ever."""
    number = 0
    while True:
        yield number / rate
        number += 1


def poisson(rate: float, seed: int) -> Iterator[float]:
    """``rate`` a second on average with exponential gaps, for ever: what many independent users make."""
    chance = random.Random(seed)
    at = 0.0
    while True:
        at += chance.expovariate(rate)
        yield at


def burst(rate: float, size: int) -> Iterator[float]:
    """``size`` at once, then nothing until ``rate`` a second is true on average, for ever."""
    number = 0
    while True:
        for _ in range(size):
            yield number * size / rate
        number += 1


def replay(timestamps: Iterable[float | None], speed: float) -> Iterator[float]:
    """A trace's own times from its first one on, ``speed`` times as fast.

    One without a time, or with an earlier one than before (clocks that were set), comes with the one before it.
    """
    first: float | None = None
    at = 0.0
    for timestamp in timestamps:
        if timestamp is not None:
            first = timestamp if first is None else first
            at = max(at, (timestamp - first) / speed)
        yield at
