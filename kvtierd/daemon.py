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
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import structlog

from kvtierd import __version__
from kvtierd.act.adjusted import read_adjustments
from kvtierd.cluster.hello import NodeFacts
from kvtierd.control.server import ControlServer
from kvtierd.control.v1 import control_pb2 as pb
from kvtierd.engines.l3_switch import DetachedEngines
from kvtierd.engines.proof import GenerationProof
from kvtierd.errors import KvtierError
from kvtierd.events import NO_PLAN_EVENT, EventLog
from kvtierd.files import DirectoryLock
from kvtierd.http_get import fetch_text
from kvtierd.node.coordination import facts_of, make_coordination, name_of_witness
from kvtierd.node.gating import Gates, make_start_checks
from kvtierd.node.hands import NodeHands
from kvtierd.node.mastership import Mastership
from kvtierd.node.pilot import Pilot
from kvtierd.node.rollout import Rollout
from kvtierd.node.showing import Showing
from kvtierd.node.sources import NodeSources
from kvtierd.node.state import Node
from kvtierd.node.takeover import Takeover
from kvtierd.node.tier_look import TierLook
from kvtierd.node.verbs import NodeVerbs
from kvtierd.observe.engines import EngineObserver, Target
from kvtierd.observe.log_lines import LineObserver, watch_output
from kvtierd.plan.engine import EngineDriver
from kvtierd.plan.model import NodePlan
from kvtierd.plan.units import META_ID
from kvtierd.plugins import load_plugins
from kvtierd.provision.assembly import DEFAULT_SETTINGS, SOCKET_NAME
from kvtierd.provision.carry_out import last_plan
from kvtierd.service import ServiceManager, configure_logging
from kvtierd.settings import Settings, load_settings
from kvtierd.units.choice import Choice, choose_backend
from kvtierd.units.supervisor import Supervisor
from kvtierd.units.views import UnitEvent

log = structlog.get_logger(__name__)

ROUND_SECONDS = 1.0  # when all is well; changes of units are seen at once, whatever this is
BUSY_ROUND_SECONDS = 0.5  # while something is not
RECOVERY_ROUND_SECONDS = 0.1  # while clients are held up because the MetaService died
CLUSTER_AGAIN_SECONDS = 2.0
DETACHED_FILE = "l3-detached.json"
RESTING = frozenset({"ready", "stopped", "failed"})
STOP_ALL_SECONDS = 60.0


class Daemon:
    """The stages and the loop of one node."""

    def __init__(
        self, settings_file: Path, settings: Settings, choice: Choice, *, witness: bool = False
    ) -> None:
        backend = choice.backend
        self._proof = GenerationProof(self._driver)
        supervisor = Supervisor(
            backend,
            gate=lambda spec, views: self._gates.why_not(spec, views),  # noqa: PLW0108 - made below
            extra_checks={
                "meta": lambda spec, process: self._gates.check_meta(spec, process),  # noqa: PLW0108
                "engine": self._proof.check,
            },
            on_event=self._unit_event,
            state_dir=Path(settings.paths.runtime),
        )
        self.node = Node(
            settings_file=settings_file,
            settings=settings,
            plugins=load_plugins(),
            events=EventLog(Path(settings.paths.state)),
            backend=backend,
            backend_note=choice.note,
            supervisor=supervisor,
            observer=EngineObserver(fetch_text),
            lines=LineObserver(backend.follow),
            detached=DetachedEngines(Path(settings.paths.state) / DETACHED_FILE),
            adjusted=read_adjustments(Path(settings.paths.state))[0],
            witness=witness,
        )
        self._verbs = NodeVerbs(self.node, self._reload)
        self._takeover = Takeover(self.node, self._verbs.act)
        self._stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._observing: asyncio.Task[None] | None = None
        self._next_observation = 0.0
        self._gates = Gates(self.node)
        self._gates.start_checks = make_start_checks(self.node)
        self._tier = TierLook(self.node)
        self._rollout = Rollout(self.node, self._verbs)
        self._sources = NodeSources(self.node)
        self._hands = NodeHands(self.node, self._takeover, self._verbs)
        self._pilot: Pilot | None = None
        self._showing: Showing | None = None
        self._mastership: Mastership | None = None

    # -- life

    async def run(self, service: ServiceManager) -> None:
        """Until a signal ends it. Units stay, unless the settings say otherwise.

        Raises:
            KvtierError: the control socket cannot be used, or the units cannot be looked at.
        """
        node = self.node
        server = ControlServer(self._verbs, node.runtime / SOCKET_NAME)
        try:
            adopted = await node.supervisor.adopt()
            node.plan = last_plan(node.settings)
            if node.plan is not None:
                await self._takeover.connect_tier(node.settings, node.plan)
                self._join_cluster()  # at once: a lease that an earlier daemon held goes on
            await server.start()
            self._watch_signals(service)
            node.events.add(
                "info", "daemon.started", f"kvtierd {__version__} started, {len(adopted)} running units found"
            )
            service.ready()
            if node.witness:
                self._join_cluster()
                node.planned = True
                await self._loop(service)
                return
            # Beside the loop: a hung npu-smi must keep neither the watchdog nor the running units waiting.
            self._spawn(self._first_plan())
            await self._loop(service)
        finally:
            service.stopping()
            await self._wind_up(server)

    def _watch_signals(self, service: ServiceManager) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        loop.add_signal_handler(signal.SIGHUP, lambda: self._spawn(self._reload_by_signal(service)))

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _first_plan(self) -> None:
        try:
            await self._reload(False)
            self._join_cluster()
        except KvtierError as error:
            # Units that run go on under the plan in force; the operator sees what is wrong in status.
            self.node.events.add("error", NO_PLAN_EVENT, error.message)
        except Exception as error:
            log.exception("plan.failed")
            problem = f"internal error while planning: {type(error).__name__}: {error}"
            self.node.problems = [problem]
            self.node.events.add("error", NO_PLAN_EVENT, problem)
        finally:
            self.node.planned = True
            if self._gates.start_checks is not None:
                self._gates.start_checks.begin()

    def _join_cluster(self) -> None:
        """Takes part in the cluster, once it is known which of its nodes this is."""
        node = self.node
        if self._mastership is not None or node.settings.cluster.mode == "standalone":
            return
        if node.plan is None and not node.witness:
            return
        meta = node.view(META_ID)
        part = make_coordination(
            node.settings,
            node.plan.node if node.plan is not None else name_of_witness(node.settings),
            self._facts,
            witness=node.witness,
            meta_runs=meta is not None and meta.pid is not None,
        )
        self._mastership = Mastership(node, part)
        self._gates.mastership = self._tier.mastership = self._mastership
        if self._pilot is not None:
            self._pilot.join(self._mastership)
        self._mastership.judge_fitness()  # before an election can begin
        self._verbs.cluster.join(part, self._mastership)
        # Whatever the master says anew is acted on at once, not in the next round.
        part.network.board.listeners.append(node.supervisor.poke)
        self._spawn(self._keep_running("network", part.network.run))
        if (fence := part.fence) is not None:
            self._spawn(self._keep_running("fence", lambda: fence.run(node.supervisor.poke)))
        self._spawn(
            self._keep_running("coordinator", lambda: part.coordinator.run(lambda _: node.supervisor.poke()))
        )

    def _facts(self) -> NodeFacts:
        if self._mastership is None:
            return facts_of(self.node.plan, self.node.settings)
        return self._mastership.facts()

    async def _keep_running(self, what: str, run: Callable[[], Awaitable[None]]) -> None:
        """A fault in here must not end the daemon, and not go unseen."""
        while True:
            try:
                await run()
            except KvtierError as error:
                self.node.events.add("error", f"cluster.{what}", str(error))
            except Exception as error:
                log.exception("cluster.failed", what=what)
                self.node.events.add(
                    "error", f"cluster.{what}", f"internal error: {type(error).__name__}: {error}"
                )
            await asyncio.sleep(CLUSTER_AGAIN_SECONDS)

    async def _reload(self, restart_changed: bool) -> pb.ReloadReply:
        reply = await self._takeover.reload(restart_changed)
        if self.node.planned:
            self._join_cluster()  # when the first plan of this start failed, or there was no cluster in it
        if self._mastership is not None and self._mastership.outdated:
            reply.notes.append(self._mastership.outdated)
        return reply

    async def _reload_by_signal(self, service: ServiceManager) -> None:
        service.reloading(time.monotonic())
        try:
            with contextlib.suppress(KvtierError):  # it is in the events and in status
                await self._reload(False)
        finally:
            service.ready()

    async def _wind_up(self, server: ControlServer) -> None:
        node = self.node
        if node.settings.daemon.stop_units_on_exit and node.planned:
            going_round = asyncio.create_task(self._go_round())
            with contextlib.suppress(KvtierError):
                await self._verbs.stop_all(STOP_ALL_SECONDS, remember=False)
            going_round.cancel()
        self._rollout.cancel()
        for task in (*self._tasks, self._observing):
            if task is not None:
                task.cancel()
        if self._showing is not None:
            await self._showing.close()
        if self._pilot is not None:
            await self._pilot.close()
        if self._mastership is not None:
            await self._mastership.part.coordinator.close()
            await self._mastership.part.network.close()
        if self._gates.start_checks is not None:
            await self._gates.start_checks.close()
        await self._proof.close()
        await node.lines.close()
        if node.keeper is not None:
            await node.keeper.close()
        await server.close()
        await node.supervisor.close()
        await node.backend.close()
        node.events.add("info", "daemon.stopped", "kvtierd stopped; units that run go on")

    async def _go_round(self) -> None:
        while True:
            await self._round()
            await asyncio.sleep(RECOVERY_ROUND_SECONDS)

    # -- the loop

    async def _loop(self, service: ServiceManager) -> None:
        while not self._stopping.is_set():
            try:
                await self._round()
            except Exception:
                # A fault of ours must not take the supervision away; the watchdog sees a loop that hangs.
                log.exception("round.failed")
                await asyncio.sleep(BUSY_ROUND_SECONDS)
            service.alive()
            service.status(self._status_line())
            waiting = asyncio.ensure_future(self.node.supervisor.wait(self._pause_seconds()))
            stopping = asyncio.ensure_future(self._stopping.wait())
            await asyncio.wait((waiting, stopping), return_when=asyncio.FIRST_COMPLETED)
            for task in (waiting, stopping):
                task.cancel()

    async def _round(self) -> None:
        plan = self.node.plan
        if plan is None:
            if self.node.witness and self._mastership is not None:
                self._mastership.show()
            return
        if self._mastership is not None:
            await self._mastership.round()
            self._rollout.restart_stranded()
            self._mastership.look_at_clients(self._rollout.roll_client)
        await self.node.supervisor.step(plan.units)
        await self._tier.round(at_rest=self._at_rest())
        self._observe(plan)
        self._rollout.round(plan)
        self._steer()

    def _steer(self) -> None:
        """What the policy makes of what is seen, and showing it; from the first plan of this start on."""
        if not self.node.planned or self._stopping.is_set():  # units that are being stopped need no help
            return
        if self._pilot is None:
            self._pilot = Pilot(self.node, self._sources, self._hands)
            self._verbs.policy.fly(self._pilot)
            if self._mastership is not None:
                self._pilot.join(self._mastership)
            self._showing = Showing(self.node, self._pilot)
        self._pilot.round()
        if self._showing is not None:
            self._showing.round()

    def _pause_seconds(self) -> float:
        if self._at_rest():
            return ROUND_SECONDS
        held_up = self.node.tier.phase == "recovering" or not self._tier.endpoint_is_open
        pause_seconds = RECOVERY_ROUND_SECONDS if held_up else BUSY_ROUND_SECONDS
        return (
            pause_seconds
            if self._mastership is None
            else min(pause_seconds, self._mastership.due_in_seconds())
        )

    def _at_rest(self) -> bool:
        """Everything is as it should be: then looking seldom is enough."""
        return self._tier.is_well and all(v.state in RESTING for v in self.node.supervisor.views())

    def _status_line(self) -> str:
        views = self.node.supervisor.views()
        ready = sum(v.state == "ready" for v in views)
        return f"tier {self.node.tier.state.replace('_', ' ')}; {ready} of {len(views)} units ready"

    def _observe(self, plan: NodePlan) -> None:
        if time.monotonic() < self._next_observation or (self._observing and not self._observing.done()):
            return
        self._next_observation = time.monotonic() + self.node.settings.observe.interval
        targets = {}
        for unit in plan.units:
            view = self.node.view(unit.id)
            driver = self.node.plugins.drivers.get(unit.plugin or "")
            if view and driver and unit.metrics_url and view.state in {"ready", "degraded"}:
                targets[unit.id] = Target(unit.id, unit.metrics_url, driver)
        self._observing = asyncio.create_task(self.node.observer.look(targets))
        watch_output(self.node.lines, self.node.supervisor, plan.units, self._driver)

    # -- what the supervisor asks

    def _driver(self, name: str) -> EngineDriver | None:
        return self.node.plugins.drivers.get(name)

    def _unit_event(self, event: UnitEvent) -> None:
        self.node.events.add(event.severity, event.kind, event.message, unit=event.unit_id)


async def _run(
    settings_file: Path, settings: Settings, service: ServiceManager, *, witness: bool = False
) -> None:
    paths = settings.paths
    choice = await choose_backend(settings.daemon.backend, Path(paths.runtime), Path(paths.logs))
    await Daemon(settings_file, settings, choice, witness=witness).run(service)


def argument_parser() -> argparse.ArgumentParser:
    """The command line of kvtierd."""
    parser = argparse.ArgumentParser(
        prog="kvtierd", description="Node daemon for a tiered KV cache on Ascend hosts."
    )
    parser.add_argument(
        "--settings",
        "-s",
        type=Path,
        default=DEFAULT_SETTINGS,
        metavar="FILE",
        help=f"settings file; default {DEFAULT_SETTINGS}",
    )
    parser.add_argument(
        "--witness", action="store_true",
        help="only vote for a master (mode lease): a machine without NPUs, MemCache and engines",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"kvtierd {__version__}")
    return parser


def main() -> None:
    """Entry point of kvtierd."""
    arguments = argument_parser().parse_args()
    file = arguments.settings.absolute()
    service = ServiceManager()
    locks: list[DirectoryLock] = []
    try:
        settings = load_settings(file)
        if arguments.witness:
            name_of_witness(settings)  # refused now, if it is none
        configure_logging(settings.daemon.log_level, settings.daemon.log_format)
        for directory in (settings.paths.state, settings.paths.runtime):
            locks.append(DirectoryLock(Path(directory)))
            locks[-1].acquire()
        asyncio.run(_run(file, settings, service, witness=arguments.witness))
    except KvtierError as error:
        print(f"kvtierd: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    finally:
        for lock in locks:
            lock.release()


if __name__ == "__main__":
    main()
