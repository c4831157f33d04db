"""What every unit backend must do, on real processes. A further backend joins by another entry in ``BACKENDS``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pwd
import re
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from kvtierd.errors import UnitError
from kvtierd.plan.model import LogProbe, Readiness, StopPolicy, UnitSpec
from kvtierd.units import procfs, shim_record
from kvtierd.units.backend import UnitBackend, UnitProcess
from kvtierd.units.shim_backend import ShimBackend

Factory = Callable[[], UnitBackend]
BACKENDS = {"shim": lambda base: ShimBackend(base / "run", base / "log", log_max_bytes=64 * 1024, log_keep=3)}


@pytest.fixture(params=sorted(BACKENDS))
async def make_backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Factory]:
    """Makes backends on one state, as successive daemons would; whatever still runs at the end is killed."""
    made: list[UnitBackend] = []

    def make() -> UnitBackend:
        made.append(BACKENDS[request.param](tmp_path))
        return made[-1]

    yield make
    last = make()
    for process in await last.list():
        if process.running:
            await last.kill(process.unit_id)
            await wait_ended(last, process.unit_id)
    for backend in made:
        await backend.close()


@pytest.fixture
def backend(make_backend: Factory) -> UnitBackend:
    return make_backend()


def unit(code: str, name: str = "a", **changes: object) -> UnitSpec:
    """A unit that runs this Python text."""
    fields: dict[str, object] = {
        "id": f"kvtier-engine-{name}",
        "kind": "engine",
        "name": name,
        "argv": (sys.executable, "-I", "-S", "-u", "-c", textwrap.dedent(code)),
    }
    return UnitSpec.model_validate(fields | changes)


SLEEPER = "import time\nprint('up')\ntime.sleep(300)"
# Ignores TERM, and leaves a grandchild in another session, reparented, that ignores it too.
STUBBORN_TREE = """
    import os, signal, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            os.write(1, b"grandchild %d\\n" % os.getpid())
            time.sleep(300)
        os._exit(0)
    if os.fork() == 0:
        os.write(1, b"child %d\\n" % os.getpid())
        time.sleep(300)
    os.wait()
    os.write(1, b"main %d\\n" % os.getpid())
    LAST
"""


# The same in one session: that is all that can be found once the shim has been killed.
SESSION_TREE = """
    import os, signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        if os.fork() == 0:
            os.write(1, b"grandchild %d\\n" % os.getpid())
            time.sleep(300)
        os._exit(0)
    if os.fork() == 0:
        os.write(1, b"child %d\\n" % os.getpid())
        time.sleep(300)
    os.wait()
    os.write(1, b"main %d\\n" % os.getpid())
    time.sleep(300)
"""


async def wait_ended(backend: UnitBackend, unit_id: str, seconds: float = 15.0) -> UnitProcess:
    deadline = time.monotonic() + seconds
    while True:
        process = await backend.find(unit_id)
        assert process is not None
        if not process.running:
            return process
        assert time.monotonic() < deadline, f"{unit_id} still runs: {process}"
        await backend.wait_change(0.2)


async def wait_lines(backend: UnitBackend, unit_id: str, count: int, seconds: float = 10.0) -> list[str]:
    deadline = time.monotonic() + seconds
    while len(lines := await backend.tail(unit_id, 50)) < count:
        assert time.monotonic() < deadline, f"only {lines}"
        await asyncio.sleep(0.02)
    return lines


async def tree_pids(backend: UnitBackend, unit_id: str) -> dict[str, int]:
    return {name: int(pid) for name, pid in (line.split() for line in await wait_lines(backend, unit_id, 3))}


def is_alive(pid: int) -> bool:
    stat = procfs.read_stat(pid)
    return stat is not None and not stat.ended


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
    started = await backend.start(unit(STUBBORN_TREE.replace("LAST", "os._exit(7)")))
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
        open("/dev/stderr", "w").write("by name\\n")
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
        "by name",
    ]


# --- output ---


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
    assert [len(line) for line in lines[1:4]] == [65536, 65536, 150000 - 2 * 65536]
    assert lines[4:] == ["no end"]


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
    def counting(first: int) -> UnitSpec:
        return unit(
            f"""
            import time
            for i in range({first}, {first} + 3000):
                print("n", i, "x" * 30)
                if i % 500 == 0:
                    time.sleep(0.1)
            """
        )

    await backend.start(counting(0))
    seen: list[int] = []

    async def read() -> None:
        async for line in backend.follow("kvtier-engine-a", lines=100_000):
            seen.append(int(line.split()[1]))
            if len(seen) == 6000:
                return

    reading = asyncio.create_task(read())
    await wait_ended(backend, "kvtier-engine-a")
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

DAEMON = """
import asyncio, sys
from pathlib import Path
from kvtierd.plan.model import UnitSpec
from kvtierd.units.shim_backend import ShimBackend

async def main():
    backend = ShimBackend(Path(sys.argv[1]) / "run", Path(sys.argv[1]) / "log")
    for text in sys.argv[2:]:
        print((await backend.start(UnitSpec.model_validate_json(text))).pid, flush=True)
    await asyncio.sleep(300)

asyncio.run(main())
"""


@contextlib.contextmanager
def daemon_with(tmp_path: Path, *specs: UnitSpec) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process that started these units, and their pids."""
    argv = [sys.executable, "-c", DAEMON, str(tmp_path), *(spec.model_dump_json() for spec in specs)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True) as daemon:
        try:
            assert daemon.stdout is not None
            yield daemon, [int(daemon.stdout.readline()) for _ in specs]
        finally:
            daemon.kill()


async def test_units_outlive_a_killed_daemon_and_are_adopted(make_backend: Factory, tmp_path: Path) -> None:
    specs = [unit(SLEEPER, f"u{i}") for i in range(8)]
    with daemon_with(tmp_path, *specs) as (daemon, pids):
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


async def test_an_end_without_a_daemon_is_known_later(make_backend: Factory, tmp_path: Path) -> None:
    with daemon_with(tmp_path, unit("import time; time.sleep(0.6); raise SystemExit(9)")) as (daemon, _):
        daemon.kill()
        daemon.wait()
    ended = await wait_ended(make_backend(), "kvtier-engine-a")
    assert ended.exit is not None
    assert (ended.exit.code, ended.exit.requested) == (9, False)


# --- the shim itself: not part of what other backends must do ---


@pytest.fixture
async def shims(tmp_path: Path) -> AsyncIterator[ShimBackend]:
    backend = BACKENDS["shim"](tmp_path)
    yield backend
    for process in await backend.list():
        if process.running:
            await backend.kill(process.unit_id)
            await wait_ended(backend, process.unit_id)
    await backend.close()


def record_of(tmp_path: Path, unit_id: str = "kvtier-engine-a") -> dict[str, object]:
    record = shim_record.read_record(str(tmp_path / "run" / "units" / unit_id))
    assert record is not None
    return record


def shim_pid(tmp_path: Path) -> int:
    pid = record_of(tmp_path)["shim_pid"]
    assert isinstance(pid, int)
    return pid


async def wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 5
    while is_alive(pid):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_a_shim_is_small_and_on_its_own(shims: ShimBackend, tmp_path: Path) -> None:
    await shims.start(unit(SLEEPER))
    await wait_lines(shims, "kvtier-engine-a", 1)
    pid = shim_pid(tmp_path)
    rss_kb = int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0])
    print(f"shim RSS {rss_kb} kB")
    assert rss_kb <= 14_000  # 11 MB on CPython 3.11; interpreters differ a little
    stat = procfs.read_stat(pid)
    assert stat is not None
    assert stat.ppid != os.getpid()
    assert stat.session not in {os.getsid(0), os.getpid()}
    assert stat.comm == "kvtierd-shim"
    directory = tmp_path / "run" / "units" / "kvtier-engine-a"
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (directory / "control.sock").stat().st_mode & 0o777 == 0o600
    assert (directory / "shim.err").read_text() == ""


async def test_a_killed_shim_is_replaced_beside_its_unit(shims: ShimBackend, tmp_path: Path) -> None:
    code = "import time\nfor i in range(100000):\n    print('n', i, 'y' * 500)\n    time.sleep(.001)"
    started = await shims.start(unit(code))
    await wait_lines(shims, started.unit_id, 5)
    first = shim_pid(tmp_path)
    os.kill(first, signal.SIGKILL)
    await wait_gone(first)
    found = await BACKENDS["shim"](tmp_path).find(started.unit_id)
    assert found is not None
    assert (found.pid, found.instance, found.running) == (started.pid, started.instance, True)
    assert "its shim was killed" in found.note
    assert shim_pid(tmp_path) != first
    with pytest.raises(UnitError) as caught:
        await shims.start(unit(code))
    assert caught.value.stable_code == "unit.exists"

    async def last_number() -> int:
        lines = await shims.tail(
            started.unit_id, 20
        )  # a line that is just being written is among them, cut short
        return [
            int(found[1]) for found in (re.fullmatch(r"n (\d+) y{500}", line) for line in lines) if found
        ][-1]

    seen = await last_number()  # the output goes on
    await asyncio.sleep(0.5)
    assert await last_number() > seen
    ended = await shims.stop(started.unit_id, timeout_seconds=5)
    assert ended.exit is not None
    assert (ended.exit.code, ended.exit.signal, ended.exit.requested) == (None, None, True)
    assert not is_alive(started.pid)


async def test_start_before_any_look_does_not_double_an_unshimmed_unit(
    shims: ShimBackend, tmp_path: Path
) -> None:
    started = await shims.start(unit(SLEEPER))
    first = shim_pid(tmp_path)
    os.kill(first, signal.SIGKILL)
    await wait_gone(first)
    with pytest.raises(UnitError) as caught:
        await BACKENDS["shim"](tmp_path).start(unit(SLEEPER))
    assert caught.value.stable_code == "unit.exists"
    assert is_alive(started.pid)


async def test_the_tree_of_an_unshimmed_unit_is_stopped(shims: ShimBackend, tmp_path: Path) -> None:
    started = await shims.start(unit(SESSION_TREE))
    pids = await tree_pids(shims, started.unit_id)
    os.kill(shim_pid(tmp_path), signal.SIGKILL)
    await shims.stop(started.unit_id, timeout_seconds=0.5)
    assert not [name for name, pid in pids.items() if is_alive(pid)]


async def test_shim_and_main_process_killed_leaves_no_orphans(shims: ShimBackend, tmp_path: Path) -> None:
    started = await shims.start(unit(SESSION_TREE))
    pids = await tree_pids(shims, started.unit_id)
    os.kill(shim_pid(tmp_path), signal.SIGKILL)
    os.kill(started.pid, signal.SIGKILL)
    ended = await wait_ended(shims, started.unit_id)
    assert ended.exit is not None
    assert ended.exit.describe() == "ended, exit status unknown"
    assert "left behind and killed" in ended.note
    assert not [name for name, pid in pids.items() if is_alive(pid)]
    assert (await shims.start(unit(SLEEPER))).running


async def test_a_hanging_shim_does_not_make_a_stop_hang(shims: ShimBackend, tmp_path: Path) -> None:
    started = await shims.start(unit(SLEEPER))
    os.kill(shim_pid(tmp_path), signal.SIGSTOP)
    begun = time.monotonic()
    ended = await shims.stop(started.unit_id, timeout_seconds=2)
    assert time.monotonic() - begun < 12
    assert not ended.running
    assert not is_alive(started.pid)


async def test_sigterm_to_the_shim_stops_the_unit_in_order(shims: ShimBackend, tmp_path: Path) -> None:
    code = "import signal, time, sys\nsignal.signal(2, lambda *_: sys.exit(6))\nprint('up')\ntime.sleep(300)"
    await shims.start(unit(code, stop=StopPolicy(signal="SIGINT", timeout_seconds=5)))
    await wait_lines(shims, "kvtier-engine-a", 1)
    os.kill(shim_pid(tmp_path), signal.SIGTERM)
    ended = await wait_ended(shims, "kvtier-engine-a")
    assert ended.exit is not None
    assert (ended.exit.code, ended.exit.requested) == (6, False)
    assert "SIGTERM" in ended.note


@contextlib.contextmanager
def stranger() -> Iterator[dict[str, object]]:
    """A process that has nothing to do with us, as a record would name it. It must stay unharmed."""
    with subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True
    ) as process:
        try:
            stat = procfs.read_stat(process.pid)
            assert stat is not None
            ticks = stat.start_ticks
            yield {
                "pid": stat.pid,
                "start_ticks": ticks,
                "shim_pid": stat.pid,
                "shim_start_ticks": ticks,
                "exit": None,
            }
            assert process.poll() is None
        finally:
            process.kill()


async def test_a_record_of_another_boot_is_an_ended_run(shims: ShimBackend, tmp_path: Path) -> None:
    """Its process id, and even its start time, may well exist again."""
    directory = tmp_path / "run" / "units" / "kvtier-engine-a"
    await shims.start(unit("pass"))
    await wait_ended(shims, "kvtier-engine-a")
    with stranger() as fields:
        shim_record.write_record(str(directory), record_of(tmp_path) | fields | {"boot_id": "another boot"})
        found = await shims.find("kvtier-engine-a")
        assert found is not None
        assert not found.running
        assert "restarted" in found.note
        assert (await shims.start(unit(SLEEPER))).running


async def test_a_reused_pid_is_not_mistaken(shims: ShimBackend, tmp_path: Path) -> None:
    directory = tmp_path / "run" / "units" / "kvtier-engine-a"
    await shims.start(unit("pass"))
    await wait_ended(shims, "kvtier-engine-a")
    with stranger() as fields:
        earlier = {"start_ticks": 1, "shim_start_ticks": 1}
        shim_record.write_record(str(directory), record_of(tmp_path) | fields | earlier)
        found = await shims.find("kvtier-engine-a")
        assert found is not None
        assert not found.running


async def test_a_shim_whose_directory_was_removed_still_ends(shims: ShimBackend, tmp_path: Path) -> None:
    started = await shims.start(unit(SLEEPER))
    shim = shim_pid(tmp_path)
    shutil.rmtree(tmp_path / "run")
    os.kill(started.pid, signal.SIGKILL)
    await wait_gone(shim)


async def test_hostile_requests_do_not_end_a_shim(shims: ShimBackend, tmp_path: Path) -> None:
    await shims.start(unit(SLEEPER))
    address = str(tmp_path / "run" / "units" / "kvtier-engine-a" / "control.sock")
    os.chdir(Path(address).parent)
    requests = [
        b"\n",
        b"[]\n",
        b"{}\n",
        b"nonsense\n",
        b'{"do": "stop"}\n',
        b'{"do": "stop", "signal": 999, "timeout_seconds": 1}\n',
        b'{"do": "stop", "signal": 15, "timeout_seconds": "x"}\n',
        b'{"do": "stop", "signal": 15, "timeout_seconds": NaN}\n',
        b'{"do": "recent", "lines": -1e400}\n',
        b"x" * 100_000,
    ]
    for request in requests:
        reader, writer = await asyncio.open_unix_connection("control.sock")
        writer.write(request)
        with contextlib.suppress(TimeoutError, ConnectionError):
            await asyncio.wait_for(reader.readline(), 0.3)
        writer.close()
    idle = [await asyncio.open_unix_connection("control.sock") for _ in range(40)]
    for _, writer in idle:
        writer.close()
    os.chdir("/")
    await asyncio.sleep(0.1)
    found = await BACKENDS["shim"](tmp_path).find("kvtier-engine-a")
    assert found is not None
    assert found.running
    assert (await shims.stop("kvtier-engine-a", timeout_seconds=5)).exit is not None


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount the small file system that gets full")
async def test_a_full_disk_stops_neither_unit_nor_shim(shims: ShimBackend, tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "none", tmp_path / "log"], check=True)
    try:
        (tmp_path / "log" / "ballast").write_bytes(b"x" * 110_000)
        code = (
            "import os, time\nfor i in range(4000): print('n', i, 'z' * 60)\nprint('done')\ntime.sleep(300)"
        )
        await shims.start(unit(code))
        deadline = time.monotonic() + 10
        while (await shims.tail("kvtier-engine-a", 1)) != ["done"]:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        (tmp_path / "log" / "ballast").unlink()
        await asyncio.sleep(1.1)
        ended = await shims.stop("kvtier-engine-a", timeout_seconds=5)
        assert ended.exit is not None
        assert ended.exit.signal == signal.SIGTERM
        assert (
            "bytes of output are missing here: No space left"
            in (tmp_path / "log" / "kvtier-engine-a.log").read_text()
        )
    finally:
        subprocess.run(["umount", tmp_path / "log"], check=True)


async def test_an_unusable_runtime_directory_is_said(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the directory should be")
    backend = ShimBackend(tmp_path / "run", tmp_path / "log")
    with pytest.raises(UnitError) as caught:
        await backend.start(unit(SLEEPER))
    assert caught.value.stable_code == "unit.runtime-dir"
    await backend.close()


KEY = "kSecretSecretSecretSecret"
# Prints its key in two writes, and again when it is told to.
TALKATIVE = """
    import signal, sys, time
    key = open(sys.argv[1]).read().split()[-1]
    def say(*_):
        sys.stdout.write("the key is " + key[:9]); sys.stdout.flush(); time.sleep(.05)
        sys.stdout.write(key[9:] + " indeed\\n"); sys.stdout.flush()
    signal.signal(signal.SIGUSR1, say)
    say()
    while True: time.sleep(1)
"""


def talkative(tmp_path: Path) -> UnitSpec:
    path = tmp_path / "key.yaml"
    path.write_text(f"key: {KEY}\n")
    path.chmod(0o600)
    spec = unit(TALKATIVE)
    return spec.model_copy(update={"argv": (*spec.argv, str(path)), "secret_files": (str(path),)})


async def wait_tail(backend: UnitBackend, unit_id: str, wanted: list[str]) -> None:
    deadline = time.monotonic() + 10
    while (lines := await backend.tail(unit_id, 10)) != wanted:
        assert time.monotonic() < deadline, lines
        await asyncio.sleep(0.05)


async def test_a_secret_is_in_no_log_and_no_record(shims: ShimBackend, tmp_path: Path) -> None:
    spec = talkative(tmp_path)
    started = await shims.start(spec)
    await wait_tail(shims, started.unit_id, ["the key is *** indeed"])
    first = shim_pid(tmp_path)
    os.kill(first, signal.SIGKILL)
    await wait_gone(first)
    assert await BACKENDS["shim"](tmp_path).find(started.unit_id) is not None
    os.kill(started.pid, signal.SIGUSR1)  # the shim that was put in its place hides it too
    await wait_tail(shims, started.unit_id, ["the key is *** indeed"] * 2)
    await shims.stop(started.unit_id, timeout_seconds=5)
    kept = [p for d in ("run", "log") for p in (tmp_path / d).rglob("*") if p.is_file()]
    assert kept
    assert not [p for p in kept if KEY.encode() in p.read_bytes()]
    assert record_of(tmp_path)["secret_files"] == list(spec.secret_files)


@pytest.mark.parametrize("damage", ["absent", "open"])
async def test_a_unit_whose_secret_could_not_be_hidden_is_not_started(
    shims: ShimBackend, tmp_path: Path, damage: str
) -> None:
    spec = talkative(tmp_path)
    path = Path(spec.secret_files[0])
    path.unlink() if damage == "absent" else path.chmod(0o644)
    with pytest.raises(UnitError) as caught:
        await shims.start(spec)
    assert caught.value.stable_code == "unit.secret"
    assert KEY not in str(caught.value)
    assert await shims.find(spec.id) is None
