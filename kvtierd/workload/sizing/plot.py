"""The curve as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvtierd.errors import WorkloadError
from kvtierd.workload.needs import need
from kvtierd.workload.sizing.figures import GB
from kvtierd.workload.sizing.hit_rates import KNEE_SHARE, HitRates

FORMATS: Final = (".png", ".svg")
_LOGARITHMIC_BELOW: Final = 0.05  # a knee this far left of the end could not be seen on an even scale
_TB: Final = 1000 * GB


def check_plot(path: Path) -> None:
    """Before the work: whether the plot can be written there.

    Raises:
        WorkloadError: ``sizing.plot``, ``workload.missing-package``.
    """
    if path.suffix.lower() not in FORMATS:
        raise WorkloadError(
            f"{path}: a plot is written as PNG or SVG",
            hint="name a file that ends in .png or .svg",
            code="sizing.plot",
        )
    if not path.absolute().parent.is_dir():
        raise WorkloadError(
            f"there is no directory {path.absolute().parent} for the plot",
            hint="make it first",
            code="sizing.plot",
        )
    need("matplotlib", "draw plots")


def plot(rates: HitRates, path: Path, *, title: str) -> None:
    """Draws hit rate against pool size with the knee, without a display.

    Raises:
        WorkloadError: as ``check_plot``, and when the file cannot be written.
    """
    check_plot(path)
    figure_class = need("matplotlib.figure", "draw plots").Figure
    factor, unit = (_TB, "TB") if rates.all_bytes >= 3 * _TB else (GB, "GB")
    if rates.all_bytes < GB / 2:
        factor, unit = 1_000_000, "MB"
    sizes = [point.pool_bytes / factor for point in rates.points]
    shares = [100 * point.hit_rate for point in rates.points]
    knee_at, knee_share = rates.knee.pool_bytes / factor, 100 * rates.knee.hit_rate
    figure = figure_class(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.plot(sizes, shares, color="#1f5fa8", linewidth=2, label="hit rate")
    if rates.error:
        band = 100 * rates.error
        axes.fill_between(
            sizes, [max(0, s - band) for s in shares], [min(100, s + band) for s in shares], color="#1f5fa8",
            alpha=0.15, linewidth=0, label=f"95 %: within {band:.1f} points (sampled)",
        )  # fmt: skip
    axes.axhline(
        100 * rates.max_hit_rate, color="#777777", linewidth=1, linestyle="--",
        label=f"endless pool: {rates.max_hit_rate:.1%}",
    )  # fmt: skip
    axes.plot(
        [knee_at], [knee_share], "o", color="#c0392b", markersize=7,
        label=f"knee, {KNEE_SHARE:.0%} of that: {knee_share:.1f} % at {knee_at:,.4g} {unit}",
    )  # fmt: skip
    axes.axvline(knee_at, color="#c0392b", linewidth=0.8, linestyle=":")
    if knee_at < _LOGARITHMIC_BELOW * sizes[-1]:
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0)
    axes.set_ylim(0, max(5.0, min(100.0, 115 * rates.max_hit_rate)))
    axes.set_xlabel(f"KV cache that the pool holds ({unit})")
    axes.set_ylabel("prompt tokens found (%)")
    axes.set_title(title, fontsize=11)
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.legend(loc="lower right", fontsize=9)
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    except OSError as error:
        raise WorkloadError(
            f"cannot write {path}: {error.strerror}", hint="name another file", code="sizing.plot"
        ) from None
