"""PURE: a run, and runs beside each other, as plain text for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvtierd.workload.report.rows import Row

_METRICS = (
    ("TTFT", "ttft_seconds"),
    ("TPOT", "tpot_seconds"),
    ("inter-token", "inter_token_seconds"),
    ("end to end", "e2e_seconds"),
)
_COLUMNS = ("mean", "min", "max", "p50", "p75", "p90", "p99", "count")


def run_text(result: Mapping[str, Any]) -> str:
    """One run: latencies, throughput, hits by tier, errors, notes."""
    summary = result["summary"]
    lines = [_headline(result)]
    head = ("", *(c.upper() for c in _COLUMNS))
    body = [
        (name, *("-" if not summary[key] else _cell(summary[key][c], c) for c in _COLUMNS))
        for name, key in _METRICS
    ]
    lines += ["", *grid([head, *body])]
    lines += ["", *_throughput(summary)]
    tiers = result.get("tiers")
    if tiers:
        lines += ["", *_tiers(tiers)]
    if summary["errors"]:
        lines += [
            "",
            f"{summary['failed']} of {summary['requests']} requests failed; they are in no latency above:",
        ]
        lines += [f"  {e['count']:>6} x {e['kind']}: {e['example']}" for e in summary["errors"]]
    if result.get("requests_not_sent"):
        lines.append(f"{result['requests_not_sent']} later turns were not sent after a failed one")
    lines += [f"note: {note}" for note in result["notes"]]
    return "\n".join(lines) + "\n"


def comparison_text(rows: Sequence[Row]) -> str:
    """Runs beside each other, and under the table why a comparison is not there."""
    head = (
        "RUN", "REQUESTS", "FAILED", "HIT RATE", "L1", "L2", "L3", "TTFT", "TTFT P50", "TTFT P99", "TPOT", "E2E",
        "TOKENS/S", "TTFT LESS", "SPEED-UP",
    )  # fmt: skip
    body = [
        (
            row["label"] + ("" if row["complete"] else " (PARTIAL)"),
            str(row["requests"]), str(row["failed"]), percent(row["hit_rate"]), percent(row["l1_share"]),
            percent(row["l2_share"]), percent(row["l3_share"]), duration(row["ttft_mean_seconds"]),
            duration(row["ttft_p50_seconds"]), duration(row["ttft_p99_seconds"]), duration(row["tpot_mean_seconds"]),
            duration(row["e2e_mean_seconds"]), f"{row['output_tokens_per_second']:.1f}",
            percent(row["ttft_reduction"]), "-" if row["speed_up"] is None else f"{row['speed_up']:.2f} x",
        )
        for row in rows
    ]  # fmt: skip
    lines = grid([head, *body])
    lines += [
        f"no speed-up is told for {row['label']}: {row['no_speed_up_because']}"
        for row in rows
        if row["no_speed_up_because"]
    ]
    return "\n".join(lines) + "\n"


def grid(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows under each other, the first column to the left and the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in rows
    ]


def duration(seconds: float | None) -> str:
    """Seconds for people: 12.3 ms, 1.23 s."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    return f"{seconds:.2f} s" if seconds < 100 else f"{seconds:.0f} s"


def percent(share: float | None) -> str:
    """A share for people; unknown is not zero."""
    return "-" if share is None else f"{share:.1%}"


def _cell(value: float, column: str) -> str:
    return f"{value:.0f}" if column == "count" else duration(value)


def _headline(result: Mapping[str, Any]) -> str:
    summary, label = result["summary"], result.get("label")
    text = f"{label}: " if label else ""
    text += f"{summary['succeeded']} of {summary['requests']} requests succeeded in {duration(summary['seconds'])}"
    if not result["complete"]:
        sessions = result["sessions"]
        text = f"PARTIAL ({result['ended']}) {text}; {sessions['done']} of {sessions['planned']} conversations are through"
    return text


def _throughput(summary: Mapping[str, Any]) -> list[str]:
    total = summary["total_tokens_per_second"]
    cached = summary["cached_tokens"]
    prompt = summary["prompt_tokens"]
    return [
        f"throughput       {summary['requests_per_second']:.2f} requests/s, "
        f"{summary['output_tokens_per_second']:.1f} output tokens/s"
        + ("" if total is None else f", {total:.1f} tokens/s in all")
        + f"; {summary['mean_concurrency']:.1f} under way on average",
        f"tokens           {'unknown' if prompt is None else f'{prompt:,}'} in prompts"
        + ("" if cached is None else f" ({cached:,} of them cached, as the answers say)")
        + f", {summary['output_tokens']:,} in answers",
    ]


def _tiers(tiers: Mapping[str, Any]) -> list[str]:
    rows: list[tuple[str, ...]] = [("TIER", "ASKED FOR", "FOUND", "HIT RATE", "OF ALL")]
    for name in ("l1", "l2", "l3"):
        tier = tiers[name]
        if tier["query_tokens"] is not None or tier["hit_tokens"] is not None:
            counts = ("-" if tier[k] is None else f"{tier[k]:,}" for k in ("query_tokens", "hit_tokens"))
            rows.append((name.upper(), *counts, percent(tier["hit_rate"]), percent(tier["share"])))
    found, asked = tiers["hit_tokens"], tiers["looked_up_tokens"]
    rows.append(
        (
            "all",
            "-" if asked is None else f"{asked:,}",
            "-" if found is None else f"{found:,}",
            percent(tiers["hit_rate"]),
            percent(tiers["hit_rate"]),
        )
    )
    return [*grid(rows), f"(tokens, by the counters at {tiers['source']})"]
