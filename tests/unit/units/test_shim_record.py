from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtierd.units import shim_record

RECORD = {"unit_id": "u", "instance": "i", "pid": 1, "start_ticks": 2, "boot_id": "b", "exit": None}


def test_a_record_comes_back_and_nothing_else_is_left(tmp_path: Path) -> None:
    shim_record.write_record(str(tmp_path), RECORD)
    shim_record.write_record(str(tmp_path), RECORD | {"later": "field"})
    assert shim_record.read_record(str(tmp_path)) == RECORD | {"later": "field"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]
    assert (tmp_path / "record.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"unit_id": "u"}', b"\xff\xff"])
def test_a_damaged_record_counts_as_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "record.json").write_bytes(content)
    assert shim_record.read_record(str(tmp_path)) is None


def test_a_failed_write_keeps_the_old_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shim_record.write_record(str(tmp_path), RECORD)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        shim_record.write_record(str(tmp_path), RECORD | {"pid": 9})
    monkeypatch.undo()
    assert shim_record.read_record(str(tmp_path)) == RECORD
    assert [entry.name for entry in tmp_path.iterdir()] == ["record.json"]


def test_a_lock_is_exclusive_until_it_is_closed(tmp_path: Path) -> None:
    lock = shim_record.try_lock(str(tmp_path))
    assert lock >= 0
    assert shim_record.try_lock(str(tmp_path)) == -1
    os.close(lock)
    again = shim_record.try_lock(str(tmp_path))
    assert again >= 0
    os.close(again)


def test_a_lock_on_a_removed_file_protects_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process removed and made the file anew between our open and our lock."""
    real_flock, swapped = shim_record.fcntl.flock, []

    def swap_first(fd: int, operation: int) -> None:
        if not swapped:
            swapped.append(fd)
            (tmp_path / "lock").unlink()
            (tmp_path / "lock").touch()
        real_flock(fd, operation)

    monkeypatch.setattr(shim_record.fcntl, "flock", swap_first)
    lock = shim_record.try_lock(str(tmp_path))
    assert os.fstat(lock).st_ino == (tmp_path / "lock").stat().st_ino
    os.close(lock)
