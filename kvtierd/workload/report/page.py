"""PURE: the report as one HTML page that needs nothing else: plots are inside it, no script, no address."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from typing import Any

from kvtierd.workload.report.plots import Plotted
from kvtierd.workload.report.rows import Row
from kvtierd.workload.report.table import duration, percent, run_text

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff;
  margin: 2rem auto; max-width: 1400px; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; white-space: nowrap }
th, td { padding: .35rem .55rem; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left } th { font-weight: 600; border-bottom: 2px solid #888 }
.better { font-weight: 600; color: #1b7837 } .partial { color: #b30000; font-weight: 600 }
img { max-width: min(100%, 1100px); height: auto }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; font-size: 13px }
.note { color: #555 }
"""


def page(
    rows: Sequence[Row], results: Sequence[Mapping[str, Any]], plots: Sequence[Plotted], *, made_by: str
) -> str:
    """The whole page. Whatever came from outside (labels, error texts) is escaped."""
    head = (
        "Run", "Requests", "Failed", "Hit rate", "L1", "L2", "L3", "TTFT mean", "p50", "p99", "TPOT mean", "End to end",
        "Tokens/s", "TTFT less", "Speed-up",
    )  # fmt: skip
    title = " · ".join(row["label"] for row in rows)
    parts = [
        "<!doctype html>\n<html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>{_text(title)}</title><style>{_STYLE}</style>",
        f"<h1>{_text(title)}</h1><div class=wide><table><tr>",
        *(f"<th>{_text(name)}" for name in head),
        *(_table_row(row) for row in rows),
        "</table></div>",
        *(
            f"<p class=note>No speed-up is told for {_text(r['label'])}: {_text(r['no_speed_up_because'])}.</p>"
            for r in rows
            if r["no_speed_up_because"]
        ),
    ]
    for plot in plots:
        data = base64.b64encode(plot.png).decode()
        parts.append(
            f"<h2>{_text(plot.title)}</h2><img alt='{_text(plot.title)}' src='data:image/png;base64,{data}'>"
        )
    parts += [
        f"<h2>{_text(result.get('label') or 'run')}</h2><pre>{_text(run_text(result))}</pre>"
        for result in results
    ]
    parts.append(f"<p class=note>{_text(made_by)}</p></html>\n")
    return "".join(parts)


def _table_row(row: Row) -> str:
    label = _text(row["label"]) + ("" if row["complete"] else " <span class=partial>partial</span>")
    speed = "-" if row["speed_up"] is None else f"{row['speed_up']:.2f} x"
    cells = [
        label, str(row["requests"]), str(row["failed"]), percent(row["hit_rate"]), percent(row["l1_share"]),
        percent(row["l2_share"]), percent(row["l3_share"]), duration(row["ttft_mean_seconds"]),
        duration(row["ttft_p50_seconds"]), duration(row["ttft_p99_seconds"]), duration(row["tpot_mean_seconds"]),
        duration(row["e2e_mean_seconds"]), f"{row['output_tokens_per_second']:.1f}", percent(row["ttft_reduction"]),
    ]  # fmt: skip
    better = " class=better" if (row["speed_up"] or 0) > 1 else ""
    return "<tr>" + "".join(f"<td>{c}" for c in cells) + f"<td{better}>{speed}"


def _text(value: str) -> str:
    return html.escape(value, quote=True)
