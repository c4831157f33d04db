"""Runs checks: all at once, each with its deadline, all within one. A check that fails to work is ``unknown``."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import Iterable
from functools import partial
from typing import Any, Final

from kvtierd.checks import CHECK_SECONDS, CannotTellError, Check, Outcome, Patient, Severity, absent, unknown
from kvtierd.errors import PluginError
from kvtierd.foreign import ForeignCalls, told_of

ALL_SECONDS: Final = 9.0
PAGE: Final = "docs/checks.md"


@dataclasses.dataclass(frozen=True, slots=True)
class Examined:
    """A check and what it found."""

    check: Check
    outcome: Outcome

    @property
    def severity(self) -> Severity:
        """How bad."""
        return self.outcome.severity

    def as_dict(self) -> dict[str, Any]:
        """The documented JSON: id, group, severity, title, found, why, fix, doc."""
        return {
            "id": self.check.id,
            "group": self.check.group,
            "severity": self.severity,
            "title": self.check.title,
            "found": self.outcome.found,
            "why": self.check.why,
            "fix": self.outcome.fix or self.check.fix,
            "doc": f"{PAGE}#{anchor(self.check.id)}",
        }


def anchor(check_id: str) -> str:
    """The heading's name in the page of checks, as renderers of Markdown make it."""
    return check_id.replace(".", "")


async def examine(
    patient: Patient, checks: Iterable[Check], *, all_seconds: float = ALL_SECONDS
) -> tuple[Examined, ...]:
    """All checks, in their order. Never raises for what a check does, and never takes longer."""
    calls = ForeignCalls()
    chosen = tuple(checks)
    deadline = asyncio.get_running_loop().time() + all_seconds
    tasks = [asyncio.create_task(_one(patient, check, calls, deadline)) for check in chosen]
    outcomes = await asyncio.gather(*tasks)
    return tuple(Examined(check, outcome) for check, outcome in zip(chosen, outcomes, strict=True))


async def _one(patient: Patient, check: Check, calls: ForeignCalls, deadline: float) -> Outcome:
    loop = asyncio.get_running_loop()
    seconds = max(0.0, min(CHECK_SECONDS, deadline - loop.time()))
    ends = loop.time() + seconds
    try:
        # In threads: a file of a broken driver or a dead network mount can keep whoever reads it.
        if check.unless is not None:
            reason = await calls.ask(f"{check.id} unless", partial(check.unless, patient), seconds=seconds)
            if reason:
                return absent(reason)
        if inspect.iscoroutinefunction(check.examine):
            async with asyncio.timeout_at(ends):
                outcome = await check.examine(patient)
        else:
            asked = partial(check.examine, patient)
            outcome = await calls.ask(check.id, asked, seconds=max(0.0, ends - loop.time()))
    except CannotTellError as error:
        return unknown(str(error))
    except (TimeoutError, PluginError) as error:
        hung = isinstance(error, TimeoutError) or error.stable_code == "plugin.hangs"
        return unknown(f"no answer within {seconds:.0f} s" if hung else told_of(error))
    except Exception as error:  # noqa: BLE001 - whatever a check does, the others are shown
        return unknown(f"the check itself failed: {told_of(error)}")
    if not isinstance(outcome, Outcome):
        return unknown(f"the check itself failed: it answered {type(outcome).__name__}")
    return outcome
