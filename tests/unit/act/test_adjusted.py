"""What actions have changed, on disk: kept, taken back, and set aside when it cannot be read."""

from __future__ import annotations

from pathlib import Path

from kvtierd.act.adjusted import FILE, read_adjustments, write_adjustments
from kvtierd.plan.adjustments import NOTHING, AddedHolder, Adjustments

SOME = Adjustments(evict_high=80, evict_low=70, holders=(AddedHolder(index=0, dram_bytes=1 << 26),))


def test_it_is_there_again_and_gone_when_all_is_taken_back(tmp_path: Path) -> None:
    assert read_adjustments(tmp_path) == (NOTHING, "")
    write_adjustments(tmp_path, SOME)
    assert read_adjustments(tmp_path) == (SOME, "")
    write_adjustments(tmp_path, NOTHING)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_changes_nothing_is_said_and_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"evict_high": 700}')
    found, problem = read_adjustments(tmp_path)
    assert found == NOTHING
    assert "damaged" in problem
    write_adjustments(tmp_path, SOME)
    assert read_adjustments(tmp_path) == (SOME, "")
    (aside,) = tmp_path.glob("*.damaged-*")
    assert aside.read_text() == '{"evict_high": 700}'


def test_a_file_that_is_far_too_large_is_not_read(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b" " * 100_000)
    assert "too large" in read_adjustments(tmp_path)[1]
