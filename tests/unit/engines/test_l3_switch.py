"""Taking L3 off and on: between requests, again after a refusal, and remembered for one run of the engine."""

import pytest

from kvtierd.engines import drain as drain_module
from kvtierd.engines import l3_switch as module
from kvtierd.engines.l3_switch import DetachedEngines, calls_of, switch
from kvtierd.engines.talk import EngineRefusedError
from kvtierd.errors import StateError, UnitError
from kvtierd.plan.engine import EngineObservation
from kvtierd.plan.model import EngineTalk, HttpCall, UnitSpec

OFF = HttpCall(method="DELETE", path="/l3", needs_idle=True)


class Engine:
    """An engine with so many requests, one observation after another; refuses as told."""

    def __init__(self, requests=(0,), refusals=()):
        self.requests, self.refusals = list(requests), list(refusals)
        self.now, self.asked = 0.0, []

    async def look(self):
        self.now += 0.5
        count = self.requests.pop(0) if len(self.requests) > 1 else self.requests[0]
        return None if count is None else EngineObservation(running=count, waiting=0)

    async def ask(self, call):
        self.now += 0.1
        self.asked.append(call)
        if self.refusals:
            raise EngineRefusedError("e answered 400", status=self.refusals.pop(0), why="not idle")
        return b""

    async def switch(self, *calls, deadline=20.0):
        return await switch(
            "e", calls or (OFF,), self.ask, self.look, deadline_seconds=deadline, clock=lambda: self.now
        )


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(drain_module, "POLL_SECONDS", 0)
    monkeypatch.setattr(module, "RETRY_SECONDS", 0)


async def test_it_waits_for_a_moment_without_requests():
    engine = Engine(requests=(2, 1, 0))
    done = await engine.switch()
    assert engine.asked == [OFF]
    assert done.seconds >= 1.5
    assert done.refusals == 0


async def test_an_engine_that_needs_no_such_moment_is_asked_at_once():
    engine = Engine(requests=(5,))
    await engine.switch(HttpCall(method="DELETE", path="/l3"))
    assert (len(engine.asked), engine.now) == (1, pytest.approx(0.1))


async def test_one_that_is_never_without_requests_is_not_asked_at_all():
    engine = Engine(requests=(3,))
    with pytest.raises(UnitError, match="not without requests") as busy:
        await engine.switch(deadline=5.0)
    assert busy.value.stable_code == "engine.busy"
    assert "3 request" in busy.value.why
    assert engine.asked == []


async def test_a_request_that_slips_in_is_waited_for_and_said():
    engine = Engine(requests=(0, 0, 0, 0, 1, 0), refusals=(400,))
    done = await engine.switch()
    assert len(engine.asked) == 2
    assert "1 refusal" in done.describe()


async def test_an_engine_that_refuses_though_it_is_idle_is_believed_in_the_end():
    engine = Engine(refusals=[400] * 99)
    with pytest.raises(EngineRefusedError) as refused:
        await engine.switch(deadline=600)
    assert refused.value.why == "not idle"
    assert len(engine.asked) == module.MOST_REFUSALS


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_refusal_that_no_wait_changes_ends_it(status):
    engine = Engine(refusals=[status] * 9)
    with pytest.raises(EngineRefusedError):
        await engine.switch()
    assert len(engine.asked) == 1


async def test_no_try_after_the_deadline():
    engine = Engine(refusals=[409] * 99)
    with pytest.raises(EngineRefusedError):
        await engine.switch(deadline=0.0)
    assert len(engine.asked) == 1


async def test_an_engine_that_does_not_say_how_many_requests_it_has_is_asked_in_the_end():
    engine = Engine(requests=(None,))
    await engine.switch(deadline=3.0)
    assert (len(engine.asked), engine.now >= 3.0) == (1, True)


def unit(kind="engine", **talk):
    return UnitSpec(
        id="kvtier-engine-e", kind=kind, name="e", argv=("x",), talk=EngineTalk(**talk) if talk else None
    )


def test_what_cannot_be_switched_says_why():
    able = unit(base_url="http://x", l3_detach=(OFF,), l3_attach=(HttpCall(path="/on"),))
    assert calls_of(able, on=False) == (OFF,)
    assert calls_of(able, on=True)[0].path == "/on"
    with pytest.raises(UnitError) as fixed:
        calls_of(unit(base_url="http://x", l3_fixed="its connector stays"), on=True)
    assert (fixed.value.stable_code, fixed.value.why) == ("engine.l3-fixed", "its connector stays")
    with pytest.raises(UnitError, match="cannot be taken off") as headless:
        calls_of(unit(), on=True)
    assert headless.value.why == "it serves no HTTP"
    with pytest.raises(UnitError, match="not an engine"):
        calls_of(unit(kind="meta"), on=True)


def test_what_is_off_is_known_to_the_next_daemon_and_only_of_that_run(tmp_path):
    path = tmp_path / "l3.json"
    first = DetachedEngines(path)
    assert not first.is_off("e", "one")
    first.mark("e", "one")
    again = DetachedEngines(path)
    assert again.is_off("e", "one")
    assert not again.is_off("e", "two")
    assert not again.is_off("e", None)
    assert not again.is_off("f", "one")
    again.mark("e", None)
    assert not DetachedEngines(path).is_off("e", "one")


@pytest.mark.parametrize("text", ["", "[1]", '{"e": ', "\x00"])
def test_a_damaged_file_is_no_memory(tmp_path, text):
    path = tmp_path / "l3.json"
    path.write_text(text)
    assert not DetachedEngines(path).is_off("e", "one")


def test_a_file_that_cannot_be_written_is_said_and_this_daemon_knows_it(tmp_path):
    path = tmp_path / "f" / "l3.json"
    (tmp_path / "f").write_text("no directory")
    engines = DetachedEngines(path)
    with pytest.raises(StateError):
        engines.mark("e", "one")
    assert engines.is_off("e", "one")
