"""Reads a flat JSON object with the line and column of every key, and says well why text is not JSON.

``json`` keeps no positions and silently drops the first of two equal keys, so the outer object is taken apart here
and only the values are left to it.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from kvtierd.mmc_conf.parse import printable
from kvtierd.mmc_conf.problems import ConfProblem

MAX_JSON_BYTES = 1024 * 1024
_MAX_MEMBERS = 1000
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Member:
    """One key of the object. ``line`` and ``column`` count from 1."""

    name: str
    value: Any
    line: int
    column: int


class _JsonError(Exception):
    def __init__(self, position: int, code: str, message: str, hint: str) -> None:
        super().__init__(message)
        self.position, self.code, self.message, self.hint = position, code, message, hint


def read_object(data: bytes) -> tuple[tuple[Member, ...], tuple[ConfProblem, ...]]:
    """The members of a JSON object in their order, or the one problem that ends reading. Never raises."""
    text, problem = _decode(data)
    if text is None:
        return (), (problem,) if problem else ()
    starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def place(position: int) -> tuple[int, int]:
        line = bisect_right(starts, position)
        return line, position - starts[line - 1] + 1

    try:
        found = _members(text)
    except _JsonError as error:
        line, column = place(error.position)
        return (), (ConfProblem(line, None, error.code, error.message, error.hint, column=column),)
    return tuple(Member(name, value, *place(position)) for name, value, position in found), ()


def _decode(data: bytes) -> tuple[str | None, ConfProblem | None]:
    def problem(code: str, message: str, hint: str, line: int | None = 1) -> ConfProblem:
        return ConfProblem(line, None, code, message, hint)

    if len(data) > MAX_JSON_BYTES:
        size = f"the file has {len(data)} bytes"
        return None, problem(
            "file-too-big", size, "a configuration has a few hundred bytes: is this the right file?", None
        )
    if data.startswith(b"\xef\xbb\xbf"):
        return None, problem(
            "bom",
            "the file begins with a byte order mark; SGLang refuses it",
            "save the file as UTF-8 without a byte order mark",
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        message = f"byte 0x{data[error.start]:02x} is not UTF-8; SGLang refuses the file"
        return None, problem("encoding", message, "save the file as UTF-8", line)
    if "\x00" in text:
        message = "the file contains NUL bytes: it is not UTF-8 text"
        return None, problem(
            "encoding", message, "save the file as UTF-8", text[: text.index("\x00")].count("\n") + 1
        )
    return text, None


def _skip(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _members(text: str) -> list[tuple[str, Any, int]]:
    found: list[tuple[str, Any, int]] = []
    position = _skip(text, 0)
    if text[position : position + 1] != "{":
        raise _unexpected(text, position, "an object: the file must begin with {")
    position = _skip(text, position + 1)
    if text[position : position + 1] == "}":
        _expect_end(text, position + 1)
        return found
    while True:
        key_position = position
        if text[position : position + 1] != '"':
            if text[position : position + 1] == "}":
                raise _JsonError(
                    position,
                    "json-trailing-comma",
                    "there is a comma after the last entry",
                    "remove the comma before }",
                )
            raise _unexpected(text, position, 'a key in double quotes (")')
        name, position = _value(text, position)
        position = _skip(text, position)
        if text[position : position + 1] != ":":
            raise _unexpected(text, position, "a colon after the key")
        value, position = _value(text, _skip(text, position + 1))
        found.append((name, value, key_position))
        if len(found) > _MAX_MEMBERS:
            raise _JsonError(
                position,
                "too-many",
                f"the object has more than {_MAX_MEMBERS} entries",
                "is this the right file?",
            )
        position = _skip(text, position)
        match text[position : position + 1]:
            case ",":
                position = _skip(text, position + 1)
            case "}":
                _expect_end(text, position + 1)
                return found
            case _:
                raise _unexpected(text, position, "a comma or }")


def _value(text: str, position: int) -> tuple[Any, int]:
    if not text[position : position + 1]:
        raise _unexpected(text, position, "a value")
    try:
        return _DECODER.raw_decode(text, position)
    except json.JSONDecodeError as error:
        if text[position] == '"':
            raise _JsonError(
                error.pos, "json", f"the text is not JSON: {error.msg}", 'close the string with "'
            ) from None
        raise _unexpected(text, error.pos, "a value") from None
    except RecursionError:
        raise _JsonError(position, "json", "the value is nested too deeply", "write a plain value") from None
    except ValueError as error:  # an integer with thousands of digits
        raise _JsonError(
            position, "json", f"the value cannot be read: {error}", "write a smaller number"
        ) from None


def _expect_end(text: str, position: int) -> None:
    position = _skip(text, position)
    if position != len(text):
        raise _unexpected(text, position, "the end of the file")


def _unexpected(text: str, position: int, expected: str) -> _JsonError:
    rest = text[position : position + 2]
    if rest in {"//", "/*"} or rest[:1] == "#":
        mark = rest if rest[:1] == "/" else "#"
        return _JsonError(
            position,
            "json-comment",
            f"JSON has no comments ({mark}); SGLang refuses the file",
            "remove the comment",
        )
    if rest[:1] == "'":
        return _JsonError(
            position, "json-quotes", "JSON strings have double quotes", "write \" in place of '"
        )
    for wrong, right in (("True", "true"), ("False", "false"), ("None", "null")):
        if text.startswith(wrong, position):
            return _JsonError(position, "json", f"{wrong} is Python, not JSON", f"write {right}")
    shown = f"{printable(text[position : position + 20])!r}" if rest else "the end of the file"
    return _JsonError(
        position, "json", f"expected {expected}, found {shown}", "the file must be one JSON object"
    )
