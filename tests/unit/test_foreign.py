import asyncio
import threading

import pytest

from kvtierd.errors import PluginError, SettingsError
from kvtierd.foreign import ForeignCalls, told_of


@pytest.fixture
def release():
    event = threading.Event()
    yield event
    event.set()


def test_an_answer_and_an_exception_come_through():
    calls = ForeignCalls()
    assert calls.call("k", lambda: 5, seconds=5) == 5
    with pytest.raises(ZeroDivisionError):
        calls.call("k", lambda: 1 / 0, seconds=5)


def test_a_plugin_that_wants_to_end_the_process_does_not():
    def leave():
        raise SystemExit(3)

    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        ForeignCalls().call("k", leave, seconds=5)


def test_a_call_that_hangs_is_given_up_costs_one_thread_and_may_come_back(release):
    calls = ForeignCalls()
    with pytest.raises(PluginError, match=r"^k has not come back within 0.05 s$") as caught:
        calls.call("k", release.wait, seconds=0.05)
    assert caught.value.stable_code == "plugin.hangs"
    for _ in range(3):
        with pytest.raises(PluginError, match="still hangs"):
            calls.call("k", lambda: 5, seconds=5)
    assert sum(t.name == "k" for t in threading.enumerate()) == 1
    assert calls.call("other", lambda: 6, seconds=5) == 6
    late = next(t for t in threading.enumerate() if t.name == "k")
    release.set()
    late.join(5)
    assert calls.call("k", lambda: 7, seconds=5) == 7


async def test_the_loop_goes_on_while_a_call_is_out(release):
    calls = ForeignCalls()
    asked = asyncio.create_task(calls.ask("k", release.wait, seconds=5))
    together = [calls.ask("k", lambda n=n: n, seconds=5) for n in range(3)]
    assert await asyncio.gather(*together) == [0, 1, 2], "only a call that was given up bars its key"
    release.set()
    assert await asked is True
    with pytest.raises(ZeroDivisionError):
        await calls.ask("k", lambda: 1 / 0, seconds=5)


async def test_a_call_that_hangs_is_given_up_by_a_coroutine_too(release):
    calls = ForeignCalls()
    with pytest.raises(PluginError, match="has not come back"):
        await calls.ask("k", release.wait, seconds=0.05)
    with pytest.raises(PluginError, match="still hangs"):
        await calls.ask("k", release.wait, seconds=5)


def test_errors_are_told_with_their_type_unless_they_are_ours():
    assert told_of(ValueError("no")) == "ValueError: no"
    assert told_of(SettingsError("wrong")) == "wrong"
