"""Whatever happens, in whatever order: the rules that must never be broken."""

from __future__ import annotations

import dataclasses

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtierd.plan.model import Readiness, RestartPolicy, UnitSpec
from kvtierd.units.backend import ProcessExit, UnitProcess
from kvtierd.units.lifecycle import advance
from kvtierd.units.probes import OK, ProbeResult
from kvtierd.units.unit_state import (
    ActionFailure,
    KillTree,
    Seen,
    StartProcess,
    StopProcess,
    UnitState,
    UnitStatus,
)

POLICY = RestartPolicy(
    first_seconds=1,
    factor=2,
    longest_seconds=16,
    jitter=0.2,
    limit=6,
    reset_after_seconds=100,
    fatal_patterns=("FATAL",),
)
SPEC = UnitSpec(
    id="kvtier-meta-main",
    kind="meta",
    name="main",
    argv=("meta",),
    readiness=Readiness(deadline_seconds=30, holdoff_seconds=3, liveness_seconds=20),
    restart=POLICY,
)


class UnitMachine(RuleBasedStateMachine):
    """Plays supervisor and world. The process in the world is the truth; the machine sees it only between actions."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = SPEC
        self.status = UnitStatus()
        self.now = 0.0
        self.process: UnitProcess | None = None
        self.runs = 0
        self.busy: StartProcess | StopProcess | KillTree | None = None
        self.desired = "run"
        self.gate: str | None = None
        self.stop_gate: str | None = None
        self.problems: tuple[str, ...] = ()
        self.probe: ProbeResult | None = None
        self.failure: ActionFailure | None = None
        self.lines: tuple[str, ...] = ()
        self.once: dict[str, object] = {}
        self.delays: list[tuple[int, float]] = []

    # --- one pass of the loop ---

    @rule(seconds=st.floats(0, 40), random=st.floats(0, 0.999))
    def step(self, seconds: float, random: float) -> None:
        self.now += seconds
        before = self.status
        seen = Seen(
            now=self.now,
            desired=self.desired,  # type: ignore[arg-type]
            process=self.process,
            process_age_seconds=50.0,
            probe=self.probe,
            busy=self.busy is not None,
            gate=self.gate,
            stop_gate=self.stop_gate,
            problems=self.problems,
            last_lines=self.lines,
            failure=self.failure,
            random=random,
            **self.once,  # type: ignore[arg-type]
        )
        step = advance(self.spec, before, seen)
        self.status = step.status
        if self.busy is not None:
            assert step.action is None
            return
        self.failure, self.once = None, {}
        self.check_action(before, seen, step.action)
        self.busy = step.action
        if self.status.state is UnitState.BACKOFF and self.status.failures != before.failures:
            self.check_delay(before)

    def check_action(self, before: UnitStatus, seen: Seen, action: object) -> None:
        running = self.process is not None and self.process.running
        if isinstance(action, StartProcess):
            assert not running, "a second start without an end in between"
            assert self.desired == "run", "started although it is not wanted"
            assert self.gate is None, "started through a closed gate"
            asked = seen.start_requested or seen.restart_requested is not None
            if before.state is UnitState.BACKOFF and not asked and before.next_try_at is not None:
                assert self.now >= before.next_try_at, "started before its time"
            if before.state is UnitState.FAILED:
                assert asked or self.spec.digest != before.failed_digest, "a failed unit was started"
        elif action is not None:
            assert running, "stopped what does not run"

    def check_delay(self, before: UnitStatus) -> None:
        """Monotone until it starts anew, apart from the jitter."""
        assert self.status.next_try_at is not None
        delay = self.status.next_try_at - self.now
        base = min(2.0 ** (self.status.failures - 1), 16.0)
        assert base * 0.8 - 1e-6 <= delay <= base * 1.2 + 1e-6
        assert self.status.failures in {before.failures + 1, 1}, "failures are counted one by one"

    # --- what the world does ---

    @precondition(lambda self: self.busy is not None)
    @rule(works=st.booleans(), crash=st.booleans(), fatal=st.booleans(), orderly=st.booleans())
    def action_ends(self, works: bool, crash: bool, fatal: bool, orderly: bool) -> None:
        action, self.busy = self.busy, None
        if not works:
            self.failure = ActionFailure("it did not work", fatal=fatal)
            return
        if isinstance(action, StartProcess):
            if self.process is None or not self.process.running:  # else another daemon was faster
                self.new_run()
            if crash:
                self.end_run(requested=False)
        elif self.process is not None and self.process.running:
            self.end_run(requested=orderly)

    def new_run(self) -> None:
        self.runs += 1
        self.probe = None
        self.process = UnitProcess(self.spec.id, f"run-{self.runs}", self.runs, 0.0, self.spec.digest)

    def end_run(self, *, requested: bool) -> None:
        assert self.process is not None
        self.process = dataclasses.replace(self.process, exit=ProcessExit(0, None, 0.0, requested))

    @precondition(lambda self: self.process is not None and self.process.running)
    @rule(requested=st.booleans(), fatal=st.booleans())
    def process_ends(self, requested: bool, fatal: bool) -> None:
        self.lines = ("FATAL",) if fatal else ()
        self.end_run(requested=requested)

    @precondition(lambda self: self.process is None or not self.process.running)
    @rule()
    def somebody_else_starts_it(self) -> None:
        self.new_run()

    @rule(result=st.sampled_from([None, OK, ProbeResult(ok=False, reason="no answer")]))
    def probe_result(self, result: ProbeResult | None) -> None:
        self.probe = result

    @rule(desired=st.sampled_from(["run", "run", "stop"]))
    def want(self, desired: str) -> None:
        self.desired = desired

    @rule(gate=st.sampled_from([None, "waiting"]), stop_gate=st.sampled_from([None, "used"]))
    def gates(self, gate: str | None, stop_gate: str | None) -> None:
        self.gate, self.stop_gate = gate, stop_gate

    @rule(problems=st.sampled_from([(), ("pressure",)]))
    def problem(self, problems: tuple[str, ...]) -> None:
        self.problems = problems

    @rule(what=st.sampled_from(["restart_requested", "start_requested"]))
    def ask(self, what: str) -> None:
        self.once[what] = "asked" if what == "restart_requested" else True

    @rule(flag=st.sampled_from(["--a", "--b"]))
    def change_specification(self, flag: str) -> None:
        self.spec = SPEC.model_copy(update={"argv": ("meta", flag)})

    @initialize(adopted=st.booleans())
    def begin(self, adopted: bool) -> None:
        if adopted:
            self.new_run()

    # --- what always holds ---

    @invariant()
    def status_makes_sense(self) -> None:
        status = self.status
        if status.state is UnitState.BACKOFF:
            assert status.next_try_at is not None
            assert 1 <= status.failures <= POLICY.limit
        if status.state is UnitState.FAILED:
            assert status.reason
            assert status.failed_digest is not None
        if status.state in {UnitState.READY, UnitState.DEGRADED, UnitState.STOPPING}:
            assert status.instance is not None
            assert not status.ended
        if status.state is UnitState.DEGRADED:
            assert status.reason
        assert status.since <= self.now

    def teardown(self) -> None:
        """From wherever it is, a unit that is left in peace becomes ready."""
        self.spec, self.gate, self.stop_gate, self.problems, self.lines = SPEC, None, None, (), ()
        self.desired, self.probe = "run", OK
        self.once = {"start_requested": True}
        for _ in range(60):
            if self.busy is not None:
                self.action_ends(works=True, crash=False, fatal=False, orderly=True)
            self.probe = OK
            self.step(4.0, 0.5)
            if self.status.state is UnitState.STOPPING and self.busy is None and self.process is not None:
                continue
        assert self.status.state is UnitState.READY, self.status


UnitMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestUnitMachine = UnitMachine.TestCase
