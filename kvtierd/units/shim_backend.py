"""The backend without systemd: one shim process per unit (``kvtierd.units.shim``), found again by its directory.

``RUNTIME/units/<unit id>/`` holds a unit's lock, record and socket, ``LOG/<unit id>.log`` its output. Nothing about a
unit lives only in this process, so any later daemon finds everything. Losing the shim itself (kill -9) is survived
too: a new one is put beside the unit.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import os
import re
import secrets
import signal as signals
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from kvtierd.errors import UnitError
from kvtierd.plan.model import LogProbe, UnitSpec
from kvtierd.quantities import parse_cpu_list
from kvtierd.units import procfs, shim_record
from kvtierd.units.backend import ProcessExit, UnitProcess, signal_number
from kvtierd.units.log_reader import LogFollower, last_lines
from kvtierd.units.shim_link import (
    ANSWER_LIMIT_SECONDS,
    NoAnswerError,
    Record,
    ask,
    connect,
    launch,
    read_answer,
)

KILL_LIMIT_SECONDS = 15.0  # after SIGKILL; the keeper gives up waiting after 10
FOLLOW_POLL_SECONDS = 0.2
_NO_MEMORY_MAX = "memory_max is not enforced: without systemd a unit has no control group of its own"
_UNIT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,127}")


class ShimBackend:
    """Runs each unit under a shim process of its own.

    Args:
        runtime_dir: Where the records live; best on a tmpfs such as /run. Created when needed.
        log_dir: Where the output goes. Created when needed.
        log_max_bytes: Size at which an output file is rotated.
        log_keep: How many rotated files are kept of each unit.
        python: The interpreter for the shims; it needs nothing but the standard library.
    """

    name = "shim"

    def __init__(
        self,
        runtime_dir: Path,
        log_dir: Path,
        *,
        log_max_bytes: int = 16 * 1024 * 1024,
        log_keep: int = 4,
        python: str = sys.executable,
    ) -> None:
        self._units_dir = runtime_dir.absolute() / "units"
        self._log_dir = log_dir.absolute()
        self._log_max_bytes = log_max_bytes
        self._log_keep = log_keep
        self._python = python
        self._live: dict[str, Record] = {}  # the last status of units whose shim we follow
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._changed = asyncio.Event()

    # --- the interface ---

    async def start(self, spec: UnitSpec) -> UnitProcess:
        """Starts the unit; see ``UnitBackend.start``.

        Raises:
            UnitError: ``unit.exists``; ``unit.exec`` when it can never work (no such program or user);
                ``unit.secret`` when a secret could not be kept out of its log; ``unit.start``, ``unit.runtime-dir``
                or ``unit.shim-died`` otherwise.
        """
        if not spec.argv:
            raise UnitError(f"{spec.id} has no command", code="unit.exec")
        request = {
            "unit_id": spec.id,
            "instance": secrets.token_hex(8),
            "spec_digest": spec.digest,
            "argv": list(spec.argv),
            "env": spec.env,
            "cwd": spec.cwd,
            "user": spec.user,
            "cpus": list(parse_cpu_list(spec.resources.cpus)) if spec.resources.cpus else [],
            "nice": spec.resources.nice,
            "guard_file": spec.guard_file or "",
            "note": _NO_MEMORY_MAX if spec.resources.memory_max_bytes is not None else "",
            "watch": [probe.contains for probe in spec.readiness.probes if isinstance(probe, LogProbe)],
            "secret_files": list(spec.secret_files),
            "stop_signal": signal_number(spec.stop.signal),
            "stop_timeout_seconds": spec.stop.timeout_seconds,
        }
        async with self._lock(spec.id):
            record = await self._launch(spec.id, {"adopt": False, **request})
            self._stop_following(spec.id)  # whatever is still on its way belongs to an earlier run
            self._changed.set()
        return await self.find(spec.id) or to_process(record)

    async def stop(
        self, unit_id: str, *, signal: str = "SIGTERM", timeout_seconds: float = 20.0
    ) -> UnitProcess:
        """Stops the whole tree; see ``UnitBackend.stop``. An ended unit is returned as it is.

        Raises:
            UnitError: ``unit.unknown``; ``unit.stuck`` when a process does not even end by SIGKILL.
        """
        request = {"do": "stop", "signal": signal_number(signal), "timeout_seconds": timeout_seconds}
        limit = timeout_seconds + KILL_LIMIT_SECONDS
        for _ in range(3):  # a shim that is killed meanwhile is replaced by find()
            process = await self.find(unit_id)
            if process is None:
                raise UnitError(f"there is no unit {unit_id}", code="unit.unknown")
            if not process.running:
                return process
            await self._replace_hanging_shim(unit_id)
            try:
                answer = await ask(self._directory(unit_id), request, limit)
            except NoAnswerError:
                continue
            if not answer.get("ok"):
                stuck = ", ".join(answer.get("stuck", ())) or answer.get("error", "?")
                raise UnitError(
                    f"{unit_id} does not end, not even by SIGKILL: {stuck}",
                    hint="A process in state D waits for a device or a file system; look at dmesg.",
                    code="unit.stuck",
                )
            self._stop_following(unit_id)
            self._changed.set()
            return to_process(answer["status"])
        raise UnitError(f"the shim of {unit_id} does not answer", code="unit.no-answer")

    async def kill(self, unit_id: str, signal: str = "SIGKILL") -> None:
        """Signals every process of the unit; nothing happens to a unit that has ended."""
        request = {"do": "kill", "signal": signal_number(signal)}
        for _ in range(3):
            process = await self.find(unit_id)
            if process is None or not process.running:
                return
            await self._replace_hanging_shim(unit_id)
            with contextlib.suppress(NoAnswerError):
                await ask(self._directory(unit_id), request, ANSWER_LIMIT_SECONDS)
                return
        raise UnitError(f"the shim of {unit_id} does not answer", code="unit.no-answer")

    async def find(self, unit_id: str) -> UnitProcess | None:
        """The unit's current or last run. Cheap while its shim is followed."""
        live = self._live.get(unit_id)
        if live is None:
            async with self._lock(unit_id):
                live = self._live.get(unit_id) or await self._look(unit_id)
        return None if live is None else to_process(live)

    async def list(self) -> list[UnitProcess]:
        """All units that have a record. What ended before this boot is forgotten: a failure of then holds no longer."""
        try:
            names = sorted(
                entry.name for entry in self._units_dir.iterdir() if _UNIT_ID.fullmatch(entry.name)
            )
        except FileNotFoundError:
            return []
        for name in names:
            record = shim_record.read_record(str(self._directory(name)))
            if record is not None and record["exit"] is not None and record["boot_id"] != procfs.boot_id():
                await self.forget(name)
        found = await asyncio.gather(*(self.find(name) for name in names))
        return [process for process in found if process is not None]

    async def forget(self, unit_id: str) -> None:
        """Drops the record of an ended unit; its log stays. Raises ``UnitError`` (``unit.running``) while it runs."""
        process = await self.find(unit_id)
        directory = self._directory(unit_id)
        if process is not None and process.running:
            raise UnitError(f"{unit_id} is running", hint="Stop it first.", code="unit.running")
        deadline = time.monotonic() + ANSWER_LIMIT_SECONDS
        while directory.exists():
            lock = shim_record.try_lock(str(directory))
            if lock >= 0:
                for entry in directory.iterdir():
                    entry.unlink()
                directory.rmdir()
                os.close(lock)
                break
            if time.monotonic() > deadline:
                raise UnitError(f"{unit_id} is being started or stopped", code="unit.running")
            await asyncio.sleep(0.02)
        self._live.pop(unit_id, None)

    async def tail(self, unit_id: str, lines: int = 20) -> builtins.list[str]:
        """The last lines of the current or last run; from the shim's memory while its disk is full."""
        record = self._live.get(unit_id) or shim_record.read_record(str(self._directory(unit_id)))
        if record is None:
            return []
        if unit_id in self._live:
            with contextlib.suppress(NoAnswerError):
                answer = await ask(
                    self._directory(unit_id), {"do": "recent", "lines": lines}, ANSWER_LIMIT_SECONDS
                )
                if answer.get("dropping"):
                    return builtins.list(answer["lines"])
        since = (record.get("log_inode", 0), record.get("log_offset", 0))
        found = await asyncio.to_thread(last_lines, self._log_path(unit_id), lines, since)
        if not found and record["exit"] is not None:
            return builtins.list(record.get("last_lines", ()))[-lines:]
        return [line.decode(errors="replace") for line in found]

    async def logged(self, unit_id: str, text: str) -> bool:
        """Whether the current run wrote this text. The shim looks for the texts of the specification's log probes."""
        if await self.find(unit_id) is None:
            return False
        record = self._live.get(unit_id) or shim_record.read_record(str(self._directory(unit_id)))
        return record is not None and text in record.get("seen", ())

    async def follow(
        self, unit_id: str, lines: int = 20, *, instance: str | None = None
    ) -> AsyncIterator[str]:
        """The last lines (also of earlier runs unless ``instance`` names one), then new ones for ever."""
        since = None if instance is None else await self._begin_of(unit_id, instance)
        follower = await asyncio.to_thread(LogFollower, self._log_path(unit_id), lines, since)
        try:
            while True:
                found = await asyncio.to_thread(follower.read)
                for line in found:
                    yield line.decode(errors="replace")
                if not found:
                    await asyncio.sleep(FOLLOW_POLL_SECONDS)
        finally:
            follower.close()

    async def _begin_of(self, unit_id: str, instance: str) -> tuple[int, int]:
        """Inode and offset of the log where this run began."""
        deadline = time.monotonic() + ANSWER_LIMIT_SECONDS
        while True:
            record = self._live.get(unit_id) or shim_record.read_record(str(self._directory(unit_id)))
            if record is not None and record["instance"] == instance:
                return record.get("log_inode", 0), record.get("log_offset", 0)
            if time.monotonic() > deadline:
                raise UnitError(f"{unit_id} has no run {instance} now", code="unit.other-run")
            await asyncio.sleep(0.05)

    async def wait_change(self, timeout_seconds: float) -> bool:
        """True as soon as a unit started, ended or said something new; False when the time is up."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._changed.wait()
        except TimeoutError:
            return False
        self._changed.clear()
        return True

    async def close(self) -> None:
        """Stops following. Units and their shims go on."""
        followers = builtins.list(self._followers.values())
        for task in followers:
            task.cancel()
        await asyncio.gather(*followers, return_exceptions=True)
        self._followers.clear()
        self._live.clear()

    # --- finding ---

    async def _look(self, unit_id: str) -> Record | None:
        """The unit's record after making sure that it is true; follows the shim, or replaces a lost one."""
        directory = str(self._directory(unit_id))
        deadline = time.monotonic() + 2 * ANSWER_LIMIT_SECONDS
        while True:
            record = shim_record.read_record(directory)
            if record is None or record["exit"] is not None:
                return record
            if record["boot_id"] != procfs.boot_id():
                return await self._write_off(unit_id, "the host or its container was restarted")
            if procfs.find_process(record["shim_pid"], record["shim_start_ticks"]) is not None:
                try:
                    return await self._follow_shim(unit_id)
                except NoAnswerError:
                    if time.monotonic() > deadline:
                        return record | {"note": f"its shim (process {record['shim_pid']}) does not answer"}
            elif procfs.find_process(record["pid"], record["start_ticks"]) is not None:
                try:
                    await self._launch(unit_id, {"adopt": True})
                except (
                    UnitError
                ) as error:  # another daemon was faster, or no room: say so and let the unit run
                    if error.stable_code not in {"unit.exists", "unit.ended"} or time.monotonic() > deadline:
                        return record | {
                            "note": f"its shim was killed and cannot be replaced: {error.message}"
                        }
            else:
                written_off = await self._write_off(unit_id, "its shim was killed")
                if written_off is not None or time.monotonic() > deadline:
                    return written_off or record
            await asyncio.sleep(0.02)

    async def _write_off(self, unit_id: str, why: str) -> Record | None:
        """Records that a run ended unseen, and kills what is left of it. ``None`` when the record is in other hands."""
        directory = str(self._directory(unit_id))
        lock = shim_record.try_lock(directory)
        if lock < 0:
            return None
        try:
            record = shim_record.read_record(directory)
            if record is None or record["exit"] is not None:
                return record
            left: builtins.list[procfs.Stat] = []
            if record["boot_id"] == procfs.boot_id():
                left = await self._kill_session(record)
            killed = f"; {len(left)} processes were left behind and killed" if left else ""
            record["note"] = f"{why}, so nobody saw how it ended{killed}"
            record["exit"] = {
                "code": None,
                "signal": None,
                "at_unix_seconds": time.time(),
                "requested": False,
            }
            with contextlib.suppress(OSError):  # a full disk; we will come here again
                shim_record.write_record(directory, record)
            return record
        finally:
            os.close(lock)

    @staticmethod
    async def _kill_session(record: Record) -> builtins.list[procfs.Stat]:
        deadline = time.monotonic() + KILL_LIMIT_SECONDS
        first: builtins.list[procfs.Stat] = []
        while time.monotonic() < deadline:
            table = procfs.process_table()
            left = procfs.session_tree(record["pid"], record["start_ticks"], table) if record["pid"] else []
            if not left:
                break
            first = first or left
            for stat in left:
                procfs.send_signal(stat, signals.SIGKILL)
            await asyncio.sleep(0.05)
        return first

    async def _replace_hanging_shim(self, unit_id: str) -> None:
        """A shim that hangs (stopped by a signal) is killed; the next look puts a new one in its place."""
        try:
            await ask(self._directory(unit_id), {"do": "status"}, ANSWER_LIMIT_SECONDS)
        except NoAnswerError:
            record = shim_record.read_record(str(self._directory(unit_id)))
            if record is None or record["exit"] is not None:
                return
            shim = procfs.find_process(record["shim_pid"], record["shim_start_ticks"])
            if shim is not None:
                procfs.send_signal(shim, signals.SIGKILL)
            deadline = time.monotonic() + ANSWER_LIMIT_SECONDS
            while shim is not None and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
                shim = procfs.find_process(record["shim_pid"], record["shim_start_ticks"])
            self._stop_following(unit_id)
            await self.find(unit_id)

    # --- talking to shims ---

    async def _follow_shim(self, unit_id: str) -> Record:
        """Connects, takes the first status, and keeps ``_live`` up to date from then on."""
        reader, writer = await connect(self._directory(unit_id))
        try:
            writer.write(b'{"do": "follow"}\n')
            status: Record = (await read_answer(reader, ANSWER_LIMIT_SECONDS))["status"]
        except BaseException:
            writer.close()
            raise
        if status["exit"] is None:
            self._stop_following(unit_id)
            self._live[unit_id] = status
            follower = self._keep_following(unit_id, reader, writer)
            self._followers[unit_id] = asyncio.create_task(follower, name=f"follow {unit_id}")
        else:
            writer.close()
        return status

    async def _keep_following(
        self, unit_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        me = asyncio.current_task()
        try:
            while True:
                status = (await read_answer(reader, None))["status"]
                if status["exit"] is not None or unit_id not in self._live:
                    break
                self._live[unit_id] = status
                self._changed.set()
        except NoAnswerError:
            pass
        finally:
            with contextlib.suppress(RuntimeError):  # the loop was closed under us
                writer.close()
            if self._followers.get(unit_id) is me:
                del self._followers[unit_id]
                self._live.pop(unit_id, None)
                self._changed.set()

    def _stop_following(self, unit_id: str) -> None:
        self._live.pop(unit_id, None)
        follower = self._followers.pop(unit_id, None)
        if follower is not None:
            follower.cancel()

    async def _launch(self, unit_id: str, request: dict[str, Any]) -> Record:
        directory = self._directory(unit_id)
        for path in (self._units_dir, self._log_dir):
            with contextlib.suppress(OSError):  # the launcher reports what is really in the way
                path.mkdir(mode=0o750, parents=True, exist_ok=True)
        request |= {"log": str(self._log_path(unit_id))}
        request |= {"log_max_bytes": self._log_max_bytes, "log_keep": self._log_keep}
        return await launch(self._python, directory, request)

    def _directory(self, unit_id: str) -> Path:
        if not _UNIT_ID.fullmatch(unit_id):
            raise UnitError(f"{unit_id!r} is not a unit's id", code="unit.unknown")
        return self._units_dir / unit_id

    def _log_path(self, unit_id: str) -> Path:
        return self._log_dir / f"{self._directory(unit_id).name}.log"

    def _lock(self, unit_id: str) -> asyncio.Lock:
        return self._locks.setdefault(unit_id, asyncio.Lock())


def to_process(record: Record) -> UnitProcess:
    """A record as the value that the rest of the daemon sees."""
    ended = record["exit"]
    if ended is not None:  # by name: a later shim may write more
        ended = ProcessExit(ended["code"], ended["signal"], ended["at_unix_seconds"], ended["requested"])
    return UnitProcess(
        unit_id=record["unit_id"],
        instance=record["instance"],
        pid=record["pid"],
        started_unix_seconds=record["started_unix_seconds"],
        spec_digest=record["spec_digest"],
        exit=ended,
        note=record.get("note", ""),
    )
