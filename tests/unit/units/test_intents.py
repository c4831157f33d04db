from __future__ import annotations

from pathlib import Path

from kvtierd.units.intents import FILE_NAME, StopIntents


def test_a_stop_is_remembered_and_taken_back(tmp_path: Path) -> None:
    StopIntents(tmp_path / "run").add("a")
    assert "a" in StopIntents(tmp_path / "run")
    StopIntents(tmp_path / "run").discard("a")
    assert "a" not in StopIntents(tmp_path / "run")


def test_a_damaged_file_is_said_and_counts_as_empty(tmp_path: Path) -> None:
    for content in ("{", "[]", '{"stopped": 5}', '{"other": []}'):
        (tmp_path / FILE_NAME).write_text(content)
        intents = StopIntents(tmp_path)
        assert "cannot be read" in intents.problem, content
        assert "a" not in intents
        intents.add("a")
        assert intents.problem == ""


def test_a_file_that_cannot_be_written_is_said_and_the_stop_holds(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("in the way")
    intents = StopIntents(tmp_path / "run")
    intents.add("a")
    assert "a" in intents
    assert "cannot be written" in intents.problem


def test_without_a_directory_it_lives_in_memory() -> None:
    intents = StopIntents(None)
    intents.add("a")
    assert "a" in intents
    assert intents.problem == ""
