"""Until when a guarded unit may run: one line in a file that the daemon writes and the unit's guard reads.

``<boot id> <seconds of CLOCK_BOOTTIME>``. A file and no connection, since it works for a guard of another user, over
restarts of the daemon, and says the same to whoever looks. Standard library only: the keeper of a shim imports this.
"""

from __future__ import annotations

import contextlib
import os
import time

POLL_SECONDS = 0.2  # a guard looks this often; the deadline itself it keeps to the millisecond
LONGEST_LINE_BYTES = 256
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def now_seconds() -> float:
    """The clock of all deadlines: it goes on while the host is suspended, and nothing sets it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def write_deadline(path: str, until_seconds: float) -> None:
    """Lets the unit run until then; a time that has passed ends it now. Replaces the file in one step.

    Raises:
        OSError: it cannot be written; the deadline before this one holds.
    """
    unfinished = f"{path}.new"
    with open(unfinished, "w", encoding="ascii") as file:  # noqa: PTH123
        file.write(f"{_boot_id()} {until_seconds:.6f}\n")
    os.replace(unfinished, path)  # noqa: PTH105


def read_deadline(path: str) -> float | None:
    """Seconds of CLOCK_BOOTTIME; ``None``: there is no file of this boot that can be understood."""
    with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:  # noqa: PTH123
        boot, _, seconds = file.read(LONGEST_LINE_BYTES).decode("ascii").partition(" ")
        if boot == _boot_id():
            return float(seconds)
    return None


def _boot_id() -> str:
    with open(_BOOT_ID, encoding="ascii") as file:  # noqa: PTH123
        return file.read().strip()
