"""The reconcile loop's part for units: looks, lets ``lifecycle`` decide, and carries out what it decided.

Slow things (stops, starts, probes, looking at a unit whose shim hangs) run as tasks of their own and are collected in a
later pass, so that no unit ever waits for another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import structlog

from kvtierd.errors import KvtierError, UnitError
from kvtierd.plan.model import UnitKind, UnitSpec
from kvtierd.units.backend import UnitBackend, UnitProcess
from kvtierd.units.intents import StopIntents
from kvtierd.units.lifecycle import advance
from kvtierd.units.managed import Managed
from kvtierd.units.prober import Prober
from kvtierd.units.unit_state import (
    Action,
    ActionFailure,
    Event,
    KillTree,
    Seen,
    StartProcess,
    StopProcess,
    UnitState,
    UnitStatus,
)
from kvtierd.units.views import ExtraCheck, Gate, UnitEvent, UnitView, after_units_ready, stand_in_spec

LOOK_LIMIT_SECONDS = 1.0  # the longest that a pass waits for the backend to look at units
LINES_SHOWN = 20
LINES_AGE_SECONDS = 5.0
LINES_AGE_UNREADY_SECONDS = 1.0
STARTS_AT_ONCE = 4
WAIT_FLOOR_SECONDS = 0.02

_log = structlog.get_logger(__name__)


class Supervisor:
    """Keeps the units of the plan running.

    Args:
        backend: What runs the processes.
        clock: Monotonic seconds.
        rng: Spreads restart delays.
        gate: The reason why a unit may not start yet, or ``None``.
        extra_checks: Further readiness and liveness checks by kind of unit: ``None`` = well, else why not.
        on_event: Called with each event; must not block.
        state_dir: Where it is remembered what the operator stopped; ``None``: nowhere.
        wall_clock: Unix seconds.
    """

    def __init__(
        self,
        backend: UnitBackend,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        gate: Gate = after_units_ready,
        extra_checks: Mapping[UnitKind, ExtraCheck] | None = None,
        on_event: Callable[[UnitEvent], None] | None = None,
        state_dir: Path | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._backend = backend
        self._clock = clock
        self._wall_clock = wall_clock
        self._rng = rng or random.Random()
        self._gate = gate
        self._on_event = on_event
        self._intents = StopIntents(state_dir)
        self._intent_problem_told = ""
        self._units: dict[str, Managed] = {}
        self._problems: dict[str, dict[str, str]] = {}
        self._poke = asyncio.Event()
        self._prober = Prober(backend, extra_checks or {}, clock, self._poke.set)
        self._start_slots = asyncio.Semaphore(STARTS_AT_ONCE)

    # --- what others call ---

    async def adopt(self) -> tuple[UnitProcess, ...]:
        """Takes over what an earlier daemon left, running or ended. Call it once, before the first ``step``.

        Units that the first plan does not name are stopped then.
        """
        found = tuple(await self._backend.list())
        for process in found:
            managed = self._units.setdefault(
                process.unit_id, Managed(stand_in_spec(process.unit_id), planned=False)
            )
            managed.process = process
        return tuple(process for process in found if process.running)

    async def step(self, desired: Sequence[UnitSpec]) -> None:
        """One pass. Returns within about a second, whatever the units do."""
        self._take_plan(desired)
        await self._look_at_all()
        views = {managed.spec.id: self._view(managed) for managed in self._units.values()}
        for managed in list(self._units.values()):
            self._prober.start_if_due(managed)
            self._decide(managed, views)
            views[managed.spec.id] = self._view(managed)
        for managed in [unit for unit in self._units.values() if not unit.planned]:
            self._drop_if_gone(managed)
        self._tell_intent_problem()

    async def wait(self, timeout_seconds: float) -> None:
        """Until something happened that ``step`` should look at, or something is due, or the time is up."""
        limit = max(WAIT_FLOOR_SECONDS, min(timeout_seconds, self._seconds_until_due()))
        tasks = {
            asyncio.create_task(self._poke.wait(), name="units poke"),
            asyncio.create_task(self._backend.wait_change(limit), name="units change"),
        }
        try:
            await asyncio.wait(tasks, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._poke.clear()

    def views(self) -> tuple[UnitView, ...]:
        """All units, in the plan's order; units that are being removed come last."""
        return tuple(self._view(managed) for managed in self._units.values())

    def view(self, unit_id: str) -> UnitView | None:
        """One unit; ``None`` when there is none of this id."""
        managed = self._units.get(unit_id)
        return None if managed is None else self._view(managed)

    def request_restart(self, unit_id: str, reason: str) -> None:
        """Stops and starts the unit in the next pass; a stopped or failed one is just started."""
        managed = self._get(unit_id)
        self._intents.discard(unit_id)
        managed.restart_requested, managed.stopped_for_now = reason, False
        self._poke.set()

    def request_stop(self, unit_id: str, *, remember: bool = True) -> None:
        """A stop that holds until ``request_start``; the operator's (``remember``) also across restarts of the daemon."""
        managed = self._get(unit_id)
        managed.start_requested, managed.restart_requested = False, None
        if remember:
            self._intents.add(unit_id)
        else:
            managed.stopped_for_now = True
        self._poke.set()

    def request_start(self, unit_id: str) -> None:
        """Takes back a stop, ends a backoff, and gives a failed unit a new chance."""
        managed = self._get(unit_id)
        self._intents.discard(unit_id)
        managed.start_requested, managed.stopped_for_now = True, False
        self._poke.set()

    def poke(self) -> None:
        """Something happened elsewhere that a round of the loop should look at."""
        self._poke.set()

    def set_resting(self, unit_id: str, why: str) -> None:
        """A unit that this node does not need now is kept stopped, and says why; "" takes it back."""
        managed = self._units.get(unit_id)
        if managed is not None and managed.resting != why:
            managed.resting = why
            self._poke.set()

    async def kill_now(self, unit_id: str) -> None:
        """SIGKILL to everything of the unit, past all that is under way for it. Raises ``UnitError``."""
        await self._backend.kill(unit_id)
        self._poke.set()

    def report_output(self, unit_id: str, instance: str, fatal: str | None) -> None:
        """What the output of this run says of why it cannot go on; ``None``: nothing. Not for another run."""
        managed = self._units.get(unit_id)
        if managed is None:
            return
        sign = (instance, fatal) if fatal is not None else None
        if sign != managed.fatal_sign:
            managed.fatal_sign = sign
            self._poke.set()

    def set_problem(self, unit_id: str, source: str, text: str | None) -> None:
        """Something found wrong elsewhere degrades the unit until ``None`` takes it back."""
        problems = self._problems.setdefault(unit_id, {})
        if problems.get(source) == text:
            return
        if text is None:
            del problems[source]
        else:
            problems[source] = text
        if not problems:
            del self._problems[unit_id]
        self._poke.set()

    async def close(self) -> None:
        """Ends the supervisor's own tasks. Units go on; a stop that was begun is finished by the backend."""
        tasks = [
            task
            for unit in self._units.values()
            for task in (unit.look, unit.action, unit.probing)
            if task is not None
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- one pass ---

    def _take_plan(self, desired: Sequence[UnitSpec]) -> None:
        old, self._units = self._units, {}
        for spec in desired:
            managed = old.pop(spec.id, None) or Managed(spec, planned=True)
            managed.spec, managed.planned = spec, True
            self._units[spec.id] = managed
        for unit_id, managed in old.items():
            managed.planned = False
            self._units[unit_id] = managed

    async def _look_at_all(self) -> None:
        for managed in self._units.values():
            managed.collect()
            if managed.action is None and managed.look is None:
                managed.look = asyncio.create_task(self._look(managed), name=f"look {managed.spec.id}")
        looks = {managed.look for managed in self._units.values() if managed.look is not None}
        if looks:
            await asyncio.wait(looks, timeout=LOOK_LIMIT_SECONDS)
        for managed in self._units.values():
            managed.collect()

    async def _look(self, managed: Managed) -> None:
        unit_id = managed.spec.id
        try:
            process = await self._backend.find(unit_id)
            await self._read_lines(managed, process)
        except KvtierError as error:
            self.set_problem(unit_id, "backend", error.message)
            return
        except Exception as error:  # noqa: BLE001 - shown as the unit's problem; the loop goes on
            _log.exception("looking at a unit failed", unit=unit_id)
            self.set_problem(unit_id, "backend", f"{type(error).__name__}: {error}")
            return
        managed.process, managed.looked = process, True
        self.set_problem(unit_id, "backend", None)

    async def _read_lines(self, managed: Managed, process: UnitProcess | None) -> None:
        if process is None:
            return
        run = (process.instance, not process.running)
        unready = managed.status.state is not UnitState.READY
        age = self._clock() - managed.lines_at
        due = process.running and age >= (LINES_AGE_UNREADY_SECONDS if unready else LINES_AGE_SECONDS)
        if run != managed.lines_of or due:
            managed.last_lines = tuple(await self._backend.tail(managed.spec.id, LINES_SHOWN))
            managed.lines_of, managed.lines_at = run, self._clock()

    def _decide(self, managed: Managed, views: Mapping[str, UnitView]) -> None:
        spec, process, now = managed.spec, managed.process, self._clock()
        busy = managed.busy
        desired_run = self._wanted(managed)
        seen = Seen(
            now=now,
            desired="run" if desired_run else "stop",
            process=process,
            process_age_seconds=self._wall_clock() - process.started_unix_seconds
            if process is not None
            else 0.0,
            probe=managed.probe
            if process is not None and managed.probed_instance == process.instance
            else None,
            busy=busy,
            gate=self._gate(spec, views) if desired_run and not managed.running else None,
            stop_gate=None if desired_run else self._still_used_by(spec.id),
            problems=tuple(self._problems.get(spec.id, {}).values()),
            fatal_sign=managed.fatal_sign[1]
            if managed.fatal_sign is not None
            and process is not None
            and managed.fatal_sign[0] == process.instance
            else None,
            last_lines=managed.last_lines,
            restart_requested=managed.restart_requested,
            start_requested=managed.start_requested,
            failure=managed.failure,
            random=self._rng.random(),
        )
        step = advance(spec, managed.status, seen)
        if step.status.since != managed.status.since or not managed.since_unix_seconds:
            managed.since_unix_seconds = self._wall_clock()
        managed.status = step.status
        if not busy:
            managed.failure, managed.restart_requested = None, None
            managed.start_requested = False
        for event in step.events:
            self._tell(spec.id, event)
        if step.action is not None:
            name = f"{type(step.action).__name__} {spec.id}"
            managed.looked = False
            managed.action = asyncio.create_task(self._carry_out(managed, step.action), name=name)

    async def _carry_out(self, managed: Managed, action: Action) -> None:
        spec = managed.spec
        try:
            match action:
                case StartProcess():
                    async with self._start_slots:
                        managed.process = await self._backend.start(spec)
                case StopProcess():
                    stop = spec.stop
                    managed.process = await self._backend.stop(
                        spec.id, signal=stop.signal, timeout_seconds=stop.timeout_seconds
                    )
                case KillTree():
                    await self._backend.kill(spec.id)
        except UnitError as error:
            message = f"{error.message} ({error.why})" if error.why else error.message
            managed.failure = ActionFailure(message, fatal=error.stable_code == "unit.exec")
        except Exception as error:  # noqa: BLE001 - shown as the unit's problem; the loop goes on
            _log.exception("an action on a unit failed", unit=spec.id, action=type(action).__name__)
            managed.failure = ActionFailure(f"{type(error).__name__}: {error}")
        finally:
            managed.next_probe_at = self._clock()
            self._poke.set()

    # --- small things ---

    def _wanted(self, managed: Managed) -> bool:
        stopped = managed.stopped_for_now or bool(managed.resting) or managed.spec.id in self._intents
        return managed.planned and not stopped

    def _still_used_by(self, unit_id: str) -> str | None:
        """Units that need this one are stopped before it: they would hang on a MetaService that goes first."""
        users = [
            other.spec.id
            for other in self._units.values()
            if unit_id in other.spec.after and other.running and not self._wanted(other)
        ]
        return f"waiting for {', '.join(users)} to stop first" if users else None

    def _drop_if_gone(self, managed: Managed) -> None:
        """A unit that is in no plan any more and has stopped is forgotten."""
        if managed.action is not None or managed.running or managed.status.state is not UnitState.STOPPED:
            return

        async def forget() -> None:
            with contextlib.suppress(UnitError):
                await self._backend.forget(managed.spec.id)
            managed.process, managed.status, managed.since_unix_seconds = None, UnitStatus(), 0.0
            self._poke.set()

        if managed.process is None:
            del self._units[managed.spec.id]
            self._problems.pop(managed.spec.id, None)
        else:
            managed.looked = False
            managed.action = asyncio.create_task(forget(), name=f"forget {managed.spec.id}")

    def _seconds_until_due(self) -> float:
        now = self._clock()
        due: list[float] = [float("inf")]
        for managed in self._units.values():
            status = managed.status
            if managed.busy:
                continue
            if status.state is UnitState.BACKOFF and status.next_try_at is not None:
                due.append(status.next_try_at)
            next_probe_at = self._prober.next_due(managed)
            if next_probe_at is not None:
                due.append(next_probe_at)
            if status.state is UnitState.STARTING and managed.running:
                due.append(status.run_since + managed.spec.readiness.deadline_seconds)
                if status.holdoff_since is not None:
                    due.append(status.holdoff_since + managed.spec.readiness.holdoff_seconds)
            if status.state is UnitState.STOPPING and status.retry_stop_at is not None:
                due.append(status.retry_stop_at)
        return max(0.0, min(due) - now)

    def _view(self, managed: Managed) -> UnitView:
        status, process = managed.status, managed.process
        next_try = status.next_try_at if status.state is UnitState.BACKOFF else None
        return UnitView(
            id=managed.spec.id,
            kind=managed.spec.kind,
            name=managed.spec.name,
            state=status.state,
            reason=self._reason(managed),
            pid=process.pid if process is not None and process.running else None,
            since_unix_seconds=managed.since_unix_seconds,
            restarts=status.restarts,
            next_try_in_seconds=None if next_try is None else max(0.0, next_try - self._clock()),
            last_lines=managed.last_lines,
            stale=status.stale,
            instance=process.instance if process is not None else None,
            last_exit=status.last_exit,
        )

    def _reason(self, managed: Managed) -> str:
        problem = self._problems.get(managed.spec.id, {}).get("backend")
        if problem is not None:
            return problem
        resting = managed.resting if managed.status.state is UnitState.STOPPED else ""
        return resting or managed.status.reason

    def _get(self, unit_id: str) -> Managed:
        managed = self._units.get(unit_id)
        if managed is None or not managed.planned:
            known = ", ".join(unit.spec.id for unit in self._units.values() if unit.planned) or "none"
            raise UnitError(f"there is no unit {unit_id}", hint=f"Units are: {known}.", code="unit.unknown")
        return managed

    def _tell(self, unit_id: str, event: Event) -> None:
        if self._on_event is None:
            return
        try:
            self._on_event(UnitEvent(self._wall_clock(), unit_id, event.kind, event.message, event.severity))
        except Exception:  # noqa: BLE001 - a listener may not stop the loop
            _log.exception("the event listener failed", unit=unit_id, kind=event.kind)

    def _tell_intent_problem(self) -> None:
        problem = self._intents.problem
        if problem != self._intent_problem_told:
            self._intent_problem_told = problem
            if problem:
                self._tell("", Event("intents", problem, "warning"))
