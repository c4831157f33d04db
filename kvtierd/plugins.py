"""Finding and loading engine plugins. A plugin that is broken is reported, never fatal."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.metadata
from collections.abc import Iterable

import pluggy

from kvtierd import hookspecs
from kvtierd.errors import PluginError
from kvtierd.plan.engine import API_VERSION, EngineDriver

DRIVER_MEMBERS = (
    "name", "api_version", "default_port", "package", "versions", "launch", "metrics_url", "observe", "read_line",
    "generation", "generated", "tokens", "flush", "l3_switch",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class PluginInfo:
    """One installed plugin: where it comes from, which drivers it brings, what is wrong with it ("" = nothing)."""

    name: str
    distribution: str
    version: str
    drivers: tuple[str, ...] = ()
    problem: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class PluginSet:
    """All drivers that can be used, and every plugin that was found."""

    drivers: dict[str, EngineDriver]
    plugins: tuple[PluginInfo, ...]

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
    plugins: list[PluginInfo] = []
    for entry in sorted(entry_points, key=lambda e: e.name):
        info = PluginInfo(
            entry.name,
            entry.dist.name if entry.dist else "",
            entry.dist.version if entry.dist else "",
        )
        try:
            found = _drivers_of(entry)
            doubled = [d.name for d in found if d.name in drivers]
            if doubled:
                raise PluginError(f"the driver {doubled[0]!r} is already brought by another plugin")
        except Exception as error:  # noqa: BLE001 - foreign code: anything may come out of it
            problem = error.message if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"
            plugins.append(dataclasses.replace(info, problem=problem))
            continue
        drivers.update({d.name: d for d in found})
        plugins.append(dataclasses.replace(info, drivers=tuple(d.name for d in found)))
    return PluginSet(drivers, tuple(plugins))


def _drivers_of(entry: importlib.metadata.EntryPoint) -> list[EngineDriver]:
    """One plugin in a manager of its own, so that its fault cannot spoil the others' hooks."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(entry.load(), name=entry.name)
    manager.check_pending()
    found = [driver for drivers in manager.hook.kvtierd_engine_drivers() for driver in drivers]
    if not found:
        raise PluginError("the plugin brings no engine driver (hook kvtierd_engine_drivers)")
    for driver in found:
        _check_driver(driver)
    return found


def _check_driver(driver: EngineDriver) -> None:
    missing = [name for name in DRIVER_MEMBERS if not hasattr(driver, name)]
    if missing:
        raise PluginError(f"the driver {getattr(driver, 'name', driver)!r} lacks {', '.join(missing)}")
    if driver.api_version != API_VERSION:
        raise PluginError(
            f"the driver {driver.name!r} is written for plugin API {driver.api_version},"
            f" this kvtierd has {API_VERSION}"
        )
