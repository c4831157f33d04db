"""What can go wrong with a service, as errors for the operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvtierd.errors import UnitError
from kvtierd.plan.model import UnitSpec
from kvtierd.units.systemd_bus import SystemdRefusedError

_FATAL_REFUSALS = frozenset({"InvalidArgs", "PropertyReadOnly", "BadUnitSetting"})


def foreign(service: str, properties: Mapping[str, Any]) -> UnitError:
    """The name is taken by a unit that is not ours."""
    where = properties.get("FragmentPath") or "no file"
    return UnitError(
        f"systemd has another unit named {service}, which is not this kvtierd's",
        why=f"it is described as {properties.get('Description', '')!r} and comes from {where}",
        hint=f"Rename the engine, or remove that unit (systemctl status {service}).",
        code="unit.foreign",
    )


def refused(unit_id: str, error: SystemdRefusedError) -> UnitError:
    """systemd's own no to a start."""
    code = "unit.start"
    if error.name in _FATAL_REFUSALS:
        code = "unit.exec"
    elif error.name in {"AccessDenied", "InteractiveAuthorizationRequired"}:
        code = "unit.denied"
    return UnitError(f"systemd refuses to start {unit_id}", why=error.text or error.name, code=code)


def not_started(spec: UnitSpec, program: str, result: str, problem: tuple[str, bool] | None) -> UnitError:
    """The start failed: what ``setup_problem`` said, or else the result of the job."""
    why, for_good = problem or (f"systemd's job ended as {result!r}", False)
    who = f" as {spec.user}" if spec.user else ""
    return UnitError(
        f"cannot execute {program!r}{who} in {spec.cwd}",
        why=why,
        hint="Check that the program and the directory exist and that the user may use them."
        if for_good
        else "",
        code="unit.exec" if for_good else "unit.start",
    )


def journal_would_show_secrets(spec: UnitSpec) -> UnitError:
    """Nobody stands between a service's output and the journal, so nothing can be masked there."""
    return UnitError(
        f"{spec.id} has a secret that it may print, and its output would go to the journal unmasked",
        why="secrets are masked in the output of units under shims only",
        hint='Remove l3_switch from the engine, or run kvtierd with [daemon] backend = "shim".',
        code="unit.secret",
    )


def stuck(unit_id: str, left: Sequence[tuple[int, str]]) -> UnitError:
    """What is left of a unit after SIGKILL: process ids and commands."""
    names = ", ".join(f"{pid} ({command[:60]})" for pid, command in left) or "its control group is not empty"
    return UnitError(
        f"{unit_id} does not end, not even by SIGKILL: {names}",
        hint="A process in state D waits for a device or a file system; look at dmesg.",
        code="unit.stuck",
    )
