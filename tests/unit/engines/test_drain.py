import pytest

from kvtierd.engines import drain as module
from kvtierd.engines.drain import drain
from kvtierd.plan.engine import EngineObservation


class Script:
    """Observations one after another, and a clock that goes on with each wait."""

    def __init__(self, *seen):
        self.seen = list(seen)
        self.now = 0.0

    async def look(self):
        self.now += 0.5
        seen = self.seen.pop(0) if len(self.seen) > 1 else self.seen[0]
        return None if seen is None else EngineObservation(running=seen[0], waiting=seen[1])


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(module, "POLL_SECONDS", 0)


async def run(script, deadline=10.0):
    return await drain(script.look, deadline_seconds=deadline, clock=lambda: script.now)


async def test_it_waits_for_running_and_waiting_requests_and_a_quiet_moment():
    script = Script((2, 1), (1, 0), (0, 0))
    outcome = await run(script)
    assert outcome.complete
    assert outcome.seconds >= 1.0 + module.QUIET_SECONDS
    assert "drained" in outcome.describe()


async def test_a_short_lull_is_not_the_end():
    script = Script((0, 0), (1, 0), (0, 0))
    assert (await run(script)).seconds >= 1.0 + module.QUIET_SECONDS


async def test_what_is_cut_off_is_said():
    outcome = await run(Script((3, 2)), deadline=4)
    assert (outcome.left, outcome.complete) == (5, False)
    assert "5 request(s) were still running" in outcome.describe()
    assert outcome.seconds < 6


async def test_an_engine_that_does_not_say_is_not_called_drained():
    for silent in (Script(None), Script((None, None))):
        outcome = await run(silent, deadline=2)
        assert outcome.left is None
        assert not outcome.complete
        assert "does not say" in outcome.describe()
