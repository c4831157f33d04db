"""Starts a shim: run by the backend as a short-lived process, with one JSON request on stdin and one JSON answer on stdout.

Request: ``{directory, root, log, log_max_bytes, log_keep, adopt}`` and, unless ``adopt``, what to start:
``{unit_id, instance, spec_digest, argv, env, cwd, user, cpus, nice, note, guard_file, watch, secret_files,
stop_signal, stop_timeout_seconds}``.
Answer: ``{"ok": true, "record": {...}}`` or ``{"ok": false, "code", "message", "hint"}``.

Steps: take the unit's lock, leave the caller (fork, own session, fork), become the subreaper, start the unit's main
process, write the record, answer, and turn into the keeper (``kvtierd.units.shim``) by exec. The keeper needs
neither ``subprocess`` nor ``ctypes``, which saves 1.5 MB for each unit; children and subreaper survive an exec.

With ``adopt`` nothing is started: a keeper is put beside a unit whose own one was killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import pwd
import resource
import signal
import socket
import subprocess
import sys
import time

from kvtierd.secret_files import read_secret
from kvtierd.units import procfs, shim_record
from kvtierd.units.guard_file import now_seconds, read_deadline
from kvtierd.units.shim_log import OutputLog

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, NoReturn

    Answer = dict[str, Any]

BOOT_KEEPER = "import sys; sys.path.append(sys.argv[1]); from kvtierd.units.shim import main; main()"
PR_SET_CHILD_SUBREAPER = 36
PIPE_BYTES = 256 * 1024
LOCK_WAIT_SECONDS = 3.0  # a keeper that has written its unit's end lets go of the lock a moment later


class Refused(Exception):  # noqa: N818
    """The unit cannot be started; becomes the answer."""

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.answer: Answer = {"ok": False, "code": code, "message": message, "hint": hint}


def main() -> None:
    """Entry point of the short-lived process."""
    request = json.loads(sys.stdin.buffer.read())
    try:
        lock = take_unit(request)
        answer = run_detached(request, lock)
    except Refused as refused:
        answer = refused.answer
    except OSError as error:
        answer = Refused(
            "unit.runtime-dir",
            f"the unit's directory {request['directory']} cannot be used: {error.strerror}",
            "Check that it exists, is writable for the daemon and has room.",
        ).answer
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()


def take_unit(request: dict[str, Any]) -> int:
    """The unit's lock, once it is certain that the unit does not run (or, to adopt it, that it does)."""
    directory = request["directory"]
    deadline = time.monotonic() + LOCK_WAIT_SECONDS
    while True:
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)  # noqa: PTH103
            lock = shim_record.try_lock(directory)
        except FileNotFoundError:  # removed by forget() between the two lines
            lock = -1
        record = shim_record.read_record(directory)
        if lock >= 0:
            break
        if (record is not None and record["exit"] is None) or time.monotonic() > deadline:
            raise Refused("unit.exists", f"{os.path.basename(directory)} is already looked after by a shim")  # noqa: PTH119
        time.sleep(0.01)
    runs = record is not None and record["exit"] is None and is_running(record)
    if runs and not request["adopt"]:
        assert record is not None
        raise Refused(
            "unit.exists", f"{record['unit_id']} already runs as process {record['pid']}, without a shim"
        )
    if request["adopt"] and not runs:
        raise Refused("unit.ended", f"{os.path.basename(directory)} does not run")  # noqa: PTH119
    return lock


def is_running(record: dict[str, Any]) -> bool:
    """Whether the recorded main process is alive: same boot, same id, same start time."""
    if record["boot_id"] != procfs.boot_id():
        return False
    return procfs.find_process(record["pid"], record["start_ticks"]) is not None


def run_detached(request: dict[str, Any], lock: int) -> Answer:
    """Forks twice and waits for the answer of the process that becomes the shim."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child:
        os.close(write_end)
        os.waitpid(child, 0)
        with os.fdopen(read_end, "rb") as pipe:
            text = pipe.read()  # ends when the shim has answered or died
        if not text:
            raise Refused(
                "unit.shim-died", "the shim died before it could answer", "Its last words are in shim.err."
            )
        answer: Answer = json.loads(text)
        return answer
    try:
        os.setsid()
        if os.fork() == 0:
            os.close(read_end)
            become_shim(request, lock, write_end)
    finally:
        os._exit(1)


def become_shim(request: dict[str, Any], lock: int, answer_fd: int) -> NoReturn:
    """In the detached process: set up, answer, turn into the keeper."""
    os.umask(0o077)
    os.chdir(request["directory"])  # keeps the socket's address short
    use_own_streams()
    reset_signals_and_limits()
    try:
        listener, fifo = listen(), open_fifo(keep_existing=request["adopt"])
        record = adopted_record() if request["adopt"] else start_unit(request, fifo)
        answer: Answer = {"ok": True, "record": record}
    except Refused as refused:
        answer = refused.answer
    except OSError as error:
        message = f"no shim can be set up in {request['directory']}: {error.strerror or error}"
        answer = Refused(
            "unit.runtime-dir", message, "Check the directory's free space and permissions."
        ).answer
    os.write(answer_fd, json.dumps(answer).encode())
    os.close(answer_fd)
    if not answer["ok"]:
        os._exit(0)
    options = {"lock": lock, "listener": listener, "fifo": fifo, "parent": not request["adopt"]}
    options |= {name: request[name] for name in ("log", "log_max_bytes", "log_keep")}
    for fd in (lock, listener, fifo):
        os.set_inheritable(fd, True)
    argv = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        BOOT_KEEPER,
        request["root"],
        record["unit_id"],
        json.dumps(options),
    ]
    os.execv(sys.executable, argv)  # noqa: S606


def use_own_streams() -> None:
    """No stream of the caller stays open; what goes wrong in the shim can be read in ``shim.err``."""
    null = os.open(os.devnull, os.O_RDWR)
    errors = os.open(
        shim_record.ERRORS, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW, 0o600
    )
    for fd, target in ((null, 0), (null, 1), (errors, 2)):
        os.dup2(fd, target)
    os.close(null)
    os.close(errors)


def reset_signals_and_limits() -> None:
    """What the daemon set for itself must not reach the unit; the subreaper collects whatever the unit leaves."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for signum in signal.valid_signals():
        if signal.getsignal(signum) is signal.SIG_IGN and signum not in {signal.SIGPIPE, signal.SIGXFSZ}:
            signal.signal(signum, signal.SIG_DFL)  # Popen restores the two that Python itself ignores
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    for limit in (unlimited, (hard, hard)):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_MEMLOCK, limit)
            break
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+", encoding="ascii") as file:  # noqa: PTH123
        if int(file.read()) < 0:  # the daemon's own protection
            file.write("0")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def listen() -> int:
    """The control socket, only for this user. Clients may connect from now on; the keeper will answer."""
    remove(shim_record.SOCKET)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(shim_record.SOCKET)
    os.chmod(shim_record.SOCKET, 0o600)  # noqa: PTH101
    listener.listen(16)
    return listener.detach()


def open_fifo(*, keep_existing: bool) -> int:
    """What the unit writes to.

    A named pipe that the unit itself holds open for reading and writing: when the shim is killed the unit gets no
    SIGPIPE, and the next shim can go on reading.
    """
    if not keep_existing:
        remove(shim_record.FIFO)
    with contextlib.suppress(FileExistsError):
        os.mkfifo(shim_record.FIFO, 0o600)
    fd = os.open(shim_record.FIFO, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    with contextlib.suppress(OSError):  # an unprivileged user may be over the limit for pipes
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return fd


def adopted_record() -> Answer:
    """The record of a unit whose shim was killed, with this process as its shim."""
    record = shim_record.read_record(".")
    if record is None:
        raise Refused("unit.ended", "its record is gone")
    record["note"] = "its shim was killed; a new one watches it, but will not learn its exit status"
    record |= shim_identity()
    shim_record.write_record(".", record)
    return record


# Popen's finaliser collects a child that has ended already, and with it the exit status that the keeper wants.
_STARTED: list[subprocess.Popen[bytes]] = []


def start_unit(request: dict[str, Any], fifo: int) -> Answer:
    """Starts the main process and writes the record."""
    log = OutputLog(request["log"], request["log_max_bytes"], request["log_keep"])
    log_inode, log_offset = log.position()
    log.finish()
    refuse_without_lease(request["guard_file"])
    read_secrets(request["secret_files"])  # what the keeper cannot hide must not be written
    names = (
        *("unit_id", "instance", "spec_digest", "watch", "secret_files", "guard_file"),
        *("stop_signal", "stop_timeout_seconds"),
    )
    record = {name: request[name] for name in names} | shim_identity()
    record |= {"version": shim_record.VERSION, "boot_id": procfs.boot_id(), "pid": 0, "start_ticks": 0}
    record |= {"log_inode": log_inode, "log_offset": log_offset, "started_unix_seconds": time.time()}
    record |= {"seen": [], "note": request["note"], "exit": None, "last_lines": []}
    shim_record.write_record(".", record)  # a disk that takes no record is found out before the start
    process = None
    try:
        process = start_main(request, fifo)
        _STARTED.append(process)
        record["pid"] = process.pid
        record["start_ticks"] = start_ticks(process.pid)
        shim_record.write_record(".", record)
    except BaseException:
        if process is not None:
            process.kill()
        remove(shim_record.RECORD)
        raise
    return record


def refuse_without_lease(guard_file: str) -> None:
    """A guarded unit is not even started when it would be killed at once."""
    if guard_file and (until := read_deadline(guard_file) or 0.0) <= now_seconds():
        raise Refused("unit.start", "there is no lease: not started" + (" (it has ended)" if until else ""))


def read_secrets(paths: list[str]) -> None:
    """Makes sure that the unit's secrets can be read."""
    for path in paths:
        try:
            read_secret(path)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise Refused(
                "unit.secret",
                f"the secret in {path} cannot be read, so it could not be kept out of the unit's log: {why}",
                "kvtierctl reload writes the file again.",
            ) from error


def start_main(request: dict[str, Any], fifo: int) -> subprocess.Popen[bytes]:
    """The unit's main process: leader of its own session, with exactly the given environment."""
    argv, cwd, user = request["argv"], request["cwd"], request["user"]
    output = os.open(f"/proc/self/fd/{fifo}", os.O_RDWR | os.O_CLOEXEC)  # blocking, unlike the shim's own end
    try:
        identity = user_arguments(user)
        if "user" in identity:
            os.fchown(output, identity["user"], -1)  # the unit may open /dev/stderr by name
        with given_to_children(request["cpus"], request["nice"]):
            return subprocess.Popen(
                argv,
                env=request["env"],
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                umask=0o022,
                **identity,
            )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        transient = isinstance(error, OSError) and error.errno in {
            errno.EAGAIN,
            errno.ENOMEM,
            errno.ETXTBSY,
            errno.ENFILE,
        }
        who = f" as {user}" if user else ""
        raise Refused(
            "unit.start" if transient else "unit.exec",
            f"cannot execute {argv[0]!r}{who} in {cwd}: {error}",
            ""
            if transient
            else "Check that the program and the directory exist and that the user may use them.",
        ) from error
    finally:
        os.close(output)


@contextlib.contextmanager
def given_to_children(cpus: list[int], nice: int) -> Iterator[None]:
    """CPUs and priority that a process started meanwhile has from its first moment; ours come back afterwards."""
    own_cpus, own_nice = os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)
    try:
        if cpus:
            os.sched_setaffinity(0, cpus)
        if nice:
            os.setpriority(os.PRIO_PROCESS, 0, nice)
    except OSError as error:
        raise Refused(
            "unit.exec",
            f"the unit cannot be given its CPUs and priority: {error.strerror}",
            "Check cpus and nice; a priority above the normal one needs root.",
        ) from error
    try:
        yield
    finally:
        os.sched_setaffinity(0, own_cpus)
        with contextlib.suppress(OSError):  # without root there is no way back up; the keeper needs little
            os.setpriority(os.PRIO_PROCESS, 0, own_nice)


def user_arguments(user: str | None) -> dict[str, Any]:
    """Popen's user, group and extra_groups for this user name or number; empty when nothing is to change."""
    if user is None:
        return {}
    try:
        entry = pwd.getpwuid(int(user)) if user.isdigit() else pwd.getpwnam(user)
    except KeyError:
        hint = "Create the user or correct the setting `user`."
        raise Refused("unit.exec", f"there is no user {user!r} on this host", hint) from None
    if entry.pw_uid == os.geteuid():
        return {}
    groups = os.getgrouplist(entry.pw_name, entry.pw_gid)
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": groups}


def shim_identity() -> dict[str, int]:
    """This process, as the record names it. An exec keeps both."""
    return {"shim_pid": os.getpid(), "shim_start_ticks": start_ticks(os.getpid())}


def start_ticks(pid: int) -> int:
    """The start time of a process that exists (our own or an uncollected child)."""
    stat = procfs.read_stat(pid)
    if stat is None:
        raise OSError(errno.ESRCH, f"/proc/{pid}/stat cannot be read")
    return stat.start_ticks


def remove(name: str) -> None:
    """Removes a file of the unit's directory if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name)  # noqa: PTH108
