"""What the supervisor shows of units, and the two questions it lets others answer (gate and extra check)."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from kvtierd.plan.model import UnitKind, UnitSpec
from kvtierd.units.backend import ProcessExit, UnitProcess
from kvtierd.units.unit_state import Severity, UnitState


@dataclasses.dataclass(frozen=True, slots=True)
class UnitView:
    """One unit as others see it. ``next_try_in_seconds`` is set in backoff only."""

    id: str
    kind: UnitKind
    name: str
    state: UnitState
    reason: str
    pid: int | None
    since_unix_seconds: float
    restarts: int
    next_try_in_seconds: float | None
    last_lines: tuple[str, ...]
    stale: bool
    instance: str | None
    last_exit: ProcessExit | None

    @property
    def ready(self) -> bool:
        """Whether others may build on it."""
        return self.state is UnitState.READY


@dataclasses.dataclass(frozen=True, slots=True)
class UnitEvent:
    """Something that happened to a unit. ``kind`` is stable, ``message`` is for people."""

    at_unix_seconds: float
    unit_id: str
    kind: str
    message: str
    severity: Severity


Gate = Callable[[UnitSpec, Mapping[str, UnitView]], str | None]
ExtraCheck = Callable[[UnitSpec, UnitProcess], Awaitable[str | None]]


def after_units_ready(spec: UnitSpec, views: Mapping[str, UnitView]) -> str | None:
    """The default gate: all units named in ``after`` are ready."""
    for unit_id in spec.after:
        view = views.get(unit_id)
        if view is None:
            return f"waiting for {unit_id}, which is not in the plan"
        if not view.ready:
            return f"waiting for {unit_id} to be ready"
    return None


def stand_in_spec(unit_id: str) -> UnitSpec:
    """A stand-in for a unit that runs but is not in the plan (yet); ids are ``kvtier-<kind>-<name>``."""
    parts: list[Any] = unit_id.split("-", 2)
    known = len(parts) == 3 and parts[0] == "kvtier" and parts[1] in {"endpoint", "meta", "pool", "engine"}
    kind, name = (parts[1], parts[2]) if known else ("engine", unit_id)
    return UnitSpec(id=unit_id, kind=kind, name=name, argv=())
