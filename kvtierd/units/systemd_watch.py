"""What systemd knows of the units of one daemon: read over D-Bus, and kept up to date by its signals."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import signal as signals
import socket
import time
from pathlib import Path
from typing import Any

from kvtierd.errors import UnitError
from kvtierd.units.systemd_bus import MANAGER, SystemdBus, SystemdRefusedError
from kvtierd.units.systemd_errors import stuck
from kvtierd.units.systemd_properties import SUFFIX, has_ended, marker_of, object_path, service_name

START_LIMIT_SECONDS = 25.0
UNLOAD_LIMIT_SECONDS = 5.0
KILL_LIMIT_SECONDS = 15.0  # after SIGKILL
POLL_SECONDS = 0.5  # only in case a signal of systemd's was missed
CGROUPS_AGENT = Path("/run/systemd/cgroups-agent")

Properties = dict[str, Any]


class ServiceWatch:
    """The services of one daemon.

    Args:
        owner: The daemon's runtime directory, as it stands in the units' descriptions.

    Attributes:
        changed: Set when something of a unit changed; whoever waits for it clears it.
    """

    def __init__(self, owner: str) -> None:
        self.bus = SystemdBus(self._take_signal, self._take_gap)
        self.changed = asyncio.Event()
        self._owner = owner
        self._seen: dict[str, Properties] = {}  # as last read, with what signals have told since
        self._stale: set[str] = set()
        self._units_of_paths: dict[str, str] = {}
        self._job_results: dict[str, str] = {}
        self._signalled = asyncio.Event()

    # --- reading ---

    def last_seen(self, unit_id: str) -> Properties | None:
        """As last read or told, perhaps no longer true; ``None``: never looked."""
        return self._seen.get(unit_id)

    def is_fresh(self, unit_id: str) -> bool:
        """Whether ``last_seen`` is how things are: no signal has come since, and signals do come."""
        return unit_id in self._seen and unit_id not in self._stale and self.bus.connected

    def forget(self, unit_id: str) -> None:
        """Nothing is remembered of this unit."""
        self._seen.pop(unit_id, None)

    async def list_units(self) -> builtins.list[str]:
        """Ids of all units of our kind of name, whoever's they are."""
        try:
            (units,) = await self.bus.manager("ListUnitsByPatterns", "asas", [], [f"kvtier-*{SUFFIX}"])
        except SystemdRefusedError as error:
            raise UnitError("systemd does not list its units", why=error.text, code="unit.denied") from error
        return [str(unit[0]).removesuffix(SUFFIX) for unit in units]

    async def read(self, unit_id: str, *, load: bool = False) -> Properties:
        """The unit's properties, new from systemd, and kept up to date by signals; empty when it is not loaded.

        ``load``: look for a unit file too. Not without need: systemd drops such a unit at once and tells everybody.
        """
        path = object_path(service_name(unit_id))
        self._units_of_paths[path] = unit_id
        await self.bus.watch(path)
        self._stale.discard(unit_id)
        try:
            if not load:
                await self.bus.manager("GetUnit", "s", service_name(unit_id))
            properties = await self.bus.properties(path)
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

    async def is_over(self, unit_id: str, properties: Properties) -> bool:
        """Whether nothing of the run is left.

        With the older control groups (v1) in a container the kernel does not tell systemd that a group is empty, and it
        would wait for the time-out of a unit whose processes are all gone. So it is told here.
        """
        if has_ended(properties):
            return True
        waits = properties.get("ActiveState") == "deactivating" and not properties.get("MainPID")
        if not waits or await self.processes(unit_id):
            return False
        tell_of_empty_group(str(properties.get("ControlGroup", "")))
        return True

    async def processes(self, unit_id: str) -> builtins.list[tuple[int, str]]:
        """Process ids and commands in the unit's control group."""
        try:
            (found,) = await self.bus.manager("GetUnitProcesses", "s", service_name(unit_id))
        except SystemdRefusedError:  # gone
            return []
        return [(int(pid), str(command)) for _group, pid, command in found if pid]

    async def signal(self, unit_id: str, who: str, signum: int) -> None:
        """Signals ``main`` or ``all`` processes; nothing happens when there are none."""
        try:
            await self.bus.manager("KillUnit", "ssi", service_name(unit_id), who, int(signum))
        except SystemdRefusedError as error:
            if error.name == "AccessDenied":
                raise UnitError(
                    f"systemd does not let us signal {unit_id}", why=error.text, code="unit.denied"
                ) from error
            # else nothing is left that could be signalled

    async def kill_left_behind(self, unit_id: str) -> int:
        """Kills what a main process left; how many there were."""
        left = await self.processes(unit_id)
        count = len(left)
        deadline = time.monotonic() + KILL_LIMIT_SECONDS
        while left:
            await self.signal(unit_id, "all", signals.SIGKILL)
            await asyncio.sleep(0.02)
            left = await self.processes(unit_id)
            if left and time.monotonic() > deadline:
                raise stuck(unit_id, left)
        return count

    # --- starting and unloading ---

    async def wait_job(self, unit_id: str, job: str) -> str:
        """The job's result (``done``, ``failed`` ...); empty when systemd's word on it was missed."""
        deadline = time.monotonic() + START_LIMIT_SECONDS
        while True:
            self._signalled.clear()
            if job in self._job_results:
                return self._job_results.pop(job)
            if not await self.wait_signal(POLL_SECONDS) or not job:
                now = await self.read(unit_id)
                pending = now.get("Job", [0])[0] != 0 or now.get("ActiveState") == "activating"
                if not pending:
                    return self._job_results.pop(job, "")
            if time.monotonic() > deadline:
                raise UnitError(
                    f"systemd has not started {unit_id} after {START_LIMIT_SECONDS:.0f} s", code="unit.start"
                )

    async def unload(self, unit_id: str) -> None:
        """Makes systemd drop an ended unit, so that its name is free again."""
        service = service_name(unit_id)
        deadline = time.monotonic() + UNLOAD_LIMIT_SECONDS
        while True:
            now = await self.read(unit_id)
            if marker_of(now, self._owner) is None or not await self.is_over(unit_id, now):
                return
            with contextlib.suppress(SystemdRefusedError):
                if now.get("ActiveState") == "failed":
                    await self.bus.manager("ResetFailedUnit", "s", service)
                elif now.get("SubState") == "exited":
                    await self.bus.manager("StopUnit", "ss", service, "replace")
            if time.monotonic() > deadline:
                raise UnitError(f"systemd does not let go of {service}", code="unit.start")
            await asyncio.sleep(0.005 if has_ended(now) else 0.1)

    async def manager_variables(self) -> builtins.list[str]:
        """Names in systemd's own environment, which it hands to every service."""
        try:
            (found,) = await self.bus.call(
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

    # --- signals ---

    def _take_signal(self, path: str, member: str, body: builtins.list[Any]) -> None:
        if member == "PropertiesChanged":
            unit_id = self._units_of_paths.get(path)
            if unit_id is None:
                return
            self._seen.setdefault(unit_id, {}).update(body[1])
        elif member == "JobRemoved":
            unit_id = str(body[2]).removesuffix(SUFFIX)
            if unit_id not in self._seen:
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
        self.changed.set()

    def _take_gap(self) -> None:
        self._stale |= self._seen.keys()
        self._signalled.set()
        self.changed.set()

    def clear_signal(self) -> None:
        """Before looking, so that what is told while one looks is not missed by ``wait_signal``."""
        self._signalled.clear()

    async def wait_signal(self, seconds: float) -> bool:
        """Waits for the next word of systemd; False on time-out."""
        try:
            async with asyncio.timeout(seconds):
                await self._signalled.wait()
        except TimeoutError:
            return False
        return True


def tell_of_empty_group(control_group: str, agent: Path = CGROUPS_AGENT) -> None:
    """Says what ``systemd-cgroups-agent`` says when the kernel calls it; systemd looks for itself whether it is true.

    There is no such socket where only control groups v2 are used.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(control_group.encode(), str(agent))
