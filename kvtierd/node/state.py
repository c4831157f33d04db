"""What the daemon knows of its node while it runs: one value that the loop writes and the verbs read."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvtierd.endpoint.control import EndpointControl
from kvtierd.engines.l3_switch import DetachedEngines
from kvtierd.events import EventLog
from kvtierd.node.report import ClusterState, NodeState, unit_problems
from kvtierd.observe.engines import EngineObserver
from kvtierd.observe.log_lines import LineObserver, merged
from kvtierd.observe.tiers import Sample, tier_lines
from kvtierd.plan.adjustments import NOTHING, Adjustments
from kvtierd.plan.model import NodePlan
from kvtierd.plan.units import resolve_unit
from kvtierd.plugins import PluginSet
from kvtierd.provision.carry_out import HugepageState
from kvtierd.settings import Settings
from kvtierd.tier.keeper import TierKeeper
from kvtierd.tier.machine import TierView
from kvtierd.units.backend import UnitBackend
from kvtierd.units.supervisor import Supervisor
from kvtierd.units.views import UnitView


@dataclasses.dataclass(slots=True)
class Node:
    """The running node.

    Attributes:
        settings_file, settings: Where the settings are, and what was last accepted.
        witness: It only votes for a master; it has no plan and runs nothing.
        backend_note: Why the backend is not the one that was asked for.
        plan: The plan in force, ``None`` until there is one.
        adjusted: What actions have changed beside the settings, in the plan in force.
        planned: The settings of this start have been looked at; until then nothing new is started.
        problems: What is wrong with the settings or the plan; units and tier bring their own.
        detached: The engines that an operator or the policy took L3 off.
        keeper, endpoint, endpoint_status: The tier's, on the node that runs the MetaService.
        exporter_problem: Why metrics and status page are not there.
        due_engines: Engines that wait for their turn in a rolling restart.
        clean_stop_instance: The MetaService's run that was quiesced before its stop.
        master, role, master_why, epoch, view_age_seconds: Of the cluster, as this node sees it; "" and 0 without one.
        master_tier: What the master says of the tier, on a node that is not the master.
        paused: Why an operator holds this node back; ``None``: nobody does.
        start_problems: What doctor's checks before a start have found.
    """

    settings_file: Path
    settings: Settings
    plugins: PluginSet
    events: EventLog
    backend: UnitBackend
    supervisor: Supervisor
    observer: EngineObserver
    lines: LineObserver
    detached: DetachedEngines
    witness: bool = False
    backend_note: str = ""
    plan: NodePlan | None = None
    adjusted: Adjustments = NOTHING
    planned: bool = False
    problems: list[str] = dataclasses.field(default_factory=list)
    hugepages: HugepageState = dataclasses.field(default_factory=HugepageState)
    keeper: TierKeeper | None = None
    endpoint: EndpointControl | None = None
    endpoint_status: Mapping[str, Any] | None = None
    clean_stop_instance: str | None = None
    master: str = ""
    role: str = ""
    master_why: str = ""
    epoch: int = 0
    view_age_seconds: float | None = None
    master_tier: TierView | None = None
    cluster_problems: list[str] = dataclasses.field(default_factory=list)
    paused: str | None = None
    exporter_problem: str = ""
    due_engines: list[str] = dataclasses.field(default_factory=list)
    start_problems: Callable[[], list[str]] = list
    started_unix_seconds: float = dataclasses.field(default_factory=time.time)

    @property
    def runtime(self) -> Path:
        """The runtime directory; it does not change while the daemon runs."""
        return Path(self.settings.paths.runtime)

    @property
    def state(self) -> Path:
        """The state directory; it does not change while the daemon runs."""
        return Path(self.settings.paths.state)

    def view(self, unit_id: str) -> UnitView | None:
        """One unit as last seen."""
        return self.supervisor.view(unit_id)

    def remark(self, view: UnitView) -> str:
        """What somebody did to a unit that still holds; empty for nothing."""
        if view.pid is None or not self.detached.is_off(view.id, view.instance):
            return ""
        return f"without L3: detached by {self.detached.by(view.id)}; kvtierctl l3 attach {view.name}"

    def resolve(self, name: str) -> str:
        """The id of the unit an operator means. Raises ``UsageError``."""
        return resolve_unit(name, [v.id for v in self.supervisor.views()])

    def _problems(self, views: tuple[UnitView, ...]) -> list[str]:
        """Everything that keeps this node from being as it should be, worst first."""
        found = list(self.problems)
        if self.plan is None and not found and not self.witness:
            found.append("no plan is in force yet: the first one is being made")
        if self.backend_note:
            found.append(self.backend_note)
        if self.plan is not None:
            found += self.plan.left_out.values()
        found += unit_problems(views)
        found += self.start_problems()
        if self.hugepages.problem:
            found.append(self.hugepages.problem.splitlines()[0])
        found += self.cluster_problems
        if self.exporter_problem:
            found.append(self.exporter_problem)
        if self.paused is not None:
            found.append(f"paused by an operator{': ' if self.paused else ''}{self.paused}; kvtierctl resume")
        if (self.keeper is not None or self.master_tier is not None) and self.tier.state != "joinable":
            found.append(f"the tier is {self.tier.state.replace('_', ' ')}: {'; '.join(self.tier.reasons)}")
        found += [f"{unit}: {text}" for unit, text in sorted(self.observer.problems.items())]
        found += [f"{unit}: {text}" for unit, text in sorted(self.lines.problems.items())]
        if self.events.unwritten:
            found.append(f"{self.events.unwritten} events could not be written to {self.state}")
        return found

    @property
    def tier(self) -> TierView:
        """The tier as last judged; on a node without the MetaService, who judges it."""
        if self.master_tier is not None:
            return self.master_tier
        if self.keeper is not None:
            return self.keeper.view
        if self.plan is not None and self.plan.master not in {"", self.plan.node}:
            return TierView(reasons=(f"looked after by {self.plan.master}",))
        return TierView()

    def _samples(self) -> list[Sample]:
        """The engines' newest figures; what only their output says fills what their metrics do not."""
        return [
            dataclasses.replace(sample, observation=merged(self.lines.readings[unit], sample.observation))
            if unit in self.lines.readings
            else sample
            for unit, sample in self.observer.samples.items()
        ]

    def snapshot(self) -> NodeState:
        """Everything the status is made of, at this moment."""
        now = time.time()
        views = self.supervisor.views()
        keeper = self.keeper
        lines = tier_lines(
            self._samples(),
            keeper.pool if keeper and self.master_tier is None else None,
            keeper.pool_seen_unix_seconds if keeper and self.master_tier is None else None,
            self.tier,
            now,
            fresh_seconds=3 * self.settings.observe.interval + 2,
        )
        return NodeState(
            plan=self.plan,
            views=views,
            remarks={view.id: self.remark(view) for view in views},
            tier=self.tier,
            tiers=lines if self.plan else (),
            endpoint=self.endpoint_status,
            hugepages=self.hugepages,
            problems=self._problems(views),
            backend=self.backend.name,
            cluster=ClusterState(
                self.role,
                self.epoch,
                self.master,
                self.master_why,
                self.view_age_seconds,
                self.paused is not None,
            ),
            started_unix_seconds=self.started_unix_seconds,
            now_unix_seconds=now,
        )
