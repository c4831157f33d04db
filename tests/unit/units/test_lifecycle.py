"""One rule, one test. ``Story`` plays passes against the state machine like the supervisor does."""

from __future__ import annotations

import dataclasses

import pytest

from kvtierd.plan.model import Readiness, RestartPolicy, StopPolicy, UnitSpec
from kvtierd.units.backend import ProcessExit, UnitProcess
from kvtierd.units.lifecycle import STOP_ORDER_LIMIT_SECONDS, STOP_RETRY_SECONDS, advance, restart_delay
from kvtierd.units.probes import OK, ProbeResult
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

BAD = ProbeResult(ok=False, reason="no answer")


def make_spec(**changes: object) -> UnitSpec:
    fields: dict[str, object] = {
        "id": "kvtier-meta-main",
        "kind": "meta",
        "name": "main",
        "argv": ("meta",),
        "readiness": Readiness(deadline_seconds=30, holdoff_seconds=3),
        "restart": RestartPolicy(first_seconds=1, factor=2, longest_seconds=10, jitter=0.2, limit=4),
        "stop": StopPolicy(),
    }
    return UnitSpec.model_validate(fields | changes)


class Story:
    """A unit over time. Keyword arguments of ``step`` are fields of ``Seen``; the process is kept between steps."""

    def __init__(self, **spec: object) -> None:
        self.spec = make_spec(**spec)
        self.status = UnitStatus()
        self.now = 1000.0
        self.process: UnitProcess | None = None
        self.events: list[Event] = []
        self.runs = 0

    def step(self, after: float = 0.0, **seen: object) -> Action | None:
        self.now += after
        fields: dict[str, object] = {"now": self.now, "process": self.process}
        step = advance(self.spec, self.status, Seen(**(fields | seen)))  # type: ignore[arg-type]
        self.status = step.status
        self.events += step.events
        return step.action

    def begin(self, digest: str | None = None, note: str = "") -> None:
        self.runs += 1
        self.process = UnitProcess(
            self.spec.id, f"run-{self.runs}", 100 + self.runs, 0.0, digest or self.spec.digest, note=note
        )

    def end(self, code: int | None = 0, *, requested: bool = False, note: str = "") -> None:
        assert self.process is not None
        end = ProcessExit(code, None, 0.0, requested)
        self.process = dataclasses.replace(self.process, exit=end, note=note)

    def until_ready(self) -> None:
        assert self.step() == StartProcess()
        self.begin()
        self.step(probe=OK)
        self.step(3, probe=OK)
        assert self.state is UnitState.READY

    def crash(self, **seen: object) -> Action | None:
        self.end(1)
        return self.step(**seen)

    @property
    def state(self) -> UnitState:
        return self.status.state

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


# --- starting ---


def test_a_wanted_unit_is_started() -> None:
    story = Story()
    assert story.step() == StartProcess()
    assert story.state is UnitState.STARTING


def test_nothing_is_decided_while_an_action_is_carried_out() -> None:
    story = Story()
    story.step()
    assert story.step(busy=True, desired="stop", failure=ActionFailure("x")) is None
    assert story.state is UnitState.STARTING


def test_a_closed_gate_keeps_a_unit_planned_and_says_why() -> None:
    story = Story()
    assert story.step(gate="waiting for kvtier-meta-main") is None
    assert (story.state, story.status.reason) == (UnitState.PLANNED, "waiting for kvtier-meta-main")
    story.step(gate="waiting for kvtier-meta-main")
    assert story.kinds == ["waiting"]
    assert story.step() == StartProcess()


def test_ready_needs_probes_that_still_hold_after_the_holdoff() -> None:
    story = Story()
    story.step()
    story.begin()
    story.step(probe=BAD)
    assert (story.state, story.status.reason) == (UnitState.STARTING, "no answer")
    story.step(1, probe=OK)
    story.step(2.9, probe=OK)
    assert story.state is UnitState.STARTING
    story.step(0.2, probe=OK)
    assert story.state is UnitState.READY


def test_a_probe_that_fails_within_the_holdoff_starts_it_anew() -> None:
    story = Story()
    story.step()
    story.begin()
    story.step(probe=OK)
    story.step(2, probe=BAD)
    story.step(1, probe=OK)
    story.step(2.9, probe=OK)
    assert story.state is UnitState.STARTING
    story.step(0.2, probe=OK)
    assert story.state is UnitState.READY


def test_the_first_moment_of_a_clock_is_a_time_like_any_other() -> None:
    story = Story()
    story.now = 0.0
    story.until_ready()


def test_opening_its_ports_and_dying_within_the_holdoff_is_a_failure() -> None:
    """Field case A2: an open port is not readiness."""
    story = Story()
    story.step()
    story.begin()
    story.step(probe=OK)
    story.end(0)
    story.step(1, probe=OK)
    assert story.state is UnitState.BACKOFF
    assert "ready" not in story.kinds


def test_without_a_probe_result_nothing_is_ready() -> None:
    story = Story()
    story.step()
    story.begin()
    story.step(29, probe=None)
    assert story.state is UnitState.STARTING


def test_the_readiness_deadline_stops_the_unit_and_counts_as_a_failure() -> None:
    story = Story()
    story.step()
    story.begin()
    story.step(probe=BAD)
    action = story.step(30, probe=BAD)
    assert action == StopProcess("not ready within 30s: no answer")
    story.end(0, requested=True)
    story.step()
    assert story.state is UnitState.BACKOFF
    assert story.status.failures == 1
    assert story.status.reason.startswith("not ready within")


def test_a_fatal_sign_in_its_output_ends_a_start_at_once() -> None:
    story = Story(restart=RestartPolicy(fatal_patterns=("in use",)))
    story.step()
    story.begin()
    story.step(probe=BAD)
    assert isinstance(story.step(after=1, probe=BAD, fatal_sign="port 5 is in use"), StopProcess)
    assert story.status.reason == "it cannot become ready: port 5 is in use"
    story.end(0, requested=True)
    story.step(last_lines=("port 5 is in use",))
    assert story.status.state is UnitState.FAILED


@pytest.mark.parametrize("adopted", [False, True])
def test_what_serves_is_not_stopped_for_a_fatal_sign(adopted: bool) -> None:
    story = Story(readiness=Readiness(holdoff_seconds=0, deadline_seconds=30))
    if adopted:
        story.begin()
        assert story.step(probe=BAD, fatal_sign="its worker died") is None
        assert story.status.state is UnitState.STARTING
    else:
        story.step()
        story.begin()
        story.step(probe=OK)
    assert story.step(probe=OK, fatal_sign="its worker died") is None
    assert (story.status.state, story.status.reason) == (UnitState.DEGRADED, "its worker died")


def test_a_start_that_failed_is_retried() -> None:
    story = Story()
    story.step()
    story.step(failure=ActionFailure("cannot fork"))
    assert (story.state, story.status.reason) == (UnitState.BACKOFF, "cannot fork")


def test_a_start_that_can_never_work_fails_at_once() -> None:
    story = Story()
    story.step()
    story.step(failure=ActionFailure("no such program", fatal=True))
    assert (story.state, story.status.reason) == (UnitState.FAILED, "no such program")
    assert story.step(1000) is None


def test_a_start_that_leaves_no_process_is_a_failure() -> None:
    story = Story()
    story.step()
    assert story.step() is None
    assert story.state is UnitState.BACKOFF


def test_a_refused_start_of_a_running_unit_adopts_it() -> None:
    story = Story()
    story.step()
    story.begin()
    assert story.step(failure=ActionFailure("unit.exists")) is None
    assert story.state is UnitState.STARTING
    assert story.status.failures == 0


def test_a_run_that_ended_before_it_was_seen_alive_is_a_failure() -> None:
    story = Story()
    story.step()
    story.begin()
    story.end(1)
    story.step()
    assert (story.state, story.status.failures) == (UnitState.BACKOFF, 1)


# --- ends nobody asked for ---


@pytest.mark.parametrize("code", [0, 1, 143])
def test_any_end_nobody_asked_for_is_a_failure(code: int) -> None:
    """Field case A1: the MetaService exits 0 when it cannot start."""
    story = Story()
    story.until_ready()
    story.end(code)
    story.step()
    assert story.state is UnitState.BACKOFF
    assert story.status.reason == f"exit {code}"
    assert story.status.last_exit is not None


def test_backoff_waits_its_time_and_then_starts() -> None:
    story = Story()
    story.until_ready()
    assert story.crash() is None
    assert story.status.next_try_at == story.now + 1
    assert story.step(0.9) is None
    assert story.step(0.2) == StartProcess()
    assert story.status.restarts == 1


def test_an_end_is_counted_once() -> None:
    story = Story()
    story.until_ready()
    story.crash()
    story.step(0.1)
    story.step(0.1)
    assert story.status.failures == 1
    assert story.kinds.count("backoff") == 1


def test_more_failures_in_a_row_than_the_limit_is_failed() -> None:
    story = Story()
    story.step()
    for _ in range(4):
        story.begin()
        story.step()
        story.crash()
        assert story.state is UnitState.BACKOFF
        assert story.step(20) == StartProcess()
    story.begin()
    story.crash()
    assert story.state is UnitState.FAILED
    assert story.status.reason == "gave up after 5 failures in a row: exit 1"
    assert story.step(10_000) is None


def test_a_fatal_line_is_failed_at_once_and_shown() -> None:
    story = Story(restart=RestartPolicy(fatal_patterns=("Invalid conf",)))
    story.until_ready()
    story.crash(last_lines=("x", "Error, Invalid conf: key a", "bye"))
    assert story.state is UnitState.FAILED
    assert story.status.reason == "exit 1; trying again cannot help: Error, Invalid conf: key a"


def test_a_fatal_exit_status_is_failed_at_once_with_its_last_words() -> None:
    story = Story(restart=RestartPolicy(fatal_exit_codes=(78,)))
    story.until_ready()
    story.end(78)
    story.step(last_lines=("x", "no usable memcache_hybrid"))
    assert story.state is UnitState.FAILED
    assert story.status.reason == "exit 78; no usable memcache_hybrid"


def test_lines_of_an_earlier_run_do_not_condemn_a_start_that_failed() -> None:
    story = Story(restart=RestartPolicy(fatal_patterns=("Invalid conf",)))
    story.step()
    story.step(failure=ActionFailure("cannot fork"), last_lines=("Invalid conf",))
    assert story.state is UnitState.BACKOFF


def test_a_stable_time_in_ready_forgets_failures() -> None:
    story = Story()
    story.until_ready()
    story.crash()
    story.step(1)
    story.begin()
    story.step(probe=OK)
    story.step(3, probe=OK)
    story.step(119, probe=OK)
    assert story.status.failures == 1
    story.step(2, probe=OK)
    assert story.status.failures == 0


def test_time_in_degraded_is_not_stable() -> None:
    story = Story()
    story.until_ready()
    story.crash()
    story.step(1)
    story.begin()
    story.step(probe=OK)
    story.step(3, probe=OK)
    story.step(100, probe=BAD)
    story.step(100, probe=OK)
    assert story.status.failures == 1


def test_a_new_specification_is_a_new_chance_for_a_failed_unit() -> None:
    story = Story()
    story.step()
    story.step(failure=ActionFailure("no such program", fatal=True))
    story.spec = make_spec(argv=("meta", "--fixed"))
    assert story.step(1) == StartProcess()


def test_an_operators_start_is_a_new_chance_for_a_failed_unit() -> None:
    story = Story()
    story.step()
    story.step(failure=ActionFailure("no such program", fatal=True))
    assert story.step(start_requested=True) == StartProcess()
    assert story.status.failures == 0


def test_an_operators_start_ends_a_backoff() -> None:
    story = Story()
    story.until_ready()
    story.crash()
    assert story.step(0.01, start_requested=True) == StartProcess()


def test_left_behind_processes_are_told() -> None:
    story = Story()
    story.until_ready()
    story.end(1, note="2 processes were left behind and killed")
    story.step()
    assert story.status.reason == "exit 1 (2 processes were left behind and killed)"


def test_a_record_that_disappears_is_a_failure() -> None:
    story = Story()
    story.until_ready()
    story.process = None
    story.step()
    assert story.state is UnitState.BACKOFF


def test_delays_grow_up_to_the_longest_and_are_spread() -> None:
    policy = RestartPolicy(first_seconds=1, factor=2, longest_seconds=10, jitter=0.2)
    assert [restart_delay(policy, n, 0.5) for n in range(1, 7)] == [1, 2, 4, 8, 10, 10]
    assert restart_delay(policy, 1, 0.0) == pytest.approx(0.8)
    assert restart_delay(policy, 1, 0.999999) == pytest.approx(1.2, abs=1e-3)
    assert restart_delay(policy, 100_000, 0.5) == 10


# --- ready and degraded ---


def test_problems_and_failing_probes_degrade_and_recover() -> None:
    story = Story()
    story.until_ready()
    story.step(1, probe=OK, problems=("the pool is empty",))
    assert (story.state, story.status.reason) == (UnitState.DEGRADED, "the pool is empty")
    story.step(1, probe=BAD, problems=("the pool is empty",))
    assert story.status.reason == "no answer; the pool is empty"
    story.step(1, probe=OK)
    assert (story.state, story.status.reason) == (UnitState.READY, "")
    assert story.kinds[-2:] == ["degraded", "recovered"]


def test_without_a_liveness_limit_a_failing_unit_is_left_alone() -> None:
    story = Story()
    story.until_ready()
    for _ in range(50):
        assert story.step(100, probe=BAD) is None
    assert story.state is UnitState.DEGRADED


def test_probes_that_fail_for_the_liveness_time_restart_the_unit() -> None:
    story = Story(readiness=Readiness(holdoff_seconds=3, liveness_seconds=10))
    story.until_ready()
    story.step(1, probe=BAD)
    story.step(5, probe=OK)
    story.step(1, probe=BAD)
    assert story.step(9, probe=BAD) is None
    assert isinstance(story.step(1, probe=BAD), StopProcess)
    story.end(0, requested=True)
    story.step()
    assert (story.state, story.status.failures) == (UnitState.BACKOFF, 1)
    assert "no longer well for 10s: no answer" in story.status.reason


def test_a_hung_unit_with_nothing_to_put_in_order_is_killed_at_once() -> None:
    readiness = Readiness(liveness_seconds=10, kill_when_hung=True)
    story = Story(readiness=readiness)
    story.until_ready()
    story.step(1, probe=BAD)
    assert isinstance(story.step(10, probe=BAD), KillTree)
    story.end(None)
    story.step()
    assert story.state is UnitState.BACKOFF
    # Any other stop of it is an orderly one.
    story = Story(readiness=readiness)
    story.until_ready()
    assert isinstance(story.step(desired="stop"), StopProcess)


def test_problems_from_elsewhere_never_restart_a_unit() -> None:
    story = Story(readiness=Readiness(holdoff_seconds=3, liveness_seconds=10))
    story.until_ready()
    for _ in range(20):
        assert story.step(10, probe=OK, problems=("pressure",)) is None


# --- stopping and restarting ---


def test_an_unwanted_unit_is_stopped_once_and_stays_stopped() -> None:
    story = Story()
    story.until_ready()
    assert story.step(desired="stop") == StopProcess("stop requested")
    assert story.step(desired="stop", busy=True) is None
    story.end(0, requested=True)
    assert story.step(1, desired="stop") is None
    assert story.state is UnitState.STOPPED
    assert story.step(1000, desired="stop") is None
    assert story.kinds[-2:] == ["stopping", "stopped"]


def test_an_unwanted_unit_is_never_started() -> None:
    story = Story()
    assert story.step(desired="stop", start_requested=True, restart_requested="x") is None
    assert story.state is UnitState.STOPPED


def test_a_stopped_unit_that_is_wanted_again_starts() -> None:
    story = Story()
    story.step(desired="stop")
    assert story.step() == StartProcess()


def test_a_crash_of_an_unwanted_unit_is_told_but_not_retried() -> None:
    story = Story()
    story.until_ready()
    story.end(1)
    assert story.step(desired="stop") is None
    assert story.state is UnitState.STOPPED
    assert story.kinds[-1] == "exited"


def test_a_stop_waits_for_those_who_need_the_unit_but_not_for_ever() -> None:
    story = Story()
    story.until_ready()
    gate = {"desired": "stop", "stop_gate": "waiting for an engine"}
    assert story.step(**gate) is None
    assert story.state is UnitState.STOPPING
    assert story.step(5, **gate) is None
    assert isinstance(story.step(STOP_ORDER_LIMIT_SECONDS, **gate), StopProcess)


def test_a_restart_for_a_failure_waits_for_nobody() -> None:
    story = Story()
    story.step()
    story.begin()
    assert isinstance(story.step(31, probe=BAD, stop_gate="waiting for an engine"), StopProcess)


def test_a_stop_that_failed_becomes_a_kill() -> None:
    story = Story()
    story.until_ready()
    story.step(desired="stop")
    assert story.step(20, desired="stop", failure=ActionFailure("stuck: a (12, state D)")) is None
    assert (story.state, story.status.reason) == (UnitState.STOPPING, "stuck: a (12, state D)")
    assert isinstance(story.step(STOP_RETRY_SECONDS, desired="stop"), KillTree)
    assert story.step(0.1, desired="stop") is None
    assert isinstance(story.step(STOP_RETRY_SECONDS, desired="stop"), KillTree)


def test_a_requested_restart_stops_and_starts_without_counting_a_failure() -> None:
    story = Story()
    story.until_ready()
    assert story.step(restart_requested="operator") == StopProcess("operator")
    story.end(0, requested=True)
    assert story.step() == StartProcess()
    assert (story.status.failures, story.status.restarts) == (0, 1)


def test_a_stop_during_a_restart_wins() -> None:
    story = Story()
    story.until_ready()
    story.step(restart_requested="operator")
    story.step(desired="stop", busy=True)
    story.step(desired="stop")
    story.end(0, requested=True)
    assert story.step(desired="stop") is None
    assert story.state is UnitState.STOPPED


def test_an_end_that_somebody_else_asked_for_is_no_failure() -> None:
    story = Story()
    story.until_ready()
    story.end(0, requested=True)
    assert story.step() == StartProcess()
    assert story.status.failures == 0


# --- a changed specification ---


def test_a_changed_specification_is_noted_and_restarts_only_when_asked() -> None:
    story = Story()
    story.until_ready()
    story.spec = make_spec(argv=("meta", "--new"))
    assert story.step(1, probe=OK) is None
    assert story.step(100, probe=OK) is None
    assert story.status.stale
    assert story.kinds.count("stale") == 1
    assert story.step(1, restart_requested="its specification changed") == StopProcess(
        "its specification changed"
    )
    story.end(0, requested=True)
    assert story.step() == StartProcess()
    story.begin()
    story.step()
    assert not story.status.stale


def test_changed_limits_alone_do_not_make_a_unit_stale() -> None:
    story = Story()
    story.until_ready()
    story.spec = make_spec(stop=StopPolicy(timeout_seconds=99))
    story.step(1, probe=OK)
    assert not story.status.stale


# --- adoption ---


def test_an_adopted_unit_is_checked_not_restarted_and_skips_a_holdoff_it_has_served() -> None:
    story = Story()
    story.begin()
    assert story.step(process_age_seconds=500) is None
    assert story.state is UnitState.STARTING
    story.step(0.1, probe=OK, process_age_seconds=500)
    assert story.state is UnitState.READY
    assert story.kinds == ["adopted", "ready"]
    assert story.status.restarts == 0


def test_the_age_of_our_own_run_does_not_shorten_its_holdoff() -> None:
    """A wall clock that jumps must not."""
    story = Story()
    story.step()
    story.begin()
    story.step(probe=OK, process_age_seconds=86_400)
    assert story.state is UnitState.STARTING


def test_an_adopted_unit_has_the_whole_deadline_from_now() -> None:
    story = Story()
    story.begin()
    story.step(process_age_seconds=500)
    assert story.step(29, probe=BAD, process_age_seconds=529) is None
    assert isinstance(story.step(1, probe=BAD, process_age_seconds=530), StopProcess)


def test_an_adopted_unit_that_crashed_while_no_daemon_looked_is_a_failure() -> None:
    story = Story()
    story.begin()
    story.end(1)
    assert story.step() is None
    assert (story.state, story.status.failures) == (UnitState.BACKOFF, 1)


def test_an_adopted_unit_that_was_stopped_is_just_started() -> None:
    story = Story()
    story.begin()
    story.end(0, requested=True)
    assert story.step() == StartProcess()
    assert (story.status.failures, story.status.restarts) == (0, 0)


def test_an_adopted_unit_that_is_not_wanted_is_stopped() -> None:
    story = Story()
    story.begin()
    assert isinstance(story.step(desired="stop"), StopProcess)


def test_a_unit_found_running_during_backoff_is_adopted() -> None:
    story = Story()
    story.until_ready()
    story.crash()
    story.begin()
    assert story.step(100) is None
    assert story.state is UnitState.STARTING


def test_a_note_on_a_run_is_told_once_and_shown_while_it_is_ready() -> None:
    story = Story()
    story.until_ready()
    assert story.process is not None
    story.process = dataclasses.replace(story.process, note="its shim was killed")
    story.step(1, probe=OK)
    story.step(1, probe=OK)
    assert (story.state, story.status.reason) == (UnitState.READY, "its shim was killed")
    assert story.kinds.count("note") == 1


def test_since_is_the_beginning_of_the_state_whatever_the_reasons() -> None:
    story = Story()
    story.until_ready()
    story.step(1, problems=("a",), probe=OK)
    began = story.status.since
    story.step(5, problems=("b",), probe=OK)
    assert story.status.since == began
