"""The backend on a host that systemd runs: each unit is a transient service of the system manager in kvtierd.slice.

systemd keeps the processes, so units outlive this daemon, its restart and its upgrade, and a restart of the message
bus. A unit that has ended stays with systemd until its end has been written down here (``systemd_record``); a failed
one is left to be seen in ``systemctl`` until its next start. Output goes to the journal.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import os
import re
import secrets
import shutil
import signal as signals
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from kvtierd.errors import UnitError
from kvtierd.plan.model import UnitSpec
from kvtierd.units import journal
from kvtierd.units.backend import UnitProcess, signal_number
from kvtierd.units.systemd_bus import MANAGER, LostCallError, SystemdBus, SystemdRefusedError
from kvtierd.units.systemd_properties import (
    SLICE,
    SUFFIX,
    Marker,
    exit_of,
    has_ended,
    instance_of,
    is_loaded,
    marker_of,
    object_path,
    process_of,
    service_name,
    setup_problem,
    transient_properties,
)
from kvtierd.units.systemd_record import UnitRecords

START_LIMIT_SECONDS = 25.0
UNLOAD_LIMIT_SECONDS = 5.0
KILL_LIMIT_SECONDS = 15.0  # after SIGKILL
LOCK_LIMIT_SECONDS = START_LIMIT_SECONDS + KILL_LIMIT_SECONDS
POLL_SECONDS = 0.5  # only in case a signal of systemd's was missed
KILL_AGAIN_SECONDS = 0.2
CGROUPS_AGENT = Path("/run/systemd/cgroups-agent")
DEADLY = frozenset({signals.SIGKILL, signals.SIGTERM, signals.SIGINT, signals.SIGQUIT})
_FATAL_REFUSALS = frozenset({"InvalidArgs", "PropertyReadOnly", "BadUnitSetting"})
_KILLED = re.compile(r": Killing process (\d+) \(.*\) with signal SIGKILL")

Properties = dict[str, Any]


class SystemdBackend:
    """Runs each unit as a transient service.

    Args:
        runtime_dir: The daemon's own; it marks the units as this daemon's, and ends are written down there.
    """

    name = "systemd"

    def __init__(self, runtime_dir: Path) -> None:
        self._owner = str(runtime_dir.absolute())
        self._records = UnitRecords(runtime_dir.absolute() / "systemd")
        self._bus = SystemdBus(self._take_signal, self._take_gap)
        self._seen: dict[str, Properties] = {}  # as last read, with what signals have told since
        self._stale: set[str] = set()
        self._units_of_paths: dict[str, str] = {}
        self._job_results: dict[str, str] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._changed = asyncio.Event()  # for wait_change
        self._signalled = asyncio.Event()  # for our own waiting
        self._lines = journal.LastLines(SLICE)
        self._search = journal.TextSearch()

    # --- the interface ---

    async def start(self, spec: UnitSpec) -> UnitProcess:
        """Starts the unit; see ``UnitBackend.start``.

        Raises:
            UnitError: ``unit.exists``; ``unit.foreign`` when somebody else has a unit of this name; ``unit.exec`` when
                it can never work (no such program or user); ``unit.denied``, ``unit.start`` or ``unit.no-bus`` otherwise.
        """
        service = service_name(spec.id)
        program = program_of(spec)
        stop_signal = signal_number(spec.stop.signal)
        marker = Marker(self._owner, spec.digest, secrets.token_hex(8))
        async with self._exclusive(spec.id):
            properties = transient_properties(
                spec,
                marker,
                program,
                stop_signal=stop_signal,
                manager_variables=await self._manager_variables(),
            )
            job = await self._start_job(spec.id, service, marker, properties)
            self._records.remove(spec.id)
            try:
                result = await self._wait_job(spec.id, job)
            except UnitError:
                with contextlib.suppress(SystemdRefusedError, UnitError):
                    await self._bus.manager("KillUnit", "ssi", service, "all", int(signals.SIGKILL))
                raise
            now = await self._read(spec.id)
            problem = setup_problem(now)
            if result != "done" and (result or problem):
                await self._unload(spec.id)
                raise _not_started(spec, program, result, problem)
            process = await self._judge(spec.id, now)
            self._changed.set()
        if process is None:
            raise UnitError(f"{spec.id} was taken away while it started", code="unit.start")
        return process

    async def stop(
        self, unit_id: str, *, signal: str = "SIGTERM", timeout_seconds: float = 20.0
    ) -> UnitProcess:
        """Stops the whole tree; see ``UnitBackend.stop``. An ended unit is returned as it is.

        Raises:
            UnitError: ``unit.unknown``; ``unit.stuck`` when a process does not even end by SIGKILL.
        """
        signum = signal_number(signal)
        process = await self.find(unit_id)
        if process is None:
            raise UnitError(f"there is no unit {unit_id}", code="unit.unknown")
        if not process.running:
            return process
        self._records.write_request(unit_id, process.instance)
        for number in (signum, signals.SIGCONT):
            await self._signal(unit_id, "main", number)
        ended = await self._wait_ended(unit_id, process.instance, timeout_seconds)
        deadline = time.monotonic() + KILL_LIMIT_SECONDS
        while ended is None:
            await self._signal(unit_id, "all", signals.SIGKILL)
            ended = await self._wait_ended(unit_id, process.instance, KILL_AGAIN_SECONDS)
            if ended is None and time.monotonic() > deadline:
                raise _stuck(unit_id, await self._processes(unit_id))
        return ended

    async def kill(self, unit_id: str, signal: str = "SIGKILL") -> None:
        """Signals every process of the unit; nothing happens to a unit that has ended."""
        signum = signal_number(signal)
        process = await self.find(unit_id)
        if process is None or not process.running:
            return
        if signum in DEADLY:
            self._records.write_request(unit_id, process.instance)
        await self._signal(unit_id, "all", signum)

    async def find(self, unit_id: str) -> UnitProcess | None:
        """The unit's current or last run. Asks systemd only when a signal said that something is new."""
        service_name(unit_id)
        seen = self._seen.get(unit_id)
        if seen is not None and unit_id not in self._stale and self._bus.connected:
            marker = marker_of(seen, self._owner)
            if (
                marker is not None
                and seen.get("ActiveState") in {"active", "activating"}
                and not has_ended(seen)
            ):
                return process_of(unit_id, seen, marker)
            if not seen:  # not loaded
                return self._records.ended(unit_id)
        async with self._lock(unit_id):
            before = self._seen.get(unit_id, {})
            properties = await self._read(unit_id)
            if marker_of(properties, self._owner) is not None and not await self._is_over(
                unit_id, properties
            ):
                return await self._judge(unit_id, properties, before)
            async with self._records.exclusive(unit_id, LOCK_LIMIT_SECONDS):
                return await self._judge(unit_id, await self._read(unit_id), before)

    async def list(self) -> list[UnitProcess]:
        """All units of this daemon that systemd knows or whose end is written down."""
        try:
            (units,) = await self._bus.manager("ListUnitsByPatterns", "asas", [], [f"kvtier-*{SUFFIX}"])
        except SystemdRefusedError as error:
            raise UnitError("systemd does not list its units", why=error.text, code="unit.denied") from error
        names = {str(unit[0]).removesuffix(SUFFIX) for unit in units} | set(self._records.ids())
        found = await asyncio.gather(*(self.find(name) for name in sorted(names)))
        return [process for process in found if process is not None]

    async def forget(self, unit_id: str) -> None:
        """Drops what is known of an ended unit; its output stays. Raises ``UnitError`` (``unit.running``) while it runs."""
        process = await self.find(unit_id)
        if process is None:
            return
        if process.running:
            raise UnitError(f"{unit_id} is running", hint="Stop it first.", code="unit.running")
        async with self._exclusive(unit_id):
            now = await self._read(unit_id)
            if marker_of(now, self._owner) is not None:
                if not await self._is_over(unit_id, now):
                    raise UnitError(f"{unit_id} is being started", code="unit.running")
                await self._unload(unit_id)
            self._records.remove(unit_id)
            self._seen.pop(unit_id, None)

    async def tail(self, unit_id: str, lines: int = 20) -> builtins.list[str]:
        """The last lines of the current or last run."""
        process = await self.find(unit_id)
        return [] if process is None else await self._lines.tail(process.instance, lines)

    async def logged(self, unit_id: str, text: str) -> bool:
        """Whether the current run wrote this text in one line."""
        process = await self.find(unit_id)
        return process is not None and await self._search.has(process.instance, text)

    async def follow(self, unit_id: str, lines: int = 20) -> AsyncIterator[str]:
        """The last lines (also of earlier runs), then new ones for ever."""
        async with contextlib.aclosing(journal.follow(service_name(unit_id), lines)) as output:  # type: ignore[type-var]
            async for line in output:
                yield line

    async def wait_change(self, timeout_seconds: float) -> bool:
        """True as soon as systemd said that something of a unit changed; False when the time is up."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._changed.wait()
        except TimeoutError:
            return False
        self._changed.clear()
        return True

    async def close(self) -> None:
        """Ends the connection and the reading of the journal. Units go on."""
        await self._lines.close()
        await self._bus.close()

    # --- what systemd knows ---

    async def _read(self, unit_id: str, *, load: bool = False) -> Properties:
        """The unit's properties, new from systemd, and kept up to date by signals; empty when it is not loaded.

        ``load``: look for a unit file too. Not without need: systemd drops such a unit at once and tells everybody.
        """
        path = object_path(service_name(unit_id))
        self._units_of_paths[path] = unit_id
        await self._bus.watch(path)
        self._stale.discard(unit_id)
        try:
            if not load:
                await self._bus.manager("GetUnit", "s", service_name(unit_id))
            properties = await self._bus.properties(path)
        except SystemdRefusedError as error:
            if error.name not in {"NoSuchUnit", "UnknownObject"}:
                raise UnitError(
                    f"systemd does not show {unit_id}", why=error.text, code="unit.denied"
                ) from error
            properties = {}
        except BaseException:
            self._stale.add(unit_id)
            raise
        self._seen[unit_id] = properties
        return properties

    async def _judge(
        self, unit_id: str, properties: Properties, before: Properties | None = None
    ) -> UnitProcess | None:
        """The run as it is; an end is written down and the unit unloaded.

        ``before`` is what was last seen: a unit that somebody stopped with systemctl is not loaded any more.
        """
        marker = marker_of(properties, self._owner)
        if marker is None:
            if is_loaded(properties):
                return None  # somebody else's
            return await self._write_off(unit_id, before or {})
        if not await self._is_over(unit_id, properties):
            return process_of(unit_id, properties, marker)
        instance = instance_of(properties)
        ended = self._records.ended(unit_id, instance)
        if ended is None:
            left = 0
            if properties.get("SubState") == "exited":
                left = await self._kill_left_behind(unit_id)
            ended = await self._write_end(unit_id, properties, marker, left)
        if properties.get("SubState") == "exited":
            await self._unload(unit_id)  # systemctl would call it active
        return ended

    async def _is_over(self, unit_id: str, properties: Properties) -> bool:
        """Whether nothing of the run is left.

        With the older control groups (v1) in a container the kernel does not tell systemd that a group is empty, and it
        would wait for the time-out of a unit whose processes are all gone. So it is told here.
        """
        if has_ended(properties):
            return True
        waits = properties.get("ActiveState") == "deactivating" and not properties.get("MainPID")
        if not waits or await self._processes(unit_id):
            return False
        tell_of_empty_group(str(properties.get("ControlGroup", "")))
        return True

    async def _write_off(self, unit_id: str, before: Properties) -> UnitProcess | None:
        marker = marker_of(before, self._owner)
        last = self._records.ended(unit_id)
        if marker is None or not instance_of(before) or (last and last.instance == instance_of(before)):
            return last
        return await self._write_end(
            unit_id, before, marker, 0, "systemd let go of it: it was stopped from outside (systemctl stop)"
        )

    async def _write_end(
        self, unit_id: str, properties: Properties, marker: Marker, left: int, note: str = ""
    ) -> UnitProcess:
        instance = instance_of(properties)
        requested = self._records.is_requested(unit_id, instance)
        await journal.synchronize()  # its last words are there when somebody learns of the end
        self._lines.forget(instance)
        if not requested and not note:
            left = left or await _count_killed(instance)
            result = properties.get("Result")
            notes = [f"{left} processes were left behind and killed"] if left else []
            notes += [f"systemd says: {result}"] if result in {"oom-kill", "resources", "timeout"} else []
            note = "; ".join(notes)
        exit_ = exit_of(properties, now=time.time(), requested=requested)
        process = process_of(unit_id, properties, marker, exit_, note)
        self._records.write_end(process)
        self._changed.set()
        return process

    async def _kill_left_behind(self, unit_id: str) -> int:
        """Kills what a main process left; how many there were."""
        left = await self._processes(unit_id)
        count = len(left)
        deadline = time.monotonic() + KILL_LIMIT_SECONDS
        while left:
            await self._signal(unit_id, "all", signals.SIGKILL)
            await asyncio.sleep(0.02)
            left = await self._processes(unit_id)
            if left and time.monotonic() > deadline:
                raise _stuck(unit_id, left)
        return count

    async def _processes(self, unit_id: str) -> builtins.list[tuple[int, str]]:
        """Process ids and commands in the unit's control group."""
        try:
            (found,) = await self._bus.manager("GetUnitProcesses", "s", service_name(unit_id))
        except SystemdRefusedError:  # gone
            return []
        return [(int(pid), str(command)) for _group, pid, command in found if pid]

    async def _signal(self, unit_id: str, who: str, signum: int) -> None:
        try:
            await self._bus.manager("KillUnit", "ssi", service_name(unit_id), who, int(signum))
        except SystemdRefusedError as error:
            if error.name == "AccessDenied":
                raise UnitError(
                    f"systemd does not let us signal {unit_id}", why=error.text, code="unit.denied"
                ) from error
            # else nothing is left that could be signalled

    async def _wait_ended(self, unit_id: str, instance: str, seconds: float) -> UnitProcess | None:
        """The ended run, or ``None`` when it still runs after this time."""
        deadline = time.monotonic() + seconds
        while True:
            self._signalled.clear()
            process = await self.find(unit_id)
            if process is None:
                raise UnitError(f"{unit_id} was taken away while it was stopped", code="unit.unknown")
            if not process.running or process.instance != instance:
                return process
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            await self._wait_signal(min(left, POLL_SECONDS))

    # --- starting ---

    async def _start_job(
        self, unit_id: str, service: str, marker: Marker, properties: builtins.list[tuple[str, Any]]
    ) -> str:
        """Has systemd start it; the path of the job, empty when the answer was lost but the unit is there."""
        deadline = time.monotonic() + UNLOAD_LIMIT_SECONDS
        while True:
            now = await self._read(unit_id)
            mine = marker_of(now, self._owner)
            if mine is not None and mine.token == marker.token:
                return ""
            if mine is not None and not await self._is_over(unit_id, now):
                raise UnitError(f"{unit_id} already runs as process {now.get('MainPID')}", code="unit.exists")
            if mine is None and is_loaded(now):
                raise _foreign(service, now)
            if mine is not None:
                await self._judge(unit_id, now)
                await self._unload(unit_id)
            try:
                (job,) = await self._bus.manager(
                    "StartTransientUnit", "ssa(sv)a(sa(sv))", service, "fail", [list_of(p) for p in properties], [],
                    once=True,
                )  # fmt: skip
            except LostCallError:
                pass
            except SystemdRefusedError as error:
                if error.name != "UnitExists":
                    raise _refused(unit_id, error) from error
                there = await self._read(unit_id, load=True)
                if is_loaded(there) and marker_of(there, self._owner) is None:
                    raise _foreign(service, there) from error
            else:
                return str(job)
            if time.monotonic() > deadline:
                raise UnitError(f"systemd does not let go of an earlier {service}", code="unit.start")
            await asyncio.sleep(0.02)

    async def _wait_job(self, unit_id: str, job: str) -> str:
        """The job's result (``done``, ``failed`` ...); empty when systemd's word on it was missed."""
        deadline = time.monotonic() + START_LIMIT_SECONDS
        while True:
            self._signalled.clear()
            if job in self._job_results:
                return self._job_results.pop(job)
            if not await self._wait_signal(POLL_SECONDS) or not job:
                now = await self._read(unit_id)
                pending = now.get("Job", [0])[0] != 0 or now.get("ActiveState") == "activating"
                if not pending:
                    return self._job_results.pop(job, "")
            if time.monotonic() > deadline:
                raise UnitError(
                    f"systemd has not started {unit_id} after {START_LIMIT_SECONDS:.0f} s", code="unit.start"
                )

    async def _unload(self, unit_id: str) -> None:
        """Makes systemd drop an ended unit, so that its name is free again."""
        service = service_name(unit_id)
        deadline = time.monotonic() + UNLOAD_LIMIT_SECONDS
        while True:
            now = await self._read(unit_id)
            if marker_of(now, self._owner) is None or not await self._is_over(unit_id, now):
                return
            with contextlib.suppress(SystemdRefusedError):
                if now.get("ActiveState") == "failed":
                    await self._bus.manager("ResetFailedUnit", "s", service)
                elif now.get("SubState") == "exited":
                    await self._bus.manager("StopUnit", "ss", service, "replace")
            if time.monotonic() > deadline:
                raise UnitError(f"systemd does not let go of {service}", code="unit.start")
            await asyncio.sleep(0.005 if has_ended(now) else 0.1)

    async def _manager_variables(self) -> builtins.list[str]:
        """Names in systemd's own environment, which it hands to every service."""
        try:
            (found,) = await self._bus.call(
                "/org/freedesktop/systemd1",
                "org.freedesktop.DBus.Properties",
                "Get",
                "ss",
                [MANAGER, "Environment"],
            )
        except SystemdRefusedError as error:
            raise UnitError(
                "systemd does not show its environment", why=error.text, code="unit.denied"
            ) from error
        return [str(entry).partition("=")[0] for entry in found]

    # --- signals, locks ---

    def _take_signal(self, path: str, member: str, body: builtins.list[Any]) -> None:
        if member == "PropertiesChanged":
            unit_id = self._units_of_paths.get(path)
            if unit_id is None:
                return
            self._seen.setdefault(unit_id, {}).update(body[1])
        elif member == "JobRemoved":
            unit_id = str(body[2]).removesuffix(SUFFIX)
            if unit_id not in self._locks:
                return
            self._job_results[str(body[1])] = str(body[3])
            while len(self._job_results) > 64:
                del self._job_results[next(iter(self._job_results))]
        elif member in {"UnitNew", "UnitRemoved"}:
            unit_id = str(body[0]).removesuffix(SUFFIX)
            if unit_id not in self._seen:
                return
        else:
            return
        self._stale.add(unit_id)
        self._signalled.set()
        self._changed.set()

    def _take_gap(self) -> None:
        self._stale |= self._seen.keys()
        self._signalled.set()
        self._changed.set()

    async def _wait_signal(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._signalled.wait()
        except TimeoutError:
            return False
        return True

    @contextlib.asynccontextmanager
    async def _exclusive(self, unit_id: str) -> AsyncIterator[None]:
        async with self._lock(unit_id), self._records.exclusive(unit_id, LOCK_LIMIT_SECONDS):
            yield

    def _lock(self, unit_id: str) -> asyncio.Lock:
        return self._locks.setdefault(unit_id, asyncio.Lock())


def tell_of_empty_group(control_group: str, agent: Path = CGROUPS_AGENT) -> None:
    """Says what ``systemd-cgroups-agent`` says when the kernel calls it; systemd looks for itself whether it is true.

    There is no such socket where only control groups v2 are used.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(control_group.encode(), str(agent))


def list_of(pair: tuple[str, Any]) -> list[Any]:
    """A D-Bus struct is a list for dbus-fast."""
    return [pair[0], pair[1]]


def program_of(spec: UnitSpec) -> str:
    """The absolute path of ``argv[0]``, found as a shell would: in the unit's own PATH.

    Raises:
        UnitError: ``unit.exec``
    """
    if not spec.argv:
        raise UnitError(f"{spec.id} has no command", code="unit.exec")
    if any("\0" in text for text in (*spec.argv, *spec.env, *spec.env.values(), spec.cwd)):
        raise UnitError(f"an argument or a variable of {spec.id} holds a zero byte", code="unit.exec")
    first = spec.argv[0]
    if "/" in first:
        return os.path.normpath(Path(spec.cwd) / first)
    found = shutil.which(first, path=spec.env.get("PATH", os.defpath))
    if found is None:
        raise UnitError(f"there is no program {first!r} for {spec.id}", code="unit.exec")
    return str(Path(found).absolute())


async def _count_killed(instance: str) -> int:
    """How many processes systemd had to kill after the main process of this run had ended, by what it logged."""
    with contextlib.suppress(UnitError):
        said = await journal.read(
            ["--lines=500", "_PID=1", f"INVOCATION_ID={instance}"], journal.SYNC_LIMIT_SECONDS
        )
        return len({found[1] for entry in said if (found := _KILLED.search(entry.text))})
    return 0


def _foreign(service: str, properties: Properties) -> UnitError:
    where = properties.get("FragmentPath") or "no file"
    return UnitError(
        f"systemd has another unit named {service}, which is not this kvtierd's",
        why=f"it is described as {properties.get('Description', '')!r} and comes from {where}",
        hint=f"Rename the engine, or remove that unit (systemctl status {service}).",
        code="unit.foreign",
    )


def _refused(unit_id: str, error: SystemdRefusedError) -> UnitError:
    code = "unit.start"
    if error.name in _FATAL_REFUSALS:
        code = "unit.exec"
    elif error.name in {"AccessDenied", "InteractiveAuthorizationRequired"}:
        code = "unit.denied"
    return UnitError(f"systemd refuses to start {unit_id}", why=error.text or error.name, code=code)


def _not_started(spec: UnitSpec, program: str, result: str, problem: tuple[str, bool] | None) -> UnitError:
    why, for_good = problem or (f"systemd's job ended as {result!r}", False)
    who = f" as {spec.user}" if spec.user else ""
    return UnitError(
        f"cannot execute {program!r}{who} in {spec.cwd}",
        why=why,
        hint="Check that the program and the directory exist and that the user may use them."
        if for_good
        else "",
        code="unit.exec" if for_good else "unit.start",
    )


def _stuck(unit_id: str, left: list[tuple[int, str]]) -> UnitError:
    names = ", ".join(f"{pid} ({command[:60]})" for pid, command in left) or "its control group is not empty"
    return UnitError(
        f"{unit_id} does not end, not even by SIGKILL: {names}",
        hint="A process in state D waits for a device or a file system; look at dmesg.",
        code="unit.stuck",
    )
