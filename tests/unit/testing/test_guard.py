from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtierd.testing.guard import TookTooLongError, timed, watched


def connect() -> None:
    socket.create_connection(("127.0.0.1", 9), timeout=1)


@pytest.mark.parametrize(
    ("touch", "seen"),
    [
        (lambda: Path("/etc/passwd").read_text(), "open('/etc/passwd')"),
        (lambda: os.listdir("/"), "os.listdir('/')"),
        (lambda: Path("/etc/passwd").exists(), "os.stat"),
        (lambda: os.access("/", os.R_OK), "os.access('/')"),
        (connect, "socket."),
        (lambda: subprocess.run(["/bin/true"], check=True), "subprocess.Popen"),
    ],
)
def test_whatever_touches_the_outside_is_seen_and_forbidden(touch: Callable[[], object], seen: str) -> None:
    with watched() as touched, pytest.raises(PermissionError, match="must be pure"):
        touch()
    assert touched
    assert touched[0].startswith(seen)
    touched.clear()
    Path("/etc/hostname").exists()
    assert touched == []


def test_other_threads_and_imports_are_left_alone() -> None:
    sys.modules.pop("colorsys", None)
    with watched() as touched:
        thread = threading.Thread(target=lambda: Path("/etc/passwd").read_text())
        thread.start()
        thread.join()
        import colorsys  # noqa: F401
    assert touched == []


def backtrack() -> object:
    return re.match(r"(a+)+$", "a" * 40 + "b")


def swallow() -> None:
    while True:
        try:
            time.sleep(10)
        except BaseException:
            continue_once.append(1)
            if len(continue_once) > 2:
                raise


continue_once: list[int] = []


@pytest.mark.parametrize("call", [backtrack, swallow, lambda: time.sleep(60)])
def test_a_call_that_does_not_come_back_is_ended(call: Callable[[], object]) -> None:
    continue_once.clear()
    started = time.monotonic()
    with pytest.raises(TookTooLongError):
        timed(call, 0.02)
    assert time.monotonic() - started < 5


def test_processor_time_counts() -> None:
    with pytest.raises(TookTooLongError, match="processor time"):
        timed(lambda: sum(range(2_000_000)), 0.001 if sys.flags.dev_mode else 0.005)


def test_in_another_thread_too() -> None:
    outcome: list[object] = []

    def work() -> None:
        outcome.append(timed(lambda: 7, 1))
        for call in (lambda: time.sleep(5), lambda: 1 / 0):
            try:
                timed(call, 0.01)
            except Exception as error:
                outcome.append(type(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert outcome == [7, TookTooLongError, ZeroDivisionError]


def test_answers_and_errors_pass() -> None:
    assert timed(lambda: 5, 1) == 5
    with pytest.raises(KeyError):
        timed(lambda: {}["x"], 1)
