"""Processes as ``/proc`` shows them, and signals that reach exactly the process that was meant.

A process id alone names nothing for long: ids are reused. Here a process is its id and its start time
(clock ticks since boot, field 22 of ``/proc/PID/stat``); across boots the boot id is the third part.

Imports little on purpose: the shim uses this module and has to stay small.
"""

from __future__ import annotations

import os
import signal
from collections import namedtuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ProcessTable = dict[int, "Stat"]
# The namespace of process ids that a kernel begins with; it has this number everywhere.
HOST_PROCESSES = "pid:[4026531836]"


class Stat(namedtuple("Stat", "pid comm state ppid session start_ticks")):
    """One process at one moment. ``state`` is the kernel's letter (``R S D T Z X`` ...)."""

    __slots__ = ()

    pid: int
    comm: str
    state: str
    ppid: int
    session: int
    start_ticks: int

    @property
    def ended(self) -> bool:
        """A zombie runs no code any more: it only waits to be collected by its parent."""
        return self.state in "ZXx"


def boot_id() -> str:
    """The kernel's random id of this boot; in a container followed by the time at which its first process started.

    A container that is started again is in the same boot and has none of the processes it had.
    """
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # noqa: PTH123 (pathlib costs memory)
        boot = file.read().strip()
    if os.readlink("/proc/self/ns/pid") == HOST_PROCESSES:  # noqa: PTH115
        return boot
    first = read_stat(1)
    return boot if first is None else f"{boot}:{first.start_ticks}"


def parse_stat(text: bytes) -> Stat:
    """Reads the content of ``/proc/PID/stat``. The command may itself hold spaces and parentheses."""
    opening, closing = text.index(b"("), text.rindex(b")")
    fields = text[closing + 2 :].split()
    return Stat(
        int(text[:opening]),
        text[opening + 1 : closing].decode(errors="replace"),
        fields[0].decode(),
        int(fields[1]),
        int(fields[3]),
        int(fields[19]),
    )


def read_stat(pid: int) -> Stat | None:
    """The process with this id, or ``None`` when there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
            return parse_stat(file.read())
    except (OSError, ValueError):  # gone before or while it was read
        return None


def find_process(pid: int, start_ticks: int) -> Stat | None:
    """The live process with this identity: not another one that got the same id, not a zombie."""
    stat = read_stat(pid)
    if stat is None or stat.ended or stat.start_ticks != start_ticks:
        return None
    return stat


def process_table() -> ProcessTable:
    """All processes that can be seen, by id."""
    found = (read_stat(int(name)) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208
    return {stat.pid: stat for stat in found if stat is not None}


def descendants(root_pids: Iterable[int], table: Mapping[int, Stat]) -> list[Stat]:
    """Every live process below these ids (the ids themselves are not included)."""
    children: dict[int, list[Stat]] = {}
    for stat in table.values():
        children.setdefault(stat.ppid, []).append(stat)
    result: dict[int, Stat] = {}
    todo = list(root_pids)
    while todo:
        for child in children.get(todo.pop(), ()):
            if child.pid not in result:
                result[child.pid] = child
                todo.append(child.pid)
    return [stat for stat in result.values() if not stat.ended]


def session_tree(leader_pid: int, leader_start_ticks: int, table: Mapping[int, Stat]) -> list[Stat]:
    """The live processes of the session that this leader opened, and everything below them.

    The kernel does not give a session's id to a new process while a member lives. So if the id belongs to a
    process with another start time, no member of our session is left.
    """
    holder = table.get(leader_pid)
    if holder is not None and holder.start_ticks != leader_start_ticks:
        return []
    members = {stat.pid: stat for stat in table.values() if stat.session == leader_pid and not stat.ended}
    below = {stat.pid: stat for stat in descendants(members, table)}
    return list({**members, **below}.values())


def send_signal(target: Stat, signum: int) -> bool:
    """Signals this very process; ``False`` when it has gone.

    With a pidfd (Linux 5.3) there is no moment in which the id could pass to another process. Older kernels
    leave a gap of microseconds between check and signal.
    """
    try:
        fd = os.pidfd_open(target.pid)
    except ProcessLookupError:
        return False
    except (AttributeError, OSError):
        fd = -1
    try:
        if find_process(target.pid, target.start_ticks) is None:
            return False
        if fd >= 0:
            signal.pidfd_send_signal(fd, signum)
        else:
            os.kill(target.pid, signum)
    except ProcessLookupError:
        return False
    finally:
        if fd >= 0:
            os.close(fd)
    return True
