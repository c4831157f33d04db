"""What goes into the state machine of a unit and what comes out of it, as values. See ``kvtierd.units.lifecycle``."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from typing import Literal

from kvtierd.units.backend import ProcessExit, UnitProcess
from kvtierd.units.probes import ProbeResult

Severity = Literal["info", "warning", "error"]


class UnitState(StrEnum):
    """Where a unit is; the words are the operator's."""

    PLANNED = "planned"
    STARTING = "starting"
    READY = "ready"
    DEGRADED = "degraded"
    STOPPING = "stopping"
    STOPPED = "stopped"
    BACKOFF = "backoff"
    FAILED = "failed"


class Cause(StrEnum):
    """Why a running unit is being stopped, which decides what comes after its end."""

    WANTED = "wanted"  # by the operator or because the plan has no such unit: it stays stopped
    RESTART = "restart"  # on request: started again at once
    FAILURE = "failure"  # it was no good: counts like a crash


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """Something worth telling: ``kind`` is stable, ``message`` is for people."""

    kind: str
    message: str
    severity: Severity = "info"


@dataclasses.dataclass(frozen=True, slots=True)
class StartProcess:
    """Start the unit as its specification says."""


@dataclasses.dataclass(frozen=True, slots=True)
class StopProcess:
    """Stop the unit as its specification says."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class KillTree:
    """SIGKILL to everything: an orderly stop has failed, or would be no use."""

    reason: str


Action = StartProcess | StopProcess | KillTree


@dataclasses.dataclass(frozen=True, slots=True)
class ActionFailure:
    """What came of the last action when it went wrong. ``fatal``: it can never work as specified."""

    message: str
    fatal: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """Everything ``advance`` may look at.

    Attributes:
        now: Monotonic seconds.
        desired: What the plan and the operator want.
        process: The current or last run, or ``None`` when there never was one.
        process_age_seconds: How long that run has been alive; only asked of adopted runs.
        probe: The newest result of this run's probes, or ``None`` when there is none yet.
        busy: An action on this unit is still being carried out; nothing new is decided then.
        gate: Why the unit must not start yet, or ``None``.
        stop_gate: Why it should not stop yet (others still use it), or ``None``.
        problems: Things found wrong elsewhere; they degrade a ready unit.
        fatal_sign: What this run's output said of why it cannot go on. It ends a start, and degrades a ready unit:
            what serves is not stopped for a line.
        last_lines: The last output of an ended run.
        restart_requested: Why a restart was asked for, or ``None``. Given once.
        start_requested: The operator said start: a failed or waiting unit tries at once. Given once.
        failure: The last action failed. Given once.
        random: In [0, 1), spreads the delays.
    """

    now: float
    desired: Literal["run", "stop"] = "run"
    process: UnitProcess | None = None
    process_age_seconds: float = 0.0
    probe: ProbeResult | None = None
    busy: bool = False
    gate: str | None = None
    stop_gate: str | None = None
    problems: tuple[str, ...] = ()
    fatal_sign: str | None = None
    last_lines: tuple[str, ...] = ()
    restart_requested: str | None = None
    start_requested: bool = False
    failure: ActionFailure | None = None
    random: float = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class UnitStatus:
    """What is remembered of a unit between two passes.

    Attributes:
        state: Where it is.
        reason: Why, for people; empty when the state says it all.
        since: When it entered the state.
        instance: The run that is watched, alive or ended; its end is handled once.
        ended: That run's end has been handled.
        run_since: When this run was first seen: start of the readiness deadline.
        holdoff_since: Since when all probes hold, while starting.
        failing_since: Since when probes fail, once ready.
        failures: Ends in a row that nobody asked for.
        next_try_at: When backoff is over.
        restarts: How often it was started again.
        had_run: It ran before, so the next start is a restart.
        adopted: The watched run was not started by this daemon.
        note: What the run's note said when it was last looked at.
        stale: It runs with another specification than the plan's.
        cause: Why it is being stopped.
        hung: It is being stopped because its probes failed for the liveness time.
        stop_issued: The stop has been handed out (it may first wait for others).
        retry_stop_at: When a stop that failed is tried again, with SIGKILL.
        failed_digest: The specification that failed; another one is a new chance.
        last_exit: How the last run ended.
    """

    state: UnitState = UnitState.PLANNED
    reason: str = ""
    since: float = 0.0
    instance: str | None = None
    ended: bool = True
    run_since: float = 0.0
    holdoff_since: float | None = None
    failing_since: float | None = None
    failures: int = 0
    next_try_at: float | None = None
    restarts: int = 0
    had_run: bool = False
    adopted: bool = False
    note: str = ""
    stale: bool = False
    cause: Cause | None = None
    hung: bool = False
    stop_issued: bool = False
    retry_stop_at: float | None = None
    failed_digest: str | None = None
    last_exit: ProcessExit | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """The result of one pass."""

    status: UnitStatus
    action: Action | None = None
    events: tuple[Event, ...] = ()
