from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from kvtierd.host.view import OUTPUT_LIMIT_BYTES, HostView, RecordedRunner, SystemRunner

from .tree import plant


async def test_output_code_and_stderr_are_kept() -> None:
    script = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    result = await SystemRunner().run([sys.executable, "-c", script], timeout_seconds=20)
    assert (result.code, result.stdout, result.stderr) == (3, "out\n", "err\n")
    assert not result.ok
    assert result.describe().endswith("exit 3: err")


async def test_nothing_is_given_to_a_shell() -> None:
    result = await SystemRunner().run(["echo", "$HOME; `id` > /tmp/x"], timeout_seconds=20)
    assert result.stdout == "$HOME; `id` > /tmp/x\n"
    assert result.ok
    assert result.describe() == ""


async def test_a_missing_program_and_one_that_may_not_run(tmp_path: Path) -> None:
    missing = await SystemRunner().run(["kvtierd-no-such-program"], timeout_seconds=1)
    assert "not installed" in missing.describe()
    plain = tmp_path / "plain"
    plain.write_text("no program")
    refused = await SystemRunner().run([str(plain)], timeout_seconds=1)
    assert "Permission denied" in refused.describe()
    assert (await SystemRunner().run(["a\0b"], timeout_seconds=1)).error


async def test_a_hung_program_is_killed_with_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))\n"
        "print('started', flush=True)\n"
        "time.sleep(60)\n"
    )
    started = time.monotonic()
    result = await SystemRunner().run([sys.executable, "-c", script], timeout_seconds=1.5)
    assert time.monotonic() - started < 6
    assert result.timed_out
    assert result.code is None
    assert result.stdout == "started\n"
    assert "no answer within" in result.describe()
    child = int(pid_file.read_text())
    for _ in range(100):  # the kernel reaps it a moment later
        if not _alive(child):
            break
        time.sleep(0.02)
    assert not _alive(child)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def test_a_leftover_child_that_keeps_the_pipe_open_does_not_hang() -> None:
    script = "import subprocess; subprocess.Popen(['sleep', '30']); print('gone')"
    result = await SystemRunner().run([sys.executable, "-c", script], timeout_seconds=1.0)
    assert result.timed_out
    assert result.stdout == "gone\n"


async def test_endless_output_is_cut_and_the_program_killed() -> None:
    result = await SystemRunner().run(["yes"], timeout_seconds=20)
    assert result.truncated
    assert len(result.stdout) == OUTPUT_LIMIT_BYTES
    assert "more output than" in result.describe()


async def test_the_environment_is_what_was_given() -> None:
    result = await SystemRunner().run(["/usr/bin/env"], timeout_seconds=20, env={"ONLY": "this"})
    assert result.stdout == "ONLY=this\n"


async def test_recordings(tmp_path: Path) -> None:
    (tmp_path / "table.txt").write_text("the table\n")
    commands = [
        {"argv": ["npu-smi", "info"], "stdout_file": "table.txt"},
        {"argv": ["npu-smi", "info", "-m"], "code": 1, "stderr": "no"},
        {"argv": ["npu-smi", "info", "-l"], "timed_out": True},
    ]
    (tmp_path / "commands.json").write_text(json.dumps(commands))
    runner = RecordedRunner.from_directory(tmp_path)
    assert (await runner.run(["npu-smi", "info"], timeout_seconds=1)).stdout == "the table\n"
    assert (await runner.run(["npu-smi", "info", "-m"], timeout_seconds=1)).describe().endswith("exit 1: no")
    hung = await runner.run(["npu-smi", "info", "-l"], timeout_seconds=7)
    assert (hung.code, hung.seconds) == (None, 7)
    assert "not installed" in (await runner.run(["other"], timeout_seconds=1)).describe()
    assert runner.asked[-1] == ("other",)


def test_links_stay_below_the_root(tmp_path: Path) -> None:
    view = HostView(
        plant(
            tmp_path,
            {"/opt/cann-8.5.0/v": "8.5", "/etc/passwd": "fixture"},
            {
                "/opt/cann": "/opt/cann-8.5.0",
                "/opt/up": "../../../../etc",
                "/loop": "/loop",
                "/rel": "opt/./cann",
            },
        )
    )
    assert view.text("/opt/cann/v") == "8.5"
    assert view.text("/rel/v") == "8.5"
    assert view.text("/opt/up/passwd") == "fixture"
    assert view.text("/loop/x") is None
    assert not view.exists("/loop")


def test_reading_is_forgiving(tmp_path: Path) -> None:
    root = plant(tmp_path, {"/n": " 42\n", "/t": "x"})
    (root / "b").write_bytes(b"\xff\xfe!")
    view = HostView(root, machine="aarch64")
    assert view.integer("/n") == 42
    assert view.integer("/t") is None
    assert view.integer("/none") is None
    assert view.text("/b") == "\ufffd\ufffd!"
    assert view.names("/none") == []
    assert view.machine == "aarch64"
    with pytest.raises(FileNotFoundError):
        view.read("/none")


def test_the_default_view_is_this_host() -> None:
    view = HostView()
    assert view.live
    assert view.machine == os.uname().machine
