"""The shim itself: what goes beyond what every backend must do (``test_unit_backends``)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from backend_lab import (
    SESSION_TREE,
    SLEEPER,
    is_alive,
    make_shim,
    tree_pids,
    unit,
    wait_ended,
    wait_lines,
)

from kvtierd.errors import UnitError
from kvtierd.plan.model import StopPolicy, UnitSpec
from kvtierd.units import procfs, shim_record
from kvtierd.units.backend import UnitBackend
from kvtierd.units.shim_backend import ShimBackend


@pytest.fixture
async def shims(tmp_path: Path) -> AsyncIterator[ShimBackend]:
    backend = make_shim(tmp_path)
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
    found = await make_shim(tmp_path).find(started.unit_id)
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
        await make_shim(tmp_path).start(unit(SLEEPER))
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


async def test_a_failure_of_another_boot_is_forgotten(shims: ShimBackend, tmp_path: Path) -> None:
    directory = tmp_path / "run" / "units" / "kvtier-engine-a"
    await shims.start(unit("raise SystemExit(77)"))
    await wait_ended(shims, "kvtier-engine-a")
    assert [found.exit.code for found in await shims.list() if found.exit] == [77]
    shim_record.write_record(str(directory), record_of(tmp_path) | {"boot_id": "another boot"})
    assert await shims.list() == []
    assert not directory.exists()


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
    found = await make_shim(tmp_path).find("kvtier-engine-a")
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


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a unit as another user")
async def test_another_user_may_open_its_streams_by_name(shims: ShimBackend) -> None:
    """Not so in the journal: a socket has no name that could be opened."""
    code = 'open("/dev/stderr", "w").write("by name\\n")'
    await shims.start(unit("", user="nobody", argv=("/usr/bin/python3", "-I", "-c", textwrap.dedent(code))))
    await wait_ended(shims, "kvtier-engine-a")
    assert await shims.tail("kvtier-engine-a") == ["by name"]


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
    assert await make_shim(tmp_path).find(started.unit_id) is not None
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
