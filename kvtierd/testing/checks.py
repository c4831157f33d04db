"""The conformance suite without pytest: all checks, and what they say of a driver."""

from __future__ import annotations

from typing import NamedTuple

from kvtierd.testing import launch_checks, reading_checks
from kvtierd.testing.subject import Check, NonconformityError, Subject

__all__ = [
    "CHECKS",
    "Check",
    "NonconformityError",
    "Problem",
    "Subject",
    "conformance_problems",
    "shape_problems",
]

CHECKS: tuple[Check, ...] = (*launch_checks.CHECKS, *reading_checks.CHECKS)
_SHAPE = ("members", "api-version", "name", "default-port", "versions")


class Problem(NamedTuple):
    """A check that failed, and what it says."""

    check: str
    message: str


def conformance_problems(subject: Subject) -> list[Problem]:
    """Runs every check. An empty list: the driver conforms. Takes some seconds."""
    return _run(subject, CHECKS)


def shape_problems(subject: Subject) -> list[Problem]:
    """Only what can be seen without calling the driver's methods."""
    return _run(subject, tuple(check for check in CHECKS if check.name in _SHAPE))


def _run(subject: Subject, checks: tuple[Check, ...]) -> list[Problem]:
    problems = []
    for check in checks:
        try:
            check.run(subject)
        except NonconformityError as error:
            problems.append(Problem(check.name, str(error)))
        except Exception as error:  # noqa: BLE001 - a driver without its members makes any check stumble
            problems.append(Problem(check.name, f"{type(error).__name__}: {error}"))
    return problems
