"""Finding and loading engine plugins. A plugin that is broken, hangs or is old is reported, never fatal."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.metadata
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

from kvtierd import hookspecs
from kvtierd.drivers import BoundedDriver
from kvtierd.errors import PluginError
from kvtierd.foreign import ForeignCalls, told_of
from kvtierd.plan.engine import API_VERSION, OLDEST_API_VERSION, EngineDriver

if TYPE_CHECKING:
    from kvtierd.checks import Check

DRIVER_MEMBERS = (
    "name", "api_version", "default_port", "package", "versions", "launch", "metrics_url", "observe", "read_line",
    "generation", "generated", "tokens", "flush", "l3_switch",
)  # fmt: skip

# Members that came with a later plugin API: a driver written for an earlier one need not have them.
MEMBERS_SINCE: dict[str, int] = {}
LOAD_SECONDS = 20.0  # an import reads many files, perhaps over a network
_CALLS = (
    ForeignCalls()
)  # of this process, so that a plugin that hangs costs one thread however often it is loaded


@dataclasses.dataclass(frozen=True, slots=True)
class PluginInfo:
    """One installed plugin: where it comes from, which drivers it brings, what is wrong with it ("" = nothing).

    ``warnings`` are about what works now and will not for ever: the plugin API its drivers are written for.
    """

    name: str
    distribution: str
    version: str
    drivers: tuple[str, ...] = ()
    problem: str = ""
    warnings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class PluginSet:
    """All drivers that can be used, and every plugin that was found.

    ``bounded`` has the same drivers for callers that cannot wait for ever, such as the planner. ``checks`` are what
    plugins add to ``kvtierctl doctor``.
    """

    drivers: dict[str, EngineDriver]
    plugins: tuple[PluginInfo, ...]
    bounded: dict[str, EngineDriver] = dataclasses.field(default_factory=dict)
    checks: tuple[Check, ...] = ()

    def driver(self, name: str) -> EngineDriver:
        """The driver with this name.

        Raises:
            PluginError: there is none; says which exist and which is nearest.
        """
        if name in self.drivers:
            return self.drivers[name]
        near = difflib.get_close_matches(name, self.drivers, n=1)
        known = ", ".join(sorted(self.drivers)) or "none"
        raise PluginError(
            f"no installed plugin brings an engine driver named {name!r} (installed drivers: {known})",
            hint=f"did you mean {near[0]!r}?"
            if near
            else f"install the plugin that brings it, e.g. kvtierd-{name}",
            code="plugin.missing",
        )


def load_plugins(entry_points: Iterable[importlib.metadata.EntryPoint] | None = None) -> PluginSet:
    """Loads all plugins of the entry point group. Never raises for a plugin's fault."""
    if entry_points is None:
        entry_points = importlib.metadata.entry_points(group=hookspecs.ENTRY_POINT_GROUP)
    drivers: dict[str, EngineDriver] = {}
    bounded: dict[str, EngineDriver] = {}
    plugins: list[PluginInfo] = []
    checks: list[Check] = []
    for entry in sorted(entry_points, key=lambda e: e.name):
        info = PluginInfo(
            entry.name,
            entry.dist.name if entry.dist else "",
            entry.dist.version if entry.dist else "",
        )
        try:
            found, brought = _CALLS.call(
                f"loading the plugin {entry.name!r}",
                functools.partial(_brought_by, entry),
                seconds=LOAD_SECONDS,
            )
            doubled = [name for name in found if name in drivers]
            if doubled:
                raise PluginError(f"the driver {doubled[0]!r} is already brought by another plugin")
        except Exception as error:  # noqa: BLE001 - foreign code: anything may come out of it
            plugins.append(dataclasses.replace(info, problem=told_of(error)))
            continue
        checks += brought
        drivers.update({name: driver for name, (driver, _) in found.items()})
        bounded.update({name: guarded for name, (_, guarded) in found.items()})
        warnings = tuple(text for driver, _ in found.values() for text in warnings_about(driver))
        plugins.append(dataclasses.replace(info, drivers=tuple(found), warnings=warnings))
    return PluginSet(drivers, tuple(plugins), bounded, tuple(checks))


def _brought_by(
    entry: importlib.metadata.EntryPoint,
) -> tuple[dict[str, tuple[EngineDriver, EngineDriver]], list[Check]]:
    """One plugin's drivers by name, plain and bounded; and its checks.

    It gets a manager of its own, so that its fault cannot spoil the others' hooks.
    """
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(entry.load(), name=entry.name)
    manager.check_pending()
    found = [driver for drivers in manager.hook.kvtierd_engine_drivers() for driver in drivers]
    checks = [check for brought in manager.hook.kvtierd_doctor_checks() for check in brought]
    if not found and not checks:
        raise PluginError(
            "the plugin brings no engine driver (hook kvtierd_engine_drivers) and no check (kvtierd_doctor_checks)"
        )
    for check in checks:
        if not re.fullmatch(r"[a-z0-9-]+\.[a-z0-9-]+", str(getattr(check, "id", ""))):
            raise PluginError(f"the check {getattr(check, 'id', check)!r} has no id of the form group.name")
    for driver in found:
        _check_driver(driver)
    return {driver.name: (driver, BoundedDriver(driver, _CALLS)) for driver in found}, checks


def members_of(api_version: int) -> tuple[str, ...]:
    """What a driver written for this version of the plugin API must have."""
    return tuple(name for name in DRIVER_MEMBERS if MEMBERS_SINCE.get(name, 0) <= api_version)


def _check_driver(driver: EngineDriver) -> None:
    version = getattr(driver, "api_version", API_VERSION)
    missing = [name for name in members_of(version) if not hasattr(driver, name)]
    if missing:
        raise PluginError(f"the driver {getattr(driver, 'name', driver)!r} lacks {', '.join(missing)}")
    if not OLDEST_API_VERSION <= version <= API_VERSION:
        known = str(API_VERSION)
        if OLDEST_API_VERSION < API_VERSION:
            known = f"{OLDEST_API_VERSION} to {API_VERSION}"
        raise PluginError(
            f"the driver {driver.name!r} is written for plugin API {version}, this kvtierd has {known}"
        )


def warnings_about(driver: EngineDriver) -> list[str]:
    """What works now and will not for ever."""
    if driver.api_version == API_VERSION:
        return []
    lacking = [name for name, since in MEMBERS_SINCE.items() if since > driver.api_version]
    without = f", and does without {', '.join(lacking)}" if lacking else ""
    told = (
        f"the driver {driver.name!r} is written for plugin API {driver.api_version}{without};"
        f" kvtierd has {API_VERSION} now and a later one will refuse it"
    )
    return [told]
