"""The shell around the state machine, with a backend and a clock that tests move by hand."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kvtierd.errors import UnitError
from kvtierd.plan.model import Readiness, RestartPolicy, UnitSpec
from kvtierd.units.backend import ProcessExit, UnitProcess
from kvtierd.units.managed import Managed
from kvtierd.units.supervisor import Supervisor
from kvtierd.units.unit_state import UnitState
from kvtierd.units.views import UnitEvent, UnitView

IDS = itertools.count(1)


class FakeBackend:
    """Processes are entries in a dictionary. ``hold`` keeps calls of a kind from returning until they are let go."""

    name = "fake"

    def __init__(self) -> None:
        self.units: dict[str, UnitProcess] = {}
        self.lines: dict[str, list[str]] = {}
        self.calls: list[tuple[str, str]] = []
        self.hold: dict[tuple[str, str], asyncio.Event] = {}
        self.refuse: dict[tuple[str, str], UnitError] = {}
        self.changed = asyncio.Event()

    async def _called(self, what: str, unit_id: str) -> None:
        if what not in {"find", "tail"}:
            self.calls.append((what, unit_id))
        if (what, unit_id) in self.hold:
            await self.hold[what, unit_id].wait()
        if (what, unit_id) in self.refuse:
            raise self.refuse[what, unit_id]

    def run(self, unit_id: str, digest: str = "", started: float = 0.0) -> UnitProcess:
        number = next(IDS)
        self.units[unit_id] = UnitProcess(unit_id, f"run-{number}", number, started, digest)
        return self.units[unit_id]

    def end(self, unit_id: str, code: int = 1, *, requested: bool = False) -> UnitProcess:
        end = ProcessExit(code, None, 0.0, requested)
        self.units[unit_id] = dataclasses.replace(self.units[unit_id], exit=end)
        self.changed.set()
        return self.units[unit_id]

    async def start(self, spec: UnitSpec) -> UnitProcess:
        await self._called("start", spec.id)
        if spec.id in self.units and self.units[spec.id].running:
            raise UnitError("it runs", code="unit.exists")
        return self.run(spec.id, spec.digest)

    async def stop(
        self, unit_id: str, *, signal: str = "SIGTERM", timeout_seconds: float = 20.0
    ) -> UnitProcess:
        await self._called("stop", unit_id)
        return self.end(unit_id, 0, requested=True)

    async def kill(self, unit_id: str, signal: str = "SIGKILL") -> None:
        await self._called("kill", unit_id)
        self.end(unit_id, 0, requested=True)

    async def find(self, unit_id: str) -> UnitProcess | None:
        await self._called("find", unit_id)
        return self.units.get(unit_id)

    async def list(self) -> list[UnitProcess]:
        return [*self.units.values()]

    async def forget(self, unit_id: str) -> None:
        await self._called("forget", unit_id)
        del self.units[unit_id]

    async def tail(self, unit_id: str, lines: int = 20):
        await self._called("tail", unit_id)
        return self.lines.get(unit_id, [])[-lines:]

    async def logged(self, unit_id: str, text: str) -> bool:
        return any(text in line for line in self.lines.get(unit_id, []))

    async def follow(self, unit_id: str, lines: int = 20) -> AsyncIterator[str]:
        yield ""

    async def wait_change(self, timeout_seconds: float) -> bool:
        await self.changed.wait()
        self.changed.clear()
        return True

    async def close(self) -> None:
        pass


def spec(name: str = "a", **changes: object) -> UnitSpec:
    fields: dict[str, object] = {
        "id": f"kvtier-engine-{name}",
        "kind": "engine",
        "name": name,
        "argv": (name,),
        "restart": RestartPolicy(first_seconds=1, jitter=0),
        "readiness": Readiness(deadline_seconds=30),
    }
    return UnitSpec.model_validate(fields | changes)


class World:
    def __init__(self, **arguments: object) -> None:
        self.backend = FakeBackend()
        self.now = 100.0
        self.events: list[UnitEvent] = []
        self.arguments = {
            "clock": lambda: self.now,
            "wall_clock": lambda: 1_000_000.0 + self.now,
            "rng": random.Random(1),
            "on_event": self.events.append,
        } | arguments
        self.plan: list[UnitSpec] = []
        self.supervisor = self.new_supervisor()

    def new_supervisor(self) -> Supervisor:
        return Supervisor(self.backend, **self.arguments)  # type: ignore[arg-type]

    async def steps(self, count: int = 4, after: float = 0.0) -> None:
        """Passes with all that is ready to run in between."""
        self.now += after
        for _ in range(count):
            await self.supervisor.step(self.plan)
            for _ in range(10):
                await asyncio.sleep(0)

    def view(self, name: str = "a") -> UnitView:
        return next(view for view in self.supervisor.views() if view.name == name)

    def kinds(self, name: str = "a") -> list[str]:
        return [event.kind for event in self.events if event.unit_id == f"kvtier-engine-{name}"]


@pytest.fixture
async def make_world() -> AsyncIterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(**arguments: object) -> World:
        worlds.append(World(**arguments))
        return worlds[-1]

    yield make
    for world in worlds:
        for event in world.backend.hold.values():
            event.set()
        await world.supervisor.close()


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()


async def test_units_of_the_plan_become_ready(world: World) -> None:
    world.plan = [spec("a"), spec("b")]
    await world.steps()
    assert [view.state for view in world.supervisor.views()] == [UnitState.READY] * 2
    view = world.view()
    assert view.pid == world.backend.units["kvtier-engine-a"].pid
    assert view.instance == world.backend.units["kvtier-engine-a"].instance
    assert view.since_unix_seconds == 1_000_100.0
    assert (view.restarts, view.stale, view.next_try_in_seconds) == (0, False, None)
    assert world.kinds() == ["started", "ready"]


async def test_a_crash_shows_its_last_lines_and_the_next_try(world: World) -> None:
    world.plan = [spec()]
    await world.steps()
    world.backend.lines["kvtier-engine-a"] = ["out of memory"]
    world.backend.end("kvtier-engine-a", 3)
    await world.steps(1, after=0.5)
    view = world.view()
    assert (view.state, view.reason, view.pid) == (UnitState.BACKOFF, "exit 3", None)
    assert view.last_lines == ("out of memory",)
    assert view.next_try_in_seconds == 1.0
    assert view.last_exit is not None
    assert view.last_exit.code == 3
    await world.steps(after=1.1)
    assert (world.view().state, world.view().restarts) == (UnitState.READY, 1)


async def test_the_last_lines_decide_about_retrying(world: World) -> None:
    world.plan = [spec(restart=RestartPolicy(fatal_patterns=("bad conf",)))]
    await world.steps()
    world.backend.lines["kvtier-engine-a"] = ["bad conf: x"]
    world.backend.end("kvtier-engine-a")
    await world.steps(1)
    assert world.view().state is UnitState.FAILED


async def test_units_start_after_those_they_need(world: World) -> None:
    world.plan = [spec("a", after=("kvtier-engine-b",)), spec("b")]
    world.backend.hold["start", "kvtier-engine-b"] = asyncio.Event()
    await world.steps()
    assert (world.view().state, world.view().reason) == (
        UnitState.PLANNED,
        "waiting for kvtier-engine-b to be ready",
    )
    world.backend.hold["start", "kvtier-engine-b"].set()
    await world.steps(6)
    assert world.view().state is UnitState.READY


async def test_a_need_that_is_not_in_the_plan_is_said(world: World) -> None:
    world.plan = [spec("a", after=("kvtier-meta-main",))]
    await world.steps()
    assert world.view().reason == "waiting for kvtier-meta-main, which is not in the plan"


async def test_another_gate_can_be_given(make_world: Callable[..., World]) -> None:
    reasons = {"kvtier-engine-a": "not joinable yet"}
    world = make_world(gate=lambda unit, views: reasons.get(unit.id))
    world.plan = [spec("a"), spec("b")]
    await world.steps()
    assert (world.view("a").state, world.view("a").reason) == (UnitState.PLANNED, "not joinable yet")
    assert world.view("b").state is UnitState.READY
    reasons.clear()
    await world.steps()
    assert world.view("a").state is UnitState.READY


async def test_a_slow_stop_holds_up_nobody(world: World) -> None:
    world.plan = [spec("a"), spec("b")]
    await world.steps()
    world.backend.hold["stop", "kvtier-engine-a"] = asyncio.Event()
    world.supervisor.request_stop("kvtier-engine-a")
    world.supervisor.request_restart("kvtier-engine-b", "test")
    await world.steps(6)
    assert world.view("a").state is UnitState.STOPPING
    assert (world.view("b").state, world.view("b").restarts) == (UnitState.READY, 1)
    world.backend.hold["stop", "kvtier-engine-a"].set()
    await world.steps()
    assert world.view("a").state is UnitState.STOPPED
    assert world.backend.calls.count(("stop", "kvtier-engine-a")) == 1


async def test_a_unit_that_cannot_be_looked_at_holds_up_nobody(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtierd.units.supervisor.LOOK_LIMIT_SECONDS", 0.01)
    world.plan = [spec("a"), spec("b")]
    world.backend.hold["find", "kvtier-engine-a"] = asyncio.Event()
    await world.steps()
    assert world.view("b").state is UnitState.READY
    assert ("start", "kvtier-engine-a") not in world.backend.calls
    world.backend.hold["find", "kvtier-engine-a"].set()
    await world.steps()
    assert world.view("a").state is UnitState.READY


async def test_a_backend_that_cannot_look_is_shown_and_nothing_is_started(world: World) -> None:
    world.plan = [spec()]
    world.backend.refuse["find", "kvtier-engine-a"] = UnitError("the shim does not answer")
    await world.steps()
    assert world.view().reason == "the shim does not answer"
    assert world.backend.calls == []
    world.backend.refuse.clear()
    await world.steps()
    assert (world.view().state, world.view().reason) == (UnitState.READY, "")


async def test_requests_made_while_an_action_runs_are_not_lost(world: World) -> None:
    world.plan = [spec()]
    world.backend.hold["start", "kvtier-engine-a"] = asyncio.Event()
    await world.steps()
    world.supervisor.request_restart("kvtier-engine-a", "test")
    await world.steps()
    world.backend.hold["start", "kvtier-engine-a"].set()
    await world.steps(8)
    assert [call for call, _ in world.backend.calls] == ["start", "stop", "start"]


async def test_a_start_that_can_never_work_is_failed_until_start_is_asked_for(world: World) -> None:
    world.plan = [spec()]
    world.backend.refuse["start", "kvtier-engine-a"] = UnitError("no such program", code="unit.exec")
    await world.steps()
    assert (world.view().state, world.view().reason) == (UnitState.FAILED, "no such program")
    world.backend.refuse.clear()
    await world.steps(after=1000)
    assert world.view().state is UnitState.FAILED
    world.supervisor.request_start("kvtier-engine-a")
    await world.steps()
    assert world.view().state is UnitState.READY


async def test_other_start_errors_are_retried(world: World) -> None:
    world.plan = [spec()]
    world.backend.refuse["start", "kvtier-engine-a"] = UnitError(
        "no room", code="unit.runtime-dir", why="disk full"
    )
    await world.steps()
    assert (world.view().state, world.view().reason) == (UnitState.BACKOFF, "no room (disk full)")


async def test_a_bug_in_the_backend_does_not_end_the_loop(world: World) -> None:
    world.plan = [spec("a"), spec("b")]
    world.backend.refuse["start", "kvtier-engine-a"] = RuntimeError("oops")  # type: ignore[assignment]
    world.backend.refuse["find", "kvtier-engine-b"] = RuntimeError("oops")  # type: ignore[assignment]
    await world.steps()
    assert (world.view("a").state, world.view("a").reason) == (UnitState.BACKOFF, "RuntimeError: oops")
    assert world.view("b").reason == "RuntimeError: oops"


async def test_a_listener_that_fails_does_not_end_the_loop(make_world: Callable[..., World]) -> None:
    def broken(_: UnitEvent) -> None:
        raise RuntimeError("listener")

    world = make_world(on_event=broken)
    world.plan = [spec()]
    await world.steps()
    assert world.view().state is UnitState.READY


async def test_an_earlier_daemons_units_are_adopted_and_not_started_again(world: World) -> None:
    process = world.backend.run("kvtier-engine-a", spec().digest)
    assert await world.supervisor.adopt() == (process,)
    world.plan = [spec()]
    await world.steps()
    assert (world.view().state, world.view().instance) == (UnitState.READY, process.instance)
    assert world.backend.calls == []
    assert world.kinds() == ["adopted", "ready"]


async def test_units_that_vanish_from_the_plan_are_stopped_and_forgotten(world: World) -> None:
    world.plan = [spec("a"), spec("b")]
    await world.steps()
    world.plan = [spec("b")]
    await world.steps(6)
    assert [view.name for view in world.supervisor.views()] == ["b"]
    assert "kvtier-engine-a" not in world.backend.units


async def test_adopted_units_that_are_in_no_plan_are_stopped(world: World) -> None:
    world.backend.run("kvtier-pool-old", "x")
    await world.supervisor.adopt()
    await world.steps(1)
    assert (world.view("old").kind, world.view("old").state) == ("pool", UnitState.STOPPING)
    await world.steps(6)
    assert world.backend.units == {}
    assert world.supervisor.views() == ()


async def test_a_unit_that_comes_back_while_it_is_being_removed_is_started(world: World) -> None:
    world.plan = [spec()]
    await world.steps()
    world.backend.hold["forget", "kvtier-engine-a"] = asyncio.Event()
    world.plan = []
    await world.steps(6)
    world.plan = [spec()]
    await world.steps(2)
    world.backend.hold["forget", "kvtier-engine-a"].set()
    await world.steps(6)
    assert world.view().state is UnitState.READY


async def test_when_all_stop_those_who_need_others_go_first(world: World) -> None:
    """A MetaService that goes first makes its clients hang."""
    world.plan = [
        spec("meta"),
        spec("pool", after=("kvtier-engine-meta",)),
        spec("e", after=("kvtier-engine-pool",)),
    ]
    await world.steps(8)
    world.plan = []
    await world.steps(12)
    stops = [unit_id for call, unit_id in world.backend.calls if call == "stop"]
    assert stops == ["kvtier-engine-e", "kvtier-engine-pool", "kvtier-engine-meta"]


async def test_an_operators_stop_outlives_the_daemon(
    make_world: Callable[..., World], tmp_path: Path
) -> None:
    world = make_world(state_dir=tmp_path)
    world.plan = [spec("a"), spec("b")]
    await world.steps()
    world.supervisor.request_stop("kvtier-engine-a")
    await world.steps()
    world.supervisor = world.new_supervisor()
    await world.supervisor.adopt()
    await world.steps()
    assert (world.view("a").state, world.view("b").state) == (UnitState.STOPPED, UnitState.READY)
    world.supervisor.request_start("kvtier-engine-a")
    await world.steps()
    assert world.view("a").state is UnitState.READY


async def test_a_stop_for_now_is_forgotten_by_the_next_daemon(
    make_world: Callable[..., World], tmp_path: Path
) -> None:
    world = make_world(state_dir=tmp_path)
    world.plan = [spec("a")]
    await world.steps()
    world.supervisor.request_stop("kvtier-engine-a", remember=False)
    await world.steps()
    assert world.view("a").state is UnitState.STOPPED
    world.supervisor = world.new_supervisor()
    await world.supervisor.adopt()
    await world.steps()
    assert world.view("a").state is UnitState.READY


async def test_a_resting_unit_is_kept_stopped_says_why_and_comes_back(
    make_world: Callable[..., World], tmp_path: Path
) -> None:
    world = make_world(state_dir=tmp_path)
    world.plan = [spec("a")]
    world.supervisor.set_resting("kvtier-engine-a", "too early: no unit of this name yet")
    await world.steps()
    assert world.view("a").state is UnitState.READY
    world.supervisor.set_resting("kvtier-engine-a", "standby: b is the master")
    await world.steps()
    view = world.view("a")
    assert (view.state, view.reason, view.restarts) == (UnitState.STOPPED, "standby: b is the master", 0)
    world.supervisor.set_resting("kvtier-engine-a", "standby: c is the master")
    await world.steps()
    assert world.view("a").reason == "standby: c is the master"
    world.supervisor.request_stop("kvtier-engine-a")  # the operator's stop outlasts it
    world.supervisor.set_resting("kvtier-engine-a", "")
    await world.steps()
    assert world.view("a").state is UnitState.STOPPED
    world.supervisor.request_start("kvtier-engine-a")
    await world.steps()
    assert world.view("a").state is UnitState.READY


def test_a_living_process_is_probed_as_it_was_started() -> None:
    old, new = spec("a"), spec("a", argv=("another",))
    managed = Managed(old, planned=True)
    managed.process = UnitProcess("kvtier-engine-a", "one", 5, 1.0, old.digest)
    assert managed.spec_to_probe() is old
    managed.spec = new
    assert managed.spec_to_probe() is old, "the changed settings are not what it listens to"
    managed.process = UnitProcess("kvtier-engine-a", "two", 6, 2.0, new.digest)
    assert managed.spec_to_probe() is new


async def test_a_damaged_list_of_stops_is_told(make_world: Callable[..., World], tmp_path: Path) -> None:
    (tmp_path / "stopped-by-operator.json").write_text("{")
    world = make_world(state_dir=tmp_path)
    await world.steps(3)
    assert [(event.kind, event.severity) for event in world.events] == [("intents", "warning")]


async def test_a_restart_of_a_stopped_unit_starts_it(world: World) -> None:
    world.plan = [spec()]
    await world.steps()
    world.supervisor.request_stop("kvtier-engine-a")
    await world.steps()
    assert world.view().state is UnitState.STOPPED
    world.supervisor.request_restart("kvtier-engine-a", "operator")
    await world.steps()
    assert world.view().state is UnitState.READY


async def test_requests_for_unknown_units_name_the_known_ones(world: World) -> None:
    world.plan = [spec()]
    await world.steps(1)
    for request in (world.supervisor.request_start, world.supervisor.request_stop):
        with pytest.raises(UnitError) as caught:
            request("kvtier-engine-z")
        assert caught.value.stable_code == "unit.unknown"
        assert "kvtier-engine-a" in caught.value.hint


async def test_a_changed_specification_waits_for_the_word(world: World) -> None:
    world.plan = [spec("a"), spec("b")]
    await world.steps()
    world.plan = [spec("a", argv=("changed",)), spec("b")]
    await world.steps()
    assert (world.view("a").stale, world.view("b").stale) == (True, False)
    world.supervisor.request_restart("kvtier-engine-a", "its specification changed")
    await world.steps(6)
    assert (world.view("a").stale, world.view("a").restarts, world.view("b").restarts) == (False, 1, 0)


async def test_problems_degrade_until_they_are_taken_back(world: World) -> None:
    world.plan = [spec()]
    await world.steps()
    world.supervisor.set_problem("kvtier-engine-a", "pool", "no capacity")
    world.supervisor.set_problem("kvtier-engine-a", "hit rate", "too low")
    await world.steps(1)
    assert (world.view().state, world.view().reason) == (UnitState.DEGRADED, "no capacity; too low")
    world.supervisor.set_problem("kvtier-engine-a", "pool", None)
    world.supervisor.set_problem("kvtier-engine-a", "hit rate", None)
    world.supervisor.set_problem("kvtier-engine-a", "never set", None)
    await world.steps(1)
    assert world.view().state is UnitState.READY


async def test_a_fatal_sign_counts_for_the_run_that_said_it(world: World) -> None:
    world.plan = [spec()]
    await world.steps()
    first = world.view()
    world.supervisor.report_output("kvtier-engine-a", first.instance, "the worker died")
    world.supervisor.report_output("kvtier-engine-gone", "x", "no such unit")
    await world.steps(1)
    assert (world.view().state, world.view().reason) == (UnitState.DEGRADED, "the worker died")
    world.supervisor.request_restart("kvtier-engine-a", "by hand")
    await world.steps(6)
    assert world.view().instance != first.instance
    assert world.view().state is UnitState.READY, "the new run has said nothing"
    world.supervisor.report_output("kvtier-engine-a", world.view().instance, None)
    await world.steps(1)
    assert world.view().state is UnitState.READY


async def test_extra_checks_decide_about_readiness_and_are_tried_again(
    make_world: Callable[..., World],
) -> None:
    answers: list[str | Exception | None] = ["no capacity", RuntimeError("bug"), None]

    async def check(unit: UnitSpec, process: UnitProcess) -> str | None:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    world = make_world(extra_checks={"engine": check})
    world.plan = [spec()]
    await world.steps(4)
    assert (world.view().state, world.view().reason) == (UnitState.STARTING, "no capacity")
    await world.steps(2, after=0.3)
    assert world.view().reason == "its check failed: RuntimeError: bug"
    await world.steps(2, after=0.3)
    assert world.view().state is UnitState.READY


async def test_a_ready_unit_is_probed_less_often(make_world: Callable[..., World]) -> None:
    probes = []

    async def check(unit: UnitSpec, process: UnitProcess) -> str | None:
        probes.append(unit.id)
        return None

    world = make_world(extra_checks={"engine": check})
    world.plan = [spec()]
    await world.steps()
    before = len(probes)
    for _ in range(20):
        await world.steps(1, after=0.25)
    assert 2 <= len(probes) - before <= 3


async def test_a_result_of_an_earlier_run_is_not_taken_for_this_one(make_world: Callable[..., World]) -> None:
    gate = asyncio.Event()
    calls = []

    async def check(unit: UnitSpec, process: UnitProcess) -> str | None:
        calls.append(process.instance)
        if len(calls) == 1:
            await gate.wait()
            return None
        return "not yet"

    world = make_world(extra_checks={"engine": check})
    world.plan = [spec(readiness=Readiness(timeout_seconds=30))]
    await world.steps()
    assert len(calls) == 1
    world.backend.end("kvtier-engine-a")
    await world.steps(after=0.1)
    await world.steps(after=1.1)
    assert world.backend.units["kvtier-engine-a"].running
    gate.set()
    await world.steps(after=0.3)
    assert world.view().state is UnitState.STARTING
    assert len(set(calls)) == 2


async def test_wait_ends_at_a_request_at_a_change_and_at_what_is_due(world: World) -> None:
    world.plan = [spec()]
    await world.steps()
    await world.supervisor.wait(30)  # the start that is over
    waiting = asyncio.create_task(world.supervisor.wait(30))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    world.supervisor.request_stop("kvtier-engine-a")
    await asyncio.wait_for(waiting, 1)
    world.supervisor.request_start("kvtier-engine-a")
    await world.steps()
    await world.supervisor.wait(0.02)
    waiting = asyncio.create_task(world.supervisor.wait(30))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    world.backend.end("kvtier-engine-a")
    await asyncio.wait_for(waiting, 1)
    await world.steps(1)
    assert world.view().next_try_in_seconds == 1.0
    world.now += 0.97
    await asyncio.wait_for(world.supervisor.wait(30), 1)


async def test_close_leaves_units_running(world: World) -> None:
    world.plan = [spec()]
    await world.steps()
    await world.supervisor.close()
    assert world.backend.units["kvtier-engine-a"].running
    assert [call for call, _ in world.backend.calls] == ["start"]
