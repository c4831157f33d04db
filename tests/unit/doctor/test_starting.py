"""What fails before a start holds it up and says why; what cannot be told does not."""

import asyncio

from kvtierd.checks import Check, Patient, fail, ok, unknown
from kvtierd.doctor.recorded import DirectoryRunner
from kvtierd.doctor.starting import AGAIN_SECONDS, FIRST_SECONDS, FRESH_SECONDS, StartChecks
from kvtierd.host.view import HostView


class Lab:
    def __init__(self, tmp_path, *functions, blocks=("engine",)):
        self.at, self.told, self.runs = 100.0, [], 0
        checks = [
            Check(f"x.c{n}", "t", "w", "mend it", function, frozenset(blocks))
            for n, function in enumerate(functions)
        ]

        async def none():
            raise AssertionError("not asked")

        def admit():
            self.runs += 1
            return Patient(HostView(tmp_path, DirectoryRunner(tmp_path)), inventory=none)

        self.checks = StartChecks(checks, admit, lambda *event: self.told.append(event), now=lambda: self.at)

    async def settle(self):
        await asyncio.sleep(0)
        if self.checks._running is not None:
            await self.checks._running


async def test_a_first_start_waits_for_the_first_run_only(tmp_path):
    lab = Lab(tmp_path, lambda _: ok("fine"))
    assert "waits for doctor" in lab.checks.why_not("engine")
    assert lab.checks.why_not("meta") is None  # nothing blocks that kind
    await lab.settle()
    assert lab.checks.why_not("engine") is None
    lab.at += FRESH_SECONDS + 1
    assert lab.checks.why_not("engine") is None  # at once; looked at anew beside it
    await lab.settle()
    assert (lab.runs, lab.told) == (2, [])


async def test_a_failed_check_holds_the_start_until_it_is_mended(tmp_path):
    state = {"outcome": fail("no driver")}
    lab = Lab(tmp_path, lambda _: state["outcome"])
    lab.checks.why_not("engine")
    await lab.settle()
    assert lab.checks.why_not("engine") == "doctor x.c0: no driver (mend it)"
    assert lab.checks.problems() == ["doctor x.c0: no driver"]
    assert lab.told == [("error", "doctor.failed", "x.c0: no driver; engine not started. Do: mend it")]
    lab.checks.why_not("engine")
    assert lab.runs == 1  # not in every round
    state["outcome"] = ok("there")
    lab.at += AGAIN_SECONDS + 1
    assert lab.checks.why_not("engine") is not None
    await lab.settle()
    assert lab.checks.why_not("engine") is None
    assert lab.told[1:] == [("info", "doctor.mended", "x.c0: mended")]
    assert lab.checks.problems() == []


async def test_what_cannot_be_told_or_hangs_holds_nothing_up(tmp_path):
    async def hangs(_):
        await asyncio.Event().wait()

    lab = Lab(tmp_path, lambda _: unknown("?"), hangs)
    lab.checks.why_not("engine")
    lab.at += FIRST_SECONDS + 0.1
    assert lab.checks.why_not("engine") is None
    await lab.checks.close()
    lab = Lab(tmp_path, lambda _: unknown("?"))
    lab.checks.why_not("engine")
    await lab.settle()
    assert lab.checks.why_not("engine") is None


async def test_without_blocking_checks_nothing_runs(tmp_path):
    lab = Lab(tmp_path, lambda _: fail("x"), blocks=())
    assert lab.checks.why_not("engine") is None
    await lab.settle()
    assert lab.runs == 0


async def test_a_run_that_was_begun_early_answers_the_first_start_at_once(tmp_path):
    lab = Lab(tmp_path, lambda _: ok("fine"), blocks=("meta",))
    lab.checks.begin()
    await lab.settle()
    assert lab.checks.why_not("meta") is None
    assert lab.runs == 1
