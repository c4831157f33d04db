import asyncio
import threading

import pytest

from kvtierd.observe import log_lines as module
from kvtierd.observe.log_lines import LineObserver, merged
from kvtierd.plan.engine import EngineObservation


class Driver:
    def read_line(self, line):
        if line == "boom":
            raise ZeroDivisionError("x")
        if line.startswith("tokens="):
            return EngineObservation(kv_tokens=int(line[7:]))
        if line == "load failed":
            return EngineObservation(failed_loads=2)
        return EngineObservation(fatal=line) if "dead" in line else None


class Output:
    """Lines of units that tests add to."""

    def __init__(self):
        self.queues = {}
        self.open = 0
        self.followed = []

    def queue(self, unit):
        return self.queues.setdefault(unit, asyncio.Queue())

    async def follow(self, unit, lines, *, instance):
        self.open += 1
        self.followed.append((unit, instance))
        try:
            while True:
                yield await self.queue(unit).get()
        finally:
            self.open -= 1


@pytest.fixture
async def output():
    return Output()


async def say(output, unit, *lines):
    for line in lines:
        output.queue(unit).put_nowait(line)
    for _ in range(20):  # the lines are read in another thread
        await asyncio.sleep(0.005)


async def test_what_lines_say_is_kept_and_joined(output):
    observer = LineObserver(output.follow)
    observer.watch({"e": ("one", Driver())})
    await say(output, "e", "hello", "tokens=5", "EngineCore dead", "tokens=7")
    assert observer.readings["e"] == EngineObservation(kv_tokens=7, fatal="EngineCore dead")
    await observer.close()
    assert output.open == 0


async def test_failed_loads_are_told_line_by_line_and_added_up(output):
    observer = LineObserver(output.follow)
    observer.watch({"e": ("one", Driver())})
    await say(output, "e", "load failed", "load failed", "tokens=5")
    await say(output, "e", "load failed")
    assert observer.readings["e"] == EngineObservation(kv_tokens=5, failed_loads=6)
    await observer.close()


async def test_another_run_starts_from_nothing_and_a_gone_engine_is_forgotten(output):
    observer = LineObserver(output.follow)
    observer.watch({"e": ("one", Driver())})
    await say(output, "e", "tokens=5")
    observer.watch({"e": ("two", Driver())})
    await say(output, "e")
    assert observer.readings == {}
    assert output.followed == [("e", "one"), ("e", "two")]
    observer.watch({})
    await say(output, "e")
    assert output.open == 0


async def test_a_driver_that_raises_is_named_and_then_left_alone(output):
    observer = LineObserver(output.follow)
    observer.watch({"e": ("one", Driver())})
    await say(output, "e", "boom", "tokens=5")
    assert observer.readings["e"].kv_tokens == 5, "one bad line costs only itself"
    assert "ZeroDivisionError" in observer.problems["e"]
    await say(output, "e", *["boom"] * module.MOST_ERRORS, "tokens=9")
    assert "not asked any more" in observer.problems["e"]
    assert observer.readings["e"].kv_tokens == 5
    await observer.close()


async def test_a_driver_that_is_slow_again_and_again_is_left_alone(output, monkeypatch):
    monkeypatch.setattr(module, "SLOW_SECONDS", -1.0)
    observer = LineObserver(output.follow)
    observer.watch({"e": ("one", Driver())})
    await say(output, "e", *["x"] * (module.MOST_SLOW + 5))
    assert "too slow" in observer.problems["e"]
    await observer.close()


async def test_a_driver_that_hangs_is_named_and_the_loop_goes_on(output, monkeypatch):
    monkeypatch.setattr(module, "DRIVER_SECONDS", 0.05)
    release = threading.Event()

    class Hangs(Driver):
        def read_line(self, line):
            if line == "hang":
                release.wait(20)
            return super().read_line(line)

    observer = LineObserver(output.follow)
    observer.watch({"bad": ("one", Hangs()), "good": ("one", Driver())})
    await say(output, "bad", "tokens=3")
    await say(output, "bad", "hang", "tokens=4")
    await say(output, "good", "tokens=5")
    assert "read_line() for bad has not come back" in observer.problems["bad"]
    assert observer.readings["bad"].kv_tokens == 3, "what it said before stays"
    assert observer.readings["good"].kv_tokens == 5
    assert "good" not in observer.problems
    release.set()
    await observer.close()
    assert output.open == 0


async def test_a_driver_that_lies_about_a_line_is_named(output):
    class Lies(Driver):
        def read_line(self, line):
            return {"kv_tokens": 5}

    observer = LineObserver(output.follow)
    observer.watch({"e": ("one", Lies())})
    await say(output, "e", "x")
    assert "read_line() returned dict" in observer.problems["e"]
    assert "e" not in observer.readings
    await observer.close()


async def test_many_lines_are_read_in_order_and_all(output):
    observer = LineObserver(output.follow)
    observer.watch({"e": ("one", Driver())})
    for number in range(3 * module.MOST_WAITING):
        output.queue("e").put_nowait(f"tokens={number}")
    for _ in range(200):
        await asyncio.sleep(0.01)
        if observer.readings.get("e") == EngineObservation(kv_tokens=3 * module.MOST_WAITING - 1):
            break
    assert observer.readings["e"].kv_tokens == 3 * module.MOST_WAITING - 1
    await observer.close()


def test_newer_figures_win_and_unknown_ones_do_not_erase():
    older = EngineObservation(kv_tokens=5, l1_window_rate=0.5)
    assert merged(older, EngineObservation(l1_window_rate=0.0)) == EngineObservation(
        kv_tokens=5, l1_window_rate=0.0
    )
