"""One line a fault, printed when the tests have ended."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """What was done and what came of it; ``None``: does not apply.

    Attributes:
        epochs: Before and at the end.
        serving: Seconds from the fault until a MetaService began to accept.
        hits: Seconds from the fault until every engine in reach had read from the pool again.
        rejoined: Seconds from the fault's end until those out of reach had, too.
        overlap: Seconds for which two MetaServices accepted at once.
        failed, wrong: Requests.
        longest: Seconds of the longest request since the fault.
    """

    what: str
    epochs: tuple[int, int]
    serving: float | None
    hits: float | None
    rejoined: float | None
    overlap: float
    failed: int
    wrong: int
    longest: float


FAULTS: list[Fault] = []


def table() -> list[str]:
    rows = [
        (
            "WHAT WAS DONE",
            "EPOCH",
            "SERVING",
            "HITS",
            "ALL HIT",
            "TWO AT ONCE",
            "FAILED",
            "WRONG",
            "LONGEST REQUEST",
        )
    ]
    rows += [
        (
            fault.what,
            f"{fault.epochs[0]} -> {fault.epochs[1]}",
            _seconds(fault.serving),
            _seconds(fault.hits),
            _seconds(fault.rejoined),
            f"{fault.overlap:.2f} s" if fault.overlap else "never",
            str(fault.failed),
            str(fault.wrong),
            _seconds(fault.longest),
        )
        for fault in FAULTS
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"
