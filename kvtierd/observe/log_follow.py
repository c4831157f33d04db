"""Following a log file: through rotation, truncation and restarts of kvtierd, at constant memory.

Rotated files are ``mmc-meta.1.log`` (what MemCache makes of ``mmc-meta.log`` at every start and when it is full) or
``name.log.1``, the smallest number the newest. Blocking, but never for long: call it in a thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import zlib
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from kvtierd.errors import KvtierError
from kvtierd.files import write_atomic

MOST_LINE_BYTES: Final = 64 * 1024
BLOCK_BYTES: Final = 256 * 1024
MOST_ROTATED: Final = 100
SAVE_SECONDS: Final = 5.0
_MARK_BYTES: Final = 128
_READS_A_CALL: Final = 8


class Position(NamedTuple):
    """How far a file was read. ``mark`` is the length and the checksum of its first bytes: inodes are used again.

    ``inside``: the offset is in the middle of a line that was too long, the rest of which is left out.
    """

    inode: int
    offset: int
    mark: tuple[int, int]
    inside: bool = False

    @classmethod
    def from_json(cls, value: Any) -> Self | None:
        """From what ``to_json`` made; ``None`` for anything else."""
        try:
            inode, offset, length, checksum, inside = (int(value[name]) for name in _FIELDS)
        except (TypeError, KeyError, ValueError, OverflowError):
            return None
        if min(inode, offset, length, checksum) < 0 or length > _MARK_BYTES:
            return None
        return cls(inode, offset, (length, checksum), bool(inside))

    def to_json(self) -> dict[str, int]:
        """For a file."""
        values = (self.inode, self.offset, *self.mark, int(self.inside))
        return dict(zip(_FIELDS, values, strict=True))


_FIELDS: Final = ("inode", "offset", "mark_bytes", "mark_crc", "inside")


class LogFollower:
    """Follows one file; one that does not exist yet is waited for.

    Args:
        path: The current file.
        position: Where an earlier follower was; the file is found again where rotation has put it. What was rotated away
            and removed meanwhile is lost, and counted in ``gaps``.
        from_start: Without a position: what is there already comes first, rather than only what is new.

    Attributes:
        cut_lines: Lines that were longer than 64 KiB; their beginnings were handed out.
        truncations: How often the file was emptied in place.
        gaps: How often the place where the reading had stopped was not found again.
        problem: Why it cannot be read; "" when it can, also while it is not there.
    """

    def __init__(self, path: Path, position: Position | None = None, *, from_start: bool = False) -> None:
        self.cut_lines = self.truncations = self.gaps = 0
        self.problem = ""
        self._path = path
        self._open: _Open | None = None
        self._later: list[_Open] = []  # newer files, the oldest last: read after this one
        self._pending = b""
        self._inside = False
        if position is not None:
            self._return_to(position)
        elif not from_start and (opened := self._try_open(path)) is not None:
            opened.offset = os.fstat(opened.descriptor).st_size
            self._open = opened
            self._inside = opened.offset > 0 and os.pread(opened.descriptor, 1, opened.offset - 1) != b"\n"

    def read(self) -> bytes:
        """New complete lines, each with its end, about 256 KiB of them at most; empty when there is nothing new.

        Raises nothing: what is wrong is in ``problem``.
        """
        for _ in range(_READS_A_CALL):
            try:
                data = self._read_some()
            except OSError as error:
                self.problem = f"{self._path} cannot be read: {error.strerror or error}"
                return b""
            if data is None:
                return b""
            lines = self._lines_of(data)
            if lines:
                return lines
        return b""

    @property
    def position(self) -> Position | None:
        """Up to where lines were handed out; ``None`` while there is no file."""
        if self._open is None:
            return None
        return Position(
            self._open.inode, self._open.offset - len(self._pending), self._open.mark, self._inside
        )

    def close(self) -> None:
        """Closes the files."""
        for opened in (self._open, *self._later):
            if opened is not None:
                os.close(opened.descriptor)
        self._open, self._later = None, []

    # -- lines

    def _lines_of(self, data: bytes) -> bytes:
        if self._inside:
            _, end, data = data.partition(b"\n")
            if not end:
                return b""
            self._inside = False
        buffer = self._pending + data if self._pending else data
        end_at = buffer.rfind(b"\n") + 1
        lines, self._pending = buffer[:end_at], buffer[end_at:]
        if len(lines) > MOST_LINE_BYTES:
            lines = self._with_long_ones_cut(lines)
        if len(self._pending) > MOST_LINE_BYTES:
            lines += self._pending[:MOST_LINE_BYTES] + b"\n"
            self._pending, self._inside = b"", True
            self.cut_lines += 1
        return lines

    def _with_long_ones_cut(self, lines: bytes) -> bytes:
        parts: list[bytes] = []
        done = at = 0
        while at + MOST_LINE_BYTES < len(lines):
            end = lines.rfind(b"\n", at, at + MOST_LINE_BYTES + 1)
            if end >= 0:
                at = end + 1
                continue
            # The line that begins at ``at`` is too long: its beginning counts, its rest is left out.
            self.cut_lines += 1
            parts += (lines[done : at + MOST_LINE_BYTES], b"\n")
            done = at = lines.index(b"\n", at) + 1
        return b"".join((*parts, lines[done:])) if parts else lines

    # -- files

    def _read_some(self) -> bytes | None:
        """The next bytes, ``None`` when there are none. An ended file's last line is ended."""
        opened = self._open
        if opened is None:
            opened = self._open = self._try_open(self._path)
            if opened is None:
                return None
        size = os.fstat(opened.descriptor).st_size
        if size < opened.offset or (size > opened.offset and not opened.is_same()):
            self.truncations += 1
            opened.begin_again()
            self._pending, self._inside = b"", False
        data = os.pread(opened.descriptor, BLOCK_BYTES, opened.offset)
        if data:
            opened.offset += len(data)
            self.problem = ""
            return data
        if self._later:
            return self._ended(self._later.pop())
        if not self._is_current(opened):
            files = self._newer_than(opened)
            if files:
                # What was written to the old file after our look at it comes first.
                rest = os.pread(opened.descriptor, BLOCK_BYTES, opened.offset)
                if rest:
                    for file in files:
                        os.close(file.descriptor)
                    opened.offset += len(rest)
                    return rest
                self._later = files
                return self._ended(self._later.pop())
        return None

    def _ended(self, following: _Open) -> bytes:
        """Goes on with the next file. The last line of the one before has its end, if it had none."""
        assert self._open is not None
        os.close(self._open.descriptor)
        self._open = following
        return b"\n" if self._pending or self._inside else self._first_of(following)

    @staticmethod
    def _first_of(opened: _Open) -> bytes:
        data = os.pread(opened.descriptor, BLOCK_BYTES, opened.offset)
        opened.offset += len(data)
        return data

    def _is_current(self, opened: _Open) -> bool:
        try:
            found = self._path.stat()
        except FileNotFoundError:  # between the rename and the first byte of the next
            return True
        return (found.st_dev, found.st_ino) == (opened.device, opened.inode)

    def _newer_than(self, opened: _Open) -> list[_Open]:
        """The files that came after this one, the oldest last; all that is there when this one is gone."""
        newer: list[_Open] = []
        for path in (self._path, *_rotated(self._path)):
            file = self._try_open(path)
            if file is None:
                continue
            if (file.device, file.inode) == (opened.device, opened.inode):
                os.close(file.descriptor)
                return newer
            newer.append(file)
        # Rotated out of reach. Of the older files nobody knows what was read: only the current one is new for sure.
        self.gaps += len(newer) > 1
        for file in newer[1:]:
            os.close(file.descriptor)
        return newer[:1]

    def _return_to(self, position: Position) -> None:
        newer: list[_Open] = []
        for path in (self._path, *_rotated(self._path)):
            file = self._try_open(path)
            if file is None:
                continue
            size = os.fstat(file.descriptor).st_size
            if file.inode == position.inode and file.begins_as(position.mark):
                if size < position.offset:
                    self.truncations += 1
                else:
                    file.offset, self._inside = position.offset, position.inside
                self._open, self._later = file, newer
                return
            newer.append(file)
        # Not there any more: the current file began after it, if its beginning is another.
        self.gaps += 1
        for file in newer[1:]:
            os.close(file.descriptor)
        self._open = newer[0] if newer else None

    def _try_open(self, path: Path) -> _Open | None:
        try:
            opened = _Open.of(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.problem = f"{path} cannot be read: {error.strerror or error}"
            return None
        if opened is None:
            self.problem = f"{path} is no regular file"
        return opened


class _Open:
    """An open file, how far it was read, and how it begins."""

    def __init__(self, descriptor: int, device: int, inode: int) -> None:
        self.descriptor, self.device, self.inode = descriptor, device, inode
        self.offset = 0
        self.mark = (0, 0)
        self._take_mark()

    @classmethod
    def of(cls, path: Path) -> Self | None:
        # Without O_NONBLOCK a pipe at this place would keep us until somebody writes.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            return None
        return cls(descriptor, found.st_dev, found.st_ino)

    def begins_as(self, mark: tuple[int, int]) -> bool:
        head = os.pread(self.descriptor, mark[0], 0)
        return (len(head), zlib.crc32(head)) == mark

    def is_same(self) -> bool:
        """Whether it still begins as it did; learns more of its beginning as it grows."""
        if not self.begins_as(self.mark):
            return False
        if self.mark[0] < _MARK_BYTES:
            self._take_mark()
        return True

    def begin_again(self) -> None:
        self.offset = 0
        self._take_mark()

    def _take_mark(self) -> None:
        head = os.pread(self.descriptor, _MARK_BYTES, 0)
        self.mark = (len(head), zlib.crc32(head))


def _rotated(path: Path) -> list[Path]:
    """The rotated files that are there, newest first, at most 100."""
    form = re.compile(
        rf"{re.escape(path.stem)}\.(\d{{1,4}}){re.escape(path.suffix)}|{re.escape(path.name)}\.(\d{{1,4}})"
    )
    found: dict[int, Path] = {}
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if match := form.fullmatch(entry.name):
                found[int(match[1] or match[2])] = path.with_name(entry.name)
    return [found[number] for number in sorted(found)[:MOST_ROTATED]]


class PositionStore:
    """Positions of several files in one file of ours, written atomically and not more often than every 5 s.

    ``problem`` says why it could not be read or written the last time; a damaged file counts as none.
    """

    def __init__(self, path: Path) -> None:
        self.problem = ""
        self._path = path
        self._saved: dict[str, dict[str, int]] = {}
        self._next_seconds = 0.0
        try:
            kept = json.loads(path.read_bytes())
            self._saved = {str(k): dict(v) for k, v in kept.items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, AttributeError) as error:
            self.problem = f"{path} cannot be read, so logs are followed from their ends: {error}"

    def get(self, path: Path) -> Position | None:
        """Where this file was read up to."""
        return Position.from_json(self._saved.get(str(path)))

    def save(self, followers: dict[Path, LogFollower], now_seconds: float, *, at_once: bool = False) -> None:
        """Writes where these followers are, if it is time and something has changed."""
        if now_seconds < self._next_seconds and not at_once:
            return
        self._next_seconds = now_seconds + SAVE_SECONDS
        positions = {str(path): p.to_json() for path, f in followers.items() if (p := f.position) is not None}
        if positions == self._saved:
            return
        try:
            write_atomic(self._path, json.dumps(positions).encode(), mode=0o600)
        except KvtierError as error:
            self.problem = error.message
        else:
            self._saved, self.problem = positions, ""
