"""The scripts that run in the engine's interpreter, with a stand-in for memcache_hybrid. The real one: tests/e2e."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kvtierd.memcache

SCRIPTS = Path(kvtierd.memcache.__file__).parent
NAMES = ("run_meta.py", "run_pool.py", "run_purge.py")
STAND_IN = """
import os, signal, sys, time
plan = os.environ["PLAN"].split()

def act(name):
    if f"{name}-hangs" in plan:
        # As the library does: its own handler, which does not end the process.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            try: signal.signal(number, lambda *_: None)
            except ValueError: pass
        time.sleep(60)
    if f"{name}-raises" in plan:
        raise RuntimeError(f"{name} broke")
    print(f"called {name}", flush=True)
    return -1 if f"{name}-fails" in plan else 0

class MetaService:
    @staticmethod
    def main(): return act("main")

class DistributedObjectStore:
    def init(self, device, init_bm=True):
        print(f"init device={device} init_bm={init_bm}", flush=True)
        return act("init")
    def get_local_service_id(self): return 7
    def remove_all(self): return act("remove_all")
    def close(self): return act("close")
"""


@pytest.fixture
def start(tmp_path: Path):  # type: ignore[no-untyped-def]
    package = tmp_path / "site"
    package.mkdir()
    (package / "memcache_hybrid.py").write_text(STAND_IN)
    conf = tmp_path / "mmc.conf"
    conf.write_text("")
    started: list[subprocess.Popen[str]] = []

    def run(script: str, *arguments: str, plan: str = "", wheel: bool = True, named: str | None = None):  # type: ignore[no-untyped-def]
        env = {"PATH": os.environ["PATH"], "PLAN": plan}
        if wheel:
            env["PYTHONPATH"] = str(package)
        env["MMC_META_CONFIG_PATH"] = env["MMC_LOCAL_CONFIG_PATH"] = str(conf) if named is None else named
        isolated = [] if wheel else ["-S"]  # no site-packages: an interpreter without the wheel
        process = subprocess.Popen(
            [sys.executable, *isolated, str(SCRIPTS / script), *arguments],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate(timeout=10)


def await_line(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return line.strip()
    raise AssertionError(f"ended without {text!r}")


@pytest.mark.parametrize("name", NAMES)
def test_they_stand_alone(name: str) -> None:
    tree = ast.parse((SCRIPTS / name).read_text(), feature_version=(3, 9))
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name) or "."
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert {module.split(".")[0] for module in imported} <= {*sys.stdlib_module_names, "memcache_hybrid"}


ARGUMENTS = {"run_meta.py": (), "run_pool.py": ("--device", "0"), "run_purge.py": ()}


@pytest.mark.parametrize("name", NAMES)
def test_an_interpreter_without_the_wheel(start, name: str) -> None:  # type: ignore[no-untyped-def]
    process = start(name, *ARGUMENTS[name], wheel=False)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 78
    assert len(errors.splitlines()) == 1
    assert "has no usable memcache_hybrid" in errors
    assert sys.executable in errors


@pytest.mark.parametrize("name", NAMES)
def test_no_configuration_named(start, name: str) -> None:  # type: ignore[no-untyped-def]
    process = start(name, *ARGUMENTS[name], named="/no/such/file")
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 78
    assert "'/no/such/file' is not a file" in errors


@pytest.mark.parametrize(("plan", "status"), [("", 0), ("main-fails", 1)])
def test_meta_exit_status(start, plan: str, status: int) -> None:  # type: ignore[no-untyped-def]
    process = start("run_meta.py", plan=plan)
    process.communicate(timeout=20)
    assert process.returncode == status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_pool_closes_when_told_to_stop(start, number: signal.Signals) -> None:  # type: ignore[no-untyped-def]
    process = start("run_pool.py", "--device", "3")
    assert await_line(process, "init").startswith("init device=3 init_bm=True")
    assert await_line(process, "ready").startswith("kvtierd-pool ready rank=7 device=3 seconds=0.")
    process.send_signal(signal.SIGHUP)
    time.sleep(0.1)
    assert process.poll() is None
    process.send_signal(number)
    output, _ = process.communicate(timeout=10)
    assert "called close" in output
    assert process.returncode == 0


def test_pool_stops_while_init_hangs(start) -> None:  # type: ignore[no-untyped-def]
    process = start("run_pool.py", "--device", "0", plan="init-hangs")
    await_line(process, "init device")
    started = time.monotonic()
    process.terminate()
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 0
    assert "told to stop before it had joined" in errors
    assert time.monotonic() - started < 3


def test_pool_gives_up_on_init(start) -> None:  # type: ignore[no-untyped-def]
    process = start("run_pool.py", "--device", "0", "--init-deadline", "0.2", plan="init-hangs")
    process.communicate(timeout=10)
    assert process.returncode == 75


@pytest.mark.parametrize("plan", ["init-fails", "init-raises"])
def test_pool_is_refused(start, plan: str) -> None:  # type: ignore[no-untyped-def]
    process = start("run_pool.py", "--device", "0", plan=plan)
    output, errors = process.communicate(timeout=10)
    assert process.returncode == 1
    assert "init was refused" in errors
    assert "ready" not in output


def test_pool_ends_although_close_hangs(start) -> None:  # type: ignore[no-untyped-def]
    process = start("run_pool.py", "--device", "0", "--close-deadline", "0.2", plan="close-hangs")
    await_line(process, "ready")
    process.terminate()
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 70
    assert "close did not end" in errors


def test_purge_takes_no_rank_and_closes(start) -> None:  # type: ignore[no-untyped-def]
    process = start("run_purge.py")
    output, _ = process.communicate(timeout=10)
    assert process.returncode == 0
    lines = output.splitlines()
    assert lines[0] == "init device=0 init_bm=False"
    assert lines[1:4] == ["called init", "called remove_all", "called close"]
    assert lines[4].startswith("kvtierd-purge done seconds=")


@pytest.mark.parametrize(
    ("plan", "status"),
    [
        ("init-fails", 1),
        ("remove_all-fails", 1),
        ("remove_all-raises", 1),
        ("init-hangs", 75),
        ("remove_all-hangs", 75),
    ],
)
def test_purge_that_fails_never_says_done(start, plan: str, status: int) -> None:  # type: ignore[no-untyped-def]
    process = start("run_purge.py", "--deadline", "0.5", plan=plan)
    output, _ = process.communicate(timeout=10)
    assert process.returncode == status
    assert "done" not in output


def test_purge_stops_when_told_to(start) -> None:  # type: ignore[no-untyped-def]
    process = start("run_purge.py", plan="remove_all-hangs")
    await_line(process, "called init")
    process.terminate()
    process.communicate(timeout=5)
    assert process.returncode == 75
