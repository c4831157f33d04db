"""What several checks look at: a file's mode and owner, running processes, mounts; on this host and on recorded ones.

Modes, owners and room come from ``stat`` and ``df``, so that a recorded host answers like a live one.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final, NamedTuple

from kvtierd.checks import CannotTellError, Patient
from kvtierd.host.view import HostView

MOST_PROCESSES: Final = 20_000
CONTAINER_MARKS: Final = ("/.dockerenv", "/run/.containerenv")


class FileFacts(NamedTuple):
    """What is at a path, a symbolic link not followed. ``mode`` has the twelve permission bits."""

    kind: str
    mode: int
    user: str
    group: str

    @property
    def is_link(self) -> bool:
        """Whether it is a symbolic link."""
        return self.kind == "symbolic link"


async def file_facts(patient: Patient, path: str, *, follow: bool = False) -> FileFacts | None:
    """Kind, mode and owner of what is at a path; ``None`` when nothing is there. Raises ``CannotTellError``."""
    if not present(patient.view, path):
        return None
    words = ("stat", "-L") if follow else ("stat",)
    result = await patient.run(*words, "-c", "%a %U %G %F", path)
    match = re.fullmatch(r"([0-7]{1,5}) (\S+) (\S+) (.+)", result.stdout.strip())
    if not result.ok or not match:
        raise CannotTellError(result.describe() or f"stat said {result.stdout[:80]!r} of {path}")
    return FileFacts(match[4], int(match[1], 8), match[2], match[3])


def present(view: HostView, path: str) -> bool:
    """Whether there is something at this path, if only a link that leads nowhere. Raises ``CannotTellError``."""
    try:
        parent, _, name = path.rstrip("/").rpartition("/")
        (view.path(parent or "/") / name).lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise CannotTellError(f"{path} cannot be looked at: {error.strerror or error}") from None
    return True


def resolved(view: HostView, path: str) -> str:
    """The path on that host with all links followed."""
    real = here(view, path)
    return os.path.realpath(real) if view.live else "/" + str(real.relative_to(view.root)).removeprefix(".")


def nearest(view: HostView, path: str) -> str:
    """The path itself, or the nearest directory above it that is there."""
    while path not in {"", "/"} and not view.exists(path):
        path = path.rpartition("/")[0]
    return path or "/"


class Process(NamedTuple):
    """A running process. ``environ`` is ``None`` where it may not be read (another user's)."""

    pid: int
    argv: tuple[str, ...]
    environ: dict[str, str] | None

    @property
    def name(self) -> str:
        """The program's name, without its directory."""
        return self.argv[0].rpartition("/")[2] if self.argv else "?"


def processes(view: HostView) -> list[Process]:
    """Those with a command line, by pid. May wait for a process that the kernel holds: call it in a thread."""
    found = []
    pids = sorted(int(name) for name in view.names("/proc") if name.isdecimal())
    for pid in pids[:MOST_PROCESSES]:
        argv = _words(view, f"/proc/{pid}/cmdline")
        if argv:
            pairs = _words(view, f"/proc/{pid}/environ")
            environ = None if pairs is None else dict(p.split("=", 1) for p in pairs if "=" in p)
            found.append(Process(pid, argv, environ))
    return found


async def all_processes(patient: Patient) -> list[Process]:
    """``processes`` of the host, read once for all checks. Raises ``CannotTellError``."""

    async def asking() -> list[Process]:
        return await patient.look("/proc", lambda: processes(patient.view))

    found: list[Process] = await patient.once("command lines", asking)
    return found


def container_mark(view: HostView) -> str | None:
    """The file by which docker or podman marks a container, when the host that is looked at is one."""
    return next((mark for mark in CONTAINER_MARKS if view.exists(mark)), None)


def _words(view: HostView, name: str) -> tuple[str, ...] | None:
    try:
        text = view.read(name)
    except OSError:
        return None
    return tuple(text.removesuffix("\n").removesuffix("\0").split("\0")) if text.strip("\0\n ") else ()


class Mount(NamedTuple):
    """A line of /proc/mounts."""

    device: str
    directory: str
    kind: str
    options: tuple[str, ...]

    @property
    def read_only(self) -> bool:
        """Whether nothing can be written there."""
        return "ro" in self.options


def mounts(view: HostView) -> list[Mount]:
    """What is mounted, in the kernel's order. Raises ``CannotTellError``."""
    text = view.text("/proc/mounts")
    if text is None:
        raise CannotTellError("/proc/mounts cannot be read")
    found = []
    for line in text.splitlines():
        fields = [re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), f) for f in line.split()]
        if len(fields) >= 4:
            found.append(Mount(fields[0], fields[1], fields[2], tuple(fields[3].split(","))))
    return found


def mount_of(found: list[Mount], path: str) -> Mount | None:
    """The mount that a path is on: the longest directory above it, of those the last."""
    above = [m for m in found if m.directory == "/" or f"{path}/".startswith(m.directory.rstrip("/") + "/")]
    longest = max((len(m.directory) for m in above), default=0)
    return next((m for m in reversed(above) if len(m.directory) == longest), None)


def shown(view: HostView, text: str) -> str:
    """Text of a reader that knows this machine's paths only, in paths of the host."""
    return text if view.live else text.replace(f"{view.root}/", "/").replace(str(view.root), "/")


def own_name(patient: Patient, hostname: str, addresses: frozenset[str]) -> str:
    """This node's name, as the plan finds it: as written, by its address among the peers, else the host's."""
    settings = patient.settings
    if settings is None:
        return hostname
    if settings.node.name:
        return settings.node.name
    mine = addresses | ({settings.node.address} if settings.node.address else set())
    return next((p.name for p in settings.cluster.peers if p.address in mine), hostname)


def here(view: HostView, path: str) -> Path:
    """Where a file of the host is on this machine. Raises ``CannotTellError``."""
    try:
        return view.path(path)
    except OSError as error:
        raise CannotTellError(str(error)) from None
