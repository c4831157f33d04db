"""A container as ``docker run --init`` makes one, with the tool that docker itself uses: runc.

Docker's own capabilities, masked and read-only paths, devices, limits and /dev/shm; its init (tini); and what its
documentation says that its seccomp profile refuses (the profile itself is a list of what it allows). Not here: AppArmor,
and a network other than a loopback interface.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from debian import CONTAINER_CAPABILITIES, CannotHaveError

MIB = 1024 * 1024
INIT = ("/usr/bin/tini", "--")
MASKED = (
    "asound",
    "acpi",
    "kcore",
    "keys",
    "latency_stats",
    "timer_list",
    "timer_stats",
    "sched_debug",
    "scsi",
)
READ_ONLY = ("bus", "fs", "irq", "sys", "sysrq-trigger")
# https://docs.docker.com/engine/security/seccomp/, "Significant syscalls blocked by the default profile".
REFUSED = (
    "acct", "add_key", "clock_adjtime", "clock_settime", "create_module", "delete_module", "finit_module",
    "init_module", "ioperm", "iopl", "kcmp", "kexec_file_load", "kexec_load", "keyctl", "move_pages", "name_to_handle_at",
    "open_by_handle_at", "pivot_root", "process_vm_readv", "process_vm_writev", "reboot", "request_key", "settimeofday",
    "swapoff", "swapon", "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register",
)  # fmt: skip
REFUSED_WITHOUT = {
    "sys_admin": (
        "bpf", "fanotify_init", "fsconfig", "fsmount", "fsopen", "lookup_dcookie", "mount", "mount_setattr", "move_mount",
        "open_tree", "perf_event_open", "quotactl", "setdomainname", "sethostname", "setns", "umount", "umount2", "unshare",
    ),
    "sys_nice": ("get_mempolicy", "mbind", "set_mempolicy"),
}  # fmt: skip
NAMESPACE_FLAGS = 0x7E020000  # CLONE_NEW*
ENOSYS, EPERM = 38, 1


@dataclasses.dataclass(frozen=True)
class Run:
    """What stands behind ``docker run``.

    Attributes:
        add: ``--cap-add``, in small letters and without CAP_.
        volumes: ``--volume``: path inside -> (directory on the host, ``rw`` or ``ro``).
        shm_bytes: ``--shm-size``.
        seccomp: False for ``--security-opt seccomp=unconfined``.
        init: ``--init``.
    """

    command: Sequence[str]
    add: Sequence[str] = ()
    volumes: Mapping[str, tuple[Path, str]] = dataclasses.field(default_factory=dict)
    shm_bytes: int = 64 * MIB
    seccomp: bool = True
    init: bool = False
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


def parse(command_line: Sequence[str], host: Path) -> Run:
    """The words of a ``docker run``, with the host's directories below ``host``.

    There is no NPU, no hugepage and no network to give away here: those options are read and left out.
    """
    parser = argparse.ArgumentParser(prog="docker run", exit_on_error=False)
    for flag in ("--detach", "--init"):
        parser.add_argument(flag, action="store_true")
    for option in ("--name", "--network", "--ulimit", "--shm-size", "--stop-timeout"):
        parser.add_argument(option)
    for option in ("--volume", "--device", "--cap-add"):
        parser.add_argument(option, action="append", default=[])
    parser.add_argument("image")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args(command_line)
    volumes = {}
    for volume in given.volume:
        source, target, *mode = volume.split(":")
        if (host / source.lstrip("/")).is_dir():
            volumes[target] = (host / source.lstrip("/"), *(mode or ["rw"]))
    return Run(
        command=given.command,
        add=[c.lower() for c in given.cap_add],
        volumes=volumes,
        init=given.init,
    )


class Container:
    """One container over a root file system; gone with the block of ``running``."""

    def __init__(self, root: Path, directory: Path, run: Run) -> None:
        self._bundle = directory
        self._name = (
            f"kvtierd-container-{os.getpid()}"  # tests/systemd/lab.py knows by it whose control group it is
        )
        self._runc = ("runc", "--root", str(directory / "runc"))
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(_configuration(root, run, self._name), indent=1))
        self._log = directory / "log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """``docker run --detach``."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._runc, "run", "--bundle", str(self._bundle), self._name],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def execute(
        self, *command: str, check: bool = True, timeout_seconds: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """``docker exec``."""
        done = subprocess.run(
            [*self._runc, "exec", self._name, *command],
            capture_output=True, text=True, timeout=timeout_seconds, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        if check and done.returncode:
            raise AssertionError(
                f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}\n{self.log()}"
            )
        return done

    def log(self) -> str:
        """``docker logs``."""
        return self._log.read_text(errors="replace")

    def is_running(self) -> bool:
        """Whether its first process lives."""
        return self._process is not None and self._process.poll() is None

    def stop(self, seconds: float = 90) -> tuple[int, float]:
        """``docker stop --time``: (exit status, seconds it took)."""
        assert self._process is not None
        started = time.monotonic()
        subprocess.run([*self._runc, "kill", self._name, "TERM"], check=True, timeout=30)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        took = time.monotonic() - started
        self.kill()
        return self._process.returncode, took

    def kill(self) -> None:
        """``docker rm --force``: whatever it runs, all of it."""
        subprocess.run([*self._runc, "delete", "--force", self._name], check=False, timeout=30)
        if self._process is not None:
            self._process.wait(30)


@contextlib.contextmanager
def running(root: Path, directory: Path, run: Run) -> Iterator[Container]:
    """A started container for the time of the block."""
    container = Container(root, directory, run)
    container.start()
    try:
        yield container
    finally:
        container.kill()


def check_runc(root: Path, directory: Path) -> None:
    """Raises ``CannotHaveError`` when no container can be made here."""
    if shutil.which("runc") is None:
        raise CannotHaveError("runc is missing: apt-get install runc")
    with running(root, directory, Run(["true"])) as container:
        deadline = time.monotonic() + 30
        while container.is_running() and time.monotonic() < deadline:
            time.sleep(0.05)
        if container.log().strip():
            raise CannotHaveError(f"runc cannot make a container here: {container.log().strip()[-300:]}")


def _configuration(root: Path, run: Run, name: str) -> dict[str, object]:
    """The runtime's configuration: https://github.com/opencontainers/runtime-spec."""
    capabilities = [f"CAP_{c.upper()}" for c in (*CONTAINER_CAPABILITIES.split(","), *run.add)]
    sets = ("bounding", "effective", "permitted")
    variables = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        **run.environment,
    }
    binds = [(str(source), target, mode) for target, (source, mode) in run.volumes.items()]
    linux: dict[str, object] = {
        "cgroupsPath": f"/{name}",
        "namespaces": [{"type": kind} for kind in ("mount", "pid", "ipc", "uts", "network")],
        "resources": {"devices": [{"allow": False, "access": "rwm"}]},
        "maskedPaths": [*(f"/proc/{p}" for p in MASKED), "/sys/firmware", "/sys/devices/virtual/powercap"],
        "readonlyPaths": [f"/proc/{p}" for p in READ_ONLY],
    }
    if run.seccomp:
        linux["seccomp"] = _seccomp(run.add)
    return {
        "ociVersion": "1.0.2",
        "hostname": "kvtierd",
        "root": {"path": str(root), "readonly": False},
        "process": {
            "user": {"uid": 0, "gid": 0},
            "cwd": "/",
            "args": [*(INIT if run.init else ()), *run.command],
            "env": [f"{k}={v}" for k, v in variables.items()],
            "capabilities": dict.fromkeys(sets, capabilities),
            "noNewPrivileges": False,
            "oomScoreAdj": 0,
        },
        "mounts": [
            _mount("proc", "/proc", "proc", "nosuid", "noexec", "nodev"),
            _mount("tmpfs", "/dev", "tmpfs", "nosuid", "strictatime", "mode=755", "size=65536k"),
            _mount("devpts", "/dev/pts", "devpts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"),
            _mount("sysfs", "/sys", "sysfs", "nosuid", "noexec", "nodev", "ro"),
            _mount("cgroup", "/sys/fs/cgroup", "cgroup", "nosuid", "noexec", "nodev", "ro"),
            _mount("mqueue", "/dev/mqueue", "mqueue", "nosuid", "noexec", "nodev"),
            _mount("shm", "/dev/shm", "tmpfs", "nosuid", "noexec", "nodev", "mode=1777", f"size={run.shm_bytes}"),
            *(_mount(source, target, "bind", "rbind", mode, "rprivate") for source, target, mode in binds),
        ],
        "linux": linux,
    }  # fmt: skip


def _mount(source: str, target: str, kind: str, *options: str) -> dict[str, object]:
    return {"destination": target, "type": kind, "source": source, "options": list(options)}


def _seccomp(add: Sequence[str]) -> dict[str, object]:
    refused = [
        *REFUSED,
        *(call for need, calls in REFUSED_WITHOUT.items() if need not in add for call in calls),
    ]
    rules: list[dict[str, object]] = [{"names": refused, "action": "SCMP_ACT_ERRNO", "errnoRet": EPERM}]
    if "sys_admin" not in add:
        # clone3's flags are in memory, where a filter cannot look: the C library falls back to clone.
        rules.append({"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS})
        # Any one of the flags; a filter compares one value, hence one rule for each bit.
        bits = [1 << n for n in range(32) if NAMESPACE_FLAGS >> n & 1]
        rules += [
            {
                "names": ["clone"], "action": "SCMP_ACT_ERRNO", "errnoRet": EPERM,
                "args": [{"index": 0, "value": bit, "valueTwo": bit, "op": "SCMP_CMP_MASKED_EQ"}],
            }
            for bit in bits
        ]  # fmt: skip
    return {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": rules}
