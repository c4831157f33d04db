"""The keeper of one unit: a small process that outlives the daemon.

It collects the unit's main process and everything below it, writes the output to the log, answers on a unix socket,
and writes down how the unit ended. ``kvtierd.units.shim_start`` starts the unit and then becomes this by exec.

Socket: newline JSON. ``{"do": "status"}``, ``{"do": "stop", "signal": 15, "timeout_seconds": 20}`` (answered when all is
over), ``{"do": "kill", "signal": 9}``, ``{"do": "follow"}`` (the status now and after each change, until the end),
``{"do": "recent", "lines": 20}``. Answers have ``ok`` and either ``status`` or ``error``.

One thread, one loop, standard library only and little of it: there is one of these for every unit.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import signal
import socket
import sys
import time

from kvtierd.secret_files import read_secret
from kvtierd.units import guard_file, procfs, shim_record
from kvtierd.units.shim_log import OutputLog

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

RUNNING, STOPPING, KILLING, ENDED = "running", "stopping", "killing", "ended"
LEFTOVER_GRACE_SECONDS = 0.3  # processes that end together with the main process are not called left behind
LONGEST_STOP_SECONDS = 24 * 3600.0
KILL_AGAIN_SECONDS = 0.05
KILL_AGAIN_SLOW_SECONDS = 1.0
KILL_LIMIT_SECONDS = 10.0  # then a process in uninterruptible sleep is named in the status
POLL_SECONDS = 0.2  # a process that is not our child has to be looked at
SCAN_SECONDS = 5.0  # and the processes below it have to be searched for
RECORD_RETRY_SECONDS = 1.0
READ_BYTES = 64 * 1024
READS_PER_TURN = 16  # a flood of output must not keep the socket waiting
LONGEST_REQUEST_BYTES = 4096
MOST_CLIENTS = 32
DEADLY = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGQUIT})


class Client:
    """One connection to the control socket."""

    __slots__ = ("buffer", "follows", "link", "waits_for_end")

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.buffer = b""
        self.follows = False
        self.waits_for_end = False


class Keeper:
    """All of the keeper's state. Times are monotonic seconds unless the name says unix."""

    def __init__(self, record: dict[str, Any], options: dict[str, Any]) -> None:
        self.record = record
        self.is_parent: bool = options["parent"]
        self.lock_fd: int = options["lock"]
        self.fifo: int = options["fifo"]
        unseen = [text for text in record.get("watch", ()) if text not in record.get("seen", ())]
        self.log = OutputLog(
            options["log"], options["log_max_bytes"], options["log_keep"], unseen, self.secrets()
        )
        self.listener = socket.socket(fileno=options["listener"])
        self.clients: dict[int, Client] = {}
        self.phase = RUNNING
        self.next_kill_at = 0.0
        self.killing_since = 0.0
        self.stop_deadline = 0.0
        self.requested = False
        self.main_exit: dict[str, Any] | None = None
        self.known: dict[int, procfs.Stat] = {}  # not our children: the unit's processes as last seen
        self.stuck: list[str] = []
        self.note_leftovers = False
        self.told_to_end = False
        self.next_scan_at = 0.0
        self.guard_file: str = record.get("guard_file", "")
        # A guard that finds no file ends the unit: it was started with one.
        self.guard_until = 0.0
        self.selector = selectors.DefaultSelector()

    def secrets(self) -> list[str]:
        """What must not show in the output, from the files that the record names."""
        found = []
        for path in self.record.get("secret_files", ()):
            try:
                found.append(read_secret(path))
            except (OSError, ValueError):
                self.add_note(f"the secret in {path} cannot be read: its output may show it")
        return found

    # --- the loop ---

    def run(self) -> None:
        """Until the unit has ended and that is written down."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for signum in (signal.SIGCHLD, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, lambda *_: None)
        signal.signal(signal.SIGTERM, self.on_own_sigterm)
        self.listener.setblocking(False)
        self.selector.register(self.listener, selectors.EVENT_READ, self.accept)
        self.selector.register(self.fifo, selectors.EVENT_READ, self.read_output)
        self.selector.register(wake_read, selectors.EVENT_READ, lambda: drain(wake_read))
        while self.phase != ENDED:
            self.advance(time.monotonic())
            if self.phase == ENDED:
                break
            for key, _ in self.selector.select(self.seconds_to_wait(time.monotonic())):
                key.data()
        self.finish()

    def seconds_to_wait(self, now: float) -> float | None:
        """How long nothing has to be done unless something happens."""
        if self.phase == KILLING:
            return max(0.0, self.next_kill_at - now)
        waits = [] if self.is_parent else [POLL_SECONDS]
        if self.guard_file and self.phase != ENDED:
            waits.append(min(guard_file.POLL_SECONDS, max(0.0, self.guard_until - guard_file.now_seconds())))
        if self.phase == STOPPING:
            waits.append(max(0.0, self.stop_deadline - now))
        return min(waits, default=None)

    def advance(self, now: float) -> None:
        """Collects what has ended and takes the next step."""
        if self.told_to_end:
            self.told_to_end = False
            self.add_note("its shim was told to end by SIGTERM")
            self.begin_stop(self.record["stop_signal"], self.record["stop_timeout_seconds"])
        if self.guard_file and self.phase in {RUNNING, STOPPING}:
            self.keep_guard(now)
        all_gone = self.collect_children() if self.is_parent else not self.look_at_foreign_unit(now)
        if self.main_exit is not None and all_gone:
            self.phase = ENDED
            return
        if self.main_exit is not None and self.phase in {RUNNING, STOPPING}:
            self.note_leftovers = True
            self.begin_killing(now, grace=LEFTOVER_GRACE_SECONDS)
        elif self.phase == STOPPING and now >= self.stop_deadline:
            self.begin_killing(now, grace=0.0)
        if self.phase == KILLING and now >= self.next_kill_at:
            self.kill_all(now)

    def keep_guard(self, now: float) -> None:
        """Kills the unit when the daemon has not extended its lease: here, so that a daemon that is gone cannot fail to."""
        later = guard_file.read_deadline(self.guard_file)
        if later is not None:
            self.guard_until = later
        if guard_file.now_seconds() >= self.guard_until:
            self.add_note("its guard killed it: the lease has ended")
            self.requested = self.requested or self.main_exit is None
            self.begin_killing(now, grace=0.0)

    def begin_killing(self, now: float, grace: float) -> None:
        """From now on until nothing is left: SIGKILL to everything."""
        self.phase = KILLING
        self.killing_since = self.next_kill_at = now + grace
        self.tell_followers()

    def kill_all(self, now: float) -> None:
        """One round. New processes can appear while we kill, so rounds go on until none is left."""
        targets = self.unit_processes()
        if self.note_leftovers and targets:
            self.note_leftovers = False
            names = ", ".join(f"{stat.comm} ({stat.pid})" for stat in targets[:8])
            self.add_note(f"{len(targets)} processes were left behind and killed: {names}")
        for stat in targets:
            procfs.send_signal(stat, signal.SIGKILL)
        slow = now - self.killing_since > KILL_LIMIT_SECONDS
        if slow:
            self.stuck = [f"{stat.comm} ({stat.pid}, state {stat.state})" for stat in targets]
            self.tell_followers()
            self.answer_stuck()
        self.next_kill_at = now + (KILL_AGAIN_SLOW_SECONDS if slow else KILL_AGAIN_SECONDS)

    # --- the unit's processes ---

    def collect_children(self) -> bool:
        """Takes the exit status of whatever has ended. True when no child is left, also no adopted one."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                if self.main_exit is None:  # cannot happen; would otherwise wait for ever
                    self.main_ended(None, None)
                return True
            if pid == 0:
                return False
            if pid == self.record["pid"]:
                code = os.waitstatus_to_exitcode(status)
                self.main_ended(code if code >= 0 else None, -code if code < 0 else None)

    def look_at_foreign_unit(self, now: float) -> bool:
        """For a unit that another shim started: True while any of its processes is alive."""
        main = procfs.find_process(self.record["pid"], self.record["start_ticks"])
        if main is None or self.phase != RUNNING or now >= self.next_scan_at:
            self.next_scan_at = now + SCAN_SECONDS
            self.scan_foreign_unit()
        if self.main_exit is None and main is None:
            self.main_ended(None, None)
        return bool(self.known)

    def scan_foreign_unit(self) -> None:
        """Updates ``known``: the session of the main process, what was seen before, and all below."""
        table = procfs.process_table()
        leader, ticks = self.record["pid"], self.record["start_ticks"]
        alive = {stat.pid: stat for stat in procfs.session_tree(leader, ticks, table)}
        for stat in self.known.values():
            current = table.get(stat.pid)
            if current is not None and current.start_ticks == stat.start_ticks and not current.ended:
                alive[stat.pid] = current
        alive |= {stat.pid: stat for stat in procfs.descendants(list(alive), table)}
        self.known = alive

    def unit_processes(self) -> list[procfs.Stat]:
        """All live processes of the unit."""
        if self.is_parent:
            return procfs.descendants([os.getpid()], procfs.process_table())
        self.scan_foreign_unit()
        return list(self.known.values())

    def main_ended(self, code: int | None, signum: int | None) -> None:
        """The main process has ended; what else there is will be looked at by ``advance``."""
        self.main_exit = {
            "code": code,
            "signal": signum,
            "at_unix_seconds": time.time(),
            "requested": self.requested,
        }
        self.tell_followers()

    def signal_main(self, signum: int) -> None:
        """Signals the main process, and wakes it in case it is stopped: a stopped process would not see the signal."""
        stat = procfs.find_process(self.record["pid"], self.record["start_ticks"])
        if stat is not None and procfs.send_signal(stat, signum) and signum != signal.SIGSTOP:
            procfs.send_signal(stat, signal.SIGCONT)

    def begin_stop(self, signum: int, timeout_seconds: float) -> None:
        """The signal now, SIGKILL when the time is up. A second call can only shorten the time."""
        deadline = time.monotonic() + timeout_seconds
        if self.phase == STOPPING:
            self.stop_deadline = min(self.stop_deadline, deadline)
        elif self.phase == RUNNING:
            self.phase = STOPPING
            self.stop_deadline = deadline
            self.tell_followers()
        if self.main_exit is None:
            self.signal_main(signum)

    def on_own_sigterm(self, *_: object) -> None:
        """Somebody ends the shim itself (a host that shuts down): the unit is stopped as its specification says."""
        self.told_to_end = True

    # --- output ---

    def read_output(self) -> None:
        """Moves output to the log, a bounded amount each turn."""
        for _ in range(READS_PER_TURN):
            try:
                data = os.read(self.fifo, READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                return
            if self.log.write(data):
                self.record["seen"] = sorted({*self.record.get("seen", ()), *self.log.seen})
                self.save_record()
                self.tell_followers()

    def add_note(self, text: str) -> None:
        """Notes are for the operator; they stay with this run."""
        if text not in self.record["note"]:
            self.record["note"] = "; ".join(filter(None, (self.record["note"], text)))

    def save_record(self) -> bool:
        """True when the record is on the disk."""
        try:
            shim_record.write_record(".", self.record)
        except OSError:
            return False
        return True

    def finish(self) -> None:
        """Writes the end down, as often as it takes, and then lets go of everything."""
        self.read_rest()
        self.log.finish()
        self.record["exit"] = self.main_exit
        self.record["last_lines"] = self.log.recent_lines(40)
        while not self.save_record() and os.stat(".").st_nlink > 0:  # noqa: PTH116 - 0: somebody removed the directory
            # The end must not be lost. Until it is written the socket goes on answering.
            for key, _ in self.selector.select(RECORD_RETRY_SECONDS):
                key.data()
            self.tell_followers()
        os.close(self.lock_fd)
        self.tell_followers()
        for client in list(self.clients.values()):
            if client.waits_for_end:
                self.send(client, {"ok": True, "status": self.status()})

    def read_rest(self) -> None:
        """What the unit wrote before it ended. Nobody writes any more, so this comes to an end."""
        for _ in range(64):
            self.read_output()

    # --- the socket ---

    def status(self) -> dict[str, Any]:
        """The record as it is now, with what only lives in memory."""
        return self.record | {
            "exit": self.record["exit"] or (self.main_exit if self.phase == ENDED else None),
            "phase": self.phase,
            "stuck": self.stuck,
            "dropped_bytes": self.log.dropped_bytes,
            "dropping": self.log.dropping,
            "last_lines": [],
        }

    def accept(self) -> None:
        """A new client, unless there are too many."""
        try:
            link, _ = self.listener.accept()
        except OSError as error:
            if error.errno in {errno.EMFILE, errno.ENFILE}:
                time.sleep(0.05)
            return
        if len(self.clients) >= MOST_CLIENTS:
            link.close()
            return
        link.setblocking(False)
        client = Client(link)
        self.clients[link.fileno()] = client
        self.selector.register(link, selectors.EVENT_READ, lambda: self.receive(client))

    def receive(self, client: Client) -> None:
        """Reads requests; a client that sends nonsense or too much is cut off."""
        try:
            data = client.link.recv(LONGEST_REQUEST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        client.buffer += data
        if not data or len(client.buffer) > LONGEST_REQUEST_BYTES:
            self.drop(client)
            return
        *requests, client.buffer = client.buffer.split(b"\n")
        for request in requests:
            try:
                self.serve(client, json.loads(request))
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
                self.send(client, {"ok": False, "error": f"bad request: {error!r}"})

    def serve(self, client: Client, request: dict[str, Any]) -> None:
        """Carries out one request."""
        what = request["do"]
        if what == "status":
            self.send(client, {"ok": True, "status": self.status()})
        elif what == "stop":
            signum, timeout_seconds = signal.Signals(request["signal"]), float(request["timeout_seconds"])
            if not 0.0 <= timeout_seconds <= LONGEST_STOP_SECONDS:  # also NaN, which is never over
                raise ValueError("timeout_seconds is out of range")
            self.requested = self.requested or self.main_exit is None
            if self.phase == ENDED:
                self.send(client, {"ok": True, "status": self.status()})
                return
            client.waits_for_end = True
            self.begin_stop(signum, timeout_seconds)
        elif what == "kill":
            self.signal_all(signal.Signals(request["signal"]))
            self.send(client, {"ok": True, "status": self.status()})
        elif what == "follow":
            client.follows = True
            self.send(client, {"ok": True, "status": self.status()})
        elif what == "recent":
            lines = self.log.recent_lines(min(int(request["lines"]), 1000))
            self.send(client, {"ok": True, "lines": lines, "dropping": self.log.dropping})
        else:
            self.send(client, {"ok": False, "error": f"unknown request {what!r}"})

    def signal_all(self, signum: signal.Signals) -> None:
        """The request ``kill``: every process at once. SIGKILL goes on until none is left."""
        if signum in DEADLY:
            self.requested = self.requested or self.main_exit is None
        if signum == signal.SIGKILL:
            if self.phase != KILLING:
                self.begin_killing(time.monotonic(), grace=0.0)
            self.next_kill_at = 0.0
            return
        for stat in self.unit_processes():
            procfs.send_signal(stat, signum)

    def answer_stuck(self) -> None:
        """Those who wait for the end are told that it does not come."""
        for client in list(self.clients.values()):
            if client.waits_for_end:
                client.waits_for_end = False
                self.send(client, {"ok": False, "error": "stuck", "stuck": self.stuck})

    def tell_followers(self) -> None:
        """Sends the status to whoever follows."""
        message = {"ok": True, "status": self.status()}
        for client in list(self.clients.values()):
            if client.follows:
                self.send(client, message)

    def send(self, client: Client, message: dict[str, Any]) -> None:
        """Messages are small; a client that does not read them is cut off instead of waited for."""
        data = json.dumps(message).encode() + b"\n"
        try:
            sent = client.link.send(data)
        except OSError:
            sent = 0
        if sent < len(data):
            self.drop(client)

    def drop(self, client: Client) -> None:
        """Closes a connection."""
        if self.clients.pop(client.link.fileno(), None) is not None:
            self.selector.unregister(client.link)
            client.link.close()


def drain(fd: int) -> None:
    """Empties the pipe that signals wake the loop through."""
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        pass


def main() -> NoReturn:
    """Entry point: ``argv`` is the import root (used by the boot line), the unit's id and the options as JSON."""
    options = json.loads(sys.argv[3])
    for name in ("lock", "listener", "fifo"):
        os.set_inheritable(options[name], False)
    try:
        with open("/proc/self/comm", "w", encoding="ascii") as file:  # noqa: PTH123
            file.write("kvtierd-shim")
    except OSError:
        pass
    record = shim_record.read_record(".")
    if record is None:
        raise SystemExit("the record of the unit is gone")
    Keeper(record, options).run()
    sys.exit(0)
