"""Taking over settings: a new plan, checked for harm, then hugepages, files, directories, and the tier's keeper.

Everything here leaves the host as it is when it raises before ``_take_over``, and says what is wrong when it raises
within.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable

from kvtierd.act.adjusted import read_adjustments, write_adjustments
from kvtierd.control.v1 import control_pb2 as pb
from kvtierd.endpoint.control import EndpointControl
from kvtierd.engines.rolling import ask_for
from kvtierd.errors import KvtierError, PlanError
from kvtierd.events import Severity
from kvtierd.host.hosts_file import check_writable
from kvtierd.host.memcache_tls import prepare_tls
from kvtierd.memcache.health import ExpectedPool
from kvtierd.node.state import Node
from kvtierd.plan.adjustments import Adjustments
from kvtierd.plan.docker import IMAGE_PYTHON, container_of, exec_argv
from kvtierd.plan.model import NodePlan, UnitSpec
from kvtierd.plan.units import ENDPOINT_ID, META_ID, engine_id
from kvtierd.plugins import load_plugins
from kvtierd.provision.assembly import make_toolchain, prepare_emulation, purge_script
from kvtierd.provision.carry_out import make_directories, owner_of, reserve_hugepages, save_plan, sync_files
from kvtierd.provision.host_plan import plan_this_host
from kvtierd.settings import Settings, load_settings
from kvtierd.tier.keeper import TierKeeper
from kvtierd.tier.machine import TierMachine

STOP_ORDER = ("engine", "pool", "meta", "endpoint")
Act = Callable[[str, str, str], Awaitable[None]]


class Takeover:
    """Brings a node under new settings. One at a time."""

    def __init__(self, node: Node, act: Act) -> None:
        self.node = node
        self._act = act
        self._reload_lock = asyncio.Lock()
        self._keeper_basis: object = None
        self._adjusted_problem = ""
        self._told: set[str] = set()  # of plugins: once, until it changes

    async def reload(self, restart_changed: bool) -> pb.ReloadReply:
        """Reads settings, makes a new plan and takes it over; a plan with refusals leaves everything as it is.

        Raises:
            KvtierError: the settings are wrong, the plan is refused, or the host does not take it.
        """
        async with self._reload_lock:
            return await self._try(None, restart_changed=restart_changed)

    async def adjust(self, change: Callable[[Adjustments], Adjustments]) -> NodePlan:
        """Takes over what an action changes beside the settings; the plan that is in force then.

        The settings are those in force. What was changed is kept on disk before anything else is done.

        Raises:
            KvtierError: as ``reload`` does; nothing has changed then.
        """
        async with self._reload_lock:
            await self._try(change(self.node.adjusted), restart_changed=False)
            assert self.node.plan is not None
            return self.node.plan

    async def _try(self, adjustments: Adjustments | None, *, restart_changed: bool) -> pb.ReloadReply:
        try:
            settings, plan, adjusted = await self._new_plan(adjustments)
            if plan.refusals:
                raise PlanError(
                    "the plan is refused: " + "; ".join(r.message for r in plan.refusals),
                    hint="; ".join(dict.fromkeys(r.hint for r in plan.refusals if r.hint)),
                    code="plan.refused",
                )
            self._refuse_harm(settings, plan, restart_changed=restart_changed)
            if adjustments is None:
                reply = await self._take_over(settings, plan, adjusted, restart_changed=restart_changed)
                self.node.problems = []
                return reply
            await asyncio.to_thread(write_adjustments, self.node.state, adjustments)
            try:
                return await self._take_over(settings, plan, adjusted, restart_changed=restart_changed)
            except BaseException:
                await self._take_back(plan)
                raise
        except KvtierError as error:
            # What runs goes on under the plan in force; status says what is wrong until a reload succeeds.
            if adjustments is None:
                self.node.problems = [error.message]
            raise

    async def _take_back(self, plan: NodePlan) -> None:
        """A change that could not be taken over is not kept either; files that it has written already are as before."""
        node = self.node
        if node.plan is plan:
            return  # it is in force
        try:
            await asyncio.to_thread(write_adjustments, node.state, node.adjusted)
            if node.plan is not None:
                await asyncio.to_thread(sync_files, node.plan.files)
        except (KvtierError, OSError) as error:
            node.events.add(
                "error",
                "policy.half-done",
                f"a change could not be taken over, and what was written of it stays until kvtierctl reload: {error}",
            )

    def _refuse_harm(self, settings: Settings, plan: NodePlan, *, restart_changed: bool) -> None:
        """What a reload must not do to units that run.

        Raises:
            PlanError: an engine would be stopped because its plugin is broken; or, without ``restart_changed``, the
                MetaService or endpoint would run beside files that no longer fit it.
        """
        running = {v.id for v in self.node.supervisor.views() if v.pid}
        for engine in settings.engine:
            unit = engine_id(engine.name)
            here = not engine.nodes or plan.node in engine.nodes
            if here and unit in running and plan.unit(unit) is None:
                raise PlanError(
                    f"engine {engine.name!r} runs, but would not be in the new plan",
                    why=plan.left_out.get(engine.name, ""),
                    hint="the engine goes on as it is; mend its plugin (kvtierctl plugins), then kvtierctl reload",
                    code="plan.engine-lost",
                )
        before = {u.id: u.digest for u in self.node.plan.units} if self.node.plan else {}
        moved = [
            unit.id
            for unit in plan.units
            if unit.kind in {"meta", "endpoint"}
            and unit.id in running
            and before.get(unit.id, unit.digest) != unit.digest
        ]
        if moved and not restart_changed:
            raise PlanError(
                f"these settings need a restart of {' and '.join(moved)}",
                hint="kvtierctl apply does it; nothing has been changed",
                code="plan.needs-apply",
            )

    async def _new_plan(self, adjustments: Adjustments | None) -> tuple[Settings, NodePlan, Adjustments]:
        node = self.node
        # An action rests on what is in force, not on what an operator is about to write.
        settings = (
            await asyncio.to_thread(load_settings, node.settings_file)
            if adjustments is None
            else node.settings
        )
        if settings.paths != node.settings.paths:
            raise PlanError(
                "[paths] cannot change while kvtierd runs", hint="kvtierctl stop --all, then restart kvtierd"
            )
        node.plugins = await asyncio.to_thread(load_plugins)  # one may have been installed meanwhile
        led_to = node.plan.direct.master if node.plan is not None and node.plan.direct is not None else None
        if adjustments is not None:
            adjusted = adjustments
        else:
            adjusted, problem = await asyncio.to_thread(read_adjustments, node.state)
            if problem and problem != self._adjusted_problem:
                node.events.add("error", "policy.adjustments", problem)
            self._adjusted_problem = problem
        plan = await plan_this_host(settings, node.plugins, master=led_to, adjustments=adjusted)
        if plan.direct is not None and plan.direct.alias:
            await asyncio.to_thread(check_writable)
        return settings, plan, adjusted

    def _tell_of_plugins(self, plan: NodePlan) -> None:
        """Events for what is wrong with plugins: each text when it comes up, not with every reload."""
        found: dict[str, tuple[Severity, str]] = {}
        for plugin in self.node.plugins.plugins:
            if plugin.problem:
                found[f"plugin {plugin.name}: {plugin.problem}"] = ("error", "plugin.broken")
            found |= {f"plugin {plugin.name}: {text}": ("warning", "plugin.old") for text in plugin.warnings}
        found |= dict.fromkeys(plan.left_out.values(), ("error", "engine.left-out"))
        for text, (severity, code) in found.items():
            if text not in self._told:
                self.node.events.add(severity, code, text)
        self._told = set(found)

    async def _take_over(
        self, settings: Settings, plan: NodePlan, adjusted: Adjustments, *, restart_changed: bool
    ) -> pb.ReloadReply:
        node = self.node
        before = {u.id: u for u in node.plan.units} if node.plan else {}
        if plan.emulated:
            await asyncio.to_thread(prepare_emulation, settings)
        node.hugepages = await reserve_hugepages(settings, plan.hugepages, plan.pool.dram_bytes_per_provider)
        if node.hugepages.problem:
            node.events.add("error", "hugepages.short", node.hugepages.problem)
        await asyncio.to_thread(make_directories, settings, plan)
        if plan.tls is not None:
            await asyncio.to_thread(prepare_tls, plan.tls, owner_of(plan.tls.user))
        written = await asyncio.to_thread(sync_files, plan.files)
        await asyncio.to_thread(save_plan, settings, plan)
        node.settings, node.plan, node.adjusted = settings, plan, adjusted
        await self.connect_tier(settings, plan)
        self._tell_of_plugins(plan)
        running = {v.id: v for v in node.supervisor.views() if v.pid}
        stale = [
            u.id
            for u in plan.units
            if u.id in running
            and (running[u.id].stale or (u.id in before and u.digest != before[u.id].digest))
        ]
        if written or stale or before.keys() != {u.id for u in plan.units}:
            node.events.add(
                "info",
                "daemon.plan",
                f"new plan: {len(written)} files written, {len(plan.units)} units, {len(stale)} changed",
            )
        if restart_changed:
            # The MetaService is quiesced through the endpoint, so that goes last.
            kinds = {u.id: u.kind for u in plan.units}
            for unit in sorted(stale, key=lambda u: STOP_ORDER.index(kinds[u])):
                if kinds[unit] == "engine":
                    ask_for(node.due_engines, unit)  # one by one, drained, in the loop's rounds
                    continue
                await self._act(unit, "restart", "its specification changed")
        return pb.ReloadReply(
            changed_files=written,
            new_units=[u.id for u in plan.units if u.id not in before],
            removed_units=[u for u in before if plan.unit(u) is None],
            stale_units=stale,
            notes=[note.message for note in plan.notes],
        )

    async def connect_tier(self, settings: Settings, plan: NodePlan) -> None:
        """Makes the keeper that the plan needs; one whose basis has not changed stays, with what it knows."""
        node, meta = self.node, plan.unit(META_ID)
        relay = plan.unit(ENDPOINT_ID) is not None
        expected = ExpectedPool(plan.pool.capacity_bytes, plan.pool.providers, plan.pool.alignment_bytes)
        purge = settings.pool.purge_on_unclean
        address = plan.meta and (plan.meta.server_meta_url, plan.meta.metrics_url)
        basis = (address, plan.tls, expected, relay, purge, meta.argv if meta else None)
        if node.keeper is not None and basis == self._keeper_basis:
            return  # what it knows of the pool stays true
        if node.keeper is not None:
            await node.keeper.close()
        node.keeper = node.endpoint = node.endpoint_status = None
        self._keeper_basis = basis
        if plan.meta is None or meta is None:
            return
        socket = node.runtime / "endpoint.sock"
        # Two connections, since commands of one wait for each other and a quiesce takes seconds.
        node.endpoint = EndpointControl(socket) if relay else None
        machine = TierMachine(expected, purge_on_unclean=purge)
        admin_conf = next(f.path for f in plan.files if f.path.endswith("mmc-local-admin.conf"))
        node.keeper = TierKeeper(
            plan,
            machine,
            state_file=node.state / "tier.json",
            endpoint=EndpointControl(socket) if relay else None,
            purge_argv=_purge_command(settings, meta),
            purge_env={**meta.env, "MMC_LOCAL_CONFIG_PATH": admin_conf},
            restart_providers=self._restart_providers,
            events=node.events,
            purge_ended=node.supervisor.poke,
        )
        node.keeper.recall()

    def _restart_providers(self, reason: str) -> None:
        for view in self.node.supervisor.views():
            if view.kind == "pool" and view.state in {"ready", "degraded"}:
                self.node.supervisor.request_restart(view.id, reason)


def _purge_command(settings: Settings, meta: UnitSpec) -> tuple[str, ...]:
    """The purge program in the MetaService's interpreter and namespace; beside a run package, in the one named, or ours.

    A MetaService in a container has the wheel beside it: there the program runs in the same container.
    """
    container = container_of(meta.argv)
    if container is not None:
        tools, python = make_toolchain(settings), settings.meta.python or IMAGE_PYTHON
        inside = exec_argv(
            tools, name=container[0], variables=("MMC_LOCAL_CONFIG_PATH",), command=(python, purge_script())
        )
        return (*tools.prefix, *inside)
    if meta.argv[-1].endswith("run_meta.py"):
        return (*meta.argv[:-1], purge_script())
    return (settings.meta.python or sys.executable, purge_script())
