import os
import random
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtierd.observe.log_follow import (
    BLOCK_BYTES,
    MOST_LINE_BYTES,
    LogFollower,
    PositionStore,
)


class Log:
    """A log that MemCache's way rotates: name.log becomes name.1.log."""

    def __init__(self, directory, name="mmc-meta.log"):
        self.path = directory / name
        self.written = 0

    def say(self, *lines, end="\n"):
        with self.path.open("ab") as file:
            for line in lines:
                file.write((line if isinstance(line, bytes) else line.encode()) + end.encode())

    def rotated(self, number):
        return self.path.with_name(f"mmc-meta.{number}.log")

    def rotate(self, keep=5):
        self.rotated(keep).unlink(missing_ok=True)
        for number in range(keep - 1, 0, -1):
            if self.rotated(number).exists():
                self.rotated(number).rename(self.rotated(number + 1))
        self.path.rename(self.rotated(1))


@pytest.fixture
def log(tmp_path):
    return Log(tmp_path)


def read_all(follower):
    parts = []
    while data := follower.read():
        parts.append(data)
    return b"".join(parts).decode(errors="replace").splitlines()


def follow(log, **more):
    return LogFollower(log.path, from_start=True, **more)


def test_only_what_is_new_and_only_whole_lines(log):
    log.say("old")
    follower = LogFollower(log.path)
    assert follower.read() == b""
    log.say("one", "two")
    log.say("thr", end="")
    assert read_all(follower) == ["one", "two"]
    log.say("ee")
    assert read_all(follower) == ["three"]


def test_it_begins_behind_a_line_that_is_being_written(log):
    log.say("hal", end="")
    follower = LogFollower(log.path)
    log.say("f", "next")
    assert read_all(follower) == ["next"]


def test_a_file_that_comes_later_is_read_from_its_beginning(log):
    follower = LogFollower(log.path)
    assert follower.read() == b""
    assert follower.position is None
    log.say("one")
    assert read_all(follower) == ["one"]
    assert follower.problem == ""


def test_rotation_loses_nothing_and_doubles_nothing(log):
    follower = follow(log)
    log.say("a1", "a2")
    assert read_all(follower) == ["a1", "a2"]
    log.say("a3")
    log.rotate()
    assert read_all(follower) == ["a3"], "between the rename and the next file"
    log.say("b1")
    log.rotate()
    log.say("c1")
    log.rotate()
    log.say("d1")
    assert read_all(follower) == ["b1", "c1", "d1"], "three starts between two looks"
    assert follower.gaps == 0


def test_what_is_written_to_the_old_file_after_its_renaming_counts(log):
    follower = follow(log)
    log.say("a1")
    assert read_all(follower) == ["a1"]
    with log.path.open("ab") as old:
        log.rotate()
        log.say("b1")
        old.write(b"a2\n")
        old.flush()
        assert read_all(follower) == ["a2", "b1"]


def test_an_unfinished_last_line_of_an_old_file_is_a_line(log):
    follower = follow(log)
    log.say("whole")
    log.say("torn", end="")
    assert read_all(follower) == ["whole"]
    log.rotate()
    log.say("next")
    assert read_all(follower) == ["torn", "next"]


def test_a_file_removed_and_made_anew(log):
    follower = follow(log)
    log.say("a")
    assert read_all(follower) == ["a"]
    log.path.unlink()
    assert read_all(follower) == []
    log.say("b")
    assert read_all(follower) == ["b"]


def test_rotated_out_of_reach_goes_on_with_the_current_one_and_is_counted(log):
    follower = follow(log)
    log.say("a")
    assert read_all(follower) == ["a"]
    for name in ("b", "c", "d", "e"):
        log.rotate(keep=2)
        log.say(name)
    assert read_all(follower) == ["e"]
    assert follower.gaps == 1


def test_truncation_begins_anew(log):
    follower = follow(log)
    log.say("a", "b", "c")
    assert read_all(follower) == ["a", "b", "c"]
    os.truncate(log.path, 0)
    log.say("d")
    assert read_all(follower) == ["d"]
    assert follower.truncations == 1


def test_truncation_that_grew_past_the_old_end_is_seen_too(log):
    follower = follow(log)
    log.say("a")
    assert read_all(follower) == ["a"]
    os.truncate(log.path, 0)
    log.say("longer than before", "more")
    assert read_all(follower) == ["longer than before", "more"]
    assert follower.truncations == 1


def test_long_lines_are_cut_and_counted(log):
    follower = follow(log)
    sizes = (MOST_LINE_BYTES - 1, MOST_LINE_BYTES, MOST_LINE_BYTES + 1, 3 * BLOCK_BYTES, 10)
    for index, size in enumerate(sizes):
        log.say(str(index) * size)
    lines = read_all(follower)
    assert [line[0] for line in lines] == ["0", "1", "2", "3", "4"]
    assert [len(line) for line in lines] == [MOST_LINE_BYTES - 1, *[MOST_LINE_BYTES] * 3, 10]
    assert follower.cut_lines == 2


def test_bytes_that_are_no_text_and_carriage_returns(log):
    follower = follow(log)
    log.say(b"\xff\xfe\x00bad", b"progress 1\rprogress 2")
    assert follower.read() == b"\xff\xfe\x00bad\nprogress 1\rprogress 2\n"


def test_a_restart_goes_on_where_it_was(log, tmp_path):
    store = PositionStore(tmp_path / "positions.json")
    follower = LogFollower(log.path, store.get(log.path), from_start=True)
    log.say("a", "b")
    assert read_all(follower) == ["a", "b"]
    log.say("torn", end="")
    follower.read()
    store.save({log.path: follower}, 0.0)
    follower.close()
    log.say(" and whole", "c")
    log.rotate()
    log.say("d")
    again = PositionStore(tmp_path / "positions.json")
    follower = LogFollower(log.path, again.get(log.path))
    assert read_all(follower) == ["torn and whole", "c", "d"]


def test_an_inode_used_again_is_another_file(log):
    log.say("x" * 300)
    follower = follow(log)
    read_all(follower)
    position = follower.position
    follower.close()
    inode = log.path.stat().st_ino
    with log.path.open("r+b") as file:  # the same inode with other content, as after a removal
        file.truncate(0)
        file.write(b"y" * 400 + b"\n")
    assert log.path.stat().st_ino == inode
    follower = LogFollower(log.path, position)
    assert read_all(follower) == ["y" * 400]
    assert follower.gaps == 1


def test_a_place_in_the_middle_of_a_long_line_is_kept(log):
    follower = follow(log)
    log.say("x" * (2 * MOST_LINE_BYTES), end="")
    assert len(read_all(follower)[0]) == MOST_LINE_BYTES
    position = follower.position
    log.say("xxx", "next")
    assert read_all(LogFollower(log.path, position)) == ["next"]


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"x": 5}', "\x00", '{"/x": {"inode": -1}}', '{"/x": {"inode": 1e999}}', "7"],
)
def test_a_damaged_position_file_counts_as_none(tmp_path, log, content):
    file = tmp_path / "positions.json"
    file.write_text(content)
    store = PositionStore(file)
    assert store.get(log.path) is None
    follower = follow(log)
    log.say("a")
    read_all(follower)
    store.save({log.path: follower}, 0.0)
    assert PositionStore(file).get(log.path) == follower.position


def test_positions_are_written_seldom_and_a_full_disk_is_said(log, tmp_path, monkeypatch):
    store = PositionStore(tmp_path / "positions.json")
    follower = follow(log)
    for second in range(20):
        log.say("line")
        read_all(follower)
        store.save({log.path: follower}, float(second))
        if second == 4:
            assert store._saved[str(log.path)]["offset"] == 5
    assert store._saved[str(log.path)]["offset"] == 5 * 16
    from kvtierd.errors import StateError

    def full(*_, **__):
        raise StateError("no space to write positions.json")

    monkeypatch.setattr("kvtierd.observe.log_follow.write_atomic", full)
    log.say("line")
    read_all(follower)
    store.save({log.path: follower}, 100.0)
    assert "no space" in store.problem


def test_what_is_no_regular_file_is_said_and_blocks_nobody(tmp_path):
    pipe = tmp_path / "mmc-meta.log"
    os.mkfifo(pipe)
    started = time.monotonic()
    follower = LogFollower(pipe)
    assert follower.read() == b""
    assert "no regular file" in follower.problem
    assert time.monotonic() - started < 1
    directory = LogFollower(tmp_path)
    assert directory.read() == b""
    assert directory.problem


def test_memory_does_not_grow_with_the_file(log):
    line = b"x" * 150 + b"\n"
    with log.path.open("wb") as file:
        for _ in range(20):
            file.write(line * 7000)
        file.write(b"y" * 5_000_000)
    follower = follow(log)
    tracemalloc.start()
    total = 0
    while data := follower.read():
        total += len(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total >= 20 * 7000 * 151
    assert peak < 8 * BLOCK_BYTES


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False))
def test_whatever_happens_in_between_every_line_comes_once(tmp_path_factory, rng: random.Random):
    log = Log(tmp_path_factory.mktemp("log"))
    follower = follow(log)
    said, heard = [], []
    for step in range(40):
        what = rng.choice(["say", "say", "say", "torn", "rotate", "read", "restart"])
        if what in {"say", "torn"}:
            text = f"{step}-{'x' * rng.choice([1, 50, 3000])}"
            said.append(text)
            if what == "torn":
                log.say(text[:3], end="")
                heard += read_all(follower)
                log.say(text[3:])
            else:
                log.say(text)
        elif what == "rotate" and log.path.exists():
            heard += read_all(follower)
            log.rotate()
        elif what == "read":
            heard += read_all(follower)
        elif what == "restart" and (position := follower.position) is not None:
            follower.close()
            follower = LogFollower(log.path, position)
    log.say("end")
    heard += read_all(follower)
    assert heard == [*said, "end"]
    assert (follower.gaps, follower.truncations) == (0, 0)
