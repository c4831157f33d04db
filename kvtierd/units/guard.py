"""The guard of a service: kills its main process when the lease ends, whatever becomes of the daemon.

Started by systemd in the unit's place: it leaves a guard in the unit's control group and becomes the unit's program by
exec, so that the main process is the unit's own. The guard reads the deadline from a file (``guard_file``). It is
watched itself: it feeds systemd's watchdog only up to the deadline, so a guard that is killed or frozen costs the unit
its life as well (``WatchdogSignal=SIGKILL``). Under a shim, the shim is the guard.

Command line (behind the boot line's import root): ``DEADLINE_FILE PROGRAM ARGUMENT...``
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys

from kvtierd.units.guard_file import POLL_SECONDS, now_seconds, read_deadline

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

BOOT_GUARD = "import sys; sys.path.append(sys.argv[1]); from kvtierd.units.guard import main; main()"
EXIT_NO_LEASE = 75  # of sysexits.h: a temporary failure
WATCHDOG_SLACK_SECONDS = 0.3  # the guard itself is to be first
PR_SET_PDEATHSIG = 1
# Of the service manager's protocol; none of the unit's business.
OF_THE_GUARD = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


def guarded_argv(deadline_file: str, argv: tuple[str, ...]) -> tuple[str, ...]:
    """The command line of a unit with its guard."""
    import kvtierd

    root = os.path.dirname(os.path.dirname(os.path.abspath(kvtierd.__file__)))  # noqa: PTH100, PTH120
    return (sys.executable, "-I", "-S", "-c", BOOT_GUARD, root, deadline_file, *argv)


def main() -> NoReturn:
    """Entry point: ``argv`` is the import root, the deadline's file and the unit's command."""
    path, *command = sys.argv[2:]
    until = read_deadline(path)
    if until is None or until <= now_seconds():
        print("kvtierd-guard: there is no lease: not started", file=sys.stderr)
        sys.exit(EXIT_NO_LEASE)
    notify = os.environ.get("NOTIFY_SOCKET", "")
    environment = {name: value for name, value in os.environ.items() if name not in OF_THE_GUARD}
    unit = os.pidfd_open(os.getpid())
    if os.fork() == 0:
        try:
            watch(path, unit, until, notify)
        finally:
            os._exit(0)
    os.close(unit)
    os.execvpe(command[0], command, environment)  # noqa: S606


def watch(path: str, unit: int, until: float, notify: str) -> None:
    """In the guard's process: until the unit has ended or was killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # gone at once when the unit is
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as file:  # noqa: PTH123
        file.write("kvtierd-guard")
    feed(notify, until)
    while True:
        left = until - now_seconds()
        if left <= 0:
            print("kvtierd-guard: the lease has ended: killing the unit", file=sys.stderr, flush=True)
            signal.pidfd_send_signal(unit, signal.SIGKILL)
            return
        if select.select([unit], [], [], min(left, POLL_SECONDS))[0]:
            return
        later = read_deadline(path)
        if later is not None and later != until:
            until = later
            feed(notify, until)


def feed(notify: str, until: float) -> None:
    """Has systemd wait until a little after the deadline, and not longer."""
    if not notify:
        return
    microseconds = max(1, int((until - now_seconds() + WATCHDOG_SLACK_SECONDS) * 1_000_000))
    address = "\0" + notify[1:] if notify.startswith("@") else notify
    # Not fatal: systemd then goes by the time it was told last, which is shorter.
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.settimeout(POLL_SECONDS)
        channel.sendto(f"WATCHDOG_USEC={microseconds}\nWATCHDOG=1".encode(), address)
