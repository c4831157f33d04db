from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvtierd.errors import UnitError
from kvtierd.units.backend import ProcessExit, UnitProcess
from kvtierd.units.systemd_record import UnitRecords

ENDED = UnitProcess("u", "run1", 7, 1.0, "digest", ProcessExit(3, None, 2.0, False), "a note")


def test_an_end_comes_back(tmp_path: Path) -> None:
    records = UnitRecords(tmp_path / "systemd")
    assert records.ids() == []
    records.write_end(ENDED)
    assert records.ended("u") == ENDED
    assert records.ended("u", "run1") == ENDED
    assert records.ended("u", "run2") is None
    assert records.ids() == ["u"]
    assert (tmp_path / "systemd" / "u.json").stat().st_mode & 0o777 == 0o600
    records.remove("u")
    assert records.ended("u") is None


def test_a_request_is_of_one_run_and_does_not_overwrite_its_end(tmp_path: Path) -> None:
    records = UnitRecords(tmp_path)
    records.write_request("u", "run1")
    assert records.is_requested("u", "run1")
    assert not records.is_requested("u", "run2")
    assert records.ended("u") is None
    records.write_end(ENDED)
    records.write_request("u", "run1")
    assert records.ended("u") == ENDED


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"instance": 1}', '{"instance": "run1", "process": {"x": 1}}']
)
def test_a_damaged_record_counts_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "u.json").write_text(content)
    assert UnitRecords(tmp_path).ended("u") is None
    assert not UnitRecords(tmp_path).is_requested("u", "run1")


async def test_one_at_a_time(tmp_path: Path) -> None:
    one, other = UnitRecords(tmp_path), UnitRecords(tmp_path)
    async with one.exclusive("u", 1.0):
        with pytest.raises(UnitError) as caught:
            async with other.exclusive("u", 0.1):
                pass
        assert caught.value.stable_code == "unit.busy"
        async with other.exclusive("another", 0.1):
            pass
    async with asyncio.timeout(1), other.exclusive("u", 1.0):
        pass


async def test_an_unusable_directory_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnitError) as caught:
        async with UnitRecords(tmp_path / "file" / "systemd").exclusive("u", 1.0):
            pass
    assert caught.value.stable_code == "unit.runtime-dir"
