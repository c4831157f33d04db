"""What the checker reports, and what it may ask about a path."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class ConfProblem:
    """One thing that is wrong in a configuration file.

    Attributes:
        line: Where it is, counted from 1; None when it is about what the file does not say.
        key: The key as the file has it, or the key that is missing.
        code: Stable, for scripts: "inline-comment", "unknown-key", ...
        message: What is wrong and what MemCache does with it.
        hint: What would be right.
        severity: "error": MemCache refuses it, or takes something else than what is written. "warning": it works,
            but not as well or as safely as it could.
        column: For JSON, counted from 1.
    """

    line: int | None
    key: str | None
    code: str
    message: str
    hint: str
    severity: Severity = "error"
    column: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """The documented JSON: line, column, key, code, message, hint, severity."""
        return {
            "line": self.line,
            "column": self.column,
            "key": self.key,
            "code": self.code,
            "message": self.message,
            "hint": self.hint,
            "severity": self.severity,
        }


@dataclass(frozen=True, slots=True)
class PathInfo:
    """What is at a path. ``symlink_target`` is set when the path itself is a symbolic link."""

    exists: bool
    symlink_target: str | None = None


PathLookup = Callable[[str], PathInfo]
"""How the pure checker asks about the file system; the caller decides what it may see."""


def in_order(problems: Iterable[ConfProblem]) -> tuple[ConfProblem, ...]:
    """Problems by line, those without a line last; each only once."""
    unique = dict.fromkeys(problems)
    return tuple(sorted(unique, key=lambda p: (p.line is None, p.line or 0, p.column or 0)))


def has_errors(problems: Iterable[ConfProblem]) -> bool:
    """Whether any of the problems is more than a warning."""
    return any(p.severity == "error" for p in problems)


def check_conf_path(path: str, path_info: PathLookup) -> tuple[ConfProblem, ...]:
    """MemCache refuses a configuration file that is a symbolic link (Kubernetes ``..data``, ``/etc/alternatives``)."""
    info = path_info(path)
    if info.symlink_target is None:
        return ()
    return (
        ConfProblem(
            line=None,
            key=None,
            code="symlink",
            message=f"{path} is a symbolic link to {info.symlink_target}; MemCache refuses to read it",
            hint="name the real file, or copy it to one",
        ),
    )
