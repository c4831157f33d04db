"""Which backend runs the units: systemd's where there is one, else a shim for each. Never two at once.

Units that run are never started a second time: as long as some are left under the other backend, it stays in use.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import time
from pathlib import Path
from typing import Literal

import structlog

from kvtierd.errors import UnitError
from kvtierd.units import procfs
from kvtierd.units.backend import UnitBackend
from kvtierd.units.shim_backend import ShimBackend
from kvtierd.units.shim_record import read_record
from kvtierd.units.systemd_backend import SystemdBackend
from kvtierd.units.systemd_bus import MANAGER, MANAGER_PATH, SystemdBus, SystemdRefusedError
from kvtierd.units.systemd_files import pids_under_systemd

Wanted = Literal["auto", "systemd", "shim"]
Kind = Literal["systemd", "shim"]
BOOTED = Path("/run/systemd/system")  # exists exactly where systemd is process 1, sd_booted(3)
OLDEST_SYSTEMD = 249
BUS_LIMIT_SECONDS = 5.0  # at boot the bus may be a moment behind us

_log = structlog.get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """The backend, and what the operator should know about it; ``note`` is empty when all is as it was asked for."""

    backend: UnitBackend
    note: str = ""


def decide(
    wanted: Wanted, systemd_problem: str | None, shim_units: int, systemd_units: int
) -> tuple[Kind, str]:
    """Which backend, and the note. Pure.

    Args:
        wanted: The setting ``[daemon] backend``.
        systemd_problem: Why systemd cannot be used, or ``None``.
        shim_units: How many units run under shims.
        systemd_units: How many run under systemd.

    Raises:
        UnitError: ``unit.two-backends``; ``unit.no-systemd`` when it is asked for and cannot be had.
    """
    if shim_units and systemd_units:
        raise UnitError(
            f"{shim_units} units run under shims and {systemd_units} under systemd",
            why="one daemon looks after units of one backend",
            hint="Stop the units of one of them: systemctl stop 'kvtier-*.service'.",
            code="unit.two-backends",
        )
    move = "to move them: kvtierctl stop --all, restart kvtierd, kvtierctl start --all"
    if shim_units:
        if wanted == "systemd" or (wanted == "auto" and systemd_problem is None):
            return "shim", f"{shim_units} units still run under shims and not under systemd: {move}"
        return "shim", ""
    if systemd_units:
        if wanted == "shim":
            return "systemd", f"{systemd_units} units still run under systemd and not under shims: {move}"
        return "systemd", ""
    if wanted == "systemd" and systemd_problem is not None:
        raise UnitError(
            '[daemon] backend is "systemd", and systemd cannot be used',
            why=systemd_problem,
            hint='Set it to "auto" or "shim".',
            code="unit.no-systemd",
        )
    return ("shim", "") if wanted == "shim" or systemd_problem is not None else ("systemd", "")


async def choose_backend(wanted: Wanted, runtime: Path, logs: Path) -> Choice:
    """Looks at this host and makes the backend.

    Raises:
        UnitError: see ``decide``.
    """
    shims = await asyncio.to_thread(running_under_shims, runtime / "units")
    services = await asyncio.to_thread(pids_under_systemd, runtime)
    problem = None if wanted == "shim" else await systemd_problem()
    kind, note = decide(wanted, problem, shims, len(services))
    _log.info("unit backend", backend=kind, wanted=wanted, systemd=problem or "usable", note=note)
    if kind == "systemd":
        return Choice(SystemdBackend(runtime), note)
    return Choice(ShimBackend(runtime, logs / "units"), note)


def running_under_shims(units_directory: Path) -> int:
    """How many units of shims are alive, by their records."""
    count, boot = 0, procfs.boot_id()
    for directory in units_directory.iterdir() if units_directory.is_dir() else ():
        record = read_record(str(directory))
        if record is None or record["exit"] is not None or record["boot_id"] != boot:
            continue
        count += procfs.find_process(record["pid"], record["start_ticks"]) is not None
    return count


async def systemd_problem() -> str | None:
    """Why units cannot be services of the system's systemd; ``None`` when they can."""
    if not await asyncio.to_thread(BOOTED.is_dir):
        return "process 1 of this host or container is not systemd"
    if os.geteuid() != 0:
        return "only root may start services of the system"
    if shutil.which("journalctl") is None:
        return "there is no journalctl"
    bus = SystemdBus(lambda *_: None, lambda: None)
    try:
        deadline = time.monotonic() + BUS_LIMIT_SECONDS
        while True:
            try:
                arguments = [MANAGER, "Version"]
                (version,) = await bus.call(
                    MANAGER_PATH, "org.freedesktop.DBus.Properties", "Get", "ss", arguments
                )
                break
            except UnitError as error:
                if time.monotonic() > deadline:
                    return f"{error.message}: {error.why}"
            except SystemdRefusedError as error:
                return f"systemd does not answer us: {error.text}"
            await asyncio.sleep(0.2)
    finally:
        await bus.close()
    digits = "".join(c if c.isdigit() else " " for c in str(version)).split()
    if digits and int(digits[0]) < OLDEST_SYSTEMD:
        return f"systemd {version} is older than {OLDEST_SYSTEMD}"
    return None
