"""From what the daemon knows to the status that leaves it. Pure: values in, a message out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from kvtierd import __version__
from kvtierd.control.v1 import control_pb2 as pb
from kvtierd.observe.tiers import TierLine
from kvtierd.plan.model import NodePlan
from kvtierd.provision.carry_out import HugepageState
from kvtierd.tier.machine import TierView
from kvtierd.units.views import UnitView

MOST_LAST_LINES = 5
_KIND_ORDER = {"endpoint": 0, "meta": 1, "pool": 2, "engine": 3}


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterState:
    """This node's part in its cluster; everything empty without one."""

    role: str = ""
    epoch: int = 0
    master: str = ""
    why: str = ""
    view_age_seconds: float | None = None
    paused: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class NodeState:
    """Everything the status is made of."""

    plan: NodePlan | None
    views: Sequence[UnitView]
    remarks: Mapping[str, str]  # unit -> what an operator did to it
    tier: TierView
    tiers: Sequence[TierLine]
    endpoint: Mapping[str, Any] | None
    hugepages: HugepageState
    problems: Sequence[str]
    backend: str
    cluster: ClusterState
    started_unix_seconds: float
    now_unix_seconds: float


def unit_message(view: UnitView, remark: str = "") -> pb.Unit:
    """One unit as the control service shows it."""
    return pb.Unit(
        id=view.id,
        kind=view.kind,
        name=view.name,
        state=view.state,
        reason=view.reason or "",
        pid=view.pid,
        since=view.since_unix_seconds,
        restarts=view.restarts,
        next_try_in_seconds=view.next_try_in_seconds,
        last_lines=list(view.last_lines)[-MOST_LAST_LINES:],
        stale=view.stale,
        last_exit=view.last_exit.describe() if view.last_exit else "",
        remark=remark,
    )


def tier_message(line: TierLine) -> pb.Tier:
    """One tier as the control service shows it; unknown fields stay unset."""
    return pb.Tier(
        name=line.name,
        where=line.where,
        state=line.state,
        reason=line.reason,
        capacity_bytes=line.capacity_bytes,
        used_bytes=line.used_bytes,
        capacity_tokens=line.capacity_tokens,
        query_tokens=line.query_tokens,
        hit_tokens=line.hit_tokens,
        hit_rate=line.hit_rate,
        age_seconds=line.age_seconds,
    )


def status_message(state: NodeState) -> pb.StatusReply:
    """The whole status."""
    plan = state.plan
    views = sorted(state.views, key=lambda v: (_KIND_ORDER.get(v.kind, 9), v.name))
    return pb.StatusReply(
        node=plan.node if plan else "",
        series=plan.series if plan else "",
        emulated=plan.emulated if plan else False,
        epoch=state.cluster.epoch,
        master=state.cluster.master or (plan.master if plan else ""),
        role=state.cluster.role,
        master_why=state.cluster.why,
        view_age_seconds=state.cluster.view_age_seconds,
        paused=state.cluster.paused,
        backend=state.backend,
        version=__version__,
        memcache_version=plan.memcache_version if plan else "",
        tier_state=state.tier.state,
        tier_reasons=state.tier.reasons,
        tiers=[tier_message(line) for line in state.tiers],
        units=[unit_message(view, state.remarks.get(view.id, "")) for view in views],
        clients=_clients(state.endpoint, views),
        hugepages=_hugepages(plan, state.hugepages),
        problems=state.problems,
        endpoint_mode=str(state.endpoint["mode"]) if state.endpoint else "",
        started=state.started_unix_seconds,
        at=state.now_unix_seconds,
    )


def _hugepages(plan: NodePlan | None, state: HugepageState) -> pb.Hugepages | None:
    if plan is None or not plan.hugepages.pages:
        return None
    return pb.Hugepages(
        page_size_bytes=plan.hugepages.page_size_bytes,
        asked_pages=plan.hugepages.pages,
        got_pages=state.got_pages,
        problem=state.problem,
    )


def _clients(endpoint: Mapping[str, Any] | None, views: Sequence[UnitView]) -> list[pb.EndpointClient]:
    """The endpoint's clients that joined the pool, by the unit they belong to where that is known."""
    if endpoint is None:
        return []
    units = {view.pid: view.id for view in views if view.pid}
    return [
        pb.EndpointClient(
            pid=client["pid"] or None,
            process=units.get(client["pid"], client["name"] or ""),
            kind=client["kind"] or "",
            lookups=client["lookups"],
            lookup_hits=client["lookup_hits"],
            writes=client["writes"],
            connected=client["connected"],
        )
        for client in endpoint["clients"]
        if client["joined"] or client["connected"]
    ]


def unit_problems(views: Sequence[UnitView]) -> list[str]:
    """Units that are not as they should be: failed first, then those that are tried again or limp."""
    failed = [f"{v.id} has failed: {v.reason}" for v in views if v.state == "failed"]
    limping = [f"{v.id} is {v.state}: {v.reason}" for v in views if v.state in {"backoff", "degraded"}]
    return failed + limping
