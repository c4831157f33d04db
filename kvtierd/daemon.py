"""kvtierd: settings -> inventory -> plan -> hugepages -> files -> units -> tier -> observation, in one loop.

This is the only file that names every stage. One round of the loop compares plan and reality and starts what
follows from it; nothing else changes the host. A fault of the daemon never stops a unit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import structlog

from kvtierd import __version__
from kvtierd.assembly import (
    DEFAULT_SETTINGS,
    SOCKET_NAME,
    emulation_root,
    inventory_of_this_host,
    plan_for,
    prepare_emulation,
    purge_script,
)
from kvtierd.control.server import ControlServer
from kvtierd.control.v1 import control_pb2 as pb
from kvtierd.emulator.launch import cleanup as cleanup_emulation
from kvtierd.endpoint.control import EndpointControl
from kvtierd.errors import KvtierError, PlanError, UnitError
from kvtierd.events import Event, EventLog
from kvtierd.files import DirectoryLock
from kvtierd.http_get import fetch_text
from kvtierd.memcache.health import ExpectedPool
from kvtierd.node import (
    last_plan,
    make_directories,
    owned_pages,
    reserve_hugepages,
    save_plan,
    sync_files,
)
from kvtierd.observe.engines import EngineObserver, Target
from kvtierd.observe.tiers import tier_lines
from kvtierd.plan.model import NodePlan, UnitSpec
from kvtierd.plan.units import ENDPOINT_ID, META_ID, resolve_unit
from kvtierd.plugins import PluginSet, load_plugins
from kvtierd.report import HugepageState, NodeState, exit_problems, status_message, unit_message
from kvtierd.service import ServiceManager, configure_logging
from kvtierd.settings import Settings, load_settings
from kvtierd.tier.keeper import TierKeeper
from kvtierd.tier.machine import TierInputs, TierMachine, TierView
from kvtierd.tier.meta_check import check_meta
from kvtierd.units.backend import UnitProcess
from kvtierd.units.owned import owned_pids
from kvtierd.units.shim_backend import ShimBackend
from kvtierd.units.supervisor import Supervisor
from kvtierd.units.views import UnitEvent, UnitView

log = structlog.get_logger(__name__)

ROUND_SECONDS = 1.0  # when all is well; changes of units are seen at once, whatever this is
BUSY_ROUND_SECONDS = 0.5  # while something is not
RECOVERY_ROUND_SECONDS = 0.1  # while clients are held up because the MetaService died
REST_LOOK_SECONDS = 2.0  # between two looks at the pool when all is well
RESTING = frozenset({"ready", "stopped", "failed"})
STOP_ORDER = ("engine", "pool", "meta", "endpoint")


class Daemon:
    """One node. ``run`` it; the control service calls the other public methods."""

    def __init__(self, settings_file: Path) -> None:
        self._settings_file = settings_file
        self._settings: Settings = load_settings(settings_file)
        self._started_unix_seconds = time.time()
        self._state = Path(self._settings.paths.state)
        self._runtime = Path(self._settings.paths.runtime)
        self._plugins: PluginSet = load_plugins()
        self._plan: NodePlan | None = None
        self._problems: list[str] = []
        self._hugepages = HugepageState()
        self._keeper: TierKeeper | None = None
        self._endpoint: EndpointControl | None = None
        self._endpoint_status: Mapping[str, Any] | None = None
        self._observer = EngineObserver(fetch_text)
        self._observing: asyncio.Task[None] | None = None
        self._next_observation = 0.0
        self._next_look = 0.0
        self._meta_verified: str | None = None
        self._clean_stop_instance: str | None = None
        self._meta_instance: str | None = None
        self._stopping = asyncio.Event()
        self._reload_lock = asyncio.Lock()
        self._events: EventLog
        self._supervisor: Supervisor
        self._backend: ShimBackend

    # -- life

    async def run(self, service: ServiceManager) -> None:
        """Until a signal ends it. Units stay, unless the settings say otherwise.

        Raises:
            KvtierError: the daemon cannot start (another one runs, directories cannot be used).
        """
        locks = [DirectoryLock(self._state), DirectoryLock(self._runtime)]
        for lock in locks:
            lock.acquire()
        self._events = EventLog(self._state)
        self._backend = ShimBackend(self._runtime, Path(self._settings.paths.logs) / "units")
        self._supervisor = Supervisor(
            self._backend,
            gate=self._gate,
            extra_checks={"meta": self._check_meta},
            on_event=self._unit_event,
            state_dir=self._runtime,
        )
        server = ControlServer(self, self._runtime / SOCKET_NAME)
        try:
            adopted = await self._supervisor.adopt()
            self._plan = last_plan(self._settings)
            if self._plan is not None:
                await self._connect_tier(self._settings, self._plan)
            await server.start()
            self._watch_signals()
            self._events.add(
                "info", "daemon.started", f"kvtierd {__version__} started, {len(adopted)} running units found"
            )
            service.ready()
            await self._first_plan()
            await self._loop(service)
        finally:
            service.stopping()
            await self._wind_up(server)
            for lock in locks:
                lock.release()

    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        loop.add_signal_handler(signal.SIGHUP, lambda: loop.create_task(self._reload_by_signal()))

    async def _first_plan(self) -> None:
        try:
            await self.reload(restart_changed=False)
        except KvtierError as error:
            # Units that run go on under the plan in force; the operator sees what is wrong in status.
            self._events.add("error", "daemon.no-plan", error.message)

    async def _wind_up(self, server: ControlServer) -> None:
        if self._settings.daemon.stop_units_on_exit:
            with contextlib.suppress(KvtierError):
                await self.stop_all(60.0)
        if self._observing is not None:
            self._observing.cancel()
        if self._keeper is not None:
            await self._keeper.close()
        await server.close()
        await self._backend.close()
        self._events.add("info", "daemon.stopped", "kvtierd stopped; its units go on")

    async def _loop(self, service: ServiceManager) -> None:
        while not self._stopping.is_set():
            try:
                await self._round()
            except Exception:
                # A fault of ours must not take the supervision away; the watchdog sees a loop that hangs.
                log.exception("round.failed")
                await asyncio.sleep(ROUND_SECONDS)
            service.alive()
            service.status(self._status_line())
            waiting = asyncio.ensure_future(self._supervisor.wait(self._pause_seconds()))
            stopping = asyncio.ensure_future(self._stopping.wait())
            await asyncio.wait((waiting, stopping), return_when=asyncio.FIRST_COMPLETED)
            for task in (waiting, stopping):
                task.cancel()

    # -- one round

    async def _round(self) -> None:
        plan = self._plan
        if plan is None:
            return
        await self._supervisor.step(plan.units)
        if not self._at_rest() or time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + REST_LOOK_SECONDS
            await self._tier_step()
        self._observe(plan)

    def _pause_seconds(self) -> float:
        if self._at_rest():
            return ROUND_SECONDS
        recovering = self._keeper is not None and self._keeper.view.phase == "recovering"
        return RECOVERY_ROUND_SECONDS if recovering else BUSY_ROUND_SECONDS

    def _at_rest(self) -> bool:
        """Everything is as it should be: then looking seldom is enough."""
        tier_well = self._keeper is None or (self._keeper.view.state == "joinable")
        return tier_well and all(v.state in RESTING for v in self._supervisor.views())

    async def _tier_step(self) -> None:
        if self._keeper is None:
            return
        meta = self._view(META_ID)
        alive = (
            meta is not None and meta.pid is not None and meta.state not in {"stopped", "failed", "backoff"}
        )
        pool, self._endpoint_status = await asyncio.gather(
            self._keeper.look() if alive else _nothing(), self._ask_endpoint()
        )
        previous, self._meta_instance = (
            self._meta_instance,
            (meta.instance if meta and alive else self._meta_instance),
        )
        clean = self._clean_stop_instance is not None and self._clean_stop_instance in {
            previous,
            self._meta_instance,
        }
        status = self._endpoint_status
        await self._keeper.step(
            TierInputs(
                now_seconds=time.monotonic(),
                instance=meta.instance if meta is not None and alive else None,
                meta_up=meta is not None and meta.state == "ready",
                meta_problem=f"the MetaService is {meta.state}: {meta.reason}"
                if meta
                else "no MetaService here",
                pool=pool,
                endpoint_mode=str(status["mode"]) if status else None,
                endpoint_admission=str(status["admission"]) if status else None,
                clean_stop=clean,
                clients_alive=any(v.kind in {"pool", "engine"} and v.pid for v in self._supervisor.views()),
            )
        )

    async def _ask_endpoint(self) -> Mapping[str, Any] | None:
        if self._endpoint is None:
            return None
        try:
            return await self._endpoint.status()
        except KvtierError:
            return None

    def _observe(self, plan: NodePlan) -> None:
        if time.monotonic() < self._next_observation or (self._observing and not self._observing.done()):
            return
        self._next_observation = time.monotonic() + self._settings.observe.interval
        targets = {}
        for unit in plan.units:
            view = self._view(unit.id)
            driver = self._plugins.drivers.get(unit.plugin or "")
            if view and driver and unit.metrics_url and view.state in {"ready", "degraded"}:
                targets[unit.id] = Target(unit.id, unit.metrics_url, driver)
        self._observing = asyncio.create_task(self._observer.look(targets))

    async def _check_meta(self, spec: UnitSpec, process: UnitProcess) -> str | None:
        """The MetaService's readiness: what it says, and where it listens."""
        plan = self._plan
        if plan is None or plan.meta is None:
            return None
        if process.instance == self._meta_verified:
            return None  # its sockets do not move; that it answers, the probe sees
        expected = {(p.address, p.port) for p in plan.ports if p.unit == spec.id}
        problem = await check_meta(plan.meta.metrics_url, expected, process.pid)
        if problem is None:
            self._meta_verified = process.instance
        return problem

    def _gate(self, spec: UnitSpec, views: Mapping[str, UnitView]) -> str | None:
        """Why a unit may not start yet. Only starts are gated: what runs is never stopped by this."""
        if spec.kind in {"pool", "engine"} and self._hugepages.problem:
            return f"hugepages: {self._hugepages.problem.splitlines()[0]}"
        for other in spec.after:
            view = views.get(other)
            if view is None or view.state not in {"ready", "degraded"}:
                return f"waits for {other} ({view.state if view else 'not there'})"
        if spec.kind == "engine" and self._plan is not None and self._plan.pool.placement == "standalone":
            tier = self._keeper.view if self._keeper else TierView()
            if tier.state != "joinable":
                return f"waits for the pool: it is {tier.state.replace('_', ' ')}: {'; '.join(tier.reasons)}"
        return None

    # -- the control service's verbs

    def status(self) -> pb.StatusReply:
        """The node as last seen."""
        return status_message(self._node_state())

    def _node_state(self) -> NodeState:
        now = time.time()
        tier = self._keeper.view if self._keeper else TierView()
        views = self._supervisor.views()
        samples = [s for u, s in self._observer.samples.items()]
        pool = self._keeper.pool if self._keeper else None
        seen_at = self._keeper.pool_seen_unix_seconds if self._keeper else None
        lines = tier_lines(samples, pool, seen_at, tier, now) if self._plan else ()
        return NodeState(
            plan=self._plan,
            views=views,
            tier=tier,
            tiers=lines,
            endpoint=self._endpoint_status,
            hugepages=self._hugepages,
            problems=[*self._problems, *exit_problems(self._plan, tier, views)],
            backend=self._backend.name,
            started_unix_seconds=self._started_unix_seconds,
            now_unix_seconds=now,
        )

    def _status_line(self) -> str:
        views = self._supervisor.views()
        ready = sum(v.state == "ready" for v in views)
        tier = self._keeper.view.state if self._keeper else "down"
        return f"tier {tier.replace('_', ' ')}; {ready} of {len(views)} units ready"

    def plan_json(self) -> str:
        """The plan in force."""
        if self._plan is None:
            raise PlanError("no plan is in force", hint="kvtierctl status says why", code="plan.none")
        return self._plan.model_dump_json()

    async def reload(self, *, restart_changed: bool) -> pb.ReloadReply:
        """Reads settings, makes a new plan and takes it over; a plan with refusals leaves everything as it is.

        Raises:
            KvtierError: the settings are wrong, or the plan is refused.
        """
        async with self._reload_lock:
            try:
                settings, plan = await self._new_plan()
                if plan.refusals:
                    raise PlanError(
                        "the plan is refused: " + "; ".join(r.message for r in plan.refusals),
                        hint="; ".join(dict.fromkeys(r.hint for r in plan.refusals if r.hint)),
                        code="plan.refused",
                    )
                return await self._take_over(settings, plan, restart_changed=restart_changed)
            except KvtierError as error:
                # What runs goes on under the plan in force; status says what is wrong until a reload succeeds.
                self._problems = [error.message]
                raise

    async def _new_plan(self) -> tuple[Settings, NodePlan]:
        settings = await asyncio.to_thread(load_settings, self._settings_file)
        if settings.paths != self._settings.paths:
            raise PlanError(
                "[paths] cannot change while kvtierd runs", hint="kvtierctl stop --all, then restart kvtierd"
            )
        inventory = await inventory_of_this_host(settings)
        plan = await asyncio.to_thread(
            plan_for,
            settings,
            inventory,
            self._plugins,
            owned_pids=owned_pids(self._runtime / "units"),
            owned_pages=await owned_pages(settings, inventory.default_hugepage_size_bytes),
        )
        return settings, plan

    async def _take_over(
        self, settings: Settings, plan: NodePlan, *, restart_changed: bool
    ) -> pb.ReloadReply:
        before = {u.id: u for u in self._plan.units} if self._plan else {}
        if plan.emulated:
            await asyncio.to_thread(prepare_emulation, settings)
        self._hugepages = await reserve_hugepages(settings, plan.hugepages, plan.pool.dram_bytes_per_provider)
        if self._hugepages.problem:
            self._events.add("error", "hugepages.short", self._hugepages.problem)
        make_directories(settings, plan)
        written = await asyncio.to_thread(sync_files, plan.files)
        await asyncio.to_thread(save_plan, settings, plan)
        self._settings, self._plan, self._problems = settings, plan, []
        await self._connect_tier(settings, plan)
        running = {v.id: v for v in self._supervisor.views() if v.pid}
        stale = [
            u.id
            for u in plan.units
            if u.id in running
            and (running[u.id].stale or (u.id in before and u.digest != before[u.id].digest))
        ]
        reply = pb.ReloadReply(
            changed_files=written,
            new_units=[u.id for u in plan.units if u.id not in before],
            removed_units=[u for u in before if plan.unit(u) is None],
            stale_units=stale,
            notes=[note.message for note in plan.notes],
        )
        if written or before.keys() != {u.id for u in plan.units} or stale:
            self._events.add(
                "info",
                "daemon.plan",
                f"new plan: {len(written)} files written, {len(plan.units)} units, {len(stale)} changed",
            )
        if restart_changed:
            for unit in stale:
                await self._act(unit, "restart", "its specification changed")
        return reply

    async def _connect_tier(self, settings: Settings, plan: NodePlan) -> None:
        if plan.meta is None or plan.unit(META_ID) is None:
            return
        relay = plan.unit(ENDPOINT_ID) is not None
        self._endpoint = EndpointControl(self._runtime / "endpoint.sock") if relay else None
        machine = TierMachine(
            ExpectedPool(plan.pool.capacity_bytes, plan.pool.providers, plan.pool.alignment_bytes),
            purge_on_unclean=settings.pool.purge_on_unclean,
            has_endpoint=relay,
        )
        meta = plan.unit(META_ID)
        assert meta is not None
        admin_conf = next(f.path for f in plan.files if f.path.endswith("mmc-local-admin.conf"))
        if self._keeper is not None:
            await self._keeper.close()
        self._keeper = TierKeeper(
            plan,
            machine,
            state_file=self._state / "tier.json",
            endpoint=self._endpoint,
            purge_argv=purge_command(meta, plan),
            purge_env={**meta.env, "MMC_LOCAL_CONFIG_PATH": admin_conf},
            restart_providers=self._restart_providers,
            events=self._events,
        )
        self._keeper.recall()

    def _restart_providers(self, reason: str) -> None:
        for view in self._supervisor.views():
            if view.kind == "pool" and view.pid:
                self._supervisor.request_restart(view.id, reason)

    def events(self, last: int) -> list[Event]:
        """Kept events."""
        return self._events.last(last)

    def follow_events(self, last: int) -> AsyncIterator[Event]:
        """Kept, then new events."""
        return self._events.follow(last)

    async def tail(self, unit: str, lines: int) -> list[str]:
        """Last output lines of a unit."""
        return await self._backend.tail(self._resolve(unit), lines)

    def follow_log(self, unit: str, lines: int) -> AsyncIterator[str]:
        """Last, then new output lines of a unit."""
        return self._backend.follow(self._resolve(unit), lines)

    async def control_unit(self, unit: str, action: str, wait_seconds: float) -> pb.Unit:
        """start, stop or restart a unit, and wait until it has settled."""
        unit_id = self._resolve(unit)
        before = self._view(unit_id)
        await self._act(unit_id, action, "asked for by kvtierctl")
        deadline = time.monotonic() + wait_seconds
        wanted = {"stopped"} if action == "stop" else {"ready", "failed"}
        while True:
            view = self._view(unit_id)
            fresh = action != "restart" or before is None or view is None or view.instance != before.instance
            if view is None or (view.state in wanted and fresh) or time.monotonic() >= deadline:
                break
            await asyncio.sleep(0.05)
        if view is None:
            raise UnitError(f"{unit_id} is gone", code="unit.unknown")
        return unit_message(view)

    async def _act(self, unit_id: str, action: str, reason: str) -> None:
        view = self._view(unit_id)
        stops_meta = action != "start" and view is not None and view.kind == "meta" and view.pid is not None
        # A MetaService stopped with requests in flight leaves clients hanging and values in doubt.
        if stops_meta and self._keeper is not None and await self._keeper.quiesce():
            self._clean_stop_instance = view.instance if view else None
        if action == "start":
            self._supervisor.request_start(unit_id)
        elif action == "stop":
            self._supervisor.request_stop(unit_id)
        else:
            self._supervisor.request_restart(unit_id, reason)

    async def stop_all(self, wait_seconds: float) -> list[pb.Unit]:
        """Stops every unit: engines first, the endpoint last, each kind within the time that is left."""
        deadline = time.monotonic() + wait_seconds
        for kind in STOP_ORDER:
            ids = [v.id for v in self._supervisor.views() if v.kind == kind]
            for unit_id in ids:
                await self._act(unit_id, "stop", "stop --all")
            while time.monotonic() < deadline and not all(
                v.state in {"stopped", "failed"} and not v.pid
                for v in self._supervisor.views()
                if v.id in ids
            ):
                if self._stopping.is_set():  # the loop has ended: we go round ourselves
                    await self._round()
                await asyncio.sleep(0.05)
        views = self._supervisor.views()
        if self._plan is not None and self._plan.emulated and not any(v.pid for v in views):
            await asyncio.to_thread(cleanup_emulation, emulation_root(self._settings))
        return [unit_message(v) for v in views]

    async def purge(self) -> pb.PurgeReply:
        """Empties the pool."""
        if self._keeper is None:
            raise UnitError("no MetaService runs on this node", code="unit.missing")
        seconds = await self._keeper.purge()
        self._events.add("warning", "tier.purged", f"the pool was emptied by an operator ({seconds:.1f} s)")
        return pb.PurgeReply(seconds=seconds)

    def plugins(self) -> list[pb.Plugin]:
        """Installed plugins."""
        return [
            pb.Plugin(
                name=p.name,
                distribution=p.distribution,
                version=p.version,
                drivers=p.drivers,
                problem=p.problem,
            )
            for p in self._plugins.plugins
        ]

    # -- small things

    async def _reload_by_signal(self) -> None:
        with contextlib.suppress(KvtierError):  # it is in the events and in status
            await self.reload(restart_changed=False)

    def _unit_event(self, event: UnitEvent) -> None:
        self._events.add(event.severity, event.kind, event.message, unit=event.unit_id)

    def _view(self, unit_id: str) -> UnitView | None:
        return next((v for v in self._supervisor.views() if v.id == unit_id), None)

    def _resolve(self, name: str) -> str:
        return resolve_unit(name, [v.id for v in self._supervisor.views()])


async def _nothing() -> None:
    return None


def purge_command(meta: UnitSpec, plan: NodePlan) -> tuple[str, ...]:
    """The purge program in the MetaService's interpreter (and namespace)."""
    argv = list(meta.argv)
    if argv[-1].endswith("run_meta.py"):
        return (*argv[:-1], purge_script())
    return (sys.executable, purge_script())


def main() -> None:
    """Entry point of kvtierd."""
    parser = argparse.ArgumentParser(
        prog="kvtierd", description="Node daemon for a tiered KV cache on Ascend hosts."
    )
    parser.add_argument("--settings", "-s", type=Path, default=DEFAULT_SETTINGS, metavar="FILE")
    parser.add_argument("--version", action="version", version=f"kvtierd {__version__}")
    arguments = parser.parse_args()
    service = ServiceManager()
    try:
        settings = load_settings(arguments.settings.absolute())
        configure_logging(settings.daemon.log_level, settings.daemon.log_format)
        asyncio.run(Daemon(arguments.settings.absolute()).run(service))
    except KvtierError as error:
        print(f"kvtierd: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
