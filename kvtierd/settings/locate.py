"""Where in a TOML file a key stands. ``tomllib`` reads values but forgets lines.

Only as much of the syntax as is needed to find the line of a table header or key in a file that
``tomllib`` has already accepted, or to show the right neighbourhood in one that it has not.
"""

from __future__ import annotations

import re

Path = tuple[str | int, ...]

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\]]+?)\s*\]\]?\s*(?:#.*)?")
_KEY = re.compile(
    r"""\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*="""
)
_PART = re.compile(r"""[A-Za-z0-9_-]+|"[^"]*"|'[^']*'""")


def key_lines(text: str) -> dict[Path, int]:
    """Line numbers (from 1) of every table header and key, by path.

    Array tables count: the second ``[[engine]]`` is ``("engine", 1)``. Keys inside inline tables are found at the
    line of the key that holds them.
    """
    lines: dict[Path, int] = {}
    counts: dict[Path, int] = {}
    table: Path = ()
    scan = _ValueScan()
    for number, line in enumerate(text.splitlines(), 1):
        if scan.open:
            scan.feed(line)
            continue
        header = _HEADER.fullmatch(line)
        if header:
            parts = _split(header[2])
            table = _resolve(parts, counts)
            if header[1] == "[[":
                index = counts.get(table, -1) + 1
                counts[table] = index
                lines.setdefault(table, number)
                table = (*table, index)
            lines.setdefault(table, number)
            continue
        key = _KEY.match(line)
        if key:
            path = (*table, *_split(key[1]))
            lines.setdefault(path, number)
            scan.feed(line[key.end() :])
    return lines


def line_of(lines: dict[Path, int], path: Path) -> int | None:
    """The line of ``path``, or of its nearest parent that is written in the file."""
    for end in range(len(path), 0, -1):
        if path[:end] in lines:
            return lines[path[:end]]
    return None


def _split(dotted: str) -> Path:
    return tuple(part.strip("\"'") for part in _PART.findall(dotted))


def _resolve(parts: Path, counts: dict[Path, int]) -> Path:
    """``[engine.args]`` belongs to the latest ``[[engine]]``."""
    path: Path = ()
    for position, part in enumerate(parts):
        path = (*path, part)
        if path in counts and position < len(parts) - 1:
            path = (*path, counts[path])
    return path


class _ValueScan:
    """Follows a value over lines: brackets, strings and multi-line strings."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""

    @property
    def open(self) -> bool:
        return self._depth > 0 or len(self._quote) == 3

    def feed(self, text: str) -> None:
        position = 0
        while position < len(text):
            rest = text[position:]
            if self._quote:
                if rest.startswith(self._quote):
                    position += len(self._quote)
                    self._quote = ""
                elif rest[0] == "\\" and self._quote[0] == '"':
                    position += 2
                else:
                    position += 1
                continue
            if rest[0] == "#":
                break
            if rest.startswith(('"""', "'''")):
                self._quote = rest[:3]
                position += 3
                continue
            if rest[0] in "\"'":
                self._quote = rest[0]
            elif rest[0] in "[{":
                self._depth += 1
            elif rest[0] in "]}":
                self._depth -= 1
            position += 1
        if len(self._quote) == 1:  # an ordinary string cannot span lines
            self._quote = ""
