"""Engine units: the context each driver gets, and its answer turned into a unit specification.

Drivers are foreign code. One that raises, hangs or lies costs its own engine, never the plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kvtierd.foreign import told_of
from kvtierd.plan.docker import docker_argv
from kvtierd.plan.engine import EngineContext, EngineDriver, EngineLaunch
from kvtierd.plan.environment import merge_env
from kvtierd.plan.model import NO_RESOURCES, EngineTalk, FileSpec, HttpCall, Resources, Tier, UnitSpec
from kvtierd.plan.remarks import Remarks
from kvtierd.plan.toolchain import Toolchain
from kvtierd.plan.units import engine_id
from kvtierd.settings import EngineSettings


def _command(
    planned: PlannedEngine, toolchain: Toolchain, directories: tuple[str, ...], resources: Resources
) -> tuple[str, ...]:
    engine, launch = planned.settings, planned.launch
    if engine.runner == "host":
        return launch.argv
    return docker_argv(
        toolchain,
        name=engine_id(engine.name),
        image=engine.image or "",
        command=launch.argv,
        env=launch.env,
        devices=engine.devices,
        directories=directories,
        mounts=engine.mounts,
        shm_size=engine.shm_size,
        stop_seconds=launch.stop.timeout_seconds,
        resources=resources,
    )


PLUGIN_FAILED = "engine.plugin-failed"
PLUGIN_MISSING = "engine.plugin-missing"

FLUSHES: dict[str, frozenset[Tier]] = {
    "L1": frozenset({"L1"}),
    "L1+L2": frozenset({"L1", "L2"}),
    "L1+L3": frozenset({"L1", "L3"}),
    "L3": frozenset({"L3"}),
}


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedEngine:
    """An engine with its driver, its context and the driver's answer."""

    settings: EngineSettings
    context: EngineContext
    launch: EngineLaunch
    metrics_url: str | None
    talk: EngineTalk


def ask_driver(
    driver: EngineDriver, engine: EngineSettings, context: EngineContext, remarks: Remarks
) -> PlannedEngine | None:
    """The driver's launch, checked; when it fails, ``None``, and a note that names the plugin."""
    try:
        launch = driver.launch(context)
        if not isinstance(launch, EngineLaunch):
            raise TypeError(f"launch() returned {type(launch).__name__}, not EngineLaunch")
        if not launch.argv:
            raise ValueError("launch() gave an empty command line")
        metrics_url = driver.metrics_url(context)
        talk = _talk(driver, context, serves_http=launch.serves_http)
    except Exception as error:  # noqa: BLE001 - foreign code: anything may come out of it
        remarks.note(
            PLUGIN_FAILED,
            f"engine {engine.name!r} is left out: a fault of the driver {engine.plugin!r}: {told_of(error)}",
        )
        return None
    for note in launch.notes:
        remarks.note(note.code, f"engine {engine.name}: {note.message}")
    for refusal in launch.refusals:
        remarks.refuse(refusal.code, f"engine {engine.name}: {refusal.message}", refusal.hint)
    if context.l3_switch and talk.l3_fixed:
        remarks.refuse(
            "engine.l3-fixed",
            f"engine {context.name}: its L3 cannot be taken off and on: {talk.l3_fixed}",
            "remove l3_switch from this engine",
        )
    # What strangers must not read, the engine itself still must.
    files = tuple(f.model_copy(update={"user": engine.user}) if f.private else f for f in launch.files)
    launch = launch.model_copy(update={"files": files})
    return PlannedEngine(engine, context, launch, metrics_url, talk)


def _talk(driver: EngineDriver, context: EngineContext, *, serves_http: bool) -> EngineTalk:
    if not serves_http:
        return EngineTalk()
    flush: dict[str, tuple[HttpCall, ...]] = {}
    no_flush: dict[str, str] = {}
    for name, tiers in FLUSHES.items():
        try:
            flush[name] = tuple(driver.flush(context, tiers))
        except ValueError as error:  # the driver says that it cannot
            no_flush[name] = str(error)
    attach, detach, fixed = _l3_switch(driver, context)
    return EngineTalk(
        base_url=context.url,
        generation=driver.generation(context),
        flush=flush,
        no_flush=no_flush,
        l3_attach=attach,
        l3_detach=detach,
        l3_fixed=fixed,
    )


def _l3_switch(
    driver: EngineDriver, context: EngineContext
) -> tuple[tuple[HttpCall, ...], tuple[HttpCall, ...], str]:
    """The calls that attach and detach L3, both or neither, and why neither."""
    try:
        attach, detach = (tuple(driver.l3_switch(context, on=on)) for on in (True, False))
    except ValueError as error:
        return (), (), str(error) or "its driver does not say why"
    if not attach or not detach:
        return (), (), "it has no L3"
    return attach, detach, ""


def find_driver(
    engine: EngineSettings, drivers: Mapping[str, EngineDriver], remarks: Remarks
) -> EngineDriver | None:
    """The engine's driver; a missing plugin leaves this engine out and is said."""
    driver = drivers.get(engine.plugin)
    if driver is None:
        known = ", ".join(sorted(drivers)) or "none"
        remarks.note(
            PLUGIN_MISSING,
            f"engine {engine.name!r} is left out: no installed plugin brings the driver {engine.plugin!r}"
            f" (installed: {known})",
        )
    return driver


def _env(planned: PlannedEngine, toolchain: Toolchain) -> dict[str, str]:
    launch = planned.launch
    if planned.settings.runner == "docker":
        return merge_env(toolchain.base_env, launch.env)
    if toolchain.emulation is not None and not launch.clients:
        # Without the pool it has no use for MemCache's environment, but the emulation's launcher wants its own.
        return merge_env(toolchain.emulation.env, launch.env)
    return launch.env


def engine_unit(
    planned: PlannedEngine,
    toolchain: Toolchain,
    after: tuple[str, ...],
    *,
    directories: tuple[str, ...] = (),
    blocked: str | None = None,
    resources: Resources = NO_RESOURCES,
) -> UnitSpec:
    """The unit of one engine.

    ``directories`` are kvtierd's own that a container must see; ``blocked`` says why not to start it as things are.
    """
    launch, engine = planned.launch, planned.settings
    files: tuple[FileSpec, ...] = launch.files
    return UnitSpec(
        id=engine_id(engine.name),
        kind="engine",
        name=engine.name,
        argv=(*toolchain.prefix, *_command(planned, toolchain, directories, resources)),
        env=_env(planned, toolchain),
        user=engine.user,
        devices=engine.devices,
        files=(planned.context.local_conf_path, *(f.path for f in files)),
        secret_files=tuple(f.path for f in files if f.secret),
        after=after,
        ports=(*((planned.context.port,) if launch.serves_http else ()), *launch.extra_ports.values()),
        namespace=toolchain.namespace,
        readiness=launch.readiness,
        restart=launch.restart,
        stop=launch.stop,
        plugin=engine.plugin,
        metrics_url=planned.metrics_url,
        talk=planned.talk,
        group=engine.group,
        uses_pool=launch.clients != 0,
        l2_bytes=engine.l2,
        blocked=blocked,
        # A container has limits of its own; those of docker's client would not reach it.
        resources=resources if engine.runner == "host" else NO_RESOURCES,
    )
