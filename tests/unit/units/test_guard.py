"""The guard: a process that is killed at its deadline, whoever else is frozen or gone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtierd.units.guard import EXIT_NO_LEASE, guarded_argv
from kvtierd.units.guard_file import now_seconds, read_deadline, write_deadline

SLEEPER = (sys.executable, "-I", "-S", "-c", "import time; print('up', flush=True); time.sleep(60)")
LATE_SECONDS = 1.0  # the promised kill margin


def start(file: Path, *argv: str, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        guarded_argv(str(file), argv or SLEEPER), stdout=subprocess.PIPE, text=True, **options
    )  # type: ignore[call-overload]


def guard_of(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert len(children) == 1
    return int(children[0])


def test_a_deadline_is_read_back_and_replaced_in_one_step(tmp_path: Path) -> None:
    file = tmp_path / "lease"
    assert read_deadline(str(file)) is None
    for seconds in (12.5, 99.25, 0.0):
        write_deadline(str(file), seconds)
        assert read_deadline(str(file)) == seconds
    assert [p.name for p in tmp_path.iterdir()] == ["lease"]


@pytest.mark.parametrize("text", ["", "x", "not-this-boot 5.0", "\0" * 50])
def test_a_file_that_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "lease").write_text(text)
    assert read_deadline(str(tmp_path / "lease")) is None


@pytest.mark.parametrize("ago", [None, 1.0])
def test_without_a_lease_nothing_starts(tmp_path: Path, ago: float | None) -> None:
    file = tmp_path / "lease"
    if ago is not None:
        write_deadline(str(file), now_seconds() - ago)
    process = start(file, stderr=subprocess.PIPE)
    output, errors = process.communicate(timeout=20)
    assert (process.returncode, output) == (EXIT_NO_LEASE, "")
    assert "no lease" in errors


def test_it_runs_as_long_as_it_may_and_not_longer(tmp_path: Path) -> None:
    file = tmp_path / "lease"
    until = now_seconds() + 1.5
    write_deadline(str(file), until)
    with start(file) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        for _ in range(3):  # extended in time, again and again
            time.sleep(0.5)
            until = now_seconds() + 1.5
            write_deadline(str(file), until)
        assert process.poll() is None
        assert process.wait(20) == -signal.SIGKILL
        assert 0 <= now_seconds() - until < LATE_SECONDS


def test_a_lease_that_is_taken_back_ends_it_at_once(tmp_path: Path) -> None:
    file = tmp_path / "lease"
    write_deadline(str(file), now_seconds() + 60)
    with start(file) as process:
        assert process.stdout is not None
        process.stdout.readline()
        began = now_seconds()
        write_deadline(str(file), 0.0)
        assert process.wait(20) == -signal.SIGKILL
        assert now_seconds() - began < LATE_SECONDS


def test_a_frozen_unit_is_killed_all_the_same(tmp_path: Path) -> None:
    file = tmp_path / "lease"
    write_deadline(str(file), now_seconds() + 1)
    with start(file) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.kill(process.pid, signal.SIGSTOP)
        assert process.wait(20) == -signal.SIGKILL


def test_the_guard_goes_with_its_unit_and_the_unit_s_status_is_its_own(tmp_path: Path) -> None:
    file = tmp_path / "lease"
    write_deadline(str(file), now_seconds() + 60)
    code = "import sys, time; print('up', flush=True); sys.stdin.readline(); sys.exit(7)"
    with start(file, sys.executable, "-I", "-S", "-c", code, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        guard = guard_of(process.pid)
        process.communicate("\n", timeout=20)
        assert process.returncode == 7
        deadline = time.monotonic() + 5
        while Path(f"/proc/{guard}").exists():
            assert time.monotonic() < deadline, "the guard stayed behind"
            time.sleep(0.01)


def test_a_sigterm_to_the_group_is_for_the_unit(tmp_path: Path) -> None:
    file = tmp_path / "lease"
    write_deadline(str(file), now_seconds() + 60)
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    with start(file, sys.executable, "-I", "-S", "-c", code) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.kill(guard_of(process.pid), signal.SIGTERM)
        time.sleep(0.3)
        write_deadline(str(file), 0.0)
        assert process.wait(20) == -signal.SIGKILL, "the guard is still there"


def test_systemd_is_fed_up_to_the_deadline_and_the_unit_knows_nothing_of_it(tmp_path: Path) -> None:
    file = tmp_path / "lease"
    write_deadline(str(file), now_seconds() + 3)
    code = (
        "import os, time; print([n for n in os.environ if 'NOTIFY' in n or 'WATCHDOG' in n], flush=True);"
        "time.sleep(60)"
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(10)
        environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "10000000"}
        with start(file, sys.executable, "-I", "-c", code, env=environment) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "[]\n"

            def told() -> float:
                fields = dict(line.split("=") for line in manager.recv(4096).decode().splitlines())
                assert fields["WATCHDOG"] == "1"
                return int(fields["WATCHDOG_USEC"]) / 1e6

            assert 0.5 < told() < 3.4
            write_deadline(str(file), now_seconds() + 30)
            assert 29 < told() < 30.4
            process.kill()
