from __future__ import annotations

import concurrent.futures
import os
import stat
from pathlib import Path

import pytest

from kvtierd.emulator import build
from kvtierd.emulator.build import LIBRARY_NAMES, EmulatedDriver, driver_directory_name, ensure_driver
from kvtierd.errors import EmulatorError


def write_compiler(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="session")
def shared_driver(tmp_path_factory: pytest.TempPathFactory) -> EmulatedDriver:
    return ensure_driver(tmp_path_factory.mktemp("shared"))


def test_it_looks_like_an_ascend_installation(shared_driver: EmulatedDriver) -> None:
    assert sorted(p.name for p in shared_driver.library_dir.iterdir()) == sorted(LIBRARY_NAMES)
    assert len({p.stat().st_ino for p in shared_driver.library_dir.iterdir()}) == 1
    assert (shared_driver.home / "driver/version.info").read_text().startswith("Innerversion=V")
    for path in (shared_driver.home, shared_driver.library_dir, shared_driver.home / "driver"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o755  # other users run units


def test_env_keeps_an_earlier_library_path_behind_ours(shared_driver: EmulatedDriver) -> None:
    ours = str(shared_driver.library_dir)
    assert shared_driver.env() == {"ASCEND_HOME_PATH": str(shared_driver.home), "LD_LIBRARY_PATH": ours}
    assert (
        shared_driver.env({"LD_LIBRARY_PATH": "/opt/x", "HOME": "/h"})["LD_LIBRARY_PATH"] == f"{ours}:/opt/x"
    )


def test_a_cached_driver_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ensure_driver(tmp_path)
    monkeypatch.setenv("CC", "/no/such/compiler")
    assert ensure_driver(tmp_path) == first


def test_builds_at_the_same_time_agree_and_leave_no_litter(tmp_path: Path) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        drivers = set(pool.map(lambda _n: ensure_driver(tmp_path / "cache"), range(4)))
    assert len(drivers) == 1
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [drivers.pop().home.name]


def test_another_source_is_another_driver() -> None:
    assert driver_directory_name(b"one") != driver_directory_name(b"two")
    assert driver_directory_name(b"one") == driver_directory_name(b"one")
    assert driver_directory_name(b"one").endswith(os.uname().machine)


def test_cc_may_hold_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = write_compiler(tmp_path / "compiler", f'echo "$@" > {tmp_path}/seen; exec cc "$@"')
    monkeypatch.setenv("CC", f"{compiler} -O0")
    ensure_driver(tmp_path / "cache")
    assert (tmp_path / "seen").read_text().startswith("-O0 ")


@pytest.mark.parametrize(("cc", "tried"), [("/no/such/cc -m64", "'/no/such/cc'"), ("", "'cc' and 'gcc'")])
def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cc: str, tried: str) -> None:
    monkeypatch.setenv("CC", cc)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EmulatorError) as caught:
        ensure_driver(tmp_path / "cache")
    assert caught.value.stable_code == "emulator.no-compiler"
    assert tried in caught.value.message
    assert "install gcc" in caught.value.hint


def test_the_compilers_output_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", write_compiler(tmp_path / "broken", "echo 'fatal: no headers' >&2; exit 3"))
    with pytest.raises(EmulatorError, match="exit 3") as caught:
        ensure_driver(tmp_path / "cache")
    assert caught.value.stable_code == "emulator.compile"
    assert caught.value.why == "fatal: no headers"
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_compiler_that_writes_nothing_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", write_compiler(tmp_path / "lazy", "exit 0"))
    with pytest.raises(EmulatorError, match="exit 0"):
        ensure_driver(tmp_path / "cache")


def test_a_compiler_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", write_compiler(tmp_path / "slow", "exec sleep 30"))
    monkeypatch.setattr(build, "_BUILD_TIMEOUT_SECONDS", 0.2)
    with pytest.raises(EmulatorError, match="did not finish"):
        ensure_driver(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(EmulatorError) as caught:
        ensure_driver(tmp_path / "cache")
    assert caught.value.stable_code == "emulator.cache"
