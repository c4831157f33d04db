"""Plots of runs by matplotlib, without a display: figures as PNG and SVG bytes."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from kvtierd.workload.load.measure import RequestRecord
from kvtierd.workload.needs import need

PURPOSE: Final = "draw the plots of a report"
COLORS: Final = (
    "#4477aa",
    "#ee6677",
    "#228833",
    "#ccbb44",
    "#66ccee",
    "#aa3377",
    "#bbbbbb",
)  # told apart by anybody
TIER_COLORS: Final = {"l1": "#228833", "l2": "#ccbb44", "l3": "#4477aa"}
TIER_NAMES: Final = {"l1": "L1 (device)", "l2": "L2 (host)", "l3": "L3 (pool)"}
MOST_POINTS: Final = 20_000
_STYLE: Final = {
    "svg.hashsalt": "kvtierd",
    "svg.fonttype": "none",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}


class Plotted(NamedTuple):
    """One plot in both forms."""

    name: str
    title: str
    png: bytes
    svg: str


class RunData(NamedTuple):
    """What plots need of a run."""

    label: str
    records: Sequence[RequestRecord]
    timeline: Sequence[Mapping[str, Any]]
    row: Mapping[str, Any]


def distribution_plot(runs: Sequence[RunData]) -> Plotted:
    """TTFT of all requests as shares: how many had their first token by then."""
    figure, axes = _figure()
    for number, run in enumerate(runs):
        values = sorted(r.ttft_seconds for r in run.records if r.ok and r.ttft_seconds is not None)
        if not values:
            continue
        shares = [(i + 1) / len(values) for i in range(len(values))]
        axes.step(values, shares, where="post", color=_color(number), label=run.label, linewidth=1.8)
        middle = values[(len(values) - 1) // 2]
        axes.plot([middle], [0.5], "o", color=_color(number), markersize=4)
    axes.set_xlabel("time to first token, seconds")
    axes.set_ylabel("share of requests")
    axes.set_ylim(0, 1.02)
    axes.set_xlim(left=0)
    _legend(axes)
    return _plotted(figure, "ttft-distribution", "Time to first token: distribution")


def timeline_plot(runs: Sequence[RunData]) -> Plotted:
    """TTFT of each request at its start, and under it the share of prompt tokens found, by tier; a column a run."""
    pyplot, figure = _pyplot(), None
    with pyplot.rc_context(_STYLE):
        width = min(4.6 * len(runs) + 3, 18)
        figure, grid = pyplot.subplots(
            2,
            len(runs),
            figsize=(width, 5.4),
            sharex="col",
            sharey="row",
            squeeze=False,
            height_ratios=[3, 2],
            layout="constrained",
        )
        for column, run in enumerate(runs):
            above, below = grid[0][column], grid[1][column]
            good = [r for r in run.records if r.ok and r.ttft_seconds is not None]
            step = max(1, len(good) // MOST_POINTS)
            above.plot(
                [r.started_seconds for r in good[::step]],
                [r.ttft_seconds for r in good[::step]],
                ".",
                color=_color(column),
                markersize=4 if len(good) > 200 else 8,
                alpha=0.7,
            )
            failed = [r.started_seconds for r in run.records if not r.ok]
            if failed:
                above.plot(failed, [0] * len(failed), "x", color="#cc3311", label=f"{len(failed)} failed")
                _legend(above)
            above.set_title(run.label)
            above.margins(y=0.1)
            above.set_ylim(bottom=0)
            _hit_rates(below, run.timeline)
            below.set_xlabel("seconds since the run's start")
        grid[0][0].set_ylabel("time to first token, s")
        grid[1][0].set_ylabel("share found")
    return _plotted(figure, "ttft-over-time", "Time to first token and hit rate over time")


def comparison_plot(runs: Sequence[RunData]) -> Plotted:
    """Mean, p50 and p99 TTFT of the runs beside each other, and their hit rates stacked by tier."""
    pyplot = _pyplot()
    with pyplot.rc_context(_STYLE):
        figure, (left, right) = pyplot.subplots(
            1, 2, figsize=(max(8.5, 2.2 * len(runs) + 5), 4.2), layout="constrained"
        )
        names = ("mean", "p50", "p99")
        for offset, (name, shade) in enumerate(zip(names, (1.0, 0.65, 0.35), strict=True)):
            heights = [run.row[f"ttft_{name}_seconds"] or 0 for run in runs]
            places = [i + (offset - 1) * 0.26 for i in range(len(runs))]
            bars = left.bar(places, heights, 0.24, color=COLORS[0], alpha=shade, label=name)
            left.bar_label(bars, [_short(h) for h in heights], fontsize=8, padding=2)
        left.set_ylabel("time to first token, seconds")
        left.margins(y=0.12)
        bottoms = [0.0] * len(runs)
        for tier in ("l1", "l2", "l3"):
            shares = [run.row[f"{tier}_share"] for run in runs]
            if all(s is None for s in shares):
                continue
            known = [s or 0.0 for s in shares]
            right.bar(
                range(len(runs)), known, 0.5, bottom=bottoms, color=TIER_COLORS[tier], label=TIER_NAMES[tier]
            )
            bottoms = [b + k for b, k in zip(bottoms, known, strict=True)]
        for place, run in enumerate(runs):
            rate = run.row["hit_rate"]
            text = "unknown" if rate is None else f"{rate:.1%}"
            right.text(place, bottoms[place] + 0.015, text, ha="center", fontsize=8)
        right.set_ylim(0, 1.05)
        right.set_ylabel("share of prompt tokens found")
        for axes in (left, right):
            axes.set_xticks(range(len(runs)), [_wrapped(run.label) for run in runs])
            axes.grid(visible=False, axis="x")
        handles, _ = right.get_legend_handles_labels()
        for axes in (left, right) if handles else (left,):
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.14), ncols=3, frameon=False)
    return _plotted(figure, "comparison", "Runs compared")


def _hit_rates(axes: Any, timeline: Sequence[Mapping[str, Any]]) -> None:
    axes.set_ylim(0, 1.05)
    points = [p for p in timeline if p.get("looked_up")]
    if not points:
        axes.text(
            0.5, 0.5, "hit counters are unknown", transform=axes.transAxes, ha="center", color="#888888"
        )
        return
    # Each point stands for the time from the reading before it.
    points = [{**points[0], "seconds": 0.0}, *points]
    seconds = [p["seconds"] for p in points]
    names = [t for t in ("l1", "l2", "l3") if any(p.get(t) is not None for p in points)]
    layers = [[(p.get(t) or 0) / p["looked_up"] for p in points] for t in names]
    axes.stackplot(
        seconds,
        layers,
        labels=[TIER_NAMES[t] for t in names],
        colors=[TIER_COLORS[t] for t in names],
        alpha=0.75,
        step="pre",
    )
    _legend(axes)


def _pyplot() -> Any:
    matplotlib = need("matplotlib", PURPOSE)
    matplotlib.use("Agg")
    return need("matplotlib.pyplot", PURPOSE)


def _figure() -> tuple[Any, Any]:
    pyplot = _pyplot()
    with pyplot.rc_context(_STYLE):
        figure, axes = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    return figure, axes


def _legend(axes: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", fontsize=9, frameon=False)


def _plotted(figure: Any, name: str, title: str) -> Plotted:
    pyplot = _pyplot()
    try:
        with pyplot.rc_context(_STYLE):
            png, svg = io.BytesIO(), io.StringIO()
            figure.savefig(png, format="png", dpi=130, metadata={"Software": None})
            figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    finally:
        pyplot.close(figure)
    return Plotted(name, title, png.getvalue(), svg.getvalue())


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]


def _short(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def _wrapped(label: str) -> str:
    return label.replace(" + ", "\n+ ")
