"""Hit tokens by tier from an engine's own counters: read before and after, and every second between."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Sequence
from typing import Any, Final

from kvtierd.errors import KvtierError, WorkloadError
from kvtierd.http_get import fetch_text
from kvtierd.plan.engine import EngineDriver, EngineObservation

TIERS: Final = ("l1", "l2", "l3")
KINDS: Final = {"vllm": "vllm-ascend"}
QUIET_SECONDS: Final = 0.3
SETTLE_SECONDS: Final = 4.0


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """Tokens since the engine's start: (looked up, found) for l1, l2, l3. ``None`` is unknown."""

    tiers: tuple[tuple[int | None, int | None], ...]

    @classmethod
    def of(cls, seen: EngineObservation) -> Counts:
        """Those of an observation."""
        return cls(
            (
                (seen.l1_query_tokens, seen.l1_hit_tokens),
                (seen.l2_query_tokens, seen.l2_hit_tokens),
                (seen.l3_query_tokens, seen.l3_hit_tokens),
            )
        )


def growth(before: Counts, after: Counts) -> list[dict[str, int | None]]:
    """By how much each counter grew, in the order of ``TIERS``: query_tokens and hit_tokens.

    Engines export a counter with its first event: one that was not there and now is has grown from zero. One that went
    back belongs to an engine that was started anew: by how much it grew is unknown.
    """
    return [
        {"query_tokens": _grown(b[0], a[0]), "hit_tokens": _grown(b[1], a[1])}
        for b, a in zip(before.tiers, after.tiers, strict=True)
    ]


def _grown(before: int | None, after: int | None) -> int | None:
    if after is None:
        return None
    grown = after - (before or 0)
    return grown if grown >= 0 else None


def tier_account(before: Counts, after: Counts) -> dict[str, Any]:
    """By tier what was looked up and found, its hit rate, and the hit rate of all tiers together.

    A tier's ``hit_rate`` is of what that tier was asked for; ``share`` is of all tokens looked up, so shares add up.
    """
    grown = growth(before, after)
    looked_up = grown[0]["query_tokens"]
    account: dict[str, Any] = {"looked_up_tokens": looked_up}
    hits = 0
    known = False
    for name, tier in zip(TIERS, grown, strict=True):
        query, hit = tier["query_tokens"], tier["hit_tokens"]
        known = known or hit is not None
        hits += hit or 0
        rate = None if hit is None or not query else hit / query
        share = None if hit is None or not looked_up else hit / looked_up
        account[name] = {**tier, "hit_rate": rate, "share": share}
    account["hit_tokens"] = hits if known else None
    account["hit_rate"] = hits / looked_up if known and looked_up else None
    return account


class EngineCounters:
    """One engine's metrics.

    Args:
        url: of its Prometheus metrics.
        driver: what can read them.
    """

    def __init__(self, url: str, driver: EngineDriver) -> None:
        self.url = url
        self._driver = driver

    @property
    def source(self) -> str:
        """For people: where the figures come from."""
        return f"{self.url}, read as {self._driver.name}"

    async def read(self) -> Counts:
        """The counters now.

        Raises:
            WorkloadError: ``load.metrics``: they cannot be read.
        """
        try:
            text = await fetch_text(self.url, timeout_seconds=5.0)
            return Counts.of(self._driver.observe(text))
        except (KvtierError, ValueError) as error:
            raise WorkloadError(
                f"the hit counters at {self.url} cannot be read: {getattr(error, 'message', error)}",
                hint="--metrics-url and --engine-kind say where they are and in which form;"
                " without both a run has no hit rates",
                code="load.metrics",
            ) from error

    async def read_settled(self) -> Counts:
        """The counters when two readings in a row are the same, or after four seconds."""
        deadline = time.monotonic() + SETTLE_SECONDS
        before = await self.read()
        while time.monotonic() < deadline:
            await asyncio.sleep(QUIET_SECONDS)
            now = await self.read()
            if now == before:
                break
            before = now
        return before


def driver_for(kind: str) -> EngineDriver:
    """The driver that reads this kind of engine: vllm, sglang, refengine, or a driver's own name.

    Raises:
        PluginError: no installed plugin brings it.
    """
    from kvtierd.plugins import load_plugins

    return load_plugins().driver(KINDS.get(kind, kind))


def timeline(samples: Sequence[tuple[float, Counts]]) -> list[dict[str, float | None]]:
    """What was found between one reading and the next: seconds since the run's start, looked-up and hit tokens by tier."""
    points: list[dict[str, float | None]] = []
    for (_, before), (at, after) in itertools.pairwise(samples):
        grown = growth(before, after)
        point: dict[str, float | None] = {"seconds": at, "looked_up": grown[0]["query_tokens"]}
        points.append(point | {name: tier["hit_tokens"] for name, tier in zip(TIERS, grown, strict=True)})
    return points
