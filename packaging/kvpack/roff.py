"""Text as man pages want it. Only macros of man(7) that groff and mandoc both have."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence


def escape(text: str) -> str:
    """Text that prints as it is: backslashes, hyphens that can be copied, no line taken for a macro."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("~", "\\(ti").replace("^", "\\(ha")
    return "\n".join(f"\\&{line}" if line[:1] in {".", "'"} else line for line in text.split("\n"))


def bold(text: str) -> str:
    """Text to be typed as it stands."""
    return f"\\fB{escape(text)}\\fR"


def italic(text: str) -> str:
    """A stand-in for what the reader writes."""
    return f"\\fI{escape(text)}\\fR"


class Page:
    """One man page, built from top to bottom."""

    def __init__(self, name: str, section: int, *, version: str, date: str, summary: str) -> None:
        self._lines = [
            f'.TH {name.upper()} {section} {date} "kvtierd {version}" "kvtierd"',
            ".nh",
            ".ad l",
            ".SH NAME",
            f"{escape(name)} \\- {escape(summary)}",
        ]

    def heading(self, text: str) -> None:
        """A section. In capitals, unless it is the header of a table, which is written as it is."""
        self._lines.append(f".SH {_quoted(text if text.startswith('[') else text.upper())}")

    def subheading(self, text: str) -> None:
        """A section within one."""
        self._lines.append(f".SS {_quoted(text)}")

    def text(self, *paragraphs: str) -> None:
        """Paragraphs of plain text; words between ` are bold."""
        for index, paragraph in enumerate(paragraphs):
            after_heading = self._lines[-1].startswith((".SH", ".SS"))
            if index or not after_heading:
                self._lines.append(".PP")
            self._lines += _marked(paragraph).split("\n")

    def item(self, tag: str, text: str) -> None:
        """A tagged paragraph; ``tag`` is already roff."""
        self._lines += [".TP", tag, *(_marked(text) or "\\&").split("\n")]

    def roff(self, line: str) -> None:
        """A line that is already roff."""
        self._lines.append(line)

    def example(self, lines: Sequence[str]) -> None:
        """Lines that stay as they are."""
        start = [] if self._lines[-1].startswith((".SH", ".SS")) else [".PP"]
        self._lines += [*start, ".nf", ".RS 4", *(escape(line) or "\\&" for line in lines), ".RE", ".fi"]

    def render(self) -> str:
        """The page's source."""
        return "\n".join(self._lines) + "\n"


def _quoted(text: str) -> str:
    return '"' + escape(text).replace('"', "\\(dq") + '"'


def _marked(text: str) -> str:
    parts = re.split(r"`([^`]+)`", " ".join(text.split()))
    out = "".join(bold(part) if index % 2 else escape(part) for index, part in enumerate(parts))
    # A new line for each sentence: what changed can be seen, and roff sets the spaces.
    sentences = re.sub(r"(?<=[a-z)])\. (?=[A-Z])", ".\n", out).split("\n")
    lines = [
        line
        for s in sentences
        for line in textwrap.wrap(s, 78, break_long_words=False, break_on_hyphens=False)
    ]
    return "\n".join(f"\\&{line}" if line[:1] in {".", "'"} else line for line in lines)
