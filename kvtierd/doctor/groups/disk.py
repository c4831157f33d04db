"""Disks: room for state and logs, and what fills them or cannot be written."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from kvtierd.checks import Group, Outcome, Patient, absent, fail, note, ok, unknown, warn, worst
from kvtierd.doctor.looking import file_facts, mount_of, mounts, nearest, present, resolved
from kvtierd.quantities import format_size
from kvtierd.settings.model import PathsSettings

GROUP = Group("disk")
KIB: Final = 1024
GIB: Final = 1024**3
NONE_LEFT_BYTES: Final = 64 * 1024**2
LITTLE_BYTES: Final = 2 * GIB
LITTLE_SHARE: Final = 0.03
LARGE_LOG_BYTES: Final = GIB
FEW_INODES: Final = 100
CORE_ROOM_BYTES: Final = 100 * GIB
DISK_KEY: Final = "ubsio.disk.path"
MEMCACHE_LOGS: Final = ("/var/log/memcache_hybrid", "/var/log/memfabric_hybrid")


@GROUP.check(
    "space",
    title="There is room for state and logs",
    why="On a full disk kvtierd cannot keep its state, MemCache cannot write its log and ends with exit status 0, and engines lose"
    " their output.",
    fix="du -xh --max-depth 2 /var | sort -h; journalctl --vacuum-size=2G; delete old logs of MemCache",
)
async def space(patient: Patient) -> Outcome:
    """``df -kP`` of each directory, or of the nearest one above it that is there."""
    found, well = [], []
    for room in await _rooms(patient, "-kP"):
        if isinstance(room, Outcome):
            found.append(room)
            continue
        total, free = room.total * KIB, room.free * KIB
        told = f"{format_size(free)} of {format_size(total)} free on {room.mount} ({', '.join(room.whose)})"
        if free < NONE_LEFT_BYTES:
            found.append(fail(told))
        elif free < LITTLE_BYTES or free < total * LITTLE_SHARE:
            found.append(warn(told))
        else:
            well.append(told)
    return worst(found, "; ".join(well))


@GROUP.check(
    "inodes",
    title="There are inodes for state and logs",
    why="Without inodes no file can be made although df shows room: the same failures, with 'No space left on device'.",
    fix="df -i; find the directory with millions of files (often a cache or spool) and empty it",
)
async def inodes(patient: Patient) -> Outcome:
    """``df -iP``; file systems without a fixed number of inodes have no limit."""
    found, well = [], []
    for room in await _rooms(patient, "-iP"):
        if isinstance(room, Outcome):
            found.append(room)
            continue
        whose = ", ".join(room.whose)
        if not room.total:
            well.append(f"no limit on {room.mount} ({whose})")
            continue
        told = f"{room.free} of {room.total} inodes free on {room.mount} ({whose})"
        if room.free < FEW_INODES:
            found.append(fail(told))
        elif room.free < room.total * LITTLE_SHARE:
            found.append(warn(told))
        else:
            well.append(told)
    return worst(found, "; ".join(well))


class _Room(NamedTuple):
    """What ``df`` says of one file system, in its units, and what kvtierd keeps there."""

    total: int
    free: int
    mount: str
    whose: tuple[str, ...] = ()


async def _rooms(patient: Patient, option: str) -> list[_Room | Outcome]:
    """One entry for each file system, and one for each directory of which ``df`` says nothing."""
    rooms: dict[str, _Room] = {}
    unsaid: list[Outcome] = []
    for path, whose in _directories(patient).items():
        answer = await _df(patient, option, path)
        if isinstance(answer, Outcome):
            unsaid.append(answer)
            continue
        known = rooms.get(answer.mount)
        rooms[answer.mount] = answer._replace(whose=(*(known.whose if known else ()), *whose))
    return [*rooms.values(), *unsaid]


async def _df(patient: Patient, option: str, path: str) -> _Room | Outcome:
    """What it says of one directory, or why it says nothing."""
    result = await patient.run("df", option, path)
    line = result.stdout.strip().splitlines()[-1:] if result.ok else []
    match = re.fullmatch(r".*?\s(\d+|-)\s+(\d+|-)\s+(\d+|-)\s+(\d+%|-)\s+(/.*)", line[0]) if line else None
    if not match:
        return unknown(result.describe() or f"df said nothing of {path}")
    total, free = (int(n) if n != "-" else 0 for n in (match[1], match[3]))
    return _Room(total, free, match[5])


@GROUP.check(
    "read-only",
    title="State, logs and sockets are on file systems that can be written",
    why="A kernel that found an error on a disk makes it read-only: everything looks as before, and nothing is kept.",
    fix="dmesg | grep -i 'remount'; check the disk, then fsck; in a container: mount the directory writable",
)
def read_only(patient: Patient) -> Outcome:
    """/proc/mounts."""
    table = mounts(patient.view)
    if not any(mount.directory == "/" for mount in table):
        return unknown("/proc/mounts has no /")
    found = []
    for what, path in _wanted(patient).items():
        mount = mount_of(table, resolved(patient.view, path))
        if mount is not None and mount.read_only:
            found.append(fail(f"{path} ({what}) is on {mount.directory} ({mount.kind}), which is read-only"))
    return worst(found, "all of them")


@GROUP.check(
    "logs",
    title="No log has grown out of bounds",
    why="MemCache renames its log at every start and deletes none; at level debug it writes gigabytes a day.",
    fix='[meta] log_level = "info"; remove old files; logrotate with copytruncate for what is written to all the time',
)
async def logs(patient: Patient) -> Outcome:
    """Sizes by ``du``; no log is read."""
    view = patient.view
    own = patient.settings.paths.logs if patient.settings is not None else "/var/log/kvtierd"
    directories = [d for d in dict.fromkeys((own, *MEMCACHE_LOGS)) if present(view, d)]
    if not directories:
        return absent("there are no logs yet")
    found, total = [], 0
    for directory in directories:
        result = await patient.run("du", "-ak", "--threshold=1M", directory)
        if not result.ok:
            found.append(unknown(result.describe()))
            continue
        sizes = {
            name: int(kib) * KIB
            for kib, _, name in (line.partition("\t") for line in result.stdout.splitlines())
            if kib.isdecimal()
        }
        total += sizes.get(directory, 0)
        inner = {n for n in sizes if any(other.startswith(f"{n}/") for other in sizes)}
        large = {n: s for n, s in sizes.items() if s >= LARGE_LOG_BYTES and n not in inner}
        found += [warn(f"{name}: {format_size(size)}") for name, size in sorted(large.items())[:10]]
        if not large and sizes.get(directory, 0) >= 10 * LARGE_LOG_BYTES:
            found.append(warn(f"{directory}: {format_size(sizes[directory])} in all"))
    return worst(found, f"{format_size(total)} in {', '.join(directories)}")


@GROUP.check(
    "ssd",
    title="The disks of the SSD tier are there and nobody else's",
    why="UBS IO takes whole block devices. One that is mounted or has a file system is refused, or overwritten with force_new_disk; with"
    " none that can be used the tier is memory only, and says so in its log alone.",
    fix="lsblk -f shows what is on a disk; wipefs -a DISK once you are sure; then the path in [meta] local_conf",
)
async def ssd(patient: Patient) -> Outcome:
    """ubsio.disk.path of [meta] local_conf: block devices, not mounted, on disks without mounted partitions."""
    settings = patient.settings
    written = settings.meta.local_conf.get(DISK_KEY, "") if settings is not None else ""
    disks = [disk for disk in re.split(r"[\s,;:]+", written) if disk]
    if not disks:
        return absent("no SSD tier is set up")
    table, found = mounts(patient.view), []
    for disk in disks:
        facts = await file_facts(patient, disk, follow=True)
        used = sorted(m.directory for m in table if re.fullmatch(re.escape(disk) + r"(?:p?\d+)?", m.device))
        if facts is None:
            found.append(fail(f"{disk} does not exist"))
        elif facts.kind != "block special file":
            found.append(fail(f"{disk} is a {facts.kind}, not a disk"))
        elif used:
            found.append(fail(f"{disk} is mounted at {', '.join(used)}"))
    return worst(found, ", ".join(disks))


@GROUP.check(
    "core-dumps",
    title="A core dump of an engine does not fill a disk",
    why="An engine's core has all of its memory, hundreds of GiB with its pool: it fills the disk and keeps the card held while it is"
    " written.",
    fix="systemd-coredump with ExternalSizeMax=, or sysctl kernel.core_pattern='|/bin/false'; or a large disk of its own",
)
async def core_dumps(patient: Patient) -> Outcome:
    """kernel.core_pattern, and the room where it leads."""
    pattern = patient.view.text("/proc/sys/kernel/core_pattern")
    if pattern is None:
        return unknown("/proc/sys/kernel/core_pattern cannot be read")
    if pattern.startswith("|"):
        return ok(
            f"cores go to {pattern[1:].split()[0].rpartition('/')[2] if pattern[1:].split() else 'nobody'}"
        )
    if not pattern.startswith("/"):
        return note(f"cores go to the working directory ({pattern or 'core'}), for units /")
    directory = nearest(patient.view, pattern.rpartition("/")[0] or "/")
    answer = await _df(patient, "-kP", directory)
    if isinstance(answer, Outcome):
        return answer
    free = answer.free * KIB
    told = f"cores go to {pattern}, with {format_size(free)} free on {answer.mount}"
    return note(told) if free < CORE_ROOM_BYTES else ok(told)


def _wanted(patient: Patient) -> dict[str, str]:
    """What kvtierd and MemCache keep -> where."""
    paths = patient.settings.paths if patient.settings is not None else PathsSettings()
    return {"state": paths.state, "logs": paths.logs, "runtime": paths.runtime, "/tmp": "/tmp"}


def _directories(patient: Patient) -> dict[str, list[str]]:
    """Directory that is there -> what is kept in it."""
    found: dict[str, list[str]] = {}
    for what, path in _wanted(patient).items():
        found.setdefault(nearest(patient.view, path), []).append(what)
    return found
