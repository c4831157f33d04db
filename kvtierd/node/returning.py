"""Looking whether this node's clients are back with the present MetaService, beside the daemon's loop.

What is decided is in ``cluster.comeback``. Here clients are looked at: those behind the local endpoint by what it says of
them, those without one by their own connections (``direct``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from kvtierd.cluster.comeback import ClientSeen, Comeback, Look, Member, Roll
from kvtierd.cluster.standing import PoolRank
from kvtierd.errors import KvtierError
from kvtierd.files import write_atomic
from kvtierd.host.containers import container_pid
from kvtierd.memcache.answers import PROVIDER
from kvtierd.node.state import Node
from kvtierd.plan.docker import container_of
from kvtierd.units.procfs import ProcessTable, descendants, process_table
from kvtierd.units.views import UnitView

LOOK_SECONDS = 1.0  # while somebody is missing
REST_LOOK_SECONDS = 10.0
STATE_FILE = "returned.json"
ALIVE = frozenset({"ready", "degraded"})
See = Callable[[], Awaitable[tuple[ClientSeen, ...]]]


class Returning:
    """Which clients are back. One instance a daemon.

    Args:
        node: The running node.
        see: Looks at all clients.
    """

    def __init__(self, node: Node, see: See) -> None:
        self._node = node
        self._see = see
        self._file = node.state / STATE_FILE
        self._kept_epoch = self._recall()
        self._comeback = Comeback(self._kept_epoch)
        self._next_look_seconds = 0.0
        self._looking: asyncio.Task[tuple[Roll, ...]] | None = None
        self._problems: set[str] = set()
        self._no_help = ""

    @property
    def missing(self) -> int:
        """Clients that are expected to come back by themselves and have not."""
        return self._comeback.waited_for

    def hurry(self) -> None:
        """Something has changed: the next round looks."""
        self._next_look_seconds = 0.0

    def round(
        self,
        roll: Callable[[Roll], None],
        *,
        epoch: int,
        up: bool,
        is_open: bool,
        ranks: Mapping[int, PoolRank] | None,
        life: str = "",
    ) -> None:
        """Looks at the clients when it is time, beside the loop, and has those rolled that must be.

        Args:
            roll: Starts one anew.
            epoch: Of the master now.
            up: Its MetaService answers.
            is_open: Newcomers may join it.
            ranks: The pool's members as it sees them.
            life: Which MetaService process it is, where that is known.
        """
        if self._looking is not None:
            if not self._looking.done():
                return
            task, self._looking = self._looking, None
            try:
                for found in task.result():
                    roll(found)
            except (KvtierError, OSError) as error:
                self._node.events.add("warning", "cluster.clients-unseen", str(error))
            self._show()
        now = time.monotonic()
        if epoch != self._comeback.epoch:
            self.hurry()
        if now < self._next_look_seconds:
            return
        self._next_look_seconds = now + (REST_LOOK_SECONDS if self._comeback.settled else LOOK_SECONDS)
        self._looking = asyncio.create_task(self._look(epoch, up, is_open, ranks, life))

    async def _look(
        self, epoch: int, up: bool, is_open: bool, ranks: Mapping[int, PoolRank] | None, life: str
    ) -> tuple[Roll, ...]:
        clients = await self._see()
        return self._comeback.step(Look(time.monotonic(), epoch, up, is_open, clients, ranks, life))

    def _show(self) -> None:
        """What is wrong with them degrades them, once they had the time to come."""
        comeback = self._comeback
        found = comeback.missing if comeback.settled else {}
        for unit in self._problems | set(found):
            if self._node.view(unit) is not None:
                self._node.supervisor.set_problem(unit, "returning", found.get(unit))
        self._problems = set(found)
        if comeback.no_help and comeback.no_help != self._no_help:
            self._node.events.add(
                "error", "cluster.roll-no-help", f"no other engine is started anew: {comeback.no_help}"
            )
        self._no_help = comeback.no_help
        if comeback.settled and comeback.epoch != self._kept_epoch:
            with contextlib.suppress(KvtierError, OSError):  # a full disk: tried again in the next round
                write_atomic(self._file, json.dumps({"epoch": comeback.epoch}).encode(), mode=0o600)
                self._kept_epoch = comeback.epoch

    def _recall(self) -> int:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return int(json.loads(self._file.read_text(encoding="utf-8"))["epoch"])
        return 0


class RelayedClients:
    """The clients behind this node's endpoint, by what it says of their processes."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def see(self) -> tuple[ClientSeen, ...]:
        """All units of this node that have joined the pool; none while the endpoint does not answer."""
        node, status = self._node, self._node.endpoint_status
        if status is None or node.plan is None:
            return ()
        rows = [c for c in status["clients"] if c.get("pid") and c.get("joined") and "back" in c]
        views = [v for v in node.supervisor.views() if v.kind in {"pool", "engine"}]
        found = []
        table = await asyncio.to_thread(process_table)  # once for all units
        for view in views:
            if view.pid is None or node.detached.is_off(view.id, view.instance):
                continue
            family = await self._family(view, table)
            own = [row for row in rows if row["pid"] in family]
            if own or view.state not in ALIVE:
                found.append(self._client(view, own))
        return tuple(found)

    def _client(self, view: UnitView, rows: list[Mapping[str, Any]]) -> ClientSeen:
        plan = self._node.plan
        pool = view.kind == "pool"
        brings_bytes = plan.pool.dram_bytes_per_provider if pool and plan is not None else 0
        members = tuple(
            # An engine's rank says with its registration whether it brings memory; how much, its own settings do.
            Member(int(row["rank"]), PROVIDER if row["provider"] else "", brings_bytes)
            for row in rows
            if row.get("rank") is not None
        )
        stranded = any(row["stranded"] for row in rows)
        return ClientSeen(
            unit=view.id,
            kind="pool" if pool else "engine",
            # One that is still starting is not a survivor: its own deadline is over it.
            instance=view.instance if view.state in ALIVE else None,
            ready=view.state == "ready",
            over=view.state in {"stopped", "failed"},
            linked=all(row["back"] for row in rows) if rows else None,
            lost="the others have let go of its memory and take only a new process" if stranded else "",
            members=members,
        )

    async def _family(self, view: UnitView, table: ProcessTable) -> set[int]:
        plan = self._node.plan
        unit = plan.unit(view.id) if plan is not None else None
        pid = view.pid
        container = container_of(unit.argv) if unit is not None else None
        if container is not None:
            pid = await asyncio.to_thread(container_pid, *container)
        return family_of(pid, table) if pid is not None else set()


def family_of(pid: int, table: ProcessTable) -> set[int]:
    """A process and all that descend from it, by process id; empty when it has ended."""
    return {pid, *(child.pid for child in descendants((pid,), table))} if pid in table else set()
