"""Boots a real systemd for tests: a Debian of its own in namespaces (systemd-nspawn), with this checkout in it.

Needs root, ``systemd-nspawn`` (systemd-container) and ``mmdebstrap``; the root file system is made once (a minute, 240 MB)
and kept in the user's cache directory, under an overlay that takes what the guest writes; ``reboot`` keeps that. The
checkout and the interpreter are mounted read-only. Nothing is left behind: no process, no mount, no control group. The
guest shares the host's kernel, so its /proc/sys stays read-only, and /sys but for what ``OPEN_HUGEPAGES`` opens.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import platformdirs

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "systemd,systemd-sysv,dbus,iproute2,procps,init-system-helpers,adduser,python3-minimal,libpython3-stdlib"
)
IMAGE_VERSION = 1  # one more when PACKAGES change
# For tests of the packages: all of Python, as the .deb asks for it; rpm and dnf, which only know what they installed.
INSTALLING = ("installing", "python3,rpm,dnf")
BOOT_SECONDS = 60.0
OFF_SECONDS = 20.0
# Run inside: hugepages of the host's kernel can be written from then on. Whoever does it puts their number back.
# systemd-nspawn shows a boot id of its own, which a service with a fresh /proc does not see; with one kernel, one id.
OPEN_HUGEPAGES = """
while umount /proc/sys/kernel/random/boot_id 2>/dev/null; do :; done
mkdir -p /run/open-sys
mount -t sysfs sysfs /run/open-sys
mount -o remount,rw /run/open-sys
mount --bind /run/open-sys/kernel/mm /sys/kernel/mm
mount --bind /run/open-sys/devices/system/node /sys/devices/system/node
"""
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "SYSTEMD_PAGER": "",
    "SYSTEMD_COLORS": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "TESTS_RUN_IN_GUEST": "1",
}


class CannotBootError(Exception):
    """Why there can be no guest here; the tests are skipped with it."""


def suite() -> str:
    """The Debian release of the guest: this host's, since the host's interpreter has to run in it."""
    release = platform.freedesktop_os_release()
    return release.get("VERSION_CODENAME", "bookworm") if release.get("ID") == "debian" else "bookworm"


def image(extra: tuple[str, str] | None = None) -> Path:
    """The guest's root file system, a directory that nobody writes to; made when there is none.

    Args:
        extra: A name and the further packages that it stands for.

    Raises:
        CannotBootError: a tool is missing, or no package archive can be reached.
    """
    if os.geteuid() != 0:
        raise CannotBootError("only root can boot a guest")
    for tool, package in (("systemd-nspawn", "systemd-container"), ("mmdebstrap", "mmdebstrap")):
        if shutil.which(tool) is None:
            raise CannotBootError(f"{tool} is missing: apt-get install {package}")
    name = f"guest-{suite()}-{platform.machine()}-{IMAGE_VERSION}"
    packages = PACKAGES
    if extra is not None:
        name, packages = f"{name}-{extra[0]}", f"{packages},{extra[1]}"
    cached = platformdirs.user_cache_path("kvtierd") / "systemd" / name
    if cached.exists():
        return cached
    cached.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cached.parent, prefix="unfinished-") as unfinished:
        made = subprocess.run(
            ["mmdebstrap", "--variant=minbase", f"--include={packages}", suite(), f"{unfinished}/root.tar"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if made.returncode:
            raise CannotBootError(f"mmdebstrap cannot make a root file system: {made.stderr.strip()[-300:]}")
        root = Path(unfinished) / "root"
        root.mkdir()
        subprocess.run(["tar", "-xf", f"{unfinished}/root.tar", "-C", str(root)], check=True)
        with contextlib.suppress(OSError):  # somebody else was faster
            root.rename(cached)
    return cached


def _binds() -> list[Path]:
    """What of the host the guest sees, read-only, at the same place."""
    from kvtierd.emulator.build import ensure_driver
    from kvtierd.provision.assembly import cache_directory

    ensure_driver(cache_directory())  # there is no compiler in the guest
    wanted = [ROOT, Path(sys.prefix), Path(sys.base_prefix), cache_directory()]
    return [path for path in wanted if path != Path("/usr") and path.exists()]


class Guest:
    """One booted systemd.

    Args:
        name: Of the machine and of its control group.
        directory: An empty directory for what it shares with the tests.
        cgroup: ``v2``, or ``v1`` for the hybrid layout of older distributions.
        extra: See ``image``.
    """

    def __init__(
        self, name: str, directory: Path, cgroup: str = "v2", extra: tuple[str, str] | None = None
    ) -> None:
        self.name = name
        self.shared = directory / "shared"  # /mnt in the guest, writable
        self._written = directory / "written"
        self._console = directory / "console"
        self._cgroup_version = cgroup
        self._extra = extra
        self._nspawn: subprocess.Popen[bytes] | None = None
        self._leader = 0
        self._groups: list[Path] = []

    def start(self) -> None:
        """Boots it and waits until systemd says that it runs.

        Raises:
            CannotBootError: with what the console said.
        """
        for made in (self.shared, *(self._written / name for name in ("upper", "work", "root"))):
            made.mkdir(parents=True, exist_ok=True)
        binds = [f"--bind-ro={path}" for path in _binds()]
        # The overlay is in a mount namespace of its own, and ends with the last process in there.
        mount = 'mount -t overlay overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work" "$2/root"'
        overlay = f'{mount} && shift 2 && exec "$@"'
        argv = [
            "unshare", "--mount", "--propagation=slave", "--", "/bin/sh", "-c", overlay, "overlay", str(image(self._extra)),
            str(self._written),
            "systemd-nspawn", "--quiet", f"--directory={self._written}/root", f"--machine={self.name}", "--boot",
            "--capability=all", "--private-network", "--resolv-conf=off", "--timezone=off", "--link-journal=no",
            "--console=read-only", f"--bind={self.shared}:/mnt", *binds,
        ]  # fmt: skip
        env = {**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1" if self._cgroup_version == "v2" else "0"}
        if not Path("/run/systemd/system").exists():
            # There is no systemd outside that would give it a control group.
            argv += ["--register=no", "--keep-unit"]
            for left in _unified().glob("kvtierd-*-*"):  # of tests that were killed
                if not Path(f"/proc/{left.name.rpartition('-')[2]}").exists():
                    _remove_groups(left.name)
            group = _unified() / f"kvtierd-{self.name}"
            group.mkdir(exist_ok=True)
            self._groups = [group]
            enter = 'echo $$ >"$1/cgroup.procs" && shift && exec "$@"'
            argv = ["/bin/sh", "-c", enter, "enter", str(group), *argv]
        with self._console.open("ab") as console:
            self._nspawn = subprocess.Popen(
                argv, env=env, stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + BOOT_SECONDS
        while time.monotonic() < deadline:
            if self._nspawn.poll() is not None:
                break
            self._leader = _only_child(self._nspawn.pid)  # first a helper, then process 1
            if self._leader:
                state = self.run("systemctl", "is-system-running", check=False).stdout.strip()
                if state in {"running", "degraded"}:
                    return
            time.sleep(0.05)
        said = self._console.read_text(errors="replace")[-1500:]
        self.stop()
        raise CannotBootError(f"systemd-nspawn did not boot a guest here: {said}")

    def argv(self, *command: str) -> list[str]:
        """A command line that runs this command inside."""
        settings = [f"{name}={value}" for name, value in ENVIRONMENT.items()]
        return [
            "nsenter", f"--target={self._leader}", "--mount", "--uts", "--ipc", "--pid", "--net", "--cgroup",
            "--root", "--wd", "env", f"--chdir={ROOT}", "-i", *settings, *command,
        ]  # fmt: skip

    def run(
        self, *command: str, check: bool = True, timeout: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command inside."""
        done = subprocess.run(
            self.argv(*command), capture_output=True, text=True, timeout=timeout, check=False
        )
        if check and done.returncode:
            raise AssertionError(f"{command}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def written(self, path: str) -> Path:
        """Where the host has what the guest wrote to this path."""
        return self._written / "upper" / path.lstrip("/")

    def reboot(self, while_off: Callable[[], object] = lambda: None) -> None:
        """Powers it off and boots it again, with everything that was written. Raises ``CannotBootError``."""
        self.stop()
        while_off()
        self._leader = 0
        self.start()

    def stop(self) -> None:
        """Powers it off, in order if it will; then nothing of it is left."""
        process = self._nspawn
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                if self._leader:
                    os.kill(self._leader, signal.SIGRTMIN + 4)  # poweroff.target
            try:
                process.wait(OFF_SECONDS if self._leader else 0.1)
            except subprocess.TimeoutExpired:
                process.kill()  # its process namespace goes with it
                process.wait(10)
        self._nspawn = None
        for group in self._groups:
            _remove_groups(group.name)


@contextlib.contextmanager
def booted(name: str, cgroup: str = "v2", extra: tuple[str, str] | None = None) -> Iterator[Guest]:
    """A guest for the time of the block. Raises ``CannotBootError``."""
    directory = Path(tempfile.mkdtemp(prefix=f"kvtierd-guest-{name}-"))
    guest = Guest(f"{name}-{os.getpid()}", directory, cgroup, extra)
    try:
        guest.start()
        yield guest
    finally:
        guest.stop()
        shutil.rmtree(directory, ignore_errors=True)


def _unified() -> Path:
    hybrid = Path("/sys/fs/cgroup/unified")
    return hybrid if hybrid.is_dir() else Path("/sys/fs/cgroup")


def _only_child(pid: int) -> int:
    """systemd-nspawn's only child is the guest's process 1."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0
    return int(children[-1]) if children else 0


def _remove_groups(name: str) -> None:
    """systemd-nspawn makes its control group in every hierarchy that is mounted. What still runs in one is killed."""
    bases: Sequence[Path] = [Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").iterdir()]
    for base in bases:
        top = base / name
        for _ in range(100):
            if not top.is_dir():
                break
            for directory, _names, _files in os.walk(top, topdown=False):
                with contextlib.suppress(OSError):
                    for pid in (Path(directory) / "cgroup.procs").read_text().split():
                        os.kill(int(pid), signal.SIGKILL)
                with contextlib.suppress(OSError):
                    Path(directory).rmdir()
            time.sleep(0.05)


if __name__ == "__main__":
    with booted("command") as one:
        sys.exit(subprocess.run(one.argv(*sys.argv[1:]), check=False).returncode)
