"""A small Debian in a directory, entered like a container: no mount and no process outlives a call."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import platformdirs

ROOT = Path(__file__).parents[2]
SUITE = "bookworm"
# What a host has anyway; systemd for sysusers and systemctl, which work without a running one.
PACKAGES = f"python3,python3.{sys.version_info.minor},systemd,passwd,procps,python3-pip,libcap2-bin"
IMAGE_VERSION = 1  # one more when PACKAGES change
# An image for containers: no systemd, and what docker mounts into it (its init).
CONTAINER_PACKAGES = f"python3,python3.{sys.version_info.minor},passwd,tini"
CONTAINER_IMAGE = f"container-{SUITE}-1"
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
# Docker's default set of capabilities.
CONTAINER_CAPABILITIES = (
    "chown,dac_override,fowner,fsetid,kill,setgid,setuid,setpcap,net_bind_service,net_raw,sys_chroot,mknod,"
    "audit_write,setfcap"
)
MOUNTS = """
set -e
root=$1; shift
mount --bind "$root" "$root"
mount -t tmpfs -o mode=0755 tmpfs "$root/dev"
for name in {devices}; do touch "$root/dev/$name"; mount --bind "/dev/$name" "$root/dev/$name"; done
mkdir "$root/dev/shm"; mount -t tmpfs tmpfs "$root/dev/shm"
ln -s /proc/self/fd "$root/dev/fd"
mount -t tmpfs -o mode=0755 tmpfs "$root/run"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
ip link set lo up
cd "$root"
pivot_root . mnt
umount -l mnt
exec chroot . "$@"
"""


def commands(mark: str) -> list[str]:
    """What root types in one example of docs/install.md: the one behind the comment with this mark."""
    text = (ROOT / "docs/install.md").read_text()
    block = re.search(rf"<!-- tested: {mark} -->\n```console\n(.*?)```", text, re.DOTALL)
    assert block is not None, mark
    lines = block[1].replace("\\\n", " ").splitlines()
    return [line[2:] for line in lines if line.startswith("# ")]


class CannotHaveError(Exception):
    """Why there can be no such Debian here; tests are skipped with it."""


def build_packages(out: Path, *arguments: str) -> list[Path]:
    """Runs the build; the wheels it downloads are kept between sessions."""
    subprocess.run(
        [sys.executable, str(ROOT / "packaging/build.py"), "--out", str(out), *arguments],
        check=True,
        timeout=900,
    )
    return sorted(out.iterdir())


def debian_image(name: str = f"{SUITE}-{IMAGE_VERSION}", packages: str = PACKAGES) -> Path:
    """The archive, made once and kept in the user's cache directory. A name stands for one choice of packages.

    Raises:
        CannotHaveError: a tool is missing, or no package archive can be reached.
    """
    if os.geteuid() != 0:
        raise CannotHaveError("only root can make a Debian and enter it")
    if sys.version_info[:2] != (3, 11):
        raise CannotHaveError(
            f"Debian {SUITE} has Python 3.11, and the packages are for {sys.version_info[:2]}"
        )
    for tool in ("mmdebstrap", "unshare", "pivot_root"):
        if shutil.which(tool) is None:
            raise CannotHaveError(f"{tool} is missing: apt-get install mmdebstrap util-linux")
    path = Path(platformdirs.user_cache_dir("kvtierd")) / "packaging" / f"{name}.tar"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.tar")
        command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={packages}", SUITE, str(part)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            part.unlink(missing_ok=True)
            raise CannotHaveError(f"mmdebstrap failed: {done.stderr.strip().splitlines()[-1:]}")
        part.replace(path)
    return path


class Debian:
    """One such Debian. Each call has mounts, process ids and a network of its own, which end with it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def unpack(cls, image: Path, directory: Path) -> Debian:
        """A new one from the archive."""
        subprocess.run(
            ["tar", "-xf", str(image), "-C", str(directory), "--exclude=./dev/*", "--numeric-owner"],
            check=True,
        )
        return cls(directory)

    def run(
        self,
        *command: str,
        check: bool = True,
        capabilities: str | None = None,
        env: dict[str, str] | None = None,
        timeout_seconds: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        """A command inside; ``capabilities``: all that it and its children may ever have."""
        limit: Sequence[str] = ()
        if capabilities is not None:
            limit = (
                "setpriv",
                "--bounding-set",
                "-all," + ",".join(f"+{c}" for c in capabilities.split(",")),
            )
        variables = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "LANG": "C.UTF-8",
            **(env or {}),
        }
        done = subprocess.run(
            ["unshare", "--mount", "--pid", "--net", "--ipc", "--fork", "--kill-child", "sh", "-c",
             MOUNTS.format(devices=" ".join(DEVICES)), "sh", str(self.root),
             "env", "-i", *(f"{k}={v}" for k, v in variables.items()), *limit, *command],
            capture_output=True, text=True, timeout=timeout_seconds, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        if check and done.returncode:
            raise AssertionError(f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done

    def shell(self, script: str, **options: object) -> str:
        """A script's standard output."""
        return self.run("bash", "-euc", script, **options).stdout  # type: ignore[arg-type]

    def install(self, *packages: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """dpkg --install."""
        for package in packages:
            shutil.copy(package, self.root / "tmp" / package.name)
        return self.run("dpkg", "--install", *(f"/tmp/{p.name}" for p in packages), check=check)

    def path(self, inside: str) -> Path:
        """Where a file of it is on the host."""
        return self.root / inside.lstrip("/")
