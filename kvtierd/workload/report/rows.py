"""PURE: runs beside each other, one row each, and what may be said about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = dict[str, Any]
FAR_APART = 0.05


def rows_of(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """One row a run. The first is what the others are compared with; a comparison that would mislead is left out, and
    ``no_speed_up_because`` says why."""
    rows = [_row(result, number) for number, result in enumerate(results, 1)]
    if not rows:
        return rows
    base = rows[0]
    for row, result in zip(rows[1:], results[1:], strict=True):
        reason = why_not(results[0], result)
        if reason:
            row["no_speed_up_because"] = reason
            continue
        was, now = base["ttft_mean_seconds"], row["ttft_mean_seconds"]
        row["ttft_reduction"] = 1 - now / was
        row["speed_up"] = was / now
    return rows


def why_not(base: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Why a speed-up of ``other`` over ``base`` may not be told; "" when it may.

    A speed-up is put down to the cache, so there must have been hits that the other run did not have.
    """
    for name, run in (("this run", other), ("the first run", base)):
        summary = run["summary"]
        if not summary["succeeded"] or not summary["ttft_seconds"]:
            return f"no request of {name} succeeded"
        if not run["complete"]:
            return f"{name} is not complete ({run['ended']})"
    if _sent(base) != _sent(other):
        return "the two runs did not do the same work (requests, concurrency, length of answers or arrival differ)"
    tiers = other.get("tiers")
    if not tiers or tiers.get("hit_rate") is None:
        return "its hit counters are unknown"
    if not tiers["hit_tokens"]:
        return "it had no hits: what differs does not come from the cache"
    before = (base.get("tiers") or {}).get("hit_rate")
    if before is not None and tiers["hit_rate"] <= before:
        return f"it had no more hits than the first run ({tiers['hit_rate']:.1%} and {before:.1%})"
    return ""


def _sent(run: Mapping[str, Any]) -> tuple[Any, ...]:
    settings = run["settings"]
    names = ("concurrency", "arrival", "rate", "max_tokens", "model")
    return (run["sessions"]["planned"], *(settings.get(n) for n in names))


def _row(result: Mapping[str, Any], number: int) -> Row:
    summary, tiers = result["summary"], result.get("tiers") or {}

    def figure(name: str, which: str) -> float | None:
        values = summary.get(name)
        return values[which] if values else None

    return {
        "label": result.get("label") or f"run {number}",
        "complete": result["complete"],
        "ended": result["ended"],
        "requests": summary["requests"],
        "failed": summary["failed"],
        "hit_rate": tiers.get("hit_rate"),
        **{f"{t}_share": (tiers.get(t) or {}).get("share") for t in ("l1", "l2", "l3")},
        "ttft_mean_seconds": figure("ttft_seconds", "mean"),
        "ttft_p50_seconds": figure("ttft_seconds", "p50"),
        "ttft_p99_seconds": figure("ttft_seconds", "p99"),
        "tpot_mean_seconds": figure("tpot_seconds", "mean"),
        "e2e_mean_seconds": figure("e2e_seconds", "mean"),
        "requests_per_second": summary["requests_per_second"],
        "output_tokens_per_second": summary["output_tokens_per_second"],
        "ttft_reduction": None,
        "speed_up": None,
        "no_speed_up_because": "",
    }
