"""One row a measurement, and the table of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A number, the promise it is held against, and whether it holds."""

    what: str
    measured: str
    promise: str
    holds: bool


def print_table(rows: Iterable[Row]) -> None:
    rows = list(rows)
    widths = [max(len(getattr(r, f)) for r in rows) for f in ("what", "measured", "promise")]
    print(f"{'WHAT':<{widths[0]}}  {'MEASURED':>{widths[1]}}  {'PROMISE':>{widths[2]}}  HOLDS")
    for row in rows:
        holds = "yes" if row.holds else "NO"
        print(f"{row.what:<{widths[0]}}  {row.measured:>{widths[1]}}  {row.promise:>{widths[2]}}  {holds}")
