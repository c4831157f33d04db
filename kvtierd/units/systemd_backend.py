"""The backend on a host that systemd runs: each unit is a transient service of the system manager in kvtierd.slice.

systemd keeps the processes, so units outlive this daemon, its restart and its upgrade, and a restart of the message
bus. A unit that has ended stays with systemd until its end has been written down here (``systemd_record``); a failed
one is left to be seen in ``systemctl`` until its next start. Output goes to the journal.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import re
import secrets
import signal as signals
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from kvtierd.errors import UnitError
from kvtierd.plan.model import UnitSpec
from kvtierd.units import journal
from kvtierd.units.backend import UnitProcess, signal_number
from kvtierd.units.systemd_bus import LostCallError, SystemdRefusedError
from kvtierd.units.systemd_errors import foreign, journal_would_show_secrets, not_started, refused, stuck
from kvtierd.units.systemd_properties import (
    SLICE,
    Marker,
    exit_of,
    has_ended,
    instance_of,
    is_loaded,
    marker_of,
    process_of,
    program_of,
    service_name,
    setup_problem,
    transient_properties,
)
from kvtierd.units.systemd_record import UnitRecords
from kvtierd.units.systemd_watch import (
    KILL_LIMIT_SECONDS,
    POLL_SECONDS,
    START_LIMIT_SECONDS,
    UNLOAD_LIMIT_SECONDS,
    Properties,
    ServiceWatch,
)

LOCK_LIMIT_SECONDS = START_LIMIT_SECONDS + KILL_LIMIT_SECONDS
KILL_AGAIN_SECONDS = 0.2
DEADLY = frozenset({signals.SIGKILL, signals.SIGTERM, signals.SIGINT, signals.SIGQUIT})
_KILLED = re.compile(r": Killing process (\d+) \(.*\) with signal SIGKILL")


class SystemdBackend:
    """Runs each unit as a transient service.

    Args:
        runtime_dir: The daemon's own; it marks the units as this daemon's, and ends are written down there.
    """

    name = "systemd"

    def __init__(self, runtime_dir: Path) -> None:
        self._owner = str(runtime_dir.absolute())
        self._records = UnitRecords(runtime_dir.absolute() / "systemd")
        self._watch = ServiceWatch(self._owner)
        self._locks: dict[str, asyncio.Lock] = {}
        self._lines = journal.LastLines(SLICE)
        self._search = journal.TextSearch()

    # --- the interface ---

    async def start(self, spec: UnitSpec) -> UnitProcess:
        """Starts the unit; see ``UnitBackend.start``.

        Raises:
            UnitError: ``unit.exists``; ``unit.foreign`` when somebody else has a unit of this name; ``unit.secret`` when
                its output would show a secret; ``unit.exec`` when it can never work (no such program or user);
                ``unit.denied``, ``unit.start`` or ``unit.no-bus`` otherwise.
        """
        service = service_name(spec.id)
        if spec.secret_files:
            raise journal_would_show_secrets(spec)
        program = program_of(spec)
        stop_signal = signal_number(spec.stop.signal)
        marker = Marker(self._owner, spec.digest, secrets.token_hex(8))
        async with self._exclusive(spec.id):
            properties = transient_properties(
                spec,
                marker,
                program,
                stop_signal=stop_signal,
                manager_variables=await self._watch.manager_variables(),
            )
            job = await self._start_job(spec.id, service, marker, properties)
            self._records.remove(spec.id)
            try:
                result = await self._watch.wait_job(spec.id, job)
            except UnitError:
                with contextlib.suppress(SystemdRefusedError, UnitError):
                    await self._watch.bus.manager("KillUnit", "ssi", service, "all", int(signals.SIGKILL))
                raise
            now = await self._watch.read(spec.id)
            problem = setup_problem(now)
            if result != "done" and (result or problem):
                await self._watch.unload(spec.id)
                raise not_started(spec, program, result, problem)
            process = await self._judge(spec.id, now)
            self._watch.changed.set()
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
            await self._watch.signal(unit_id, "main", number)
        ended = await self._wait_ended(unit_id, process.instance, timeout_seconds)
        deadline = time.monotonic() + KILL_LIMIT_SECONDS
        while ended is None:
            await self._watch.signal(unit_id, "all", signals.SIGKILL)
            ended = await self._wait_ended(unit_id, process.instance, KILL_AGAIN_SECONDS)
            if ended is None and time.monotonic() > deadline:
                raise stuck(unit_id, await self._watch.processes(unit_id))
        return ended

    async def kill(self, unit_id: str, signal: str = "SIGKILL") -> None:
        """Signals every process of the unit; nothing happens to a unit that has ended."""
        signum = signal_number(signal)
        process = await self.find(unit_id)
        if process is None or not process.running:
            return
        if signum in DEADLY:
            self._records.write_request(unit_id, process.instance)
        await self._watch.signal(unit_id, "all", signum)

    async def find(self, unit_id: str) -> UnitProcess | None:
        """The unit's current or last run. Asks systemd only when a signal said that something is new."""
        service_name(unit_id)
        seen = self._watch.last_seen(unit_id)
        if seen is not None and self._watch.is_fresh(unit_id):
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
            before = self._watch.last_seen(unit_id) or {}
            properties = await self._watch.read(unit_id)
            if marker_of(properties, self._owner) is not None and not await self._watch.is_over(
                unit_id, properties
            ):
                return await self._judge(unit_id, properties, before)
            async with self._records.exclusive(unit_id, LOCK_LIMIT_SECONDS):
                return await self._judge(unit_id, await self._watch.read(unit_id), before)

    async def list(self) -> list[UnitProcess]:
        """All units of this daemon that systemd knows or whose end is written down."""
        names = {*await self._watch.list_units(), *self._records.ids()}
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
            now = await self._watch.read(unit_id)
            if marker_of(now, self._owner) is not None:
                if not await self._watch.is_over(unit_id, now):
                    raise UnitError(f"{unit_id} is being started", code="unit.running")
                await self._watch.unload(unit_id)
            self._records.remove(unit_id)
            self._watch.forget(unit_id)

    async def tail(self, unit_id: str, lines: int = 20) -> builtins.list[str]:
        """The last lines of the current or last run."""
        process = await self.find(unit_id)
        return [] if process is None else await self._lines.tail(process.instance, lines)

    async def logged(self, unit_id: str, text: str) -> bool:
        """Whether the current run wrote this text in one line."""
        process = await self.find(unit_id)
        return process is not None and await self._search.has(process.instance, text)

    async def follow(
        self, unit_id: str, lines: int = 20, *, instance: str | None = None
    ) -> AsyncIterator[str]:
        """The last lines (also of earlier runs unless ``instance`` names one), then new ones for ever."""
        matches = journal.of_service(service_name(unit_id))
        if instance is not None:
            process = await self.find(unit_id)
            if process is None or process.instance != instance:
                raise UnitError(f"{unit_id} has no run {instance} now", code="unit.other-run")
            matches = journal.of_run(instance)
        async with contextlib.aclosing(journal.follow(matches, lines)) as output:  # type: ignore[type-var]
            async for line in output:
                yield line

    async def wait_change(self, timeout_seconds: float) -> bool:
        """True as soon as systemd said that something of a unit changed; False when the time is up."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._watch.changed.wait()
        except TimeoutError:
            return False
        self._watch.changed.clear()
        return True

    async def close(self) -> None:
        """Ends the connection and the reading of the journal. Units go on."""
        await self._lines.close()
        await self._watch.bus.close()

    # --- what systemd knows ---

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
        if not await self._watch.is_over(unit_id, properties):
            return process_of(unit_id, properties, marker)
        instance = instance_of(properties)
        ended = self._records.ended(unit_id, instance)
        if ended is None:
            left = 0
            if properties.get("SubState") == "exited":
                left = await self._watch.kill_left_behind(unit_id)
            ended = await self._write_end(unit_id, properties, marker, left)
        if properties.get("SubState") == "exited":
            await self._watch.unload(unit_id)  # systemctl would call it active
        return ended

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
        self._watch.changed.set()
        return process

    async def _wait_ended(self, unit_id: str, instance: str, seconds: float) -> UnitProcess | None:
        """The ended run, or ``None`` when it still runs after this time."""
        deadline = time.monotonic() + seconds
        while True:
            self._watch.clear_signal()
            process = await self.find(unit_id)
            if process is None:
                raise UnitError(f"{unit_id} was taken away while it was stopped", code="unit.unknown")
            if not process.running or process.instance != instance:
                return process
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            await self._watch.wait_signal(min(left, POLL_SECONDS))

    # --- starting ---

    async def _start_job(
        self, unit_id: str, service: str, marker: Marker, properties: builtins.list[tuple[str, Any]]
    ) -> str:
        """Has systemd start it; the path of the job, empty when the answer was lost but the unit is there."""
        deadline = time.monotonic() + UNLOAD_LIMIT_SECONDS
        while True:
            now = await self._watch.read(unit_id)
            mine = marker_of(now, self._owner)
            if mine is not None and mine.token == marker.token:
                return ""
            if mine is not None and not await self._watch.is_over(unit_id, now):
                raise UnitError(f"{unit_id} already runs as process {now.get('MainPID')}", code="unit.exists")
            if mine is None and is_loaded(now):
                raise foreign(service, now)
            if mine is not None:
                await self._judge(unit_id, now)
                await self._watch.unload(unit_id)
            try:
                (job,) = await self._watch.bus.manager(
                    "StartTransientUnit", "ssa(sv)a(sa(sv))", service, "fail", [list(p) for p in properties], [],
                    once=True,
                )  # fmt: skip
            except LostCallError:
                pass
            except SystemdRefusedError as error:
                if error.name != "UnitExists":
                    raise refused(unit_id, error) from error
                there = await self._watch.read(unit_id, load=True)
                if is_loaded(there) and marker_of(there, self._owner) is None:
                    raise foreign(service, there) from error
            else:
                return str(job)
            if time.monotonic() > deadline:
                raise UnitError(f"systemd does not let go of an earlier {service}", code="unit.start")
            await asyncio.sleep(0.02)

    # --- signals, locks ---

    @contextlib.asynccontextmanager
    async def _exclusive(self, unit_id: str) -> AsyncIterator[None]:
        async with self._lock(unit_id), self._records.exclusive(unit_id, LOCK_LIMIT_SECONDS):
            yield

    def _lock(self, unit_id: str) -> asyncio.Lock:
        return self._locks.setdefault(unit_id, asyncio.Lock())


async def _count_killed(instance: str) -> int:
    """How many processes systemd had to kill after the main process of this run had ended, by what it logged."""
    with contextlib.suppress(UnitError):
        said = await journal.read(
            ["--lines=500", "_PID=1", f"INVOCATION_ID={instance}"], journal.SYNC_LIMIT_SECONDS
        )
        return len({found[1] for entry in said if (found := _KILLED.search(entry.text))})
    return 0
