"""PURE: the state machine of one unit. What was seen goes in, the next status, one action and events come out.

No clock, no I/O, no randomness: ``Seen`` brings all of it. ``advance`` is called once per unit and pass of the reconcile
loop, also when nothing changed. Times are monotonic seconds.

    planned -> starting -> ready <-> degraded -> stopping -> stopped
                  |           any end nobody asked for          |
                  +------------> backoff -> starting            +-> planned (wanted again)
                                    |
                                    +-> failed (will not be retried)
"""

from __future__ import annotations

from dataclasses import replace

from kvtierd.plan.model import RestartPolicy, UnitSpec
from kvtierd.quantities import format_duration
from kvtierd.units.backend import ProcessExit, UnitProcess
from kvtierd.units.unit_state import (
    Action,
    ActionFailure,
    Cause,
    Event,
    KillTree,
    Seen,
    Severity,
    StartProcess,
    Step,
    StopProcess,
    UnitState,
    UnitStatus,
)

STOP_ORDER_LIMIT_SECONDS = 120.0  # the longest that a stop waits for the units that depend on this one
STOP_RETRY_SECONDS = 2.0


def advance(spec: UnitSpec, status: UnitStatus, seen: Seen) -> Step:
    """One pass for one unit. See the module's text."""
    return _Pass(spec, status, seen).run()


def restart_delay(policy: RestartPolicy, failures: int, random: float) -> float:
    """Seconds before the try that follows this many failures in a row (1 or more)."""
    try:
        base = min(policy.first_seconds * policy.factor ** (failures - 1), policy.longest_seconds)
    except OverflowError:
        base = policy.longest_seconds
    return base * (1.0 + policy.jitter * (2.0 * random - 1.0))


def fatal_line(policy: RestartPolicy, lines: tuple[str, ...]) -> str | None:
    """The newest line that says that trying again is pointless, or ``None``."""
    return next((line for line in reversed(lines) if any(p in line for p in policy.fatal_patterns)), None)


class _Pass:
    """One call of ``advance``, taken apart. Mutates only itself."""

    def __init__(self, spec: UnitSpec, status: UnitStatus, seen: Seen) -> None:
        self.spec = spec
        self.status = status
        self.seen = seen
        self.events: list[Event] = []

    def run(self) -> Step:
        process = self.seen.process
        if self.seen.busy:
            return self.done()
        if process is not None and process.running:
            return self.running(process)
        return self.not_running(process)

    # --- a living process ---

    def running(self, process: UnitProcess) -> Step:
        if process.instance != self.status.instance or self.status.ended:
            self.meet(process)
        self.read_note(process)
        self.compare_specification(process)
        if self.status.state is UnitState.STOPPING:
            return self.stopping()
        if self.seen.desired == "stop":
            return self.begin_stop(Cause.WANTED, "stop requested")
        if self.seen.restart_requested is not None:
            return self.begin_stop(Cause.RESTART, self.seen.restart_requested)
        if self.status.state is UnitState.STARTING:
            return self.starting()
        return self.ready()

    def meet(self, process: UnitProcess) -> None:
        """A run that is seen for the first time: ours, or one that an earlier daemon started."""
        ours = self.status.state is UnitState.STARTING
        self.update(
            instance=process.instance,
            ended=False,
            adopted=not ours,
            had_run=True,
            run_since=self.status.since if ours else self.seen.now,
            next_try_at=None,
            cause=None,
            holdoff_since=None,
            failing_since=None,
            stop_issued=False,
            retry_stop_at=None,
        )
        if ours:
            self.enter(UnitState.STARTING, f"process {process.pid}, waiting for readiness")
            self.tell("started", f"started as process {process.pid}")
        else:
            self.enter(UnitState.STARTING, f"found running as process {process.pid}, being checked")
            self.tell("adopted", f"found running as process {process.pid}, adopted")

    def read_note(self, process: UnitProcess) -> None:
        if process.note and process.note != self.status.note:
            self.tell("note", process.note, "warning")
        if process.note != self.status.note:
            self.update(note=process.note)

    def compare_specification(self, process: UnitProcess) -> None:
        stale = process.spec_digest != self.spec.digest and self.seen.desired == "run"
        if stale and not self.status.stale:
            self.tell(
                "stale", "runs with an older specification; it takes effect at the next restart", "warning"
            )
        if stale != self.status.stale:
            self.update(stale=stale)

    def starting(self) -> Step:
        readiness, probe, now = self.spec.readiness, self.seen.probe, self.seen.now
        if probe is not None and probe.ok:
            if self.status.holdoff_since is None:
                self.update(holdoff_since=now)
            held = 0.0 if self.status.holdoff_since is None else now - self.status.holdoff_since
            # An adopted run that has lived longer than the hold-off has nothing to prove by waiting again.
            adopted_age = self.seen.process_age_seconds if self.status.adopted else 0.0
            if max(held, adopted_age) >= readiness.holdoff_seconds:
                return self.become_ready()
            self.enter(
                UnitState.STARTING, f"probes hold, must hold for {format_duration(readiness.holdoff_seconds)}"
            )
        else:
            self.update(holdoff_since=None)
            if probe is not None:
                self.enter(UnitState.STARTING, probe.reason)
        if self.seen.fatal_sign is not None and not self.status.adopted:
            return self.begin_stop(Cause.FAILURE, f"it cannot become ready: {self.seen.fatal_sign}")
        if now - self.status.run_since >= readiness.deadline_seconds:
            why = f"not ready within {format_duration(readiness.deadline_seconds)}"
            detail = f": {probe.reason}" if probe is not None and not probe.ok else ""
            return self.begin_stop(Cause.FAILURE, why + detail)
        return self.done()

    def become_ready(self) -> Step:
        took = self.seen.now - self.status.run_since
        self.enter(UnitState.READY, "")
        self.tell("ready", f"ready after {format_duration(took)}")
        return self.ready()

    def ready(self) -> Step:
        readiness, probe, now = self.spec.readiness, self.seen.probe, self.seen.now
        failing = probe is not None and not probe.ok
        if not failing:
            self.update(failing_since=None)
        elif self.status.failing_since is None:
            self.update(failing_since=now)
        signs = (self.seen.fatal_sign,) if self.seen.fatal_sign is not None else ()
        wrong = (*((probe.reason,) if probe is not None and failing else ()), *signs, *self.seen.problems)
        if self.status.failing_since is not None and readiness.liveness_seconds is not None:
            failing_seconds = now - self.status.failing_since
            if failing_seconds >= readiness.liveness_seconds:
                return self.begin_stop(
                    Cause.FAILURE,
                    f"no longer well for {format_duration(failing_seconds)}: {wrong[0]}",
                    hung=True,
                )
        if wrong:
            if self.status.state is UnitState.READY:
                self.tell("degraded", "; ".join(wrong), "warning")
            self.enter(UnitState.DEGRADED, "; ".join(wrong))
            return self.done()
        if self.status.state is UnitState.DEGRADED:
            self.tell("recovered", f"well again after {format_duration(now - self.status.since)}")
        self.enter(UnitState.READY, self.status.note)
        if self.status.failures and now - self.status.since >= self.spec.restart.reset_after_seconds:
            self.update(failures=0)
        return self.done()

    # --- stopping ---

    def begin_stop(self, cause: Cause, reason: str, *, hung: bool = False) -> Step:
        self.update(cause=cause, stop_issued=False, retry_stop_at=None, hung=hung)
        self.enter(UnitState.STOPPING, reason)
        self.tell("stopping", reason, "error" if cause is Cause.FAILURE else "info")
        return self.stopping()

    def stopping(self) -> Step:
        now, status = self.seen.now, self.status
        if self.seen.desired == "stop" and status.cause is not Cause.WANTED:
            self.update(cause=Cause.WANTED)
        if self.seen.failure is not None:
            self.update(retry_stop_at=now + STOP_RETRY_SECONDS)
            if self.status.reason != self.seen.failure.message:
                self.tell("stop-failed", self.seen.failure.message, "error")
            self.enter(UnitState.STOPPING, self.seen.failure.message)
            return self.done()
        if not status.stop_issued:
            in_order = self.status.cause is Cause.WANTED and now - status.since < STOP_ORDER_LIMIT_SECONDS
            if in_order and self.seen.stop_gate is not None:
                return self.done()
            self.update(stop_issued=True)
            if status.hung and self.spec.readiness.kill_when_hung:
                return self.done(KillTree(status.reason))
            return self.done(StopProcess(status.reason))
        if status.retry_stop_at is None:
            # The stop is over, and still it runs: an answer that came late. Looked at again before force is used.
            self.update(retry_stop_at=now + STOP_RETRY_SECONDS)
        elif now >= status.retry_stop_at:
            self.update(retry_stop_at=now + STOP_RETRY_SECONDS)
            return self.done(KillTree("the stop did not end it"))
        return self.done()

    # --- no living process ---

    def not_running(self, process: UnitProcess | None) -> Step:
        if process is not None and process.exit is not None:
            if process.instance != self.status.instance:
                self.meet_ended(process, process.exit)
            elif not self.status.ended:
                self.handle_end(process, process.exit)
        elif not self.status.ended:
            self.update(ended=True, instance=None)
            self.fail("its record has disappeared")
        if self.seen.desired == "stop":
            return self.stay_stopped()
        if self.status.state is UnitState.STARTING:  # the start is over and has left no process
            failure = self.seen.failure or ActionFailure("the start left no process")
            self.fail(failure.message, fatal=failure.fatal)
        self.consider_requests()
        return self.maybe_start()

    def meet_ended(self, process: UnitProcess, end: ProcessExit) -> None:
        """A run that was over when it was first seen: it ended while no daemon looked, or very quickly."""
        ours = self.status.state is UnitState.STARTING
        self.update(instance=process.instance, ended=True, last_exit=end, stale=False)
        if ours or not end.requested:
            self.update(had_run=True)
            self.fail_by(end, self.describe_end(process, end))

    def handle_end(self, process: UnitProcess, end: ProcessExit) -> None:
        """The end of the run that was watched."""
        cause = self.status.cause if self.status.state is UnitState.STOPPING else None
        reason = self.status.reason
        self.update(
            ended=True, last_exit=end, cause=None, stale=False, holdoff_since=None, failing_since=None
        )
        told = self.describe_end(process, end)
        if cause is Cause.FAILURE:
            self.tell("exited", told)
            self.fail(reason, output=self.seen.last_lines)
        elif cause is None and not end.requested:
            self.fail_by(end, told)
        else:
            self.tell("stopped", told)
            self.enter(UnitState.STOPPED if cause is Cause.WANTED else UnitState.PLANNED, reason)

    @staticmethod
    def describe_end(process: UnitProcess, end: ProcessExit) -> str:
        return end.describe() + (f" ({process.note})" if process.note else "")

    def fail_by(self, end: ProcessExit, reason: str) -> None:
        """An end nobody asked for, judged by its status and its last words."""
        fatal = end.code in self.spec.restart.fatal_exit_codes
        words = self.seen.last_lines[-1:] if fatal else ()
        self.fail("; ".join((reason, *words)), fatal=fatal, output=self.seen.last_lines)

    def fail(self, reason: str, *, fatal: bool = False, output: tuple[str, ...] = ()) -> None:
        """Counts a failure and decides between another try and giving up."""
        policy, now = self.spec.restart, self.seen.now
        failures = self.status.failures + 1
        line = fatal_line(policy, output)
        self.update(failures=failures, next_try_at=None, cause=None)
        if line is not None:
            reason = f"{reason}; trying again cannot help: {line.strip()[:200]}"
        if self.seen.desired == "stop":
            self.tell("exited", reason, "warning")
        elif fatal or line is not None or failures > policy.limit:
            if not fatal and line is None:
                reason = f"gave up after {failures} failures in a row: {reason}"
            self.update(failed_digest=self.spec.digest)
            self.enter(UnitState.FAILED, reason)
            self.tell("failed", reason, "error")
        else:
            delay = restart_delay(policy, failures, self.seen.random)
            self.update(next_try_at=now + delay)
            self.enter(UnitState.BACKOFF, reason)
            self.tell("backoff", f"{reason}; next try in {format_duration(delay)}", "warning")

    def stay_stopped(self) -> Step:
        self.update(next_try_at=None, failures=0, cause=None)
        self.enter(UnitState.STOPPED, self.status.reason if self.status.state is UnitState.STOPPED else "")
        return self.done()

    def consider_requests(self) -> None:
        """Wishes of the operator, and a changed specification, lead out of failed and shorten backoff."""
        state = self.status.state
        asked = self.seen.start_requested or self.seen.restart_requested is not None
        if state is UnitState.FAILED and not asked and self.status.failed_digest != self.spec.digest:
            asked = True
            self.tell("retry", "its specification changed, so it is tried again")
        if asked and state in {UnitState.FAILED, UnitState.BACKOFF}:
            self.update(failures=0, next_try_at=None, failed_digest=None)
            self.enter(UnitState.PLANNED, "start requested")
        elif state is UnitState.STOPPED:
            self.enter(UnitState.PLANNED, "wanted again")

    def maybe_start(self) -> Step:
        status = self.status
        if status.state is UnitState.FAILED:
            return self.done()
        if (
            status.state is UnitState.BACKOFF
            and status.next_try_at is not None
            and self.seen.now < status.next_try_at
        ):
            return self.done()
        if self.seen.gate is not None:
            if status.reason != self.seen.gate:
                self.tell("waiting", self.seen.gate)
            self.enter(UnitState.PLANNED, self.seen.gate)
            return self.done()
        self.update(
            restarts=status.restarts + (1 if status.had_run else 0),
            next_try_at=None,
        )
        self.enter(UnitState.STARTING, "", again=True)
        return self.done(StartProcess())

    # --- helpers ---

    def update(self, **changes: object) -> None:
        self.status = replace(self.status, **changes)  # type: ignore[arg-type]

    def enter(self, state: UnitState, reason: str, *, again: bool = False) -> None:
        """``since`` is when the state began, so it stays when only the reason changes."""
        if state is not self.status.state or again:
            self.update(state=state, since=self.seen.now)
        if reason != self.status.reason:
            self.update(reason=reason)

    def tell(self, kind: str, message: str, severity: Severity = "info") -> None:
        self.events.append(Event(kind, message, severity))

    def done(self, action: Action | None = None) -> Step:
        return Step(self.status, action, tuple(self.events))
