"""The launcher, against the real kernel: what a launched command sees, and that the host sees nothing of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvtierd
from kvtierd.emulator.launch import EXIT_CANNOT_ENTER, cleanup, shm_dir_for

REPOSITORY = Path(kvtierd.__file__).parent.parent
LOOK = """
import json, os, sys
from pathlib import Path
Path("/dev/shm/mark").write_text(sys.argv[1])
Path("/tmp/private-to-the-unit").write_text("")
Path("/var/log/memcache_hybrid/a.log").write_text(sys.argv[1])
Path("/tmp/mmc_meta_service.lock").write_text(sys.argv[1])
print(json.dumps({
    "pid": os.getpid(), "uid": os.getuid(), "cwd": os.getcwd(),
    "install": Path("/etc/ascend_install.info").read_text(),
    "shm": sorted(os.listdir("/dev/shm")), "etc": sorted(os.listdir("/etc")), "tmp": sorted(os.listdir("/tmp")),
    "hosts": Path("/etc/hosts").read_text(), "localtime": os.path.islink("/etc/localtime"),
    "hugepages": os.listdir("/dev/hugepages") if os.path.isdir("/dev/hugepages") else [],
}))
"""


def succeeds(*argv: str, env: dict[str, str] | None = None) -> bool:
    return (
        subprocess.run(argv, env=env, cwd="/", capture_output=True, check=False, timeout=30).returncode == 0
    )


def may_have_a_namespace() -> bool:
    """Asked with util-linux, not with the code under test."""
    flags = ["--mount"] if os.geteuid() == 0 else ["--user", "--map-current-user", "--mount"]
    return shutil.which("unshare") is not None and succeeds("unshare", *flags, "true")


needs_namespace = pytest.mark.skipif(
    not may_have_a_namespace(), reason="this kernel or container forbids mount namespaces"
)


@pytest.fixture
def ascend_home(tmp_path: Path) -> Path:
    home = tmp_path / "ascend"
    (home / "driver").mkdir(parents=True)
    (home / "driver/version.info").write_text("Innerversion=V1\n")
    return home


def launch(
    root: Path, ascend_home: Path, *argv: str, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvtierd.emulator.launch", "--root", str(root), *argv],
        env={"PATH": os.environ["PATH"], "ASCEND_HOME_PATH": str(ascend_home)},
        cwd=cwd,
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
    )


@needs_namespace
def test_what_a_unit_sees(tmp_path: Path, ascend_home: Path) -> None:
    root = tmp_path / "root"
    host_before = sorted(p.name for p in Path("/etc").iterdir()), Path("/proc/self/mountinfo").read_text()
    try:
        done = launch(root, ascend_home, "--", sys.executable, "-c", LOOK, "one", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        seen = json.loads(done.stdout)
        assert seen["install"] == f"Driver_Install_Path_Param={ascend_home}\n"
        assert seen["uid"] == os.getuid()
        assert seen["cwd"] == str(tmp_path)
        assert seen["shm"] == ["mark"]
        assert set(host_before[0]) | {"ascend_install.info"} == set(seen["etc"])
        assert seen["hosts"] == Path("/etc/hosts").read_text()
        assert seen["localtime"] == Path("/etc/localtime").is_symlink()
        assert tmp_path.parts[2] in seen["tmp"] or tmp_path.parts[1] != "tmp"
        assert seen["hugepages"] == []
        assert (root / "log/memcache_hybrid/a.log").read_text() == "one"
        assert (root / "mmc_meta_service.lock").read_text() == "one"
        assert (shm_dir_for(root) / "mark").read_text() == "one"
        assert not Path("/tmp/private-to-the-unit").exists()
        assert (
            sorted(p.name for p in Path("/etc").iterdir()),
            Path("/proc/self/mountinfo").read_text(),
        ) == host_before
    finally:
        cleanup(root)
    assert not shm_dir_for(root).exists()


@needs_namespace
def test_one_root_is_shared_and_two_are_apart(tmp_path: Path, ascend_home: Path) -> None:
    roots = [tmp_path / "a", tmp_path / "b"]
    try:
        for root, word in zip(roots, ("one", "two"), strict=True):
            assert launch(root, ascend_home, sys.executable, "-c", LOOK, word).returncode == 0
        for root, word in zip(roots, ("one", "two"), strict=True):
            again = launch(root, ascend_home, "cat", "/dev/shm/mark", "/tmp/mmc_meta_service.lock")
            assert again.stdout == word * 2
    finally:
        for root in roots:
            cleanup(root)


@needs_namespace
def test_it_becomes_the_command(tmp_path: Path, ascend_home: Path) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "kvtierd.emulator.launch",
            "--root",
            str(tmp_path / "r"),
            "sh",
            "-c",
            "echo $$; exit 7",
        ],
        env={"PATH": os.environ["PATH"], "ASCEND_HOME_PATH": str(ascend_home)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=30)
        assert int(output) == process.pid
        assert process.returncode == 7
    finally:
        cleanup(tmp_path / "r")


@needs_namespace
def test_relative_root_means_the_same_place(tmp_path: Path, ascend_home: Path) -> None:
    try:
        done = launch(Path("r"), ascend_home, "sh", "-c", "echo x > /dev/shm/x", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert (shm_dir_for(tmp_path / "r") / "x").exists()
    finally:
        cleanup(tmp_path / "r")


@needs_namespace
@pytest.mark.root
def test_an_ordinary_user_gets_the_same(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip(
            "needs root to become another user; every other test here already runs as an ordinary one"
        )
    nobody = 65534
    python = shutil.which("python3", path="/usr/bin:/bin")
    become = ["setpriv", f"--reuid={nobody}", f"--regid={nobody}", "--clear-groups"]
    probe = "import sys, kvtierd.errors; sys.exit(sys.version_info < (3, 11))"
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
    if not python or not succeeds(*become, python, "-c", probe, env=env):
        pytest.skip("nobody has no Python >= 3.11 that can read this checkout")
    if not succeeds(*become, "unshare", "--user", "--mount", "true", env=env):
        pytest.skip("this kernel forbids user namespaces to ordinary users")
    # pytest's tmp_path is closed to others.
    base = Path("/tmp") / f"kvtierd-test-nobody-{os.getpid()}"
    base.mkdir()
    try:
        (base / "ascend/driver").mkdir(parents=True)
        (base / "ascend/driver/version.info").write_text("Innerversion=V1\n")
        os.chown(base, nobody, nobody)
        done = subprocess.run(
            [
                *become,
                python,
                "-m",
                "kvtierd.emulator.launch",
                "--root",
                str(base / "root"),
                python,
                "-c",
                LOOK,
                "mine",
            ],
            env={**env, "ASCEND_HOME_PATH": str(base / "ascend")},
            cwd="/",
            check=False,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 0, done.stderr
        seen = json.loads(done.stdout)
        assert seen["uid"] == nobody
        assert seen["install"] == f"Driver_Install_Path_Param={base / 'ascend'}\n"
        assert shm_dir_for(base / "root").stat().st_uid == nobody
        assert (base / "root/log/memcache_hybrid/a.log").read_text() == "mine"
    finally:
        cleanup(base / "root")
        shutil.rmtree(base)


def test_usage(tmp_path: Path, ascend_home: Path) -> None:
    nothing = launch(tmp_path / "r", ascend_home)
    assert nothing.returncode == 2
    assert "--root DIR [--] COMMAND" in nothing.stderr


def test_missing_driver_is_said(tmp_path: Path) -> None:
    done = launch(tmp_path / "r", tmp_path, "true")
    assert done.returncode == EXIT_CANNOT_ENTER
    assert "driver/version.info is missing" in done.stderr
    assert "Traceback" not in done.stderr


def test_root_inside_shared_memory_is_refused(ascend_home: Path) -> None:
    done = launch(Path("/dev/shm/kvtierd-no-such-root"), ascend_home, "true")
    assert done.returncode == EXIT_CANNOT_ENTER
    assert "choose another directory" in done.stderr
    assert not Path("/dev/shm/kvtierd-no-such-root").exists()


@needs_namespace
def test_missing_command_is_said(tmp_path: Path, ascend_home: Path) -> None:
    try:
        done = launch(tmp_path / "r", ascend_home, "/no/such/command")
    finally:
        cleanup(tmp_path / "r")
    assert done.returncode == EXIT_CANNOT_ENTER
    assert "cannot run '/no/such/command': No such file or directory" in done.stderr


def test_a_strangers_shared_memory_is_refused(tmp_path: Path, ascend_home: Path) -> None:
    """Its name can be guessed: a symbolic link there must not be followed."""
    root = tmp_path / "r"
    shm = shm_dir_for(root)
    shm.symlink_to(tmp_path)
    try:
        done = launch(root, ascend_home, "true")
        cleanup(root)
        assert shm.is_symlink()
    finally:
        shm.unlink()
    assert done.returncode == EXIT_CANNOT_ENTER
    assert "is not a directory of this user or root" in done.stderr


def test_cleanup_of_nothing_is_fine(tmp_path: Path) -> None:
    cleanup(tmp_path / "never used")


def test_roots_of_one_pool_share_memory_and_nothing_else(tmp_path):
    owner, other = tmp_path / "owner", tmp_path / "other"
    owner.mkdir()
    other.mkdir()
    (other / "memory-of").symlink_to(owner)
    assert shm_dir_for(other) == shm_dir_for(owner)
    shm_dir_for(owner).mkdir()
    cleanup(other)
    assert shm_dir_for(owner).exists(), "only its owner removes it"
    cleanup(owner)
    assert not shm_dir_for(owner).exists()
