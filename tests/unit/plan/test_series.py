from __future__ import annotations

import pytest

from kvtierd.plan.inventory import Npu
from kvtierd.plan.series import detect_series


def dies(name: str, cards: int, per_card: int = 1) -> list[Npu]:
    return [Npu(device=i, card=i // per_card, chip=i % per_card, name=name) for i in range(cards * per_card)]


@pytest.mark.parametrize(
    ("npus", "series"),
    [
        (dies("910B4", 2), "300I-A2"),
        (dies("910B4-1", 7), "300I-A2"),
        (dies("910B3", 8), "800I-A2"),
        (dies("Ascend 910B2C", 16), "800I-A2"),
        (dies("Ascend910", 8, 2), "A3"),
        (dies("Ascend910_9392", 8, 2), "A3"),
        (dies("Ascend950PR", 8), "A5"),
        (dies("950PR", 1), "A5"),
        (dies("310P3", 2), None),
        (dies("910ProB", 8), None),
        (dies("", 1), None),
        (dies("910B3", 1) + dies("Ascend950PR", 1), None),
        ([], None),
    ],
)
def test_series(npus: list[Npu], series: str | None) -> None:
    guess = detect_series(npus)
    assert guess.series == series
    if series is None:
        assert guess.note is not None
        assert "[node] series" in guess.note


def test_a2_says_that_it_is_a_guess() -> None:
    note = detect_series(dies("910B4", 2)).note
    assert note is not None
    assert "2 A2 cards (2 x 910B4): taken as 300I-A2" in note
    assert detect_series(dies("Ascend910", 8, 2)).note is None
