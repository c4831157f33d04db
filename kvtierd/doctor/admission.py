"""Makes a patient of this machine, or of a directory that looks like one."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtierd.checks import COMMAND_SECONDS, Daemon, Patient
from kvtierd.doctor.recorded import DirectoryRunner
from kvtierd.errors import KvtierError
from kvtierd.host.inventory import take_inventory
from kvtierd.host.view import HostView
from kvtierd.plan.inventory import Inventory
from kvtierd.plan.model import NodePlan
from kvtierd.plugins import PluginSet
from kvtierd.provision.assembly import inventory_of_this_host, plan_for
from kvtierd.provision.host_plan import owned_here
from kvtierd.settings import check_settings


@dataclasses.dataclass(slots=True)
class Answers:
    """What a kvtierd said. Implements :class:`kvtierd.checks.Daemon`."""

    status: Mapping[str, Any]
    peers: Mapping[str, Any]


def admit(
    plugins: PluginSet,
    *,
    root: Path = Path("/"),
    settings_file: Path | None = None,
    confs: tuple[Path, ...] = (),
    engine_argv: tuple[str, ...] = (),
    daemon: Daemon | None = None,
    now_unix: float | None = None,
    machine: str | None = None,
) -> Patient:
    """A patient; nothing is looked at yet but the settings.

    Args:
        plugins: The engine drivers, for the plan.
        root: Where the host's ``/`` is; another one than ``/`` has its commands recorded in ``ROOT/.commands``.
        settings_file: A file on this machine; ``None``: check without settings.
        confs, engine_argv, daemon: As in ``Patient``.
        now_unix: The time; default: now.
        machine: The architecture; default: as the root says.
    """
    here = root == Path("/")
    view = HostView() if here else HostView(root, DirectoryRunner(root), machine=machine)
    settings = None
    problems: tuple[str, ...] = ()
    if settings_file is not None:
        settings, found = check_settings(settings_file.absolute())
        problems = tuple(str(problem) for problem in found)
        settings = None if found else settings

    async def inventory() -> Inventory:
        if settings is None:
            return await take_inventory(
                view,
                python=[sys.executable] if here else [],
                npu_smi_timeout_seconds=COMMAND_SECONDS,
                python_timeout_seconds=COMMAND_SECONDS,
            )
        return await inventory_of_this_host(settings, plugins, view=view, command_seconds=COMMAND_SECONDS)

    async def plan(found: Inventory) -> NodePlan:
        assert settings is not None
        pids, pages = frozenset[int](), 0
        if here:
            with contextlib.suppress(
                KvtierError
            ):  # the ledger is root's: else our own pages count as others'
                pids, pages = await owned_here(settings, found)
        return await asyncio.to_thread(
            lambda: plan_for(settings, found, plugins, owned_pids=pids, owned_pages=pages)
        )

    return Patient(
        view,
        inventory=inventory,
        settings=settings,
        settings_file=settings_file,
        settings_problems=problems,
        confs=confs,
        engine_argv=engine_argv,
        daemon=daemon,
        plan=None if settings is None else plan,
        now_unix=time.time() if now_unix is None else now_unix,
    )
