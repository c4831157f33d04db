"""From chip names to the hardware series that settings and planner speak of. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from kvtierd.plan.inventory import Npu, Record
from kvtierd.plan.model import Series

# 300I A2 and 800I A2 carry the same chips; an 800I A2 always has eight cards.
_CARDS_OF_800I = 8

_BY_CHIP: tuple[tuple[str, str], ...] = (
    (r"910B", "A2"),
    (r"910_?93|910C", "A3"),
    (r"950", "A5"),
    # npu-smi on A3 prints the bare family name for its dies; the first generation has a letter (910A, 910ProB).
    (r"910$", "A3"),
)


class SeriesGuess(Record):
    """``series`` is ``None`` when the chips do not tell; ``note`` says what was assumed or what to set."""

    series: Series | None
    note: str | None = None


def detect_series(npus: Sequence[Npu]) -> SeriesGuess:
    """The series of a host with these dies.

    A2 has two products with the same chips: eight cards or more count as 800I-A2, fewer as 300I-A2, and the note
    says so. "emulated" is never guessed: it must be written out.
    """
    if not npus:
        return SeriesGuess(series=None, note="no NPU was found, so the series is unknown; set [node] series")
    families = Counter(_family(npu.name) for npu in npus)
    names = ", ".join(
        f"{count} x {name or 'unnamed'}" for name, count in Counter(n.name for n in npus).items()
    )
    if len(families) > 1:
        return SeriesGuess(series=None, note=f"the host has different chips ({names}); set [node] series")
    family = next(iter(families))
    if family == "A2":
        cards = len({npu.card for npu in npus})
        series: Series = "800I-A2" if cards >= _CARDS_OF_800I else "300I-A2"
        return SeriesGuess(
            series=series,
            note=f"{cards} A2 cards ({names}): taken as {series}, since 300I A2 and 800I A2 have the same chips; "
            "set [node] series if this is wrong",
        )
    if family == "A3":
        return SeriesGuess(series="A3")
    if family == "A5":
        return SeriesGuess(series="A5")
    return SeriesGuess(
        series=None,
        note=f"the chips ({names}) are none of A2, A3 or A5; set [node] series if MemCache knows them",
    )


def _family(name: str) -> str | None:
    chip = re.sub(r"^ascend", "", name.replace(" ", ""), flags=re.IGNORECASE)
    return next((family for pattern, family in _BY_CHIP if re.match(pattern, chip, re.IGNORECASE)), None)
