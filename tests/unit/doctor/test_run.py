"""Checks that hang, fail or answer nonsense cost themselves only."""

import asyncio
import time

import pytest

from kvtierd.checks import (
    CannotTellError,
    Check,
    Group,
    Outcome,
    Patient,
    absent,
    fail,
    note,
    ok,
    unknown,
    warn,
    worst,
)
from kvtierd.doctor.recorded import DirectoryRunner, recording_name
from kvtierd.doctor.registry import built_in, chosen
from kvtierd.doctor.run import anchor, examine
from kvtierd.errors import HostError, UsageError
from kvtierd.host.view import HostView
from kvtierd.plan.inventory import Inventory

SMALL = Inventory(hostname="h", memory_total_bytes=1, memory_available_bytes=1)


def patient_of(tmp_path, inventory=None):
    async def small():
        return SMALL

    return Patient(HostView(tmp_path, DirectoryRunner(tmp_path)), inventory=inventory or small)


def check(examine, name="a.b"):
    return Check(name, "title", "why", "fix", examine)


def raises(error):
    def examine(_):
        raise error

    return examine


async def hangs_awaiting(_):
    await asyncio.Event().wait()


def hangs_in_a_thread(_):
    time.sleep(30)


@pytest.mark.parametrize(
    ("function", "severity", "found"),
    [
        (lambda _: fail("bad"), "fail", "bad"),
        (raises(CannotTellError("no file")), "unknown", "no file"),
        (raises(KeyError("x")), "unknown", "the check itself failed: KeyError"),
        (raises(SystemExit(3)), "unknown", "the check itself failed: RuntimeError: SystemExit"),
        (lambda _: "text", "unknown", "answered str"),
        (lambda _: None, "unknown", "answered NoneType"),
        (hangs_awaiting, "unknown", "no answer within"),
        (hangs_in_a_thread, "unknown", "no answer within"),
    ],
)
async def test_whatever_a_check_does_is_an_outcome(tmp_path, function, severity, found):
    well = check(lambda _: ok("fine"), "a.well")
    one, other = await examine(patient_of(tmp_path), [check(function), well], all_seconds=0.5)
    assert one.severity == severity
    assert found in one.outcome.found
    assert other.outcome == ok("fine")


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(
    ("unless", "outcome"),
    [
        (lambda _: "no such card", absent("no such card")),
        (lambda _: "", ok("looked")),
        (raises(CannotTellError("no file")), unknown("no file")),
        (raises(KeyError("x")), unknown("the check itself failed: KeyError: 'x'")),
        (hangs_in_a_thread, unknown("no answer within 0 s")),
    ],
)
async def test_a_check_is_not_asked_where_it_does_not_apply(tmp_path, plain, unless, outcome):
    group, asked = Group("a"), []

    def looks(_):
        asked.append(1)
        return ok("looked")

    async def looks_awaiting(patient):
        return looks(patient)

    group.check("b", title="t", why="w", fix="f", unless=unless)(looks if plain else looks_awaiting)
    (one,) = await examine(patient_of(tmp_path), group.checks, all_seconds=0.4)
    assert one.outcome == outcome
    assert bool(asked) == (outcome == ok("looked"))


async def test_all_checks_together_stay_within_the_time(tmp_path):
    started = time.monotonic()
    results = await examine(
        patient_of(tmp_path), [check(hangs_awaiting, f"a.b{n}") for n in range(20)], all_seconds=0.5
    )
    assert time.monotonic() - started < 3
    assert {r.severity for r in results} == {"unknown"}


async def test_what_many_checks_ask_is_asked_once_and_a_late_one_does_not_spoil_it(tmp_path):
    asked = []

    async def inventory():
        asked.append(1)
        await asyncio.sleep(0.3)
        return SMALL

    patient = patient_of(tmp_path, inventory)

    async def impatient(p):
        async with asyncio.timeout(0.05):
            await p.inventory()

    async def patient_one(p):
        return ok((await p.inventory()).hostname)

    late, good = await examine(patient, [check(impatient), check(patient_one, "a.c")])
    assert late.severity == "unknown"
    assert good.outcome == ok("h")
    assert asked == [1]


async def test_an_inventory_that_cannot_be_had_is_unknown(tmp_path):
    async def none():
        raise HostError("no /proc")

    async def asks(p):
        return ok(str(await p.inventory()))

    (one,) = await examine(patient_of(tmp_path, none), [check(asks)])
    assert one.outcome == unknown("there is no inventory: no /proc")


def test_the_worst_of_many():
    assert worst([], "fine") == ok("fine")
    assert worst([ok("x"), absent("y")], "fine") == ok("fine")
    assert worst([note("n"), warn("w1"), warn("w2", "do"), unknown("u")], "fine") == Outcome(
        "warn", "w1; w2", "do"
    )


def test_the_documented_json(tmp_path):
    (one,) = asyncio.run(examine(patient_of(tmp_path), [check(lambda _: warn("w", "do this"))]))
    assert one.as_dict() == {
        "id": "a.b", "group": "a", "severity": "warn", "title": "title", "found": "w", "why": "why", "fix": "do this",
        "doc": "docs/checks.md#ab",
    }  # fmt: skip
    assert anchor("hugepages.enough") == "hugepagesenough"


def test_choosing_by_group_and_id():
    checks = built_in()
    assert chosen(checks, []) == checks
    assert {c.group for c in chosen(checks, ["platform"])} == {"platform"}
    assert [c.id for c in chosen(checks, ["hugepages.enough"])] == ["hugepages.enough"]
    with pytest.raises(UsageError):
        chosen(checks, ["nonsense"])


def test_ids_are_unique_and_every_check_says_what_to_do():
    checks = built_in()
    assert len({c.id for c in checks}) == len(checks)
    assert all(c.title and c.why and c.fix and (c.examine.__doc__ or "").strip() for c in checks)
    with pytest.raises(ValueError, match="no name"):
        Group("g").check("Not A Name", title="", why="", fix="")


async def test_recorded_commands(tmp_path):
    directory = tmp_path / ".commands"
    directory.mkdir()
    (directory / "npu-smi info -m").write_text("table")
    (directory / "%usr%bin%x -c @").write_text("script")
    (directory / "hung.json").write_text('{"timed_out": true}')
    (directory / "bad.json").write_text("{")
    (directory / "no").write_text("out")
    (directory / "no.json").write_text('{"code": 3, "stderr": "err"}')
    runner = DirectoryRunner(tmp_path)

    async def run(*argv):
        return await runner.run(argv, timeout_seconds=1)

    assert (await run("npu-smi", "info", "-m")).stdout == "table"
    assert (await run("/usr/bin/x", "-c", "a\nb")).stdout == "script"
    assert (await run("hung")).timed_out
    assert "not JSON" in (await run("bad")).error
    failed = await run("no")
    assert (failed.code, failed.stdout, failed.stderr, failed.ok) == (3, "out", "err", False)
    assert "not installed" in (await run("other")).error
    assert recording_name(["a", "x" * 61, "/b"]) == "a @ %b"
