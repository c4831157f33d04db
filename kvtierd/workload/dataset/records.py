"""Reads the records of a dataset file one after the other, whatever it is packed in, in constant memory.

JSON lines, or one JSON array of objects; plain, gzip or zstd, told by the first bytes and not by the name. What
cannot be used is counted with its reason and where it was first seen, never dropped without a word.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from kvtierd.errors import WorkloadError
from kvtierd.workload.needs import need

LONGEST_BYTES: Final = 64 * 1024 * 1024
"""A line or record beyond this is skipped and counted: no prompt is that long, and memory stays bounded."""

_CHUNK_BYTES: Final = 1024 * 1024
_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_BOM: Final = codecs.BOM_UTF8
_LFS: Final = b"version https://git-lfs.github.com/spec/"

_UNREADABLE: Final = object()
_DAMAGE: Final = (OSError, EOFError, zlib.error)

Progress = Callable[[int], None]
"""Is told how many bytes of the file have been taken in so far."""


class Skips:
    """What was left out or changed on the way: how often for each reason, and where it was seen first."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, str]] = {}

    def add(self, reason: str, where: str) -> None:
        """One more; ``where`` is kept for the first only."""
        count, first = self._seen.get(reason, (0, where))
        self._seen[reason] = (count + 1, first)

    @property
    def total(self) -> int:
        """How often altogether."""
        return sum(count for count, _ in self._seen.values())

    def count(self, reason: str) -> int:
        """How often."""
        return self._seen.get(reason, (0, ""))[0]

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Reason -> ``{"count", "first"}``."""
        return {reason: {"count": count, "first": first} for reason, (count, first) in self._seen.items()}

    def lines(self) -> Iterator[str]:
        """A line for people for each reason."""
        for reason, (count, first) in self._seen.items():
            yield f"{count:,} x {reason} (first: {first})"


def read_lines(
    path: Path, skips: Skips, *, longest_bytes: int = LONGEST_BYTES, progress: Progress | None = None
) -> Iterator[tuple[int, bytes]]:
    """Number (from 1) and content of each line, without its ending and without a byte order mark.

    Raises:
        WorkloadError: ``dataset.unreadable``, ``dataset.lfs-pointer``, ``dataset.encoding``, ``dataset.damaged``.
    """
    with _opened(path) as raw:
        stream, told = _unpacked(raw, path), 0
        number = 0
        while True:
            try:
                line = stream.readline(longest_bytes + 1)
                if not line:
                    return
                number += 1
                if len(line) > longest_bytes and not line.endswith(b"\n"):
                    while rest := stream.readline(_CHUNK_BYTES):
                        if rest.endswith(b"\n"):
                            break
                    skips.add(f"a line longer than {longest_bytes:,} bytes", f"{path.name}:{number}")
                    continue
            except _DAMAGE as error:
                raise _damaged(path, f"after line {number:,}", error) from None
            if number == 1:
                line = line.removeprefix(_BOM)
            line = line.rstrip(b"\r\n")
            if b"\r" in line:  # an old line ending; JSON cannot have it inside a string
                yield from ((number, part) for part in line.split(b"\r"))
            else:
                yield number, line
            if progress is not None and (position := raw.tell()) != told:
                told = position
                progress(position)


def read_records(
    path: Path, skips: Skips, *, longest_bytes: int = LONGEST_BYTES, progress: Progress | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each JSON object of the file, with where it stands (``FILE:LINE``, ``FILE[INDEX]`` in an array).

    Raises:
        WorkloadError: as ``read_lines``, and ``dataset.array`` for an array that is not JSON.
    """
    for where, value in read_values(path, skips, longest_bytes=longest_bytes, progress=progress):
        if isinstance(value, dict):
            yield where, value


def read_values(
    path: Path, skips: Skips, *, longest_bytes: int = LONGEST_BYTES, progress: Progress | None = None
) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """As ``read_records``, with ``None`` for each line that holds something else; that is counted too."""
    if _is_array(path):
        values = _array_items(path, longest_bytes, progress)
    else:
        values = _line_items(path, skips, longest_bytes, progress)
    for where, value in values:
        if isinstance(value, dict):
            yield where, value
        else:
            if value is not _UNREADABLE:
                skips.add("not a JSON object", where)
            yield where, None


def _line_items(
    path: Path, skips: Skips, longest_bytes: int, progress: Progress | None
) -> Iterator[tuple[str, Any]]:
    loads = need("orjson", "read datasets").loads
    for number, line in read_lines(path, skips, longest_bytes=longest_bytes, progress=progress):
        where = f"{path.name}:{number}"
        try:
            yield where, loads(line)
        except ValueError:
            try:
                text = line.decode().strip()  # of more kinds of blanks than those of ASCII
                if text:
                    yield where, json.loads(text)  # knows NaN and lone surrogates too
            except UnicodeDecodeError:
                skips.add("not UTF-8", where)
                yield where, _UNREADABLE
            except (ValueError, RecursionError):
                skips.add("not JSON", where)
                yield where, _UNREADABLE


def _array_items(path: Path, longest_bytes: int, progress: Progress | None) -> Iterator[tuple[str, Any]]:
    """The elements of one array. The text of one element, not of the file, is what memory holds."""
    decoder, decode = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8-sig")("replace")
    text, at, index, ended = "", 0, 0, False
    with _opened(path) as raw:
        stream = _unpacked(raw, path)

        def more(size: int = _CHUNK_BYTES) -> bool:
            nonlocal text, at, ended
            try:
                data = stream.read(size)
            except _DAMAGE as error:
                raise _damaged(path, f"after element {index:,}", error) from None
            ended = not data
            text, at = text[at:] + decode.decode(data, final=ended), 0
            if progress is not None:
                progress(raw.tell())
            return not ended

        def skip_to_next() -> str:
            nonlocal at
            while True:
                while at < len(text) and text[at] in " \t\r\n,":
                    at += 1
                if at < len(text):
                    return text[at]
                if not more():
                    raise _not_an_array(path, index, "the file ends inside the array")

        if skip_to_next() != "[":  # pragma: no cover - the caller has looked
            raise _not_an_array(path, index, "it does not begin with [")
        at += 1
        while skip_to_next() != "]":
            size = _CHUNK_BYTES
            while True:
                try:
                    value, at = decoder.raw_decode(text, at)
                except json.JSONDecodeError as error:
                    # More text can mend only an error at the end of what is here; a string cut off is reported
                    # at its beginning. Reading twice as much each time keeps the work linear.
                    if ended or len(text) - at > longest_bytes:
                        raise _not_an_array(path, index, error.msg) from None
                    more(size)
                    size *= 2
                else:
                    break
            yield f"{path.name}[{index}]", value
            index += 1


def _is_array(path: Path) -> bool:
    with _opened(path) as raw:
        try:
            head = _unpacked(raw, path).read(4096)
        except _DAMAGE as error:
            raise _damaged(path, "at its beginning", error) from None
    return head.removeprefix(_BOM).lstrip().startswith(b"[")


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb", buffering=_CHUNK_BYTES)
    except OSError as error:
        raise WorkloadError(
            f"cannot read {path}: {error.strerror}",
            hint="ls -l shows what is there"
            if path.parent.is_dir()
            else f"there is no directory {path.parent}",
            code="dataset.unreadable",
        ) from None


def _unpacked(raw: BinaryIO, path: Path) -> BinaryIO | io.BufferedReader:
    """The content behind gzip or zstd, else the file itself."""
    head = raw.read(4096)
    raw.seek(0)
    if head.startswith(_LFS):
        raise WorkloadError(
            f"{path} is a Git LFS pointer, not the dataset",
            why="the repository was cloned without its large files",
            hint="git lfs pull, in that repository",
            code="dataset.lfs-pointer",
        )
    if head.startswith(_GZIP):
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), _CHUNK_BYTES)
    if head.startswith(_ZSTD):
        return io.BufferedReader(_ZstdFile(raw), _CHUNK_BYTES)
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in head:
        raise WorkloadError(
            f"{path} is not UTF-8 text",
            why="it begins with a UTF-16 mark or has zero bytes in its first 4,096",
            hint="iconv -f UTF-16 -t UTF-8, when it is text; of archives only gzip and zstd are read",
            code="dataset.encoding",
        )
    return raw


class _ZstdFile(io.RawIOBase):
    """The content of one or more zstd frames; unlike the library's own reader it notices a file that is cut off."""

    def __init__(self, raw: BinaryIO) -> None:
        self._zstandard = need("zstandard", "read zstd files")
        self._raw, self._frame, self._within = raw, self._next_frame(), False
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            packed = self._raw.read(_CHUNK_BYTES // 16)
            if not packed:
                if self._within:
                    raise EOFError("the last zstd frame is not complete")
                return 0
            try:
                self._ready = memoryview(self._frame.decompress(packed))
            except self._zstandard.ZstdError as error:
                raise OSError(str(error)) from None
            self._within = not self._frame.eof
            if self._frame.eof:
                self._raw.seek(-len(self._frame.unused_data), io.SEEK_CUR)
                self._frame = self._next_frame()
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size

    def _next_frame(self) -> Any:
        return self._zstandard.ZstdDecompressor().decompressobj()


def _damaged(path: Path, place: str, error: Exception) -> WorkloadError:
    return WorkloadError(
        f"{path} is damaged or cut off {place}",
        why=str(error),
        hint="compare its size or checksum with the source; gzip -t or zstd -t tests an archive",
        code="dataset.damaged",
    )


def _not_an_array(path: Path, index: int, why: str) -> WorkloadError:
    return WorkloadError(
        f"{path} begins with [ but element {index:,} cannot be read",
        why=why,
        hint="the file must be one JSON array of objects, or one object a line",
        code="dataset.array",
    )
