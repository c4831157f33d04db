"""The shim's side of a unit's output: one log file, rotated, bounded, never in the unit's way.

Bytes are written as they came (no decoding), in order. Files are ``NAME.log``, then ``NAME.log.1`` (newest) up to
``NAME.log.<keep>``; a file ends at the end of a line. When the disk is full the output is dropped and counted, and
a line in the log says so once there is room again: the unit must never wait for a disk.

Imports little on purpose, like all of the shim.
"""

from __future__ import annotations

import os
import time

from kvtierd.secret_files import MASK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

LONGEST_LINE_BYTES = 64 * 1024
RECENT_BYTES = 32 * 1024
RETRY_SECONDS = 1.0  # between two tries to write to a disk that refused
_OPEN_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class OutputLog:
    """Writes one unit's output.

    Args:
        path: The current file; rotated files stand beside it.
        max_bytes: Size from which a file is rotated, at the next end of a line.
        keep: How many rotated files are kept.
        watch: Texts to look for in the output; those found are in ``seen``.
        hide: Secrets, each replaced by ``***`` wherever the output has it.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        path: str,
        max_bytes: int,
        keep: int,
        watch: Iterable[str] = (),
        hide: Iterable[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.keep = keep
        self.seen: set[str] = set()
        self.dropped_bytes = 0
        self.dropping = ""  # why output is being dropped just now, else empty
        self._clock = clock
        self._retry_at = 0.0
        self._unreported_bytes = 0
        self._watch = {text.encode(): text for text in watch if text}
        self._overlap = b""
        # The longest first, so that none hides a part of another.
        self._hide = sorted((text.encode() for text in hide if text), key=len, reverse=True)
        self._held = b""  # the end of the output as far as it could be the beginning of a secret
        self._recent = b""
        self._line_bytes = 0  # of the unfinished line in the stream
        self._fd = -1
        self._size = 0
        self._file_ends_line = True

    def position(self) -> tuple[int, int]:
        """Inode and offset at which the next byte will be written; ``(0, 0)`` when the file cannot be opened."""
        if not self._open():
            return 0, 0
        return os.fstat(self._fd).st_ino, self._size

    def write(self, data: bytes) -> bool:
        """Takes output of any length. True when it held a watched text that was not seen before."""
        found = False
        if self._hide:
            data = self._without_secrets(data)
        for start in range(0, len(data), LONGEST_LINE_BYTES):
            found |= self._take(data[start : start + LONGEST_LINE_BYTES])
        return found

    def finish(self) -> None:
        """Ends an unfinished line and closes the file, so that the next run starts on a line of its own."""
        if self._held:
            self._take(self._held)
            self._held = b""
        if self._line_bytes:
            self._append(b"\n")
            self._line_bytes = 0
        if self._unreported_bytes:
            self._report_loss()
        self._close()

    def recent_lines(self, count: int, longest: int = 2000) -> list[str]:
        """The last lines from memory (32 KiB are kept), whether or not they reached the disk."""
        lines = self._recent.decode(errors="replace").splitlines()
        return [line[:longest] for line in lines[-count:]] if count > 0 else []

    def _take(self, data: bytes) -> bool:
        found = self._look_for_texts(data)
        line_was_open = self._line_bytes > 0
        data = self._split_long_line(data)
        self._recent = (self._recent + data)[-RECENT_BYTES:]
        if self._size < self.max_bytes:
            self._append(data)
        elif not line_was_open:
            self._rotate()
            self._append(data)
        else:
            end_of_line = data.find(b"\n") + 1
            self._append(data[: end_of_line or len(data)])
            if end_of_line:
                self._rotate()
                self._append(data[end_of_line:])
        return found

    def _without_secrets(self, data: bytes) -> bytes:
        """``data`` with what was held back before, without secrets; holds back an end that may become one."""
        data = self._held + data
        for secret in self._hide:
            data = data.replace(secret, MASK.encode())
        held = max((_common(data, secret) for secret in self._hide), default=0)
        self._held = data[len(data) - held :]
        return data[: len(data) - held]

    def _look_for_texts(self, data: bytes) -> bool:
        if not self._watch:
            return False
        window = self._overlap + data
        hits = [needle for needle in self._watch if needle in window]
        for needle in hits:
            self.seen.add(self._watch.pop(needle))
        overlap = max(map(len, self._watch), default=1) - 1
        self._overlap = window[-overlap:] if overlap else b""
        return bool(hits)

    def _split_long_line(self, data: bytes) -> bytes:
        """``data`` is at most one longest line, so only the line that was begun before can become too long."""
        room = LONGEST_LINE_BYTES - self._line_bytes
        first_newline = data.find(b"\n")
        if (len(data) if first_newline < 0 else first_newline) > room:
            data = data[:room] + b"\n" + data[room:]
        last_newline = data.rfind(b"\n")
        self._line_bytes = len(data) - last_newline - 1 + (self._line_bytes if last_newline < 0 else 0)
        return data

    def _append(self, data: bytes) -> None:
        if not data:
            return
        if self.dropping and self._clock() < self._retry_at:
            written = 0
        else:
            written = self._write_out(data) if self._report_loss() else 0
        if written < len(data):
            self._unreported_bytes += len(data) - written
            self.dropped_bytes += len(data) - written

    def _report_loss(self) -> bool:
        """Says in the log what was lost before; True when nothing is left to say and the file can be written."""
        if not self._unreported_bytes:
            return self._open()
        note = "" if self._file_ends_line else "\n"
        note += f"[kvtierd] {self._unreported_bytes} bytes of output are missing here: {self.dropping}\n"
        if not self._open() or self._write_out(note.encode()) < len(note.encode()):
            return False
        self._unreported_bytes = 0
        self.dropping = ""
        return True

    def _write_out(self, data: bytes) -> int:
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:] if written else data)
        except OSError as error:
            self._refused(error)
        if written:
            self._size += written
            self._file_ends_line = data[written - 1] == ord("\n")
        return written

    def _refused(self, error: OSError) -> None:
        self.dropping = error.strerror or str(error)
        self._retry_at = self._clock() + RETRY_SECONDS

    def _rotate(self) -> None:
        try:
            for index in range(self.keep - 1, 0, -1):
                self._move(f"{self.path}.{index}", f"{self.path}.{index + 1}")
            if self.keep > 0:
                self._move(self.path, f"{self.path}.1")
            else:
                os.unlink(self.path)  # noqa: PTH108
        except OSError as error:
            self._refused(
                error
            )  # still too big, so the next line tries again and nothing is written until it works
            return
        self._close()

    @staticmethod
    def _move(source: str, target: str) -> None:
        if os.path.exists(source):  # noqa: PTH110
            os.replace(source, target)  # noqa: PTH105

    def _open(self) -> bool:
        if self._fd >= 0:
            return True
        try:
            self._fd = os.open(self.path, _OPEN_FLAGS, 0o640)
            self._size = os.fstat(self._fd).st_size
            self._file_ends_line = not self._size or os.pread(self._fd, 1, self._size - 1) == b"\n"
        except OSError as error:
            self._refused(error)
            return False
        return True

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        self._size = 0


def _common(data: bytes, secret: bytes) -> int:
    """How many bytes at the end of ``data`` are the beginning of ``secret``, less than all of it."""
    for length in range(min(len(data), len(secret) - 1), 0, -1):
        if data.endswith(secret[:length]):
            return length
    return 0
