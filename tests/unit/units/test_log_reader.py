from __future__ import annotations

from pathlib import Path

import pytest

from kvtierd.units.log_reader import LogFollower, last_lines
from kvtierd.units.shim_log import OutputLog


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "u.log"


def read_all(follower: LogFollower) -> list[bytes]:
    lines: list[bytes] = []
    for _ in range(50):
        lines += follower.read()
    return lines


def numbered(first: int, last: int) -> list[bytes]:
    return [b"line %d" % number for number in range(first, last)]


def write(log: OutputLog, first: int, last: int) -> None:
    for line in numbered(first, last):
        log.write(line + b"\n")


def test_last_lines_reach_back_into_rotated_files(path: Path) -> None:
    write(OutputLog(str(path), 50, 5), 0, 20)
    assert last_lines(path, 12) == numbered(8, 20)


def test_last_lines_of_a_run_begin_where_it_began(path: Path) -> None:
    log = OutputLog(str(path), 60, 9)
    write(log, 0, 4)
    began = log.position()
    write(log, 4, 6)
    assert last_lines(path, 10, began) == numbered(4, 6)
    write(log, 6, 30)  # the beginning is in a rotated file now
    assert last_lines(path, 100, began) == numbered(4, 30)


def test_last_lines_of_nothing(path: Path) -> None:
    assert last_lines(path, 5) == []
    path.write_bytes(b"a\nb")
    assert last_lines(path, 0) == []
    assert last_lines(path, 1) == [b"b"]


def test_last_lines_of_a_huge_file_read_little(path: Path) -> None:
    path.write_bytes(b"x" * 3_000_000 + b"\nend\n")
    lines = last_lines(path, 5)
    assert lines[-1] == b"end"
    assert sum(map(len, lines)) < 1_100_000


def test_follower_starts_with_the_last_lines_and_goes_on(path: Path) -> None:
    log = OutputLog(str(path), 1000, 1)
    write(log, 0, 5)
    follower = LogFollower(path, 2)
    write(log, 5, 8)
    assert read_all(follower) == numbered(3, 8)
    follower.close()


def test_follower_loses_nothing_in_many_rotations(path: Path) -> None:
    log = OutputLog(str(path), 40, 20)
    follower = LogFollower(path, 0)
    seen: list[bytes] = []
    for start in range(0, 100, 25):  # several rotations between two reads
        write(log, start, start + 25)
        seen += read_all(follower)
    assert seen == numbered(0, 100)
    follower.close()


def test_follower_goes_on_with_the_oldest_file_when_its_own_is_gone(path: Path) -> None:
    log = OutputLog(str(path), 40, 2)
    write(log, 0, 3)
    follower = LogFollower(path, 0)
    write(log, 3, 100)
    seen = read_all(follower)
    assert seen[-1] == b"line 99"
    own = seen.index(b"line 5") + 1  # the rest of its own file, which it still holds open
    assert seen == [*numbered(3, 3 + own), *numbered(100 - len(seen) + own, 100)]
    assert len(seen) < 40
    follower.close()


def test_follower_holds_back_an_unfinished_line(path: Path) -> None:
    path.write_bytes(b"one\ntw")
    follower = LogFollower(path, 5)
    assert read_all(follower) == [b"one"]
    with path.open("ab") as file:
        file.write(b"o\n")
    assert read_all(follower) == [b"two"]
    follower.close()


def test_follower_waits_for_a_file_that_is_not_there(path: Path) -> None:
    follower = LogFollower(path, 5)
    assert read_all(follower) == []
    path.write_bytes(b"now\n")
    assert read_all(follower) == [b"now"]
    follower.close()


def test_follower_notices_a_file_emptied_in_place(path: Path) -> None:
    path.write_bytes(b"one\ntwo\n")
    follower = LogFollower(path, 0)
    assert read_all(follower) == []
    path.write_bytes(b"new\n")
    assert read_all(follower) == [b"new"]
    follower.close()
