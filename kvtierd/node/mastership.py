"""The cluster's part of the daemon's loop: what this node is, and what follows from it for units, endpoint and peers.

The decisions are in ``cluster.duty``; here they are carried out. A node without a cluster has none of this.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvtierd.cluster.comeback import Roll
from kvtierd.cluster.duty import (
    ArmGuard,
    Duty,
    EndpointSeen,
    KillMeta,
    MetaSeen,
    OpenEndpoint,
    PointClients,
    PointEndpoint,
    Publish,
    RestMeta,
    Seen,
    WantMeta,
    duties,
)
from kvtierd.cluster.hello import NodeFacts
from kvtierd.cluster.standing import FOREVER, ClusterView, Standing
from kvtierd.endpoint.status import lets_everybody_in
from kvtierd.errors import ClusterError, KvtierError
from kvtierd.files import write_atomic
from kvtierd.node.coordination import LEASE_EPOCH_FILE, Coordination, facts_of
from kvtierd.node.direct import DirectClients, pool_ranks
from kvtierd.node.elsewhere import Elsewhere, missing_survivors
from kvtierd.node.returning import RelayedClients, Returning
from kvtierd.node.state import Node
from kvtierd.plan.units import LEASE_FILE, META_ID
from kvtierd.tier.machine import TierView
from kvtierd.units.guard_file import now_seconds, write_deadline

PREPARE_POLL_SECONDS = 0.1
PERMIT_REST_SECONDS = 10.0  # of a permit: left for the switchover itself when the MetaService answers


class Mastership:
    """One node's part in its cluster.

    Args:
        node: The running node.
        part: Its coordinator and its network.

    Attributes:
        clients: This node's clients, where they have no endpoint.
        behind_endpoint: Which of them are back, where they have one.
        elsewhere: What the other nodes have to do with a recovery.
        handing_over: Mastership is being given away: nothing starts here.
        clean_epoch: The last epoch that this node ended as the master with nothing in flight.
        tell_more: Adds what others know of the node to what the other nodes are told.
    """

    def __init__(self, node: Node, part: Coordination) -> None:
        self._node = node
        self.part = part
        self.coordinator = part.coordinator
        self.board = part.network.board
        self._joined_with = node.settings.cluster
        self.clients = DirectClients(node)
        self.behind_endpoint = Returning(node, RelayedClients(node).see)
        self.elsewhere = Elsewhere(node, part, self.clients)
        self.handing_over = False
        self.clean_epoch = 0
        self._lease_file = str(node.runtime / LEASE_FILE)
        self._armed_until_seconds = 0.0
        self._epoch_written = 0
        self._told: Standing | None = None
        self._since_unix_seconds = 0.0
        self._problem = ""
        self._permit_until_seconds = 0.0
        self.tell_more: Callable[[NodeFacts], NodeFacts] = lambda facts: facts
        part.network.desk.prepare = self.prepare
        part.network.desk.events = node.events.last

    @property
    def is_master(self) -> bool:
        """This node is the master now; a lease that has ended counts as none."""
        standing = self.coordinator.standing
        return standing.role == "master" and now_seconds() < standing.until_seconds

    @property
    def may_run_meta(self) -> bool:
        """A MetaService may start here: this node is the master, or about to be made it by the master."""
        return self.is_master or now_seconds() < self._permit_until_seconds

    @property
    def outdated(self) -> str:
        """What a reload of the settings could not change; "" when it is all in force."""
        if self._node.settings.cluster == self._joined_with:
            return ""
        return "[cluster] has changed; this node takes part as before until kvtierd is restarted, which no unit notices"

    @property
    def master(self) -> str:
        """The master's name, as far as this node knows."""
        standing, view = self.coordinator.standing, self.board.newest
        if standing.role == "master":
            return self._name
        return view.master if view is not None and view.epoch >= standing.epoch else standing.master

    @property
    def _name(self) -> str:
        return self.part.network.node

    async def round(self) -> None:
        """Does what is due. Never raises for something that the next round may mend."""
        self._tell_of_changes()
        self.judge_fitness()
        self.show()
        for duty in duties(self._look()):
            try:
                await self._carry_out(duty)
            except (KvtierError, OSError) as error:
                self._trouble(f"{type(duty).__name__}: {error}")
                return
        self._trouble("")

    def judge_fitness(self) -> None:
        """Tells the coordinator whether this node may become the master."""
        why = self._why_unfit()
        self.coordinator.set_fit(not why, why)

    def _why_unfit(self) -> str:
        node = self._node
        meta = node.view(META_ID)
        if node.paused is not None:
            return "paused by an operator"
        if node.plan is None or node.plan.unit(META_ID) is None:
            return "it has no plan with a MetaService"
        if meta is not None and meta.state == "failed":
            return f"its MetaService has failed: {meta.reason}"
        return ""

    async def prepare(self, sender: str, epoch: int, seconds: float) -> None:
        """A switchover to this node is about to come: starts a MetaService, and returns when it answers.

        Args:
            sender: The master, as it says.
            epoch: Under which it is the master.
            seconds: For so long the MetaService may run before this node is the master.

        Raises:
            ClusterError: ``cluster.not-master``: it is not, as far as is known here; ``cluster.not-fit``.
        """
        view = self.board.newest
        if self.is_master or view is None or (view.master, view.epoch) != (sender, epoch):
            raise ClusterError(
                f"{self._name} does not know {sender} as the master (epoch {epoch})",
                hint="try again in a moment", code="cluster.not-master",
            )  # fmt: skip
        if unfit := self._why_unfit():
            raise ClusterError(f"{self._name} cannot be the master: {unfit}", code="cluster.not-fit")
        self._permit_until_seconds = until = now_seconds() + seconds
        self._node.events.add("info", "cluster.prepares", f"{sender} will hand over to this node")
        try:
            while not self._meta_seen().ready:
                if now_seconds() > until - PERMIT_REST_SECONDS:
                    meta = self._node.view(META_ID)
                    why = f"it is {meta.state}: {meta.reason}" if meta is not None else "it is not planned"
                    raise ClusterError(
                        f"the MetaService of {self._name} does not come up", why=why, code="cluster.not-fit"
                    )
                self._node.supervisor.poke()
                await asyncio.sleep(PREPARE_POLL_SECONDS)
        except BaseException:
            self._permit_until_seconds = 0.0  # the next round ends it
            self._node.supervisor.poke()
            raise

    def facts(self) -> NodeFacts:
        """What this node says of itself to the others."""
        endpoint = self._node.endpoint_status
        life = endpoint["backend"]["life"] if endpoint is not None and "epoch" in endpoint else None
        if self.clients.plan is not None:
            life = self.clients.life
        facts = dataclasses.replace(
            facts_of(self._node.plan, self._node.settings),
            endpoint_life=life or "",
            survivors_missing=missing_survivors(endpoint) + self.clients.missing,
            clean_epoch=self.clean_epoch,
        )
        return self.tell_more(facts)

    # -- this node's clients

    def look_at_clients(self, roll: Callable[[Roll], None]) -> None:
        """Are this node's clients back with the present master? ``roll`` starts one anew."""
        view = self.board.newest
        if self.is_master:
            keeper = self._node.keeper
            ranks = pool_ranks(keeper.pool) if keeper is not None else ()
        else:
            ranks = view.pool_ranks if view is not None else ()
        known = {r.rank: r for r in ranks} if ranks else None
        epoch, up, is_open = self._reached()
        if self.clients.plan is not None:
            self.clients.round(roll, epoch=epoch, up=up, is_open=is_open, ranks=known)
        elif (status := self._node.endpoint_status) is not None and "epoch" in status and epoch:
            backend = status["backend"]
            here = int(status["epoch"]) == epoch
            up = here and bool(backend["reachable"])
            is_open = up and lets_everybody_in(status)
            self.behind_endpoint.round(
                roll,
                epoch=epoch,
                up=up,
                is_open=is_open,
                ranks=known if is_open else {},  # before that nothing is known of the pool for certain
                life=str(backend["life"] or ""),
            )

    def client_gate(self) -> str | None:
        """Why a client without an endpoint may not start now."""
        if self.clients.plan is None:
            return None
        epoch, up, is_open = self._reached()
        return self.clients.gate(epoch, up=up, is_open=is_open)

    @property
    def pool_is_open(self) -> bool:
        """The master's MetaService answers and newcomers may join it, as far as this node knows."""
        _, up, is_open = self._reached()
        return up and is_open

    def _reached(self) -> tuple[int, bool, bool]:
        """The master's epoch, whether its MetaService answers, whether newcomers may join."""
        if self.is_master:
            ready = self._meta_seen().ready
            return (
                self.coordinator.standing.epoch,
                ready and not self.handing_over,
                ready and self._tier_serving,
            )
        view = self.board.newest
        if view is None or view.master == self._name:
            return 0, False, False
        up = view.tier_state != "down"
        return view.epoch, up, up and bool(view.served_life)

    def due_in_seconds(self) -> float:
        """When a round has something to do that nothing else will tell of."""
        standing = self.coordinator.standing
        wait_seconds = standing.serve_after_seconds - now_seconds()
        return wait_seconds if standing.role == "master" and wait_seconds > 0 else FOREVER

    def show(self) -> None:
        """What status says of the cluster."""
        node, standing, view = self._node, self.coordinator.standing, self.board.newest
        node.role, node.master, node.master_why = standing.role, self.master, standing.why
        node.epoch = max(standing.epoch, view.epoch if view is not None else 0)
        node.view_age_seconds = None if view is None else self.board.age_seconds()
        if self.is_master:
            node.master_tier = None
        elif view is None or not node.master:
            node.master_tier = TierView(reasons=(standing.why or "no master is known",))
        else:
            reasons = () if view.tier_state == "joinable" else (f"as {view.master}, the master, says",)
            node.master_tier = TierView(view.tier_state, reasons, "serving")  # type: ignore[arg-type]
        found = [self.part.network.problem, self.part.security.problem]
        if standing.role == "unknown":
            found.append(f"who is the master is not known: {standing.why}")
        found.append(self.outdated)
        found += [
            f"{name}: {text}" for name, texts in self.part.network.differences().items() for text in texts
        ]
        node.cluster_problems = [text for text in found if text]

    # -- looking

    def _meta_seen(self) -> MetaSeen:
        meta = self._node.view(META_ID)
        return MetaSeen(
            running=meta is not None and meta.pid is not None,
            ready=meta is not None and meta.state == "ready",
        )

    @property
    def _tier_serving(self) -> bool:
        keeper = self._node.keeper
        return keeper is not None and keeper.view.phase == "serving"

    def _look(self) -> Seen:
        node = self._node
        keeper = node.keeper
        return Seen(
            now_seconds=now_seconds(),
            node=self._name,
            standing=self.coordinator.standing,
            view=self.board.newest,
            meta=self._meta_seen(),
            endpoint=_endpoint_seen(node.endpoint_status, self._name),
            clients=self.clients.seen,
            tier_state=keeper.view.state if keeper is not None else "down",
            # From this moment the endpoint here serves too; that the MetaService has to prove itself for some seconds
            # more is no reason to keep the other nodes waiting longer than this one.
            tier_serving=self._tier_serving,
            armed_until_seconds=self._armed_until_seconds,
            handing_over=self.handing_over,
            permit_until_seconds=self._permit_until_seconds,
        )

    def _tell_of_changes(self) -> None:
        standing, view = self.coordinator.standing, self.board.newest
        if view is not None and view.master != self._name:
            self.elsewhere.epoch_before = view.epoch
        self.part.network.standing = standing  # what it tells the others
        before, self._told = self._told, standing
        if before is not None and (before.role, before.epoch, before.master) == (
            standing.role,
            standing.epoch,
            standing.master,
        ):
            return
        node = self._node
        if standing.role == "master":
            self._permit_until_seconds = 0.0
            self._since_unix_seconds = time.time()
            node.events.add(
                "info", "cluster.master", f"this node is the master, epoch {standing.epoch}: {standing.why}"
            )
        elif before is not None and before.role == "master":
            self.board.withdraw()
            self._armed_until_seconds = 0.0
            node.events.add(
                "warning", "cluster.not-master", f"this node is not the master any more: {standing.why}"
            )
        elif standing.role == "unknown":
            if before is not None:
                node.events.add(
                    "warning", "cluster.unknown", f"who is the master is not known: {standing.why}"
                )
        elif standing.master:
            node.events.add(
                "info", "cluster.follows", f"{standing.master} is the master, epoch {standing.epoch}"
            )

    # -- doing

    async def _carry_out(self, duty: Duty) -> None:
        node = self._node
        match duty:
            case ArmGuard(until_seconds):
                if (
                    node.plan is not None
                    and (meta := node.plan.unit(META_ID)) is not None
                    and meta.guard_file
                ):
                    write_deadline(self._lease_file, until_seconds)
                    if self.is_master:
                        self._remember_epoch()
                self._armed_until_seconds = until_seconds
            case KillMeta(why):
                node.events.add(
                    "warning", "cluster.meta-killed", f"the MetaService is killed: {why}", unit=META_ID
                )
                await self.end_meta(why)
            case WantMeta():
                node.supervisor.set_resting(META_ID, "")
            case RestMeta(why):
                node.supervisor.set_resting(META_ID, why)
            case PointEndpoint(epoch, target):
                await self._point(epoch, target)
            case PointClients(epoch, master):
                await self.clients.point(epoch, master)
            case OpenEndpoint():
                if node.endpoint is not None:
                    await node.endpoint.serve()
                    await node.endpoint.admit("all")
            case Publish():
                self._publish(duty)

    def _remember_epoch(self) -> None:
        """For the daemon after this one, which goes on with the lease that the guard enforces."""
        epoch = self.coordinator.standing.epoch
        if epoch != self._epoch_written:
            write_atomic(self._node.runtime / LEASE_EPOCH_FILE, str(epoch).encode())
            self._epoch_written = epoch

    async def end_meta(self, why: str) -> None:
        """SIGKILL to the MetaService: its part is over, in order or not. Raises ``UnitError``."""
        self._disarm()
        self._node.supervisor.set_resting(META_ID, why)
        await self._node.supervisor.kill_now(META_ID)

    def _disarm(self) -> None:
        self._armed_until_seconds = 0.0
        if Path(self._lease_file).exists():
            write_deadline(self._lease_file, 0.0)

    async def _point(self, epoch: int, target: str) -> None:
        node = self._node
        if node.endpoint is None or node.plan is None or node.plan.meta is None:
            return
        if target == self._name:
            meta = node.plan.meta
            where = {
                "meta": meta.server_meta_url.removeprefix("tcp://"),
                "config_store": meta.server_config_store_url.removeprefix("tcp://"),
            }
        else:
            where = {"peer": target}
        await node.endpoint.set_target(where, epoch=epoch)
        node.endpoint_status = await node.endpoint.status()
        node.supervisor.poke()  # what follows from it is due at once
        node.events.add("info", "cluster.endpoint", f"the endpoint relays to {target}, epoch {epoch}")

    def _publish(self, duty: Publish) -> None:
        plan = self._node.plan
        standing = self.coordinator.standing
        if plan is None or plan.meta is None:
            return
        direct, keeper = self.clients.plan is not None, self._node.keeper
        address = next((p.address for p in self._node.settings.cluster.peers if p.name == plan.node), "")
        self.board.publish(
            ClusterView(
                epoch=duty.epoch,
                master=plan.node,
                address=address,
                # Without endpoints clients may be told a name; where it leads to, this says.
                meta_service_url=plan.meta.server_meta_url if direct else plan.meta.client_meta_url,
                config_store_url=plan.meta.server_config_store_url
                if direct
                else plan.meta.client_config_store_url,
                since_unix_seconds=self._since_unix_seconds,
                why=standing.why,
                tier_state=duty.tier_state,
                served_life=duty.served_life,
                pool_ranks=pool_ranks(keeper.pool) if keeper is not None else (),
            )
        )

    def _trouble(self, text: str) -> None:
        if text and text != self._problem:
            self._node.events.add("error", "cluster.trouble", text)
        self._problem = text


def _endpoint_seen(status: Mapping[str, Any] | None, node: str) -> EndpointSeen | None:
    """The endpoint's status as the duties need it; an endpoint of before epochs is none."""
    if status is None or status.get("protocol", 1) < 2:
        return None
    target = status["target"]
    return EndpointSeen(
        epoch=max(int(status["epoch"]), int(status["epoch_seen"])),
        target="" if target is None or int(status["epoch"]) == 0 else str(target.get("peer", node)),
        mode=str(status["mode"]),
        admission=str(status["admission"]),
        life=str(status["backend"]["life"] or ""),
    )
