"""What may start now, and why not: the daemon's answers to the supervisor. What runs is left alone."""

from __future__ import annotations

import time
from collections.abc import Mapping

from kvtierd.checks import COMMAND_SECONDS, CannotTellError, Patient
from kvtierd.doctor.registry import all_checks
from kvtierd.doctor.starting import StartChecks
from kvtierd.host.view import HostView
from kvtierd.node.mastership import Mastership
from kvtierd.node.state import Node
from kvtierd.plan.docker import container_of
from kvtierd.plan.inventory import Inventory
from kvtierd.plan.model import NodePlan, UnitSpec
from kvtierd.provision.assembly import inventory_of_this_host
from kvtierd.tier.meta_check import check_meta as check_meta_service
from kvtierd.units.backend import UnitProcess
from kvtierd.units.views import UnitView


class Gates:
    """Over a running node.

    Attributes:
        mastership: This node's part in its cluster, once it has one.
        start_checks: What doctor says before each start.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self.mastership: Mastership | None = None
        self.start_checks: StartChecks | None = None
        self._meta_verified: str | None = None

    def why_not(self, spec: UnitSpec, views: Mapping[str, UnitView]) -> str | None:
        """Why a unit may not start yet. Only starts are gated: what runs is never stopped by this."""
        why = self._why_wait(spec, views)
        if (
            why is None and self.start_checks is not None
        ):  # last: a unit that waits for its turn asks for no run
            why = self.start_checks.why_not(spec.kind)
        return why

    def _why_wait(self, spec: UnitSpec, views: Mapping[str, UnitView]) -> str | None:
        node = self._node
        if not node.planned:
            return "waits until this start's settings are planned"
        if spec.blocked:
            return spec.blocked
        clustered = node.settings.cluster.mode != "standalone"
        permitted = self.mastership is not None and self.mastership.may_run_meta
        if spec.kind == "meta" and clustered and not permitted:
            return "waits until this node is the master"  # its unit may be newer than what said that it rests
        if spec.kind in {"pool", "engine"} and node.hugepages.problem:
            return f"{node.hugepages.problem.splitlines()[0]} (kvtierctl reload tries again)"
        for other in spec.after:
            view = views.get(other)
            if view is None or view.state not in {"ready", "degraded"}:
                return f"waits for {other} ({view.state if view else 'not there'})"
        tier = node.tier
        if self.mastership is not None and spec.kind in {"pool", "engine"}:
            # An endpoint that has not said yet whether it reaches the master counts as one that does not.
            reached = node.endpoint_status is not None and node.endpoint_status["backend"]["reachable"]
            if node.endpoint is not None and not reached:
                return f"waits for the MetaService of {node.master or 'a master'}"
            if (why := self.mastership.client_gate()) is not None:
                return why
        if node.keeper is not None and node.endpoint is None and tier.phase == "recovering":
            return "waits until those that knew the MetaService are back"  # no endpoint holds newcomers here
        standalone = node.plan is not None and node.plan.pool.placement == "standalone"
        if spec.kind == "engine" and standalone and node.keeper is not None and tier.state != "joinable":
            return f"waits for the pool: it is {tier.state.replace('_', ' ')}: {'; '.join(tier.reasons)}"
        return None

    async def check_meta(self, spec: UnitSpec, process: UnitProcess) -> str | None:
        """The MetaService's readiness: what it says, and where it listens."""
        plan = self._node.plan
        if plan is None or plan.meta is None or process.instance == self._meta_verified:
            return None  # verified once: its sockets do not move; that it answers, the probe sees
        expected = {(p.address, p.port) for p in plan.ports if p.unit == spec.id}
        problem = await check_meta_service(
            plan.meta.metrics_url, expected, process.pid, container=container_of(spec.argv), tls=plan.tls
        )
        if problem is None:
            self._meta_verified = process.instance
        return problem


def make_start_checks(node: Node) -> StartChecks:
    """Doctor's checks before a start, over this host with the settings and the plan in force."""

    async def plan(_: Inventory) -> NodePlan:
        if node.plan is None:
            raise CannotTellError("there is no plan yet")
        return node.plan

    def admit() -> Patient:
        return Patient(
            HostView(),
            inventory=lambda: inventory_of_this_host(
                node.settings, node.plugins, command_seconds=COMMAND_SECONDS
            ),
            settings=node.settings,
            settings_file=node.settings_file,
            plan=plan,
            now_unix=time.time(),
        )

    checks = StartChecks(all_checks(node.plugins), admit, node.events.add)
    node.start_problems = checks.problems
    return checks
