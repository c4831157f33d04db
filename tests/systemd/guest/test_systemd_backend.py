"""The systemd backend beyond what every backend must do: other people's units, and systemd, bus and journal going away."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from backend_lab import SLEEPER, Factory, is_alive, unit, wait_ended, wait_lines

from kvtierd.errors import UnitError
from kvtierd.units import choice, journal, systemd_backend
from kvtierd.units.owned import owned_pids
from kvtierd.units.systemd_backend import SystemdBackend

ID = "kvtier-engine-a"


def systemctl(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(["systemctl", *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert not check or done.returncode == 0, done
    return done.stdout


def shown(service: str, name: str) -> str:
    return systemctl("show", "--value", f"--property={name}", service).strip()


@pytest.fixture
def backend(make_backend: Factory) -> SystemdBackend:
    made = make_backend()
    assert isinstance(made, SystemdBackend)
    return made


async def eventually(condition, seconds: float = 10.0):
    deadline = time.monotonic() + seconds
    while True:
        try:
            result = await condition()
        except UnitError as error:
            if error.stable_code != "unit.no-bus":
                raise
            result = None
        if result:
            return result
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


# --- whose units ---


@pytest.fixture
def strangers_unit() -> Iterator[int]:
    subprocess.run(["systemd-run", "--quiet", f"--unit={ID}", "sleep", "300"], check=True)
    pid = int(shown(f"{ID}.service", "MainPID"))
    yield pid
    assert int(shown(f"{ID}.service", "MainPID")) == pid, "somebody else's unit was touched"
    systemctl("stop", f"{ID}.service")


async def test_a_strangers_unit_is_never_touched(backend: SystemdBackend, strangers_unit: int) -> None:
    with pytest.raises(UnitError) as caught:
        await backend.start(unit(SLEEPER))
    assert caught.value.stable_code == "unit.foreign"
    assert "not this kvtierd's" in caught.value.message
    assert await backend.find(ID) is None
    assert await backend.list() == []
    await backend.kill(ID)
    await backend.forget(ID)
    with pytest.raises(UnitError) as caught:
        await backend.stop(ID)
    assert caught.value.stable_code == "unit.unknown"
    assert is_alive(strangers_unit)


async def test_a_unit_file_of_that_name_is_respected(backend: SystemdBackend) -> None:
    file = Path(f"/run/systemd/system/{ID}.service")
    file.write_text("[Service]\nExecStart=/bin/false\n")
    try:
        with pytest.raises(UnitError) as caught:
            await backend.start(unit(SLEEPER))
        assert caught.value.stable_code == "unit.foreign"
        assert str(file) in caught.value.why
        assert await backend.find(ID) is None
    finally:
        file.unlink()
        systemctl("daemon-reload")


async def test_two_daemons_do_not_touch_each_other_s_units(make_backend: Factory, tmp_path: Path) -> None:
    started = await make_backend().start(unit(SLEEPER))
    other = SystemdBackend(tmp_path / "other")
    try:
        assert await other.list() == []
        with pytest.raises(UnitError) as caught:
            await other.start(unit(SLEEPER))
        assert caught.value.stable_code == "unit.foreign"
        assert owned_pids(tmp_path / "run") == {started.pid}
        assert owned_pids(tmp_path / "other") == frozenset()
    finally:
        await other.close()


# --- what systemd is told ---


async def test_the_service_is_as_it_should_be(backend: SystemdBackend) -> None:
    started = await backend.start(unit(SLEEPER))
    service = f"{ID}.service"
    assert f"/kvtierd.slice/{service}" in Path(f"/proc/{started.pid}/cgroup").read_text()
    assert (shown(service, "LimitMEMLOCK"), shown(service, "LimitMEMLOCKSoft")) == ("infinity", "infinity")
    assert Path(f"/proc/{started.pid}/oom_score_adj").read_text().strip() == "0"
    assert shown(service, "InvocationID") == started.instance
    assert (shown(service, "Restart"), shown(service, "NotifyAccess")) == ("no", "none")
    assert "kvtierd.service" not in shown(service, "PartOf") + shown(service, "BindsTo") + shown(
        service, "Requires"
    )


async def test_arguments_and_environment_arrive_word_for_word(backend: SystemdBackend) -> None:
    systemctl("set-environment", "LEAK=1")
    odd = ["$HOME", "${ONE}", "%n %% %i", "a b", "", "'\"\\", "ä;b"]
    given = {"ONE": "%n $HOME", "TWO": 'x "y" \\ z', "HOME": "/elsewhere"}
    code = """
        import json, sys, time
        entries = open("/proc/self/environ").read().split(chr(0))
        print(json.dumps([sys.argv[1:], dict(entry.split("=", 1) for entry in entries if entry)]))
        time.sleep(300)
    """
    spec = unit("", argv=(sys.executable, "-I", "-u", "-c", textwrap.dedent(code), *odd), env=given)
    try:
        await backend.start(spec)
        assert json.loads((await wait_lines(backend, ID, 1))[0]) == [odd, given]
        systemctl("daemon-reload")
        found = await backend.find(ID)
        assert found is not None
        assert (found.running, found.spec_digest) == (True, spec.digest)
    finally:
        systemctl("unset-environment", "LEAK")


async def test_ended_units_do_not_pile_up(backend: SystemdBackend) -> None:
    for number in range(3):
        await backend.start(unit("pass", f"done{number}"))
        await wait_ended(backend, f"kvtier-engine-done{number}")
    await backend.start(unit("raise SystemExit(3)"))
    await wait_ended(backend, ID)
    listed = systemctl("list-units", "--all", "--plain", "--no-legend", "kvtier-*").split()
    assert [word for word in listed if word.startswith("kvtier-")] == [f"{ID}.service"]  # failed: to be seen
    assert shown(f"{ID}.service", "ActiveState") == "failed"
    assert len(await backend.list()) == 4
    await backend.forget(ID)
    assert systemctl("list-units", "--all", "--plain", "--no-legend", "kvtier-*").split() == []
    assert (await backend.start(unit(SLEEPER))).running


async def test_a_unit_that_others_wait_for_can_be_started_again(backend: SystemdBackend) -> None:
    await backend.start(unit(SLEEPER, "needed"))
    user = unit(SLEEPER)
    await backend.start(user.model_copy(update={"after": ("kvtier-engine-needed",)}))
    await backend.stop("kvtier-engine-needed", timeout_seconds=5)
    assert (await backend.start(unit(SLEEPER, "needed"))).running


async def test_what_a_clean_end_leaves_behind_is_killed_too(backend: SystemdBackend) -> None:
    code = """
        import os, time
        if os.fork() == 0:
            os.setsid()
            os.write(1, b"%d\\n" % os.getpid())
            time.sleep(300)
        time.sleep(0.5)
    """
    await backend.start(unit(code))
    (line,) = await wait_lines(backend, ID, 1)
    ended = await wait_ended(backend, ID)
    assert ended.exit is not None
    assert ended.exit.code == 0
    assert "1 processes were left behind and killed" in ended.note
    assert not is_alive(int(line))


# --- things that go away ---


async def test_a_stop_from_outside_is_seen_and_not_taken_for_ours(backend: SystemdBackend) -> None:
    started = await backend.start(unit(SLEEPER))
    systemctl("stop", f"{ID}.service")
    ended = await wait_ended(backend, ID)
    assert ended.instance == started.instance
    assert ended.exit is not None
    assert (ended.exit.signal, ended.exit.requested) == (signal.SIGTERM, False)
    assert "stopped from outside" in ended.note
    assert (await backend.start(unit(SLEEPER))).running


async def test_lost_records_do_not_lose_a_unit(make_backend: Factory, tmp_path: Path) -> None:
    started = await make_backend().start(unit(SLEEPER))
    shutil.rmtree(tmp_path / "run")
    assert await make_backend().list() == [started]


async def test_without_a_bus_calls_fail_with_a_code_and_units_go_on(backend: SystemdBackend) -> None:
    started = await backend.start(unit(SLEEPER))
    systemctl("stop", "dbus.socket", "dbus.service")
    try:
        await asyncio.sleep(0.2)
        begun = time.monotonic()
        for call in (backend.find(ID), backend.list(), backend.stop(ID), backend.start(unit(SLEEPER, "b"))):
            with pytest.raises(UnitError) as caught:
                await call
            assert caught.value.stable_code == "unit.no-bus"
        assert time.monotonic() - begun < 5
        assert is_alive(started.pid)
    finally:
        systemctl("start", "dbus.socket", "dbus.service")
    assert await eventually(lambda: backend.find(ID)) == started
    os.kill(started.pid, signal.SIGKILL)  # and signals arrive again
    while not await backend.wait_change(10):
        pytest.fail("no change was told")
    ended = await wait_ended(backend, ID)
    assert ended.exit is not None
    assert ended.exit.signal == signal.SIGKILL


async def test_an_end_while_the_bus_was_away_is_known_afterwards(backend: SystemdBackend) -> None:
    started = await backend.start(unit(SLEEPER))
    systemctl("stop", "dbus.socket", "dbus.service")
    try:
        os.kill(started.pid, signal.SIGKILL)
        await asyncio.sleep(0.3)
    finally:
        systemctl("start", "dbus.socket", "dbus.service")
    ended = await eventually(lambda: backend.find(ID))
    assert ended.exit is not None
    assert (ended.instance, ended.exit.signal) == (started.instance, signal.SIGKILL)


async def test_systemd_executed_again_in_mid_start_starts_everything_once(backend: SystemdBackend) -> None:
    async def again() -> None:
        for _ in range(4):
            await asyncio.to_thread(systemctl, "daemon-reexec")
            await asyncio.sleep(0.05)

    busy = asyncio.create_task(again())
    started = []
    for number in range(8):
        started.append(await backend.start(unit(f"{SLEEPER}  # once{number}", f"r{number}")))
        await asyncio.sleep(0.02)
    await busy
    assert [p.pid for p in await backend.list()] == [p.pid for p in started]
    for number in range(8):
        running = subprocess.run(
            ["pgrep", "-fc", f"# once{number}$"], capture_output=True, text=True, check=False
        )
        assert running.stdout.strip() == "1"


async def test_a_restarted_journald_costs_nothing(backend: SystemdBackend) -> None:
    code = "import time\nfor i in range(10000):\n    print('n', i)\n    time.sleep(.02)"
    started = await backend.start(unit(code))
    await wait_lines(backend, ID, 3)
    systemctl("restart", "systemd-journald")
    seen = int((await backend.tail(ID, 1))[0].split()[1])

    async def goes_on() -> bool:
        return int((await backend.tail(ID, 1))[0].split()[1]) > seen + 20

    await eventually(goes_on)
    found = await backend.find(ID)
    assert found is not None
    assert (found.running, found.instance) == (True, started.instance)


async def test_last_lines_are_read_from_memory(
    backend: SystemdBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor that asks every few seconds must not start a journalctl each time."""
    calls = []
    real = journal.last_lines

    async def counted(instance: str, count: int) -> list[journal.JournalEntry]:
        calls.append(instance)
        return await real(instance, count)

    monkeypatch.setattr(journal, "last_lines", counted)
    await backend.start(
        unit("import time\nfor i in range(3000):\n    print('n', i)\n    time.sleep(.001)\ntime.sleep(300)")
    )
    while (await backend.tail(ID, 1)) != ["n 2999"]:
        await asyncio.sleep(0.05)
    assert await backend.tail(ID, 20) == [f"n {i}" for i in range(2980, 3000)]
    assert len(calls) == 1
    assert len(await backend.tail(ID, 500)) == 500
    assert len(calls) == 2


async def test_a_process_that_cannot_be_killed_is_an_error_in_time(
    backend: SystemdBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one in state D would be: here the signals are held back."""
    started = await backend.start(unit(SLEEPER))
    monkeypatch.setattr(systemd_backend, "KILL_LIMIT_SECONDS", 0.5)
    real = backend._watch.signal

    async def nothing(*_: object) -> None:
        pass

    monkeypatch.setattr(backend._watch, "signal", nothing)
    begun = time.monotonic()
    with pytest.raises(UnitError) as caught:
        await backend.stop(ID, timeout_seconds=0.2)
    assert time.monotonic() - begun < 3
    assert caught.value.stable_code == "unit.stuck"
    assert str(started.pid) in caught.value.message
    monkeypatch.setattr(backend._watch, "signal", real)


async def test_systemd_is_chosen_here(tmp_path: Path) -> None:
    chosen = await choice.choose_backend("auto", tmp_path / "run", tmp_path / "log")
    assert (chosen.backend.name, chosen.note) == ("systemd", "")
    await chosen.backend.close()
