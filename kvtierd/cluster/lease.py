"""Drives the elector: real time, a real disk, real peers.

One task does everything in order: it takes a message or the time, asks the elector, and carries the effects out before
it looks at anything else. What must be on disk is there before anything that follows it. When the disk fails the
elector is thrown away, since it already counts on what was not written; this node then does not vote, says why, and
begins anew as a voter that has just started when the disk works again.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import structlog

from kvtierd.cluster.clock import boottime_seconds
from kvtierd.cluster.election_config import ElectorConfig
from kvtierd.cluster.election_messages import (
    AnyMessage,
    Effect,
    EpochRaised,
    EpochState,
    HeldLease,
    LeaseGained,
    LeaseLost,
    LeaseRenewed,
    Persist,
    Send,
)
from kvtierd.cluster.elector import Elector
from kvtierd.cluster.epoch_store import EpochStore
from kvtierd.cluster.following import Following
from kvtierd.cluster.network import PeerNetwork
from kvtierd.cluster.observer import elects
from kvtierd.cluster.outbox import Outbox, check_successor
from kvtierd.cluster.standing import ClusterView, PeerContact, Standing
from kvtierd.errors import ClusterError, KvtierError
from kvtierd.settings import ClusterSettings

MOST_MAIL = 256  # messages that wait for the disk; more are refused
LONGEST_WAIT_SECONDS = 0.5  # a host that slept must not be found out later than this
RETRY_SECONDS = 2.0
HAND_OVER_SECONDS = 2.0
SLOW_DISK_SECONDS = 1.0

T = TypeVar("T")

_log = structlog.get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class _Mail:
    """A message and, when its sender waits for it, where the answers go."""

    message: AnyMessage
    answers: asyncio.Future[Sequence[AnyMessage]] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Resign:
    """An operator's switchover."""

    to: str
    done: asyncio.Future[None]


@dataclasses.dataclass(frozen=True, slots=True)
class _Term:
    """A lease that is held."""

    epoch: int
    until_seconds: float
    serve_after_seconds: float


class LeaseCoordinator:
    """Mode lease, for voters.

    Args:
        config: What all voters agree on; ``elector_config`` makes it from the settings.
        network: This node's; the caller runs it.
        store: The voter's file.
        following: Whom to follow while somebody else is the master, and the fence.
        witness: It votes and never becomes the master.
        held: A lease that the guard of this boot still enforces for a MetaService that runs on.
        draws: Numbers from 0 to 1, for tests.
    """

    mode = "lease"

    def __init__(
        self,
        config: ElectorConfig,
        network: PeerNetwork,
        store: EpochStore,
        following: Following,
        *,
        witness: bool = False,
        held: HeldLease | None = None,
        now: Callable[[], float] = boottime_seconds,
        draws: Iterator[float] | None = None,
    ) -> None:
        self._config = config
        self._network = network
        self._store = store
        self._following = following
        self._witness = witness
        self._held = held
        self._now = now
        self._draws = draws or iter(random.SystemRandom().random, -1.0)
        self._fit, self._why_unfit = not witness, "a witness only votes" if witness else ""
        self._elector: Elector | None = None
        self._problem = "this voter has not begun yet"
        self._failed = False
        self._ticked = False
        self._term: _Term | None = None
        self._why_lost = ""
        self._mail: asyncio.Queue[_Mail | _Resign] = asyncio.Queue(MOST_MAIL)
        self._outbox = Outbox(
            network, max(0.5, config.lease_seconds / 3), lambda answer: self._post(_Mail(answer))
        )
        self._greetings: set[asyncio.Task[set[str]]] = set()
        self._disk = concurrent.futures.ThreadPoolExecutor(1, "epoch file")
        self._changed: Callable[[Standing], None] = lambda standing: None
        self._told: Standing | None = None
        self._alarm: asyncio.TimerHandle | None = None
        network.desk.elect = self.receive

    # -- the coordinator

    @property
    def standing(self) -> Standing:
        """Where this node stands now: a lease that has run out is none, even before the elector has noticed."""
        term, problem = self._term, self._problem
        if term is not None and self._now() < term.until_seconds:
            if self._elector is None:
                return Standing("unknown", term.epoch, "", problem, term.until_seconds)
            return Standing(
                "master",
                term.epoch,
                self._config.node,
                problem or "a majority of the voters has granted the lease",
                term.until_seconds,
                term.serve_after_seconds,
            )
        if term is not None:  # whoever held a lease must know that it is over, whatever else is wrong
            why = "the lease has run out" + (f"; {problem}" if problem else "")
            return Standing("follower", term.epoch, "", why)
        problem = problem or self._following.problem
        if problem or self._elector is None:
            return Standing("unknown", why=problem)
        view = self._following.view
        if view is not None and view.master != self._config.node:
            return Standing("follower", view.epoch, view.master, f"{view.master} is the master: {view.why}")
        why = self._why_lost or self._elector.view(self._now()).why or "no master is known"
        return Standing("follower", view.epoch if view is not None else 0, "", why)

    async def run(self, changed: Callable[[Standing], None]) -> None:
        """Works until it is cancelled."""
        self._changed = changed
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._drive())
                tasks.create_task(self._following.run(self._tell))
        finally:
            if self._alarm is not None:
                self._alarm.cancel()
                self._alarm = None
            self._outbox.cancel()
            for greeting in self._greetings:
                greeting.cancel()

    def set_fit(self, fit: bool, why: str = "") -> None:
        """Whether this node may become the master; a witness never may. A lease it holds it keeps."""
        if self._witness:
            return
        self._fit, self._why_unfit = fit, why
        if self._elector is not None:
            self._elector.set_fit(fit, why)

    def peers(self) -> tuple[PeerContact, ...]:
        """The other voters."""
        refusals: dict[str, str] = {}
        if self._elector is not None and not self.standing.master:  # otherwise they are of an earlier attempt
            refusals = self._elector.view(self._now()).refusals
        contacts = (self._network.contact(name) for name in self._config.others)
        return tuple(
            dataclasses.replace(contact, problem=contact.problem or refusals.get(contact.name, ""))
            for contact in contacts
        )

    async def hand_over(self, to: str) -> None:
        """Gives the lease back in favour of another voter; returns when the voters have been told.

        Raises:
            ClusterError: ``cluster.not-master``, ``cluster.no-such-node``, ``cluster.unreachable``; nothing was given up.
        """
        if self.standing.role != "master":
            raise ClusterError(
                f"{self._config.node} is not the master, so it has nothing to hand over",
                code="cluster.not-master",
            )
        await check_successor(self._network, self._config.others, to, self._config.promise_seconds)
        resign = _Resign(to, asyncio.get_running_loop().create_future())
        self._post(resign)
        await resign.done
        await self._outbox.settle(HAND_OVER_SECONDS)

    async def promote(self) -> None:
        """Raises ``cluster.elects``."""
        raise elects()

    async def close(self) -> None:
        """Lets go of the disk; ``run`` has been cancelled before."""
        self._disk.shutdown(wait=False, cancel_futures=True)
        await asyncio.sleep(0)

    async def receive(self, message: AnyMessage) -> Sequence[AnyMessage]:
        """A message that a peer sent; the answers to it.

        Raises:
            ClusterError: This node does not vote at present.
        """
        answers: asyncio.Future[Sequence[AnyMessage]] = asyncio.get_running_loop().create_future()
        self._post(_Mail(message, answers))
        return await answers

    # -- the task

    async def _drive(self) -> None:
        """Ends only when it is cancelled: whatever keeps this node from voting is in the standing."""
        while True:
            if self._elector is None:
                await self._begin()
                continue
            item = await self._next(self._elector)
            try:
                await self._do(self._elector, item)
            except KvtierError as error:
                self._throw_away(error)
            except asyncio.CancelledError:
                self._drop(
                    "it has been stopped"
                )  # in the middle of its effects; run again, it makes another one
                raise
            except Exception as error:
                self._throw_away(ClusterError(f"internal error: {type(error).__name__}: {error}"))
                raise

    async def _begin(self) -> None:
        """A new elector from what is on disk; when that cannot be had, after a while again."""
        try:
            state = await self._on_disk(self._read_back if self._failed else self._store.load)
        except KvtierError as error:
            self._say(f"this voter does not vote: {error}")
            await asyncio.sleep(RETRY_SECONDS)
            return
        now = self._now()
        held, self._held = self._held, None
        elector = Elector(self._config, state, booted_at_seconds=now, draws=self._draws, held=held)
        elector.set_fit(self._fit, self._why_unfit)
        self._elector, self._failed, self._problem = elector, False, ""
        if held is not None and elector.view(now).role == "master":
            # Its MetaService runs already, unless this very process has waited for its time.
            serve_after = self._term.serve_after_seconds if self._term is not None else 0.0
            self._term = _Term(held.epoch, held.until_seconds, serve_after)
            self._arm()
            self._tell()
            self._publish("it has gone on with its lease after a restart of kvtierd")
        self._tell()

    def _read_back(self) -> EpochState | None:
        """What is on disk, written once more: a disk that can be read may still not be writable."""
        state = self._store.load()
        if state is not None:
            self._store.save(state)
        return state

    async def _next(self, elector: Elector) -> _Mail | _Resign | None:
        """A message, or ``None`` when something may be due; in turns, so that neither keeps the other waiting."""
        wait_seconds = min(elector.next_wake_seconds() - self._now(), LONGEST_WAIT_SECONDS)
        if not self._mail.empty() and (wait_seconds > 0 or self._ticked):
            self._ticked = False
            return self._mail.get_nowait()
        if wait_seconds > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_seconds):
                    return await self._mail.get()
        self._ticked = True
        return None

    async def _do(self, elector: Elector, item: _Mail | _Resign | None) -> None:
        now = self._now()
        if item is None:
            await self._carry_out(elector.tick(now))
        elif isinstance(item, _Resign):
            try:
                effects = elector.resign(now, item.to)
            except ClusterError as error:
                _settle(item.done, error)
            else:
                try:
                    await self._carry_out(effects)
                finally:
                    _settle(item.done, None)
        elif item.answers is None:
            await self._carry_out(elector.step(item.message, now))
        else:
            answers: list[AnyMessage] = []
            try:
                await self._carry_out(elector.step(item.message, now), item.message.sender, answers)
            finally:
                _settle(item.answers, answers)
        self._network.set_hint(elector.view(self._now()).master)

    async def _carry_out(
        self, effects: Sequence[Effect], sender: str = "", answers: list[AnyMessage] | None = None
    ) -> None:
        """In order. What is for ``sender``, who waits for it, goes to ``answers``."""
        for effect in effects:
            if isinstance(effect, Send):
                if answers is not None and effect.to == sender:
                    answers.append(effect.message)
                else:
                    self._outbox.send(effect.to, effect.message)
            elif isinstance(effect, Persist):
                await self._on_disk(lambda state=effect.state: self._store.save(state))  # type: ignore[misc]
            elif isinstance(effect, LeaseLost):
                self._lost(effect)
            else:
                self._has_lease(effect)

    def _has_lease(self, effect: LeaseGained | LeaseRenewed | EpochRaised) -> None:
        before = self._term
        if isinstance(effect, LeaseGained):
            self._term = _Term(effect.epoch, effect.until_seconds, effect.serve_after_seconds)
        else:
            serve_after = before.serve_after_seconds if before is not None else 0.0
            self._term = _Term(effect.epoch, effect.until_seconds, serve_after)
        self._why_lost = ""
        self._arm()
        # The guard first, the others after it.
        self._tell()
        if not isinstance(effect, LeaseRenewed) and self._now() < effect.until_seconds:
            raised = isinstance(effect, EpochRaised)
            self._publish("elected" if not raised else "elected; it has moved on to a later epoch")

    def _lost(self, effect: LeaseLost) -> None:
        self._term = None
        self._why_lost = f"it is no longer the master: {effect.why}"
        self._network.board.withdraw()
        self._tell()

    def _arm(self) -> None:
        """Sets an alarm for the lease's end as it is now, and bounds by it what the board says in this node's name."""
        if self._term is not None:
            self._network.board.mine_until_seconds = self._term.until_seconds
        if self._alarm is None and self._term is not None:
            left_seconds = max(0.0, self._term.until_seconds - self._now())
            self._alarm = asyncio.get_running_loop().call_later(left_seconds, self._ring)

    def _ring(self) -> None:
        """Notices the end even while the task waits for the disk; sets itself again after a renewal."""
        self._alarm = None
        if self._term is None:
            return
        if self._now() < self._term.until_seconds:
            self._arm()
            return
        self._network.board.withdraw()
        self._tell()

    def _throw_away(self, error: KvtierError) -> None:
        """The elector counts on something that is not on disk. A lease lasts until its end, but is not renewed."""
        _log.error("this voter stops voting", why=str(error))
        self._drop(str(error))
        self._failed = True
        self._say(f"this voter does not vote: {error}")

    def _drop(self, why: str) -> None:
        self._elector = None
        while not self._mail.empty():
            item = self._mail.get_nowait()
            _settle(item.done if isinstance(item, _Resign) else item.answers, _no_vote(why))
        if self._term is not None:
            self._held = HeldLease(self._term.epoch, self._term.until_seconds)

    # -- its means

    def _post(self, item: _Mail | _Resign) -> None:
        if self._elector is None:
            raise _no_vote(self._problem)
        try:
            self._mail.put_nowait(item)
        except asyncio.QueueFull:
            raise _no_vote("its disk is too slow for what it is asked") from None

    async def _on_disk(self, work: Callable[[], T]) -> T:
        """In the disk's own thread, one after the other."""
        working = asyncio.get_running_loop().run_in_executor(self._disk, work)
        started = self._now()
        while not working.done():
            await asyncio.wait((working,), timeout=SLOW_DISK_SECONDS)
            if not working.done():
                slow = self._now() - started
                self._say(f"this voter does not vote: {self._store.path} takes {slow:.0f} s to be written")
        if self._elector is not None:
            self._problem = ""
        return working.result()

    def _publish(self, why: str) -> None:
        """Tells everybody at once what matters most; the daemon publishes the rest when it serves."""
        term, network = self._term, self._network
        assert term is not None
        view = ClusterView(term.epoch, self._config.node, since_unix_seconds=time.time(), why=why)
        current = network.board.newest
        if current is not None and network.board.mine:
            view = dataclasses.replace(current, epoch=term.epoch)
        if not network.board.publish(view):
            _log.error("a later epoch than this node's own is known", known=current, own=view)
        telling = asyncio.create_task(network.greet(self._config.others))
        self._greetings.add(telling)
        telling.add_done_callback(self._greetings.discard)

    def _say(self, problem: str) -> None:
        self._problem = problem
        self._tell()

    def _tell(self) -> None:
        standing = self.standing
        if standing != self._told:
            self._told = self._network.standing = standing
            self._changed(standing)


def _settle(future: asyncio.Future[Any] | None, result: object) -> None:
    """Answers whoever still waits."""
    if future is None or future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


def _no_vote(why: str) -> ClusterError:
    return ClusterError(f"this voter does not vote at present: {why}", code="cluster.no-vote")


def elector_config(settings: ClusterSettings, node: str) -> ElectorConfig:
    """What the settings say about elections.

    Raises:
        ClusterError: They are not safe, or this node is no voter.
    """
    return ElectorConfig(settings.name, node, settings.voters, settings.lease)
