"""Unit files of systemd as doctor needs them: which file sets what, and which value holds in the end.

systemd's own answer (``systemctl show``) does not say which file a value is from, and says nothing of a unit that
is not loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from kvtierd.host.view import HostView

DIRECTORIES: Final = (
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
)
"""The first one that has a file of some name hides its namesakes in the others."""
TRUE: Final = frozenset({"1", "yes", "y", "true", "t", "on"})


class Assignment(NamedTuple):
    """``key=value`` in a file, in the order in which they count."""

    file: str
    section: str
    key: str
    value: str


class Unit(NamedTuple):
    """A unit's own file (``None``: there is none), and everything that it and its drop-ins set."""

    file: str | None
    drop_ins: tuple[str, ...]
    assignments: tuple[Assignment, ...]

    def last(self, key: str) -> Assignment | None:
        """The assignment that holds, for keys with one value. One without a value takes it back to the default."""
        own = [a for a in self.assignments if a.key == key]
        return own[-1] if own and own[-1].value else None

    def all(self, key: str) -> tuple[Assignment, ...]:
        """The assignments that hold, for keys with a list: those after the last one without a value."""
        own = [a for a in self.assignments if a.key == key]
        empty = max((i for i, a in enumerate(own) if not a.value), default=-1)
        return tuple(own[empty + 1 :])


def read_unit(view: HostView, name: str, drop_in_directories: Iterable[str] = ()) -> Unit:
    """The unit of this name, with its drop-ins; ``drop_in_directories`` are further ones (``kvtier-.service.d``)."""
    file = next((f"{d}/{name}" for d in DIRECTORIES if view.exists(f"{d}/{name}")), None)
    drop_ins: dict[str, str] = {}
    for directory in DIRECTORIES:
        for below in (*drop_in_directories, f"{name}.d"):
            for entry in view.names(f"{directory}/{below}"):
                if entry.endswith(".conf"):
                    drop_ins.setdefault(entry, f"{directory}/{below}/{entry}")
    ordered = tuple(path for _, path in sorted(drop_ins.items()))
    assignments = [
        a for path in ((file,) if file else ()) + ordered for a in parse(path, view.text(path) or "")
    ]
    return Unit(file, ordered, tuple(assignments))


def parse(file: str, text: str) -> list[Assignment]:
    """The assignments of one file; what is none is passed over. A line that ends with a backslash goes on."""
    section, found = "", []
    for line in map(str.strip, re.sub(r"\\\n\s*", " ", text).splitlines()):
        if line.startswith(("#", ";")):
            continue
        if match := re.fullmatch(r"\[([^\]]+)\]", line):
            section = match[1]
        elif "=" in line:
            key, _, value = line.partition("=")
            found.append(Assignment(file, section, key.strip(), value.strip()))
    return found


def is_on(assignment: Assignment | None) -> bool:
    """Whether a switch is on."""
    return assignment is not None and assignment.value.lower() in TRUE
