from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from kvtierd.host.interpreters import parse_set_env, probe_interpreter, probe_run_package
from kvtierd.host.view import CommandResult, HostView

from .tree import plant

HOME = "/usr/local/memcache_hybrid"
SET_ENV = """PYTHON_LIB_DIR=$(python3 -c 'import sys,os;print(os.path.join(sys.prefix,"lib"))')
export MEMCACHE_HYBRID_HOME_PATH=/usr/local/memcache_hybrid/latest
export LD_LIBRARY_PATH=/usr/local/memcache_hybrid/latest/aarch64-linux/lib64:${PYTHON_LIB_DIR}:/opt/extra:$LD_LIBRARY_PATH
export PATH=/usr/local/memcache_hybrid/latest/aarch64-linux/bin:$PATH
"""
PACKAGE = {
    f"{HOME}/1.0.0/version.info": "Version:1.0.0\nPlatform:aarch64\nKernel:linux\n",
    f"{HOME}/1.0.0/aarch64-linux/bin/mmc_meta_service": "ELF",
    f"{HOME}/1.0.0/aarch64-linux/lib64/libmf_memcache.so": "ELF",
    f"{HOME}/set_env.sh": SET_ENV,
    "/opt/extra/lib.so": "ELF",
    "/usr/local/memfabric_hybrid/latest/version.info": "Version:1.0.5\n",
    "/usr/local/memfabric_hybrid/latest/aarch64-linux/lib64/libmf_smem.so": "ELF",
}
LATEST = {f"{HOME}/latest": "1.0.0"}


def distribution(site: Path, name: str, version: str) -> None:
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
    )


class SitePath:
    """Runs the probe in this interpreter, with another directory to look for distributions in."""

    def __init__(self, site: Path) -> None:
        self.site = site

    async def run(self, argv: list[str], *, timeout_seconds: float, env: dict[str, str]) -> CommandResult:
        real = HostView().runner
        script = f"import sys; sys.path[:] = [{str(self.site)!r}, *[p for p in sys.path if 'site-packages' not in p]]\n"
        words = [sys.executable, "-I", "-S", "-c", script + argv[3]]
        return await real.run(words, timeout_seconds=timeout_seconds, env=env)


async def probe(site: Path) -> tuple[str | None, str | None, tuple[str, ...], str | None]:
    view = HostView(runner=SitePath(site))  # type: ignore[arg-type]
    install = await probe_interpreter(view, "/opt/py/bin/python3")
    return install.memcache_version, install.memfabric_version, install.library_dirs, install.problem


async def test_versions_and_library_directories(tmp_path: Path) -> None:
    distribution(tmp_path, "memcache_hybrid", "1.3.0")
    distribution(tmp_path, "memfabric_hybrid", "1.3.0")
    for part in ("memcache_hybrid/lib", "memcache_hybrid.libs", "memfabric_hybrid/lib"):
        (tmp_path / part).mkdir(parents=True)
    # Importing would be an error: only metadata is read.
    (tmp_path / "memcache_hybrid" / "__init__.py").write_text("raise SystemExit('imported')")
    versions = await probe(tmp_path)
    assert versions == (
        "1.3.0",
        "1.3.0",
        tuple(
            str(tmp_path / part)
            for part in ("memcache_hybrid/lib", "memcache_hybrid.libs", "memfabric_hybrid/lib")
        ),
        None,
    )


async def test_a_missing_wheel_names_the_interpreter_and_the_command(tmp_path: Path) -> None:
    distribution(tmp_path, "memfabric_hybrid", "1.3.0")
    memcache, memfabric, _, problem = await probe(tmp_path)
    assert (memcache, memfabric) == (None, "1.3.0")
    assert problem is not None
    assert problem.startswith("memcache_hybrid not installed in /opt/py/bin/python3 (Python 3.")
    assert "/opt/py/bin/python3 -m pip install memcache-hybrid" in problem


async def test_metadata_without_libraries(tmp_path: Path) -> None:
    distribution(tmp_path, "memcache_hybrid", "1.3.0")
    distribution(tmp_path, "memfabric_hybrid", "1.3.0")
    problem = (await probe(tmp_path))[3]
    assert problem is not None
    assert "no library directory" in problem


async def test_no_such_interpreter() -> None:
    install = await probe_interpreter(HostView(), "/nonexistent/python")
    assert install.problem == "the interpreter /nonexistent/python is not installed, or not on PATH"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("#!/bin/sh\nexec sleep 30\n", "no answer within"),
        ("#!/bin/sh\necho hello\n", "does not behave like a Python interpreter"),
        ("#!/bin/sh\necho 'KVTIERD-PROBE {\"versions\": 3}'\n", "does not behave like"),
        ("#!/bin/sh\necho broken >&2\nexit 7\n", "exit 7: broken"),
    ],
)
async def test_strange_interpreters(tmp_path: Path, script: str, words: str) -> None:
    fake = tmp_path / "python"
    fake.write_text(script)
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    install = await probe_interpreter(HostView(), str(fake), timeout_seconds=0.7)
    assert install.problem is not None
    assert words in install.problem
    assert str(fake) in install.problem


async def test_an_interpreter_too_new_for_the_wheels() -> None:
    class Old:
        async def run(self, argv: list[str], **_: object) -> CommandResult:
            answer = 'noise\nKVTIERD-PROBE {"python": "3.14.1", "versions": {}, "dirs": []}\n'
            return CommandResult(tuple(argv), code=0, stdout=answer)

    install = await probe_interpreter(HostView(runner=Old()), "/opt/py314")  # type: ignore[arg-type]
    assert install.problem is not None
    assert "CPython 3.10 to 3.13 only" in install.problem


@pytest.mark.parametrize("home", [f"{HOME}/latest", f"{HOME}/latest/", HOME])
def test_run_package(tmp_path: Path, home: str) -> None:
    install = probe_run_package(HostView(plant(tmp_path, PACKAGE, LATEST), machine="aarch64"), home)
    assert install is not None
    assert install.model_dump(exclude_defaults=True) == {
        "runtime": "binary",
        "home": f"{HOME}/latest",
        "executable": f"{HOME}/latest/aarch64-linux/bin/mmc_meta_service",
        "memcache_version": "1.0.0",
        "memfabric_version": "1.0.5",
        "library_dirs": (
            f"{HOME}/latest/aarch64-linux/lib64",
            "/opt/extra",
            "/usr/local/memfabric_hybrid/latest/aarch64-linux/lib64",
        ),
    }


def test_run_package_problems(tmp_path: Path) -> None:
    view = HostView(plant(tmp_path, PACKAGE, LATEST), machine="x86_64")
    other = probe_run_package(view, f"{HOME}/latest")
    assert other is not None
    assert other.problem == f"the run package in {HOME}/latest is for aarch64, but this host is x86_64"
    assert other.executable is None
    assert probe_run_package(view, "/opt/none") is None
    half = plant(tmp_path / "half", {f"{HOME}/latest/version.info": "Version:1.0.0\n"})
    missing = probe_run_package(HostView(half, machine="aarch64"))
    assert missing is not None
    assert "mmc_meta_service is missing" in (missing.problem or "")
    alone = plant(tmp_path / "alone", {k: v for k, v in PACKAGE.items() if "memfabric" not in k}, LATEST)
    without = probe_run_package(HostView(alone, machine="aarch64"))
    assert without is not None
    assert "MemFabric is missing" in (without.problem or "")


def test_set_env_is_read_and_not_run(tmp_path: Path) -> None:
    values = parse_set_env(SET_ENV + f"touch {tmp_path}/ran\nX=`touch {tmp_path}/ran`\n")
    assert values["MEMCACHE_HYBRID_HOME_PATH"] == f"{HOME}/latest"
    assert values["LD_LIBRARY_PATH"] == f"{HOME}/latest/aarch64-linux/lib64:/opt/extra"
    assert "PYTHON_LIB_DIR" not in values
    assert list(tmp_path.iterdir()) == []
    assert parse_set_env('A="/a"\nexport B=$A/b:${A}/c:$NONE/d\n')["B"] == "/a/b:/a/c"
