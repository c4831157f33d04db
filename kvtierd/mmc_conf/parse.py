"""The text of a conf file to entries, the way MemCache splits it, with what is wrong with the text itself.

MemCache reads bytes: it splits at newlines, takes blanks, tabs and carriage returns off both ends, skips empty
lines and lines that begin with ``#``, drops lines without ``=`` without a word, and splits the rest at the first
``=``. It knows no encoding: a byte order mark or a no-break space becomes part of the key.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

from kvtierd.mmc_conf.problems import ConfProblem

MAX_FILE_BYTES = 10 * 1024 * 1024
"""MemCache refuses larger files."""
MAX_LINE_BYTES = 4096
"""MemCache refuses a file with a longer line that is not a comment."""
MAX_PROBLEMS = 200
"""More problems than anybody reads; checking stops there, so that hostile input costs bounded time and memory."""

_BLANKS = b" \t\r\n"
_UTF8_BOM = b"\xef\xbb\xbf"
_WIDE_BOMS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class Entry:
    """One ``key = value``. ``line`` counts from 1. ``shown`` is the key as the file has it, for messages."""

    key: str
    value: str
    line: int | None
    shown: str
    column: int | None = None


@dataclass(frozen=True, slots=True)
class ParsedConf:
    """What a file holds. ``readable`` is False when nothing of it can be told apart (UTF-16, too big)."""

    entries: tuple[Entry, ...]
    problems: tuple[ConfProblem, ...]
    readable: bool = True


def parse_conf(data: bytes) -> ParsedConf:
    """Entries and text problems of a conf file. Never raises; takes time linear in the file's size."""
    whole = _whole_file_problem(data)
    if whole is not None:
        return ParsedConf((), (whole,), readable=False)
    problems: list[ConfProblem] = []
    entries: list[Entry] = []
    if data.startswith(_UTF8_BOM):
        problems.append(
            ConfProblem(
                1,
                None,
                "bom",
                "a byte order mark stands before the first key; MemCache takes it as part of the key, which is lost",
                "save the file as UTF-8 without a byte order mark",
            )
        )
        data = data.removeprefix(_UTF8_BOM)
    crlf_lines = data.count(b"\r\n")
    if crlf_lines:
        first = data[: data.index(b"\r\n")].count(b"\n") + 1
        problems.append(
            ConfProblem(
                first,
                None,
                "crlf",
                f"{crlf_lines} lines end with CR LF as on Windows; MemCache takes the CR off, other readers may not",
                "save the file with Unix line ends",
                "warning",
            )
        )
    for number, raw in _lines(data):
        entry = _parse_line(number, raw, problems)
        if entry is not None:
            entries.append(entry)
        if len(problems) >= MAX_PROBLEMS:
            break
    return ParsedConf(tuple(entries), tuple(problems))


def _whole_file_problem(data: bytes) -> ConfProblem | None:
    if len(data) > MAX_FILE_BYTES:
        return ConfProblem(
            None,
            None,
            "file-too-big",
            f"the file has {len(data)} bytes; MemCache refuses more than {MAX_FILE_BYTES}",
            "a configuration has a few hundred bytes: is this the right file?",
        )
    sample = data[:4096]
    if data.startswith(_WIDE_BOMS) or (len(sample) >= 4 and sample.count(0) * 3 >= len(sample)):
        return ConfProblem(
            1,
            None,
            "encoding",
            "the file is UTF-16 or UTF-32; MemCache finds no key in it and starts with its defaults",
            "save the file as UTF-8 without a byte order mark",
        )
    return None


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    number = start = 0
    while start <= len(data):
        number += 1
        end = data.find(b"\n", start)
        if end < 0:
            end = len(data)
        yield number, data[start:end]
        start = end + 1


def _parse_line(number: int, raw: bytes, problems: list[ConfProblem]) -> Entry | None:
    line = raw.strip(_BLANKS)
    if not line or line.startswith(b"#"):
        return None
    if len(line) > MAX_LINE_BYTES:
        problems.append(
            ConfProblem(
                number,
                None,
                "line-too-long",
                f"the line has {len(line)} bytes; MemCache refuses the file when one has more than {MAX_LINE_BYTES}",
                "shorten the line",
            )
        )
        return None
    text = _decode(number, line, problems)
    if text is None:
        return None
    left, equals, right = text.partition("=")
    if not equals:
        problems.append(_no_equals(number, text))
        return None
    key, value = left.strip(" \t\r"), right.strip(" \t\r")
    if not key:
        problems.append(
            ConfProblem(
                number,
                None,
                "empty-key",
                "there is no key before the '='; MemCache refuses the file",
                "write 'key = value', or begin the line with # to make it a comment",
            )
        )
        return None
    return Entry(key, value, number, shown=printable(key))


def _decode(number: int, line: bytes, problems: list[ConfProblem]) -> str | None:
    """The line as text, or None when what it says cannot be told."""
    if b"\x00" in line:
        problems.append(
            ConfProblem(
                number,
                None,
                "nul-byte",
                "the line contains a NUL byte; MemCache cuts the key or value there or refuses the file",
                "remove the byte; was the file cut off by a crash or copied from a disk image?",
            )
        )
        return None
    if b"\r" in line:
        problems.append(
            ConfProblem(
                number,
                None,
                "lone-cr",
                "the line contains a carriage return in the middle; MemCache takes what follows as part of the value",
                "save the file with Unix line ends",
            )
        )
        return None
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        problems.append(
            ConfProblem(
                number,
                None,
                "encoding",
                f"byte 0x{line[error.start]:02x} is not UTF-8; MemCache takes it as part of the key or value",
                "save the file as UTF-8; keys and values should be plain ASCII",
            )
        )
        return None


def _no_equals(number: int, text: str) -> ConfProblem:
    """A line that MemCache drops. It is harmless when it is only a comment in another language's style."""
    if text.startswith((";", "//")) or (text.startswith("[") and text.endswith("]")):
        what = (
            "a section header"
            if text.startswith("[")
            else f"a comment with {text[: 1 if text[0] == ';' else 2]!r}"
        )
        return ConfProblem(
            number,
            None,
            "foreign-comment",
            f"{what} is not part of MemCache's format; the line is dropped",
            "begin comments with #; the format has no sections",
            "warning",
        )
    shown = printable(text)
    parts = text.split(":", 1) if ":" in text.split(" ", 1)[0] else text.split(None, 1)
    guess = f"{parts[0].strip()} = {parts[1].strip()}" if len(parts) == 2 else f"{text} = VALUE"
    return ConfProblem(
        number,
        None,
        "no-equals",
        f"{shown!r} has no '='; MemCache drops the line without a word",
        f"write '{printable(guess)}', or begin the line with # to make it a comment",
    )


def printable(text: str, limit: int = 120) -> str:
    """Text for a message: control and invisible characters escaped, cut off when long."""
    shown = "".join(c if c.isprintable() and c != "\xa0" else f"\\u{ord(c):04x}" for c in text[:limit])
    return shown + "..." if len(text) > limit else shown


def odd_character(text: str) -> str | None:
    """A description of the first character outside printable ASCII, or None."""
    for character in text:
        if not " " <= character <= "~":
            name = unicodedata.name(character, "a control character")
            return f"U+{ord(character):04X} {name}"
    return None
