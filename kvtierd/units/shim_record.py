"""What a shim writes down about its unit, and where: one small directory per unit.

``UNIT/lock``         held (flock) as long as a shim looks after the unit; whoever holds it owns the rest
``UNIT/record.json``  who runs, since when, and how it ended; replaced atomically
``UNIT/control.sock`` the shim's socket (0600), newline JSON
``UNIT/output.fifo``  what the unit writes to
``UNIT/shim.err``     what a shim had to say before it died, normally empty

Record: ``version, unit_id, instance, pid, start_ticks, boot_id, shim_pid, shim_start_ticks, started_unix_seconds,
spec_digest, log_inode, log_offset, stop_signal, stop_timeout_seconds, watch, secret_files, seen, note, exit,
last_lines``. ``secret_files`` are paths: no secret is ever in a record.
``exit`` is ``null`` or ``{code, signal, at_unix_seconds, requested}``; code and signal are both ``null`` when nobody
saw the end.
Fields are only ever added: a daemon has to understand the shims that an older one started.

Imports little on purpose, like all of the shim.
"""

from __future__ import annotations

import fcntl
import json
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VERSION = 1
RECORD = "record.json"
LOCK = "lock"
SOCKET = "control.sock"
FIFO = "output.fifo"
ERRORS = "shim.err"


def write_record(directory: str, record: dict[str, Any]) -> None:
    """Replaces the record atomically. Raises OSError (disk full, read-only)."""
    path = os.path.join(directory, RECORD)  # noqa: PTH118
    temporary = f"{path}.new.{os.getpid()}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        data = json.dumps(record).encode()
        if os.write(fd, data) != len(data):
            raise OSError("short write")
        os.fsync(fd)
    except OSError:
        os.unlink(temporary)  # noqa: PTH108
        raise
    finally:
        os.close(fd)
    os.replace(temporary, path)  # noqa: PTH105


def read_record(directory: str) -> dict[str, Any] | None:
    """The record, or ``None`` when there is none or it cannot be understood (then nothing is known of a run)."""
    try:
        with open(os.path.join(directory, RECORD), "rb") as file:  # noqa: PTH118, PTH123
            record = json.loads(file.read(1 << 20))
    except (OSError, ValueError):
        return None
    needed = {"unit_id", "instance", "pid", "start_ticks", "boot_id", "exit"}
    return record if isinstance(record, dict) and needed <= record.keys() else None


def try_lock(directory: str) -> int:
    """Takes the unit's lock without waiting: a file descriptor, or -1 when somebody else holds it.

    The lock file can be removed together with its directory while we wait for it; a lock on a file that is no
    longer there would protect nothing, hence the comparison.
    """
    path = os.path.join(directory, LOCK)  # noqa: PTH118
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_ino == os.stat(path).st_ino:  # noqa: PTH116
                return fd
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(fd)
            return -1
        except OSError:
            os.close(fd)
            raise
        os.close(fd)
