"""Reads runs and writes their report: JSON, text, plots, page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import kvtierd
from kvtierd.files import write_atomic
from kvtierd.workload.load.results import read_requests, read_result
from kvtierd.workload.report.page import page
from kvtierd.workload.report.plots import (
    Plotted,
    RunData,
    comparison_plot,
    distribution_plot,
    timeline_plot,
)
from kvtierd.workload.report.rows import Row, rows_of
from kvtierd.workload.report.table import comparison_text, run_text


class Report(NamedTuple):
    """What was made."""

    rows: list[Row]
    text: str
    files: list[Path]


def write_report(runs: Sequence[Path], output: Path) -> Report:
    """Writes the report of these runs' directories into ``output``.

    Raises:
        WorkloadError: a directory holds no run; matplotlib is missing.
        StateError: it cannot be written.
    """
    results = [read_result(directory) for directory in runs]
    for directory, result in zip(runs, results, strict=True):
        result["label"] = result.get("label") or directory.name
    rows = rows_of(results)
    data = [
        RunData(row["label"], read_requests(directory), result.get("timeline") or [], row)
        for directory, result, row in zip(runs, results, rows, strict=True)
    ]
    plots: list[Plotted] = [distribution_plot(data), timeline_plot(data)]
    text = run_text(results[0])
    if len(data) > 1:
        plots.append(comparison_plot(data))
        text = comparison_text(rows)
    made_by = f"made by kvtierctl bench report, kvtierd {kvtierd.__version__}"
    contents = {
        "report.json": json.dumps({"runs": rows, "results": results}, indent=2, ensure_ascii=False) + "\n",
        "report.txt": text,
        "report.html": page(rows, results, plots, made_by=made_by),
        **{f"{plot.name}.svg": plot.svg for plot in plots},
    }
    files = []
    for name, content in contents.items():
        write_atomic(output / name, content.encode("utf-8", errors="replace"))
        files.append(output / name)
    for plot in plots:
        write_atomic(output / f"{plot.name}.png", plot.png)
        files.append(output / f"{plot.name}.png")
    return Report(rows, text, sorted(files))
