"""Reading a unit's rotated output: the last lines of a run, and following across rotations.

Knows the files that ``shim_log.OutputLog`` writes. Blocking: call it in a thread.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

TAIL_BYTES = 1024 * 1024  # the most that is read to find the last lines
FOLLOW_BYTES = 1024 * 1024  # the most that one call of LogFollower.read takes


class _Opened(NamedTuple):
    file: BinaryIO
    inode: int
    size_bytes: int  # when it was opened


def _open_newest_first(path: Path) -> Iterator[_Opened]:
    """Opens the current file, then the rotated ones. A rotation in between shows no file twice."""
    index, seen = 0, set[int]()
    while True:
        try:
            file = (path if index == 0 else path.with_name(f"{path.name}.{index}")).open("rb")
        except FileNotFoundError:
            if index:
                return
        else:
            status = os.fstat(file.fileno())
            if status.st_ino in seen:
                file.close()
            else:
                seen.add(status.st_ino)
                yield _Opened(file, status.st_ino, status.st_size)
        index += 1


def _tail(files: list[_Opened], count: int, since: tuple[int, int] | None) -> bytes:
    """The bytes that hold the last ``count`` lines of these files (newest first), perhaps more."""
    data = b""
    for file, inode, size_bytes in files:
        run_began_here = since is not None and inode == since[0]
        lowest = since[1] if since is not None and run_began_here else 0
        start = max(lowest, size_bytes - (TAIL_BYTES - len(data)))
        file.seek(start)
        data = file.read(max(0, size_bytes - start)) + data
        if run_began_here or start > lowest or data.count(b"\n") > count:
            break
    return data


def _last(data: bytes, count: int) -> list[bytes]:
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines[-count:] if count > 0 else []


def last_lines(path: Path, count: int, since: tuple[int, int] | None = None) -> list[bytes]:
    """The last ``count`` lines without their ends, oldest first; at most 1 MiB is looked at.

    Args:
        path: The current log file; rotated ones stand beside it.
        count: How many lines; an unfinished last one counts.
        since: Inode and offset where the run began; lines before it are left out. ``None``: all that is kept.
    """
    with contextlib.ExitStack() as stack:
        files = list(_open_newest_first(path))
        for opened in files:
            stack.callback(opened.file.close)
        return _last(_tail(files, count, since), count)


class LogFollower:
    """Follows one log through rotations; a file that does not exist yet is waited for.

    Args:
        path: The current log file.
        lines: How many lines that are there already come first.
        since: Inode and offset where a run began: no lines from before it. ``None``: from all that is kept.
    """

    def __init__(self, path: Path, lines: int, since: tuple[int, int] | None = None) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._unfinished = b""
        self._first: list[bytes] = []
        files = list(_open_newest_first(path))
        try:
            data = _tail(files, lines, since)
            if data and not data.endswith(b"\n"):
                data, _, self._unfinished = data.rpartition(b"\n")
            self._first = _last(data, lines)
        finally:
            for opened in files[1:]:
                opened.file.close()
        if files:
            self._file = files[0].file
            self._file.seek(files[0].size_bytes)

    def read(self) -> list[bytes]:
        """New complete lines without their ends, at most about 1 MiB of them; empty when there is nothing new."""
        first, self._first = self._first, []
        if first:
            return first
        data = self._read_some()
        if not data:
            return []
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        return lines

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read_some(self) -> bytes:
        if self._file is None:  # there was no file at all, so all that there is now is new
            files = list(_open_newest_first(self._path))
            for opened in files[:-1]:
                opened.file.close()
            self._file = files[-1].file if files else None
        if self._file is None:
            return b""
        data = self._file.read(FOLLOW_BYTES)
        if data:
            return data
        ours = os.fstat(self._file.fileno())
        if ours.st_size < self._file.tell():  # emptied in place by somebody
            self._file.seek(0)
            return self._file.read(FOLLOW_BYTES)
        try:
            if self._path.stat().st_ino == ours.st_ino:
                return b""
        except FileNotFoundError:  # between the rotation and the first byte after it
            return b""
        # Rotated. What was written before that but after our read comes first.
        return self._file.read(FOLLOW_BYTES) or self._step_to_next(ours.st_ino)

    def _step_to_next(self, inode: int) -> bytes:
        files = list(_open_newest_first(self._path))
        position = next((index for index, opened in enumerate(files) if opened.inode == inode), len(files))
        chosen = max(0, position - 1)
        for index, opened in enumerate(files):
            if index != chosen:
                opened.file.close()
        if not files:
            return b""
        self.close()
        self._file = files[chosen].file
        return self._file.read(FOLLOW_BYTES)
