"""What every unit backend must do, on real processes: one suite for all of them.

The systemd backend needs a systemd as process 1: ``make test-systemd`` boots one and runs these tests inside.
"""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import resource
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from backend_lab import (
    IN_GUEST,
    SLEEPER,
    STUBBORN_TREE,
    Factory,
    backends,
    daemon_with,
    is_alive,
    tree_pids,
    unit,
    wait_ended,
    wait_lines,
)

from kvtierd.errors import UnitError
from kvtierd.plan.model import LogProbe, Readiness, Resources, UnitSpec
from kvtierd.units import procfs
from kvtierd.units.backend import UnitBackend, UnitProcess
from kvtierd.units.guard import EXIT_NO_LEASE
from kvtierd.units.guard_file import now_seconds, write_deadline

only_in_guest = pytest.mark.skipif(
    not IN_GUEST, reason="needs a systemd as process 1: make test-systemd boots one"
)


@pytest.fixture(params=["shim", pytest.param("systemd", marks=only_in_guest)])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def make_backend(kind: str, tmp_path: Path) -> AsyncIterator[Factory]:
    async with backends(kind, tmp_path) as make:
        yield make


@pytest.fixture
def backend(make_backend: Factory) -> UnitBackend:
    return make_backend()


# --- start, stop, exit status ---


async def test_started_unit_is_found_and_stopped(backend: UnitBackend) -> None:
    started = await backend.start(unit(SLEEPER))
    assert started.running
    assert started.spec_digest == unit(SLEEPER).digest
    assert abs(started.started_unix_seconds - time.time()) < 30
    assert os.getsid(started.pid) == started.pid
    assert await backend.find("kvtier-engine-a") == started
    ended = await backend.stop("kvtier-engine-a", timeout_seconds=5)
    assert ended.instance == started.instance
    assert ended.exit is not None
    assert (ended.exit.code, ended.exit.signal, ended.exit.requested) == (None, signal.SIGTERM, True)
    assert not is_alive(started.pid)
    assert await backend.find("kvtier-engine-a") == ended


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise SystemExit(0)", (0, None)),
        ("raise SystemExit(3)", (3, None)),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", (None, 9)),
        ("import os; os.kill(os.getpid(), 34)", (None, 34)),  # a real-time signal, which has no name
    ],
)
async def test_exit_status_is_kept(
    make_backend: Factory, code: str, expected: tuple[int | None, int | None]
) -> None:
    backend = make_backend()
    await backend.start(unit(code))
    ended = await wait_ended(backend, "kvtier-engine-a")
    assert ended.exit is not None
    assert (ended.exit.code, ended.exit.signal) == expected
    assert not ended.exit.requested
    assert ended.exit.describe()
    assert await make_backend().find("kvtier-engine-a") == ended


async def test_stop_of_an_ended_unit_returns_it(backend: UnitBackend) -> None:
    await backend.start(unit("raise SystemExit(4)"))
    ended = await wait_ended(backend, "kvtier-engine-a")
    assert await backend.stop("kvtier-engine-a") == ended


async def test_new_start_has_a_new_identity(backend: UnitBackend) -> None:
    first = await backend.start(unit(SLEEPER))
    await backend.stop("kvtier-engine-a", timeout_seconds=5)
    second = await backend.start(unit(SLEEPER))
    assert second.instance != first.instance
    assert second.running


async def test_unknown_unit_has_a_code(backend: UnitBackend) -> None:
    assert await backend.find("kvtier-engine-none") is None
    with pytest.raises(UnitError) as caught:
        await backend.stop("kvtier-engine-none")
    assert caught.value.stable_code == "unit.unknown"


async def test_id_cannot_leave_the_directory(backend: UnitBackend) -> None:
    with pytest.raises(UnitError) as caught:
        await backend.find("../../etc")
    assert caught.value.stable_code == "unit.unknown"


@pytest.mark.parametrize(
    "changes",
    [
        {"argv": ("/no/such/program",)},
        {"argv": ("/etc/hostname",)},  # there, but not executable
        {"cwd": "/no/such/directory"},
        {"user": "no-such-user-kvtier"},
        {"argv": ("/bin/echo", "a\0b")},
    ],
)
async def test_what_can_never_run_has_its_own_code(backend: UnitBackend, changes: dict[str, object]) -> None:
    with pytest.raises(UnitError) as caught:
        await backend.start(unit(SLEEPER, **changes))
    assert caught.value.stable_code == "unit.exec"
    assert await backend.find("kvtier-engine-a") is None


async def test_start_while_running_is_refused(make_backend: Factory) -> None:
    first = await make_backend().start(unit(SLEEPER))
    other = make_backend()
    with pytest.raises(UnitError) as caught:
        await other.start(unit(SLEEPER))
    assert caught.value.stable_code == "unit.exists"
    assert await other.find("kvtier-engine-a") == first


async def test_of_racing_starts_one_wins(make_backend: Factory) -> None:
    backends = [make_backend() for _ in range(5)]
    results = await asyncio.gather(*(b.start(unit(SLEEPER)) for b in backends), return_exceptions=True)
    won = [result for result in results if isinstance(result, UnitProcess)]
    lost = [result.stable_code for result in results if isinstance(result, UnitError)]
    assert len(won) == 1
    assert lost == ["unit.exists"] * 4
    assert {await b.find("kvtier-engine-a") for b in backends} == {won[0]}


async def test_forget_needs_an_ended_unit(backend: UnitBackend) -> None:
    await backend.start(unit(SLEEPER))
    with pytest.raises(UnitError) as caught:
        await backend.forget("kvtier-engine-a")
    assert caught.value.stable_code == "unit.running"
    await backend.stop("kvtier-engine-a", timeout_seconds=5)
    await backend.forget("kvtier-engine-a")
    assert await backend.find("kvtier-engine-a") is None
    assert await backend.list() == []


# --- the whole tree ---


async def test_stop_kills_the_whole_stubborn_tree(backend: UnitBackend) -> None:
    started = await backend.start(unit(STUBBORN_TREE.replace("LAST", "time.sleep(300)")))
    pids = await tree_pids(backend, started.unit_id)
    assert all(is_alive(pid) for pid in pids.values())
    begun = time.monotonic()
    ended = await backend.stop(started.unit_id, timeout_seconds=0.5)
    assert 0.5 <= time.monotonic() - begun < 5
    assert ended.exit is not None
    assert ended.exit.signal == signal.SIGKILL
    assert not [name for name, pid in pids.items() if is_alive(pid)]


async def test_kill_reaches_the_whole_tree(backend: UnitBackend) -> None:
    started = await backend.start(unit(STUBBORN_TREE.replace("LAST", "time.sleep(300)")))
    pids = await tree_pids(backend, started.unit_id)
    await backend.kill(started.unit_id)
    ended = await wait_ended(backend, started.unit_id)
    assert ended.exit is not None
    assert ended.exit.requested
    assert not [name for name, pid in pids.items() if is_alive(pid)]


async def test_orphans_of_a_dead_main_process_are_killed_and_noted(backend: UnitBackend) -> None:
    started = await backend.start(unit(STUBBORN_TREE.replace("LAST", "time.sleep(0.5); os._exit(7)")))
    pids = await tree_pids(backend, started.unit_id)
    ended = await wait_ended(backend, started.unit_id)
    assert ended.exit is not None
    assert (ended.exit.code, ended.exit.requested) == (7, False)
    assert "2 processes were left behind and killed" in ended.note
    assert not [name for name, pid in pids.items() if is_alive(pid)]


async def test_a_fork_storm_ends(backend: UnitBackend) -> None:
    storm = """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        print("up")
        while True:
            if os.fork() == 0:
                time.sleep(0.005)
                if os.fork():
                    os._exit(0)
                os.setsid()
                time.sleep(0.2)
                os._exit(0)
            time.sleep(0.005)
    """
    started = await backend.start(unit(storm))
    await wait_lines(backend, started.unit_id, 1)
    await backend.stop(started.unit_id, timeout_seconds=0.3)
    assert not [
        stat for stat in procfs.process_table().values() if stat.session == started.pid and not stat.ended
    ]


async def test_a_stopped_unit_is_stopped_in_bounded_time(backend: UnitBackend) -> None:
    """SIGSTOP keeps a process from seeing SIGTERM; it gets SIGCONT with it."""
    started = await backend.start(unit(SLEEPER))
    await wait_lines(backend, started.unit_id, 1)
    os.kill(started.pid, signal.SIGSTOP)
    begun = time.monotonic()
    ended = await backend.stop(started.unit_id, timeout_seconds=5)
    assert time.monotonic() - begun < 4
    assert ended.exit is not None
    assert ended.exit.signal == signal.SIGTERM


async def test_the_stop_signal_can_be_chosen(backend: UnitBackend) -> None:
    await backend.start(
        unit(
            "import signal, time, sys\nsignal.signal(2, lambda *_: sys.exit(5))\nprint('up')\ntime.sleep(300)"
        )
    )
    await wait_lines(backend, "kvtier-engine-a", 1)
    ended = await backend.stop("kvtier-engine-a", signal="SIGINT", timeout_seconds=5)
    assert ended.exit is not None
    assert ended.exit.code == 5
    with pytest.raises(UnitError) as caught:
        await backend.stop("kvtier-engine-a", signal="SIGNONE")
    assert caught.value.stable_code == "unit.signal"


async def test_kill_can_send_any_signal(backend: UnitBackend) -> None:
    await backend.start(
        unit(
            "import signal, time\nsignal.signal(10, lambda *_: print('usr1'))\nprint('up')\nwhile True: time.sleep(1)"
        )
    )
    await wait_lines(backend, "kvtier-engine-a", 1)
    await backend.kill("kvtier-engine-a", "SIGUSR1")
    assert await wait_lines(backend, "kvtier-engine-a", 2) == ["up", "usr1"]


async def test_a_second_stop_can_only_shorten_the_first(backend: UnitBackend) -> None:
    await backend.start(
        unit("import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('up')\ntime.sleep(300)")
    )
    await wait_lines(backend, "kvtier-engine-a", 1)
    slow = asyncio.create_task(backend.stop("kvtier-engine-a", timeout_seconds=60))
    await asyncio.sleep(0.2)
    begun = time.monotonic()
    await backend.stop("kvtier-engine-a", timeout_seconds=0.3)
    await slow
    assert time.monotonic() - begun < 5


# --- what the unit gets ---


async def test_the_environment_is_exactly_the_given_one(
    make_backend: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/leak")
    monkeypatch.setenv("WATCHDOG_USEC", "1")
    given = {"ONE": "1", "EMPTY": "", "SPACES": "a b\tc", "UTF8": "ÄÖ"}
    code = """
        import json
        entries = open("/proc/self/environ").read().split(chr(0))
        print(json.dumps(dict(entry.split("=", 1) for entry in entries if entry)))
    """
    backend = make_backend()
    await backend.start(unit(code, env=given, argv=(sys.executable, "-I", "-c", textwrap.dedent(code))))
    await wait_ended(backend, "kvtier-engine-a")
    assert json.loads((await backend.tail("kvtier-engine-a"))[-1]) == given


async def test_nothing_but_three_streams_is_inherited(backend: UnitBackend) -> None:
    code = """
        import os, signal
        print(sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:3], len(os.listdir("/proc/self/fd")))
        print(os.readlink("/proc/self/fd/0"))
        print(os.getcwd(), oct(os.umask(0)), os.getsid(0) == os.getpid())
        print(signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getsignal(signal.SIGHUP) == signal.SIG_DFL)
    """
    await backend.start(unit(code, cwd="/usr"))
    await wait_ended(backend, "kvtier-engine-a")
    # 4: the three streams and the descriptor that lists the directory
    assert await backend.tail("kvtier-engine-a") == [
        "[0, 1, 2] 4",
        "/dev/null",
        "/usr 0o22 True",
        "set() True",
    ]


def memlock_allowed() -> tuple[int, int]:
    """The limit a unit is to have: none, where this process may lift it (CAP_SYS_RESOURCE)."""
    limits = (
        "import resource as r; r.setrlimit(r.RLIMIT_MEMLOCK, (-1, -1)); print(r.getrlimit(r.RLIMIT_MEMLOCK))"
    )
    lifted = subprocess.run([sys.executable, "-c", limits], capture_output=True, check=False).returncode == 0
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    return (-1, -1) if lifted else (hard, hard)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a unit as another user")
async def test_user_is_switched_with_its_groups(backend: UnitBackend) -> None:
    code = """
        import os, resource
        print(os.getresuid(), os.getresgid(), os.getgroups())
        print(resource.getrlimit(resource.RLIMIT_MEMLOCK))
    """
    argv = ("/usr/bin/python3", "-I", "-u", "-c", textwrap.dedent(code))
    if subprocess.run(["/usr/bin/python3", "-V"], check=False, capture_output=True).returncode:
        pytest.fail("needs a system python3 that the user nobody may execute")
    await backend.start(unit("", user="nobody", argv=argv))
    await wait_ended(backend, "kvtier-engine-a")
    entry = pwd.getpwnam("nobody")
    uid, gid = entry.pw_uid, entry.pw_gid
    assert await backend.tail("kvtier-engine-a") == [
        f"({uid}, {uid}, {uid}) ({gid}, {gid}, {gid}) {sorted(os.getgrouplist('nobody', gid))}",
        str(memlock_allowed()),
    ]


# --- output ---


async def test_a_unit_has_its_cpus_and_its_priority(backend: UnitBackend) -> None:
    here = sorted(os.sched_getaffinity(0))
    code = "import os; print(sorted(os.sched_getaffinity(0)), os.nice(0), flush=True)"
    for name, resources, cpus, nice in (
        ("a", Resources(cpus=str(here[0]), nice=7), [here[0]], 7),
        ("b", Resources(), here, os.nice(0)),
    ):
        spec = unit(f"{code}; import time; time.sleep(300)", name, resources=resources)
        await backend.start(spec)
        assert await wait_lines(backend, spec.id, 1) == [f"{cpus} {nice}"]
    assert sorted(os.sched_getaffinity(0)) == here


async def test_memory_max_is_enforced_or_said_not_to_be(backend: UnitBackend) -> None:
    code = "import time; print('up', flush=True); held = b'x' * (300 << 20); print('has it', flush=True); time.sleep(300)"
    process = await backend.start(unit(code, resources=Resources(memory_max_bytes=100 << 20)))
    if "memory_max is not enforced" in process.note:  # a shim, or a systemd without the memory controller
        assert await wait_lines(backend, process.unit_id, 2) == ["up", "has it"]
    else:
        ended = await wait_ended(backend, process.unit_id)
        assert ended.exit is not None
        assert ended.exit.signal == signal.SIGKILL
        assert await backend.tail(process.unit_id, 5) == ["up"]


async def test_output_keeps_its_order(backend: UnitBackend) -> None:
    code = "import os\nfor i in range(200): os.write(1 + i % 2, b'line %d\\n' % i)"
    await backend.start(unit(code))
    await wait_ended(backend, "kvtier-engine-a")
    assert await backend.tail("kvtier-engine-a", 500) == [f"line {i}" for i in range(200)]


async def test_tail_shows_the_last_run_only(backend: UnitBackend) -> None:
    for text in ("first", "second"):
        await backend.start(unit(f"print('{text}')"))
        await wait_ended(backend, "kvtier-engine-a")
    assert await backend.tail("kvtier-engine-a") == ["second"]


async def test_odd_output_survives(backend: UnitBackend) -> None:
    code = "import os; os.write(1, b'\\xff\\xfe caf\\xc3\\xa9\\n' + b'x' * 150000 + b'\\n' + b'no end')"
    await backend.start(unit(code))
    await wait_ended(backend, "kvtier-engine-a")
    lines = await backend.tail("kvtier-engine-a", 10)
    assert lines[0] == "\ufffd\ufffd café"
    assert "".join(lines[1:-1]) == "x" * 150000
    assert max(len(line) for line in lines) <= 65536  # a longer one is cut, wherever the backend cuts
    assert lines[-1] == "no end"


async def test_logged_texts_are_remembered(make_backend: Factory) -> None:
    spec = unit(
        """
        import time
        print("first Started MetaService now")
        for i in range(9000):
            print("filler" * 5)
        print("up")
        time.sleep(300)
        """,
        readiness=Readiness(
            probes=(LogProbe(contains="Started MetaService"), LogProbe(contains="never said"))
        ),
    )
    backend = make_backend()
    await backend.start(spec)
    while (await backend.tail(spec.id, 1)) != ["up"]:
        await asyncio.sleep(0.02)
    assert await backend.logged(spec.id, "Started MetaService")
    assert not await backend.logged(spec.id, "never said")
    assert await make_backend().logged(spec.id, "Started MetaService")


async def test_follow_goes_on_across_rotation_and_restart(backend: UnitBackend) -> None:
    name = f"f{secrets.token_hex(4)}"  # the journal remembers other tests
    name_id = f"kvtier-engine-{name}"

    def counting(first: int) -> UnitSpec:
        return unit(
            f"""
            import time
            for i in range({first}, {first} + 3000):
                print("n", i, "x" * 30)
                if i % 500 == 0:
                    time.sleep(0.1)
            """,
            name,
        )

    await backend.start(counting(0))
    seen: list[int] = []

    async def read() -> None:
        async for line in backend.follow(name_id, lines=100_000):
            seen.append(int(line.split()[1]))
            if len(seen) == 6000:
                return

    reading = asyncio.create_task(read())
    await wait_ended(backend, name_id)
    await backend.start(counting(3000))
    await asyncio.wait_for(reading, 20)
    assert seen == list(range(6000))


async def test_following_a_run_gives_no_line_of_an_earlier_one(backend: UnitBackend) -> None:
    first = await backend.start(unit("print('I am dying')"))
    await wait_ended(backend, "kvtier-engine-a")
    second = await backend.start(unit("import time; print('I am well', flush=True); time.sleep(30)"))
    following = backend.follow("kvtier-engine-a", lines=100, instance=second.instance)
    assert await asyncio.wait_for(anext(following), 20) == "I am well"
    await following.aclose()  # type: ignore[attr-defined]
    gone = backend.follow("kvtier-engine-a", lines=100, instance=first.instance)
    with pytest.raises(UnitError) as caught:
        await asyncio.wait_for(anext(gone), 20)
    assert caught.value.stable_code == "unit.other-run"


async def test_wait_change_tells_of_an_end(backend: UnitBackend) -> None:
    await backend.start(unit("import time; time.sleep(0.5)"))
    while await backend.wait_change(0.05):
        pass
    begun = time.monotonic()
    assert await backend.wait_change(10)
    assert time.monotonic() - begun < 5
    assert not (await wait_ended(backend, "kvtier-engine-a")).running


# --- the daemon goes away ---


async def test_units_outlive_a_killed_daemon_and_are_adopted(
    make_backend: Factory, kind: str, tmp_path: Path
) -> None:
    specs = [unit(SLEEPER, f"u{i}") for i in range(8)]
    with daemon_with(kind, tmp_path, *specs) as (daemon, pids):
        os.killpg(daemon.pid, signal.SIGKILL)
        daemon.wait()
    await asyncio.sleep(0.2)
    backend = make_backend()
    begun = time.perf_counter()
    found = await backend.list()
    print(f"adopted {len(found)} units in {(time.perf_counter() - begun) * 1000:.0f} ms")
    assert [process.pid for process in found] == pids
    assert all(process.running for process in found)
    for spec in specs:
        with pytest.raises(UnitError) as caught:
            await backend.start(spec)
        assert caught.value.stable_code == "unit.exists"
    ended = await asyncio.gather(*(backend.stop(spec.id, timeout_seconds=5) for spec in specs))
    assert [process.exit.signal for process in ended if process.exit] == [signal.SIGTERM] * 8


async def test_an_end_without_a_daemon_is_known_later(
    make_backend: Factory, kind: str, tmp_path: Path
) -> None:
    with daemon_with(kind, tmp_path, unit("import time; time.sleep(0.6); raise SystemExit(9)")) as (
        daemon,
        _,
    ):
        daemon.kill()
        daemon.wait()
    ended = await wait_ended(make_backend(), "kvtier-engine-a")
    assert ended.exit is not None
    assert (ended.exit.code, ended.exit.requested) == (9, False)


# --- the guard of the lease ---

KILL_MARGIN_SECONDS = 1.0


async def wait_killed_at(pid: int, until_seconds: float) -> None:
    """The process is gone between the deadline and the margin behind it."""
    while is_alive(pid):
        assert now_seconds() < until_seconds + 10, "it lives on"
        await asyncio.sleep(0.01)
    assert -0.05 <= now_seconds() - until_seconds < KILL_MARGIN_SECONDS


@pytest.mark.parametrize("daemon_is", ["healthy", "frozen", "gone"])
async def test_a_guarded_unit_dies_with_its_lease_whatever_the_daemon_is(
    make_backend: Factory, kind: str, tmp_path: Path, daemon_is: str
) -> None:
    file = str(tmp_path / "lease")
    write_deadline(file, now_seconds() + 60)
    spec = unit(STUBBORN_TREE.replace("LAST", "time.sleep(300)"), guard_file=file)
    with daemon_with(kind, tmp_path, spec) as (daemon, pids):
        until = now_seconds() + 2
        write_deadline(file, until)
        if daemon_is == "frozen":
            daemon.send_signal(signal.SIGSTOP)
        elif daemon_is == "gone":
            os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait()
        await asyncio.sleep(0.5)
        assert is_alive(pids[0])
        await wait_killed_at(pids[0], until)
    ended = await wait_ended(make_backend(), "kvtier-engine-a")
    assert ended.exit is not None
    assert ended.exit.signal == signal.SIGKILL


async def test_a_guarded_unit_lives_as_long_as_its_lease_is_extended(
    backend: UnitBackend, tmp_path: Path
) -> None:
    file = str(tmp_path / "lease")
    spec = unit(SLEEPER, guard_file=file)
    with pytest.raises(UnitError):  # without a lease it is not started, or ends at once
        ended = await backend.start(spec)
        ended = await wait_ended(backend, spec.id)
        assert ended.exit is not None
        assert ended.exit.code == EXIT_NO_LEASE
        raise UnitError("it ended at once")
    until = now_seconds() + 2
    write_deadline(file, until)
    process = await backend.start(spec)
    for _ in range(4):
        await asyncio.sleep(0.8)
        until = now_seconds() + 2
        write_deadline(file, until)
    assert is_alive(process.pid)
    os.kill(process.pid, signal.SIGSTOP)  # frozen: it could not end by itself
    await wait_killed_at(process.pid, until)


async def test_a_guarded_unit_has_no_lease_of_an_earlier_boot(backend: UnitBackend, tmp_path: Path) -> None:
    file = tmp_path / "lease"
    file.write_text(f"00000000-0000-0000-0000-000000000000 {now_seconds() + 60}\n")
    spec = unit(SLEEPER, guard_file=str(file))
    with pytest.raises(UnitError):
        await backend.start(spec)
        await wait_ended(backend, spec.id)
        raise UnitError("it ended at once")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_losing_the_guard_itself_costs_the_unit_its_life_under_systemd(
    backend: UnitBackend, tmp_path: Path, how: signal.Signals
) -> None:
    if backend.name != "systemd":
        pytest.skip("under a shim the shim is the guard; a killed one is replaced by the daemon")
    file = str(tmp_path / "lease")
    until = now_seconds() + 3
    write_deadline(file, until)
    process = await backend.start(unit(SLEEPER, guard_file=file))
    await wait_lines(backend, process.unit_id, 1)  # then the guard is there
    (guard,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(guard), how)
    await wait_killed_at(process.pid, until)
