"""Observe, decide, act: a picture of the node, what the policy makes of it, and the actions that follow.

One step a look. The decider is pure and keeps its memory in a file, so that a restarted daemon forgets no budget; actions
run beside the loop, are written into the journal, and their outcome goes back to the decider.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import time

import structlog

from kvtierd.act.executor import Executor, Outcome
from kvtierd.act.holders import Holders, Requests
from kvtierd.act.journal import ActionJournal
from kvtierd.cluster.clock import boottime_seconds
from kvtierd.cluster.hello import NodeFacts
from kvtierd.cluster.peer_server import HolderChange
from kvtierd.decide.decider import Decider
from kvtierd.decide.limits import Circumstances
from kvtierd.decide.policy import policy_from
from kvtierd.decide.proposals import Proposal
from kvtierd.errors import ActionError, KvtierError
from kvtierd.events import Severity
from kvtierd.files import aside_name, write_atomic
from kvtierd.node.hands import NodeHands
from kvtierd.node.mastership import Mastership
from kvtierd.node.sources import NodeSources
from kvtierd.node.state import Node
from kvtierd.observe.observer import Observer
from kvtierd.observe.picture import Picture
from kvtierd.plan.units import pool_id
from kvtierd.quantities import format_size
from kvtierd.units.procfs import boot_id

log = structlog.get_logger(__name__)

STATE_FILE = "decider.json"
MOST_STATE_BYTES = 4 * 1024 * 1024
STEP_SECONDS = 2.0  # rules go by minutes; a picture of 8 engines and 256 segments costs some 15 ms
CLIENTS_SECONDS = 5.0  # between two looks whose links are whose
KEEP_SECONDS = 10.0  # at most so often the decider's memory is written when nothing was decided
PICTURE_SECONDS = 15.0
HEARD_SECONDS = 30.0  # what a node said longer ago of what it does says nothing any more
KEPT_PICTURES = 240  # an hour


class Pilot:
    """One node's. ``step`` is called again and again; it never raises for a source, a rule or an action.

    Attributes:
        journal: Of actions.
        decider: With what it sees and why.
        observer: With the newest picture.
        pictures: Of the last hour, one in a while: to try a policy on.
        counts: Rule and outcome -> how often, since this began.
    """

    def __init__(self, node: Node, sources: NodeSources, hands: NodeHands) -> None:
        self._node = node
        self._sources = sources
        self._hands = hands
        self._file = node.state / STATE_FILE
        self._boot = boot_id()
        self._loop = asyncio.get_running_loop()
        self.observer = Observer(sources.sources(), state_dir=node.state)
        self.decider = Decider(policy_from(node.settings.policy))
        self.journal = ActionJournal(node.state, hands.node, told=self._journal_says)
        self._holders = Holders(hands)
        self._requests = Requests(self._holders)
        self._executor = Executor(
            hands, self._holders, self.journal, deadline_seconds=self.decider.policy.deadline_seconds
        )
        self._mastership: Mastership | None = None
        self._acting: dict[int, asyncio.Task[None]] = {}  # by the proposal's number
        self.counts: collections.Counter[tuple[str, str]] = collections.Counter()
        self._keeping = asyncio.Lock()
        self._fault = ""
        self._stepping: asyncio.Task[None] | None = None
        self._next_seconds = 0.0
        self._next_keeping = 0.0
        self._next_clients = 0.0
        self.pictures: collections.deque[Picture] = collections.deque(maxlen=KEPT_PICTURES)
        self._recall()
        for entry in self.journal.cut_off:
            node.events.add(
                "warning", "policy.half-done",
                f"kvtierd ended while it was to {entry.what}: {entry.step or 'how far it came is not known'}",
            )  # fmt: skip

    def join(self, mastership: Mastership) -> None:
        """The node takes part in a cluster: others hear of its memory, and its master may have holders changed."""
        self._mastership = mastership
        self._sources.mastership = self._hands.mastership = mastership
        mastership.tell_more = self._tell
        mastership.part.network.desk.change_holders = self._change_holders

    @property
    def acting(self) -> bool:
        """Something is being carried out."""
        return bool(self._acting)

    # -- what nodes know of each other's disturbances

    def _tell(self, facts: NodeFacts) -> NodeFacts:
        flights = self.decider.limits.flights.values()
        busy = {f.proposal.group for f in flights if f.proposal.disruptive}
        told = self._sources.tell(facts, self.observer.picture)
        return dataclasses.replace(told, busy_groups=tuple(sorted(busy)))

    def _busy_elsewhere(self) -> frozenset[str]:
        if self._mastership is None:
            return frozenset()
        now = boottime_seconds()
        return frozenset(
            group
            for link in self._mastership.part.network.links.values()
            if link.facts is not None and now - (link.facts_at_seconds or 0.0) < HEARD_SECONDS
            for group in link.facts.busy_groups
        )

    # -- the loop's part

    def round(self) -> None:
        """Begins a step when it is time and none is under way. Returns at once."""
        now = time.monotonic()
        if now < self._next_seconds or (self._stepping is not None and not self._stepping.done()):
            return
        self._next_seconds = now + max(STEP_SECONDS, self._node.settings.observe.interval)
        self._stepping = asyncio.create_task(self._guarded_step())

    async def _guarded_step(self) -> None:
        try:
            await self.step()
        except Exception as error:
            log.exception("pilot.failed")
            fault = f"internal error: {type(error).__name__}: {error}"
            if fault != self._fault:  # once, not with every look
                self._node.events.add("error", "policy.internal", fault)
            self._fault = fault
            await asyncio.sleep(KEEP_SECONDS)
        else:
            self._fault = ""

    async def step(self) -> None:
        """One look, and what follows from it."""
        node = self._node
        policy = policy_from(node.settings.policy)
        if policy != self.decider.policy:
            self._take_policy()
        if time.monotonic() >= self._next_clients:
            self._next_clients = time.monotonic() + CLIENTS_SECONDS
            await self._sources.look_at_clients()
        picture = await self.observer.step()
        self._hands.newest = picture
        if not self.pictures or picture.now_seconds - self.pictures[-1].now_seconds >= PICTURE_SECONDS:
            self.pictures.append(picture)
        clustered = node.settings.cluster.mode != "standalone"
        around = Circumstances(
            paused=node.paused is not None,
            no_master=clustered and not node.master,
            busy_groups=self._busy_elsewhere(),
            under_way=frozenset(self._acting),
        )
        proposals = self.decider.step(picture, around)
        for proposal in proposals:
            await self._take_up(proposal)
        if proposals or time.monotonic() >= self._next_keeping:
            await self._keep()

    async def _take_up(self, proposal: Proposal) -> None:
        node, unit = self._node, proposal.target if node_has(self._node, proposal.target) else ""
        told = f"{proposal.rule}: {proposal.reason}"
        if proposal.is_advice:
            node.events.add(proposal.severity, "policy.advice", f"{told}; {proposal.action.text}", unit=unit)
            self.counts[proposal.rule, "said"] += 1
            await asyncio.to_thread(self.journal.note, proposal, "said", proposal.action.text)
            return
        if proposal.dry_run:
            node.events.add(
                proposal.severity, "policy.dry-run", f"{told}; would {proposal.action.text}", unit=unit
            )
            self.counts[proposal.rule, "dry run"] += 1
            await asyncio.to_thread(self.journal.note, proposal, "dry run")
            return
        node.events.add(proposal.severity, "policy.acts", f"{told}; {proposal.action.text}", unit=unit)
        if proposal.disruptive and self._mastership is not None:
            self._mastership.elsewhere.hear_from_all()  # they hear of it with the same words
        self._acting[proposal.id] = task = asyncio.create_task(self._act(proposal, unit))
        task.add_done_callback(lambda _: self._acting.pop(proposal.id, None))

    async def _act(self, proposal: Proposal, unit: str) -> None:
        try:
            outcome = await self._executor.carry_out(proposal)
        except Exception as error:
            log.exception("act.failed")
            outcome = Outcome("failed", f"internal error: {type(error).__name__}: {error}")
        self.counts[proposal.rule, outcome.state] += 1
        severity = "info" if outcome.ok else "error" if outcome.state == "half done" else "warning"
        self._node.events.add(
            severity,  # type: ignore[arg-type]
            f"policy.{outcome.state.replace(' ', '-')}",
            f"{proposal.action.text}: {outcome.text}",
            unit=unit,
        )
        now = boottime_seconds()
        self.decider.outcome(proposal.id, ok=outcome.ok, text=outcome.text, now_seconds=now)
        await self._keep()
        self._node.supervisor.poke()

    async def undo_all(self) -> list[str]:
        """Takes everything back that was changed beside the settings; what that was. Raises ``KvtierError``."""
        kept = self._hands.adjustments()
        undone: list[str] = []

        def did(text: str) -> None:  # at once: what follows may not work
            undone.append(text)
            self._node.events.add("warning", "policy.reset", f"by an operator: {text}")

        for holder in kept.holders:
            unit, memory_bytes = await self._holders.remove(pool_id(holder.name))
            did(f"{unit} ({format_size(memory_bytes)}) was removed")
        if kept.evict_high is not None or kept.evict_low is not None:
            await self._hands.adjust(lambda a: a.model_copy(update={"evict_high": None, "evict_low": None}))
            did(f"thresholds {kept.evict_high}/{kept.evict_low} are as the settings say again")
        return undone

    # -- what a master asks for

    async def _change_holders(self, change: HolderChange) -> tuple[str, int]:
        """Raises ``KvtierError``: not by this sender, not now, or it did not work and was undone."""
        node, mastership = self._node, self._mastership
        view = mastership.board.newest if mastership is not None else None
        if view is None or (view.master, view.epoch) != (change.sender, change.epoch):
            raise ActionError(
                f"{self._hands.node} does not know {change.sender} as the master (epoch {change.epoch})",
                hint="try again in a moment", code="act.not-master",
            )  # fmt: skip
        if node.paused is not None:
            raise ActionError(f"{self._hands.node} is paused by an operator", code="act.paused")
        if node.settings.policy.dry_run:
            raise ActionError(f"{self._hands.node} has [policy] dry_run on", code="act.dry-run")
        if not change.remove_unit and change.add_bytes <= 0:
            raise ActionError("a pool holder of no size", code="act.no-size")
        what = f"remove {change.remove_unit}" if change.remove_unit else "add a pool holder"
        node.events.add("info", "policy.asked", f"{change.sender} asks to {what}: {change.reason}")
        return await self._requests.take(
            change.token,
            add_bytes=change.add_bytes,
            remove_unit=change.remove_unit,
            say=lambda text: self._say("info", "policy.asked", f"{change.sender} asked: {text}"),
        )

    def _journal_says(self, text: str) -> None:
        """From whichever thread writes."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._say, "error", "policy.journal", text)

    def _say(self, severity: Severity, kind: str, text: str) -> None:
        self._node.events.add(severity, kind, text)

    # -- memory

    def _take_policy(self) -> None:
        """New settings: what was counted stays."""
        kept = self.decider.remember(self._boot)
        self.decider = Decider(policy_from(self._node.settings.policy))
        self.decider.recall(kept, self._boot, boottime_seconds())
        self._executor.deadline_seconds = self.decider.policy.deadline_seconds

    def _recall(self) -> None:
        try:
            if self._file.stat().st_size > MOST_STATE_BYTES:
                raise ValueError("it is too large")
            kept = json.loads(self._file.read_bytes())
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError) as error:
            kept = {"unreadable": str(error)}
        now = boottime_seconds()
        problem = self.decider.recall(kept, self._boot, now)
        if problem:
            self._node.events.add("warning", "policy.memory", f"{problem}{self._set_aside()}")
        for number in list(self.decider.limits.flights):
            text = "kvtierd ended while it was under way"
            self.decider.outcome(number, ok=False, text=text, now_seconds=now)

    def _set_aside(self) -> str:
        aside = aside_name(self._file, "damaged", time.time())
        try:
            self._file.rename(aside)
        except OSError:
            return ""
        return f"; {self._file} was set aside as {aside.name}"

    async def _keep(self) -> None:
        async with self._keeping:  # the later one last
            kept = self._remembered()
            await asyncio.to_thread(self._write, kept)

    def _remembered(self) -> bytes:
        self._next_keeping = time.monotonic() + KEEP_SECONDS
        return json.dumps(self.decider.remember(self._boot)).encode()

    def _write(self, kept: bytes) -> None:
        with contextlib.suppress(KvtierError, OSError):  # a full disk: tried again
            write_atomic(self._file, kept, mode=0o600)

    async def close(self) -> None:
        """What is under way is cut off, and said so in the journal."""
        self._holders.closing = True
        tasks = [*self._acting.values(), *([self._stepping] if self._stepping is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.observer.close()
        self._write(self._remembered())
        self.journal.close()


def node_has(node: Node, target: str) -> bool:
    """Whether a rule's target is a unit of this node."""
    return node.view(target) is not None
