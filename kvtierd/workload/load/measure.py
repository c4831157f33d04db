"""PURE: one record a request, and what a run was like as a whole: quantiles from all values, errors apart.

Seconds, tokens and tokens a second throughout. A figure that nothing was measured for is ``None``, never zero.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

QUANTILES: Final = (50, 75, 90, 95, 99)
Counted = Literal["usage", "events"]


@dataclasses.dataclass(frozen=True, slots=True)
class RequestRecord:
    """What is kept of one request.

    ``started_seconds`` is since the run's start; ``lag_seconds`` how much later than planned it started (0 in a closed
    loop). ``output_tokens`` are the server's own count or, with ``tokens_from`` "events", the events with text.
    """

    number: int
    conversation: str
    turn: int
    started_seconds: float
    lag_seconds: float
    ttft_seconds: float | None
    e2e_seconds: float | None
    tpot_seconds: float | None
    prompt_tokens: int | None
    output_tokens: int
    tokens_from: Counted
    cached_tokens: int | None
    prompt_chars: int
    error: str = ""
    error_text: str = ""

    @property
    def ok(self) -> bool:
        """It has a whole answer."""
        return not self.error

    def as_dict(self) -> dict[str, Any]:
        """A line of requests.jsonl."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RequestRecord:
        """The reverse; unknown fields of a later version are left out.

        Raises:
            TypeError: a field is missing.
        """
        names = {f.name for f in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})


def time_per_output_token(
    first_seconds: float | None, last_seconds: float | None, tokens: int
) -> float | None:
    """Time for each token after the first; ``None`` with fewer than two."""
    if first_seconds is None or last_seconds is None or tokens < 2:
        return None
    return (last_seconds - first_seconds) / (tokens - 1)


def quantile(ordered: Sequence[float], percent: float) -> float:
    """Of ascending values, with linear interpolation between neighbours (numpy's default)."""
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def distribution(values: Iterable[float | None]) -> dict[str, float] | None:
    """count, mean, std, min, max and p50 to p99 of all values; ``None`` without any."""
    ordered = sorted(v for v in values if v is not None)
    if not ordered:
        return None
    count = len(ordered)
    mean = math.fsum(ordered) / count
    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in ordered) / count)
    found = {"count": count, "mean": mean, "std": spread, "min": ordered[0], "max": ordered[-1]}
    return found | {f"p{p}": quantile(ordered, p) for p in QUANTILES}


def summarize(
    records: Sequence[RequestRecord], gaps_seconds: Iterable[float], *, seconds: float
) -> dict[str, Any]:
    """The run in figures.

    Args:
        records: all requests, also those that failed.
        gaps_seconds: the times between events with text, of all requests that succeeded.
        seconds: from the first request's start to the last one's end.
    """
    good = [r for r in records if r.ok]
    output = sum(r.output_tokens for r in good)
    known = [r.prompt_tokens for r in good if r.prompt_tokens is not None]
    prompt = sum(known) if good and len(known) == len(good) else None
    cached = [r.cached_tokens for r in good if r.cached_tokens is not None]
    rate = (lambda count: count / seconds) if seconds > 0 else (lambda _: 0.0)
    return {
        "requests": len(records),
        "succeeded": len(good),
        "failed": len(records) - len(good),
        "seconds": seconds,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "output_tokens_from": "events" if any(r.tokens_from == "events" for r in good) else "usage",
        "cached_tokens": sum(cached) if good and len(cached) == len(good) else None,
        "requests_per_second": rate(len(good)),
        "output_tokens_per_second": rate(output),
        "total_tokens_per_second": None if prompt is None else rate(prompt + output),
        "mean_concurrency": rate(math.fsum(r.e2e_seconds or 0.0 for r in good)),
        "ttft_seconds": distribution(r.ttft_seconds for r in good),
        "tpot_seconds": distribution(r.tpot_seconds for r in good),
        "inter_token_seconds": distribution(gaps_seconds),
        "e2e_seconds": distribution(r.e2e_seconds for r in good),
        "prompt_tokens_each": distribution(known),
        "output_tokens_each": distribution(r.output_tokens for r in good),
        "start_lag_seconds": distribution(r.lag_seconds for r in records),
        "errors": group_errors(records),
    }


def group_errors(records: Iterable[RequestRecord]) -> list[dict[str, Any]]:
    """Failures by kind, the most frequent first: kind, count, and the text of one."""
    counts: collections.Counter[str] = collections.Counter()
    examples: dict[str, str] = {}
    for record in records:
        if record.error:
            counts[record.error] += 1
            examples.setdefault(record.error, record.error_text)
    return [{"kind": kind, "count": count, "example": examples[kind]} for kind, count in counts.most_common()]
