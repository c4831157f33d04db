from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtierd.units import shim_log
from kvtierd.units.shim_log import LONGEST_LINE_BYTES, OutputLog


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "u.log"


def written(path: Path) -> list[bytes]:
    files = [path, *(path.with_name(f"u.log.{i}") for i in range(1, 9))]
    return [file.read_bytes() for file in files if file.exists()]


def test_bytes_arrive_unchanged(path: Path) -> None:
    log = OutputLog(str(path), 1000, 2)
    log.write(b"\xff\x00one\n")
    log.write(b"two\n")
    log.finish()
    assert written(path) == [b"\xff\x00one\ntwo\n"]


def test_rotation_is_bounded_and_between_lines(path: Path) -> None:
    log = OutputLog(str(path), 20, 2)
    for number in range(11):
        log.write(b"line %d\nand " % number)
        log.write(b"more\n")
    log.finish()
    files = written(path)
    assert len(files) == 3
    assert all(file.endswith(b"\n") for file in files)
    assert files[0].splitlines()[-1] == b"and more"
    assert all(len(file) < 40 for file in files)


def test_a_read_of_many_lines_does_not_break_one(path: Path) -> None:
    log = OutputLog(str(path), 10, 1)
    log.write(b"aaaaaaaaaaaaaaa\nbbb")
    log.write(b"bbb\nccc\n")
    assert written(path) == [b"ccc\n", b"aaaaaaaaaaaaaaa\nbbbbbb\n"]


def test_no_rotated_files_are_kept_when_none_are_wanted(path: Path) -> None:
    log = OutputLog(str(path), 4, 0)
    log.write(b"one\n")
    log.write(b"two\n")
    assert written(path) == [b"two\n"]


def test_a_new_run_starts_on_its_own_line(path: Path) -> None:
    log = OutputLog(str(path), 1000, 1)
    log.write(b"no end")
    log.finish()
    again = OutputLog(str(path), 1000, 1)
    assert again.position() == (path.stat().st_ino, 7)
    again.write(b"next\n")
    assert written(path) == [b"no end\nnext\n"]


@given(st.lists(st.binary(max_size=40).map(lambda b: b * 5000), max_size=8))
@settings(max_examples=60, deadline=None)
def test_no_line_is_longer_than_the_limit_and_nothing_is_lost(tmp_path_factory, chunks: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("log") / "u.log"
    log = OutputLog(str(path), 1 << 30, 1)
    for chunk in chunks:
        log.write(chunk)
    content = path.read_bytes() if path.exists() else b""
    assert all(len(line) <= LONGEST_LINE_BYTES for line in content.split(b"\n"))
    assert content.replace(b"\n", b"") == b"".join(chunks).replace(b"\n", b"")


def test_a_line_of_exactly_the_limit_is_not_split(path: Path) -> None:
    log = OutputLog(str(path), 1 << 30, 1)
    log.write(b"x" * 65000)
    log.write(b"x" * (LONGEST_LINE_BYTES - 65000) + b"\nnext\n")
    assert path.read_bytes() == b"x" * LONGEST_LINE_BYTES + b"\nnext\n"


def test_watched_texts_are_seen_across_reads(path: Path) -> None:
    log = OutputLog(str(path), 1000, 1, watch=["Started MetaService", "never"])
    assert not log.write(b"... Started Me")
    assert log.write(b"taService\n")
    assert not log.write(b"Started MetaService\n")
    assert log.seen == {"Started MetaService"}


def test_recent_lines_come_from_memory(path: Path) -> None:
    log = OutputLog(str(path), 1000, 0)
    for number in range(5000):
        log.write(b"line %d\n" % number)
    assert log.recent_lines(2) == ["line 4998", "line 4999"]
    assert len(log.recent_lines(100_000)) < 5000
    assert log.recent_lines(0) == []


def test_a_full_disk_drops_counts_and_says_so_later(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    log = OutputLog(str(path), 1 << 20, 1, clock=clock)
    log.write(b"before\n")
    real_write = os.write

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shim_log.os, "write", full)
    log.write(b"lost 1\n")
    log.write(b"lost 22\n")
    assert (log.dropped_bytes, log.dropping) == (15, "No space left on device")
    assert log.recent_lines(1) == ["lost 22"]
    monkeypatch.setattr(shim_log.os, "write", real_write)
    log.write(b"still lost\n")  # the disk is not tried at every read
    clock.now += 2
    log.write(b"after\n")
    assert log.dropping == ""
    assert path.read_text().splitlines() == [
        "before",
        "[kvtierd] 26 bytes of output are missing here: No space left on device",
        "after",
    ]


def test_a_write_that_stops_half_way_keeps_the_files_lines_apart(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    log = OutputLog(str(path), 1 << 20, 1, clock=clock)
    real_write, calls = os.write, []

    def fills_up(fd: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(fd, data[:3])

    monkeypatch.setattr(shim_log.os, "write", fills_up)
    log.write(b"abcdef\n")
    monkeypatch.setattr(shim_log.os, "write", real_write)
    clock.now += 2
    log.write(b"next\n")
    assert (
        path.read_text()
        == "abc\n[kvtierd] 4 bytes of output are missing here: No space left on device\nnext\n"
    )


def test_a_missing_log_directory_loses_output_and_nothing_else(tmp_path: Path) -> None:
    clock = Clock()
    log = OutputLog(str(tmp_path / "none" / "u.log"), 100, 1, clock=clock)
    log.write(b"lost\n")
    assert log.position() == (0, 0)
    assert log.dropped_bytes == 5
    (tmp_path / "none").mkdir()
    clock.now += 2
    log.write(b"kept\n")
    assert (tmp_path / "none" / "u.log").read_text().endswith("\nkept\n")


def test_when_rotation_fails_the_file_stops_growing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    log = OutputLog(str(path), 10, 1, clock=clock)

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(shim_log.os, "replace", refuse)
    for _ in range(100):
        log.write(b"0123456789\n")
        clock.now += 5
    assert path.stat().st_size <= 22


def test_a_symlink_is_not_followed(path: Path, tmp_path: Path) -> None:
    path.symlink_to(tmp_path / "elsewhere")
    OutputLog(str(path), 10, 1).write(b"x\n")
    assert not (tmp_path / "elsewhere").exists()


SECRET = "kABCabcABC0123456789"
OTHER = "kABCabcABC01234567890"


@given(
    st.lists(st.sampled_from([SECRET, OTHER, "kABC", "k", "\n", "x", SECRET[:-1], SECRET[1:]]), max_size=12),
    st.data(),
)
@settings(deadline=None)
def test_no_secret_gets_into_the_log_however_it_is_cut(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("log") / "u.log"
    text = "".join(parts).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    log = OutputLog(str(path), 10**6, 1, hide=(SECRET, OTHER))
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        log.write(text[start:end])
    recent = "\n".join(log.recent_lines(1000))
    log.finish()
    got = path.read_bytes() if path.exists() else b""
    assert SECRET not in got.decode()
    assert SECRET not in recent
    whole = text.replace(OTHER.encode(), b"***").replace(SECRET.encode(), b"***")
    if SECRET.encode() not in whole and not cuts:
        assert got.rstrip(b"\n") == whole.rstrip(b"\n"), "nothing else is changed or lost"


def test_a_secret_over_two_writes_is_masked_and_the_rest_is_whole(path: Path) -> None:
    log = OutputLog(str(path), 10**6, 1, ("after",), (SECRET,))
    log.write(b"key='" + SECRET[:7].encode())
    assert written(path) == [b"key='"], "what could be the beginning waits"
    assert log.write(SECRET[7:].encode() + b"' after\n")
    log.write(b"kAB")  # only looks like it
    log.finish()
    assert written(path) == [b"key='***' after\nkAB\n"]


def test_an_ordinary_line_does_not_wait(path: Path) -> None:
    log = OutputLog(str(path), 10**6, 1, hide=(SECRET,))
    log.write(b"one\n")
    assert written(path) == [b"one\n"]
