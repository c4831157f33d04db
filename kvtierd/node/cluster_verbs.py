"""What operators can ask of a node as a part of its cluster: peers, switchover, promote, pause."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from kvtierd.cluster.hello import differences
from kvtierd.control.v1 import control_pb2 as pb
from kvtierd.errors import ClusterError, StateError
from kvtierd.files import write_atomic
from kvtierd.node.cluster_events import ClusterEvents
from kvtierd.node.coordination import Coordination
from kvtierd.node.mastership import Mastership
from kvtierd.node.state import Node
from kvtierd.plan.units import META_ID
from kvtierd.units.guard_file import now_seconds

CONTACT_SECONDS = 15.0  # a peer that was not heard of for longer is not reached: greetings come every 10 s
POLL_SECONDS = 0.01
PERMIT_SECONDS = (
    40.0  # for so long the target of a switchover may run its MetaService before it is the master
)
PAUSE_FILE = "paused"


class ClusterVerbs:
    """The cluster's verbs over a running node. ``join`` is called when the node takes part in its cluster."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._part: Coordination | None = None
        self._mastership: Mastership | None = None
        node.paused = self._read_pause()

    def join(self, part: Coordination, mastership: Mastership) -> None:
        """The node has begun to take part."""
        self._part, self._mastership = part, mastership

    # -- peers

    def peers(self) -> pb.PeersReply:
        """The nodes of the cluster as this one sees them."""
        node, cluster = self._node, self._node.settings.cluster
        reply = pb.PeersReply(cluster=cluster.name, mode=cluster.mode, paused=self._node.paused is not None)
        if self._part is None or self._mastership is None:
            if cluster.mode != "standalone":
                reply.problems.append("this node does not take part in its cluster yet")
            return reply
        network, standing = self._part.network, self._part.coordinator.standing
        board, view = network.board, network.board.newest
        reply.role, reply.master = standing.role, self._mastership.master
        reply.epoch = max(standing.epoch, view.epoch if view is not None else 0)
        reply.why = standing.why
        if view is not None and view.master == reply.master and view.since_unix_seconds:
            reply.since = view.since_unix_seconds
            reply.view_age_seconds = board.age_seconds()
        if standing.role == "master" and standing.until_seconds != float("inf"):
            reply.lease_left_seconds = max(0.0, standing.until_seconds - now_seconds())
        if network.problem:
            reply.problems.append(f"other nodes cannot reach this one: {network.problem}")
        if not reply.master:
            reply.problems.append(f"no master is known: {standing.why}")
        mine = network.facts()
        for peer in cluster.peers:
            reply.peers.append(self._peer(peer.name, peer.address, voter=peer.voter, witness=peer.witness))
            shown = reply.peers[-1]
            if shown.this_node:
                continue
            link = network.links[peer.name]
            if link.facts is not None:
                shown.differences.extend(differences(mine, link.facts))
            reply.problems.extend(f"{peer.name}: {text}" for text in shown.differences)
            if shown.problem:
                reply.problems.append(f"{peer.name}: {shown.problem}")
        if node.plan is None and not node.witness:
            reply.problems.append("this node has no plan, so it cannot become the master")
        return reply

    def _peer(self, name: str, address: str, *, voter: bool, witness: bool) -> pb.Peer:
        assert self._part is not None
        network = self._part.network
        shown = pb.Peer(
            name=name, address=address, voter=voter, witness=witness, this_node=name == network.node
        )
        facts = network.facts() if shown.this_node else network.links[name].facts
        if facts is not None:
            shown.role, shown.epoch, shown.version = facts.role, facts.epoch, facts.version
            shown.memcache_version, shown.settings_digest = facts.memcache_version, facts.settings_digest
            shown.uptime_seconds = facts.uptime_seconds
        if not shown.this_node:
            contact = network.contact(name)
            if contact.last_contact_seconds is not None:
                shown.last_contact_seconds = contact.last_contact_seconds
            offset = network.links[name].clock.seconds
            if offset is not None:
                shown.clock_offset_seconds = offset
            shown.problem = contact.problem
            if not shown.problem and (contact.last_contact_seconds or 0.0) > CONTACT_SECONDS:
                shown.problem = f"not heard of for {contact.last_contact_seconds:.0f} s"
        return shown

    def events(self) -> ClusterEvents:
        """What happens on all nodes. Raises ``ClusterError``: this node has no cluster."""
        part, _ = self._taking_part()
        return ClusterEvents(part.network, self._node.events)

    # -- switchover, promote

    async def switchover(self, to: str, wait_seconds: float) -> pb.SwitchoverReply:
        """Gives mastership to another node, in order.

        Raises:
            ClusterError: this is not the master, or the other is not fit for it; nothing has changed then.
        """
        part, mastership = self._taking_part()
        await self._check_target(to)
        began = time.monotonic()
        node = self._node
        # Its MetaService first: starting one takes seconds, in which nobody would have hits.
        await part.network.prepare(to, part.coordinator.standing.epoch, PERMIT_SECONDS, PERMIT_SECONDS)
        meta = node.view(META_ID)
        quiet = node.keeper is not None and await node.keeper.quiesce()
        mastership.handing_over = True
        try:
            if meta is not None and meta.pid is not None:
                # Nothing is in flight any more; a stop by SIGTERM would take more than 4 s.
                await mastership.end_meta("switchover")
                await self._until(lambda: (v := node.view(META_ID)) is None or v.pid is None, 10.0)
            mastership.clean_epoch = part.coordinator.standing.epoch if quiet else 0
            await part.network.greet([to])  # it learns whether anything was in flight
            await part.coordinator.hand_over(to)
            node.events.add("info", "cluster.switchover", f"mastership was given to {to}")
        finally:
            mastership.handing_over = False
        served = await self._until(
            lambda: (v := part.network.board.newest) is not None and v.master == to and bool(v.served_life),
            max(1.0, wait_seconds - (time.monotonic() - began)),
        )
        view = part.network.board.newest
        return pb.SwitchoverReply(
            epoch=view.epoch if view is not None else 0,
            seconds=time.monotonic() - began,
            note="" if served else f"{to} does not serve yet; kvtierctl status there says why",
        )

    async def _check_target(self, to: str) -> None:
        part, mastership = self._taking_part()
        peers = {p.name: p for p in self._node.settings.cluster.peers}
        if not mastership.is_master:
            raise ClusterError(
                f"this node is not the master; {mastership.master or 'nobody that is known'} is",
                hint="run kvtierctl switchover there; if that node is lost: kvtierctl promote --force (mode static)",
                code="cluster.not-master",
            )
        if to not in peers or peers[to].witness or to == part.network.node:
            fit = [n for n, p in peers.items() if not p.witness and n != part.network.node]
            raise ClusterError(
                f"{to!r} cannot become the master",
                hint=f"choose one of: {', '.join(fit)}",
                code="cluster.no-such-node",
            )
        if part.coordinator.mode == "lease" and not peers[to].voter:
            raise ClusterError(
                f"{to} is no voter, so it cannot become the master", code="cluster.not-fit",
                hint="the voters are: " + ", ".join(self._node.settings.cluster.voters),
            )  # fmt: skip
        if to not in await part.network.greet([to]):
            raise ClusterError(
                f"{to} does not answer: {part.network.contact(to).problem}", code="cluster.unreachable"
            )
        facts = part.network.links[to].facts
        wrong = (
            differences(part.network.facts(), facts) if facts is not None else ("it says nothing of itself",)
        )
        wrong = tuple(text for text in wrong if not text.startswith("version "))
        if wrong:
            raise ClusterError(
                f"{to} is not fit to become the master: {'; '.join(wrong)}", code="cluster.not-fit"
            )

    async def promote(self, *, force: bool) -> pb.PeersReply:
        """Makes this node the master by an operator's word."""
        part, _ = self._taking_part()
        if not force:
            raise ClusterError("promote needs --force", code="cluster.needs-force")
        await part.coordinator.promote()
        self._node.events.add("warning", "cluster.promoted", "an operator made this node the master")
        return self.peers()

    async def _until(self, condition: object, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not condition():  # type: ignore[operator]
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(POLL_SECONDS)
        return True

    # -- pause

    def pause(self, *, on: bool, reason: str) -> pb.PeersReply:
        """Keeps this node from becoming the master; outlives the daemon.

        Raises:
            StateError: it cannot be written down.
        """
        file = self._node.state / PAUSE_FILE
        try:
            if on:
                write_atomic(file, reason.encode())
            else:
                file.unlink(missing_ok=True)
        except OSError as error:
            raise StateError(f"{file} cannot be written: {error.strerror}") from None
        self._node.paused = reason if on else None
        if self._mastership is not None:
            self._mastership.judge_fitness()
        told = f"paused by an operator{f': {reason}' if reason else ''}" if on else "resumed by an operator"
        self._node.events.add("info", "node.paused" if on else "node.resumed", told)
        return self.peers()

    def _read_pause(self) -> str | None:
        try:
            return Path(self._node.state / PAUSE_FILE).read_text(encoding="utf-8")
        except OSError:
            return None

    def _taking_part(self) -> tuple[Coordination, Mastership]:
        if self._part is None or self._mastership is None:
            standalone = self._node.settings.cluster.mode == "standalone"
            raise ClusterError(
                "there is no cluster: mode is standalone"
                if standalone
                else "this node does not take part yet",
                hint="[cluster] in the settings" if standalone else "kvtierctl status says why",
                code="cluster.none",
            )
        return self._part, self._mastership
