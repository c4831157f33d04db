"""Mode static: the settings name the master, and an operator names another one by ``promote --force``.

Nobody is elected, so nobody can tell a dead master from one that cannot be reached: that judgement is the operator's.
What is done here is that the word once given holds: every word has an epoch higher than all before it, on disk before
it counts; the latest is told to everybody, and whoever hears of a later one than its own follows at once. A master
that starts asks the others first whether it has been replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import structlog

from kvtierd.cluster.clock import boottime_seconds
from kvtierd.cluster.master_store import MasterRecord, MasterStore
from kvtierd.cluster.network import PeerNetwork
from kvtierd.cluster.standing import FOREVER, ClusterView, PeerContact, Standing
from kvtierd.errors import ClusterError, KvtierError

ASK_SECONDS = 3.0
RETRY_SECONDS = 5.0
HAND_OVER_SECONDS = 3.0
REPLACED_STOPS_SECONDS = 2.0  # a replaced master that was reached has killed its MetaService by then
FIRST_TELL_SECONDS, LONGEST_TELL_SECONDS = 1.0, 10.0

_log = structlog.get_logger(__name__)


class StaticCoordinator:
    """One node of a cluster whose master is named.

    Args:
        network: This node's; the caller runs it.
        store: The durable record.
        ask_seconds: How long a master that starts waits for the others' answers.
    """

    mode = "static"

    def __init__(
        self,
        network: PeerNetwork,
        store: MasterStore,
        *,
        ask_seconds: float = ASK_SECONDS,
        now: Callable[[], float] = boottime_seconds,
    ) -> None:
        assert network.settings.master is not None
        self._network = network
        self._node = network.node
        self._named = network.settings.master
        self._store = store
        self._ask_seconds = ask_seconds
        self._now = now
        self._fit, self._why_unfit = True, ""
        self._record: MasterRecord | None = None
        self._unsaved = False
        self._serving = False
        self._serve_after_seconds = 0.0
        self._why = ""
        self._problem = "it has not begun yet"
        self._wake = asyncio.Event()
        self._lock = asyncio.Lock()  # one word at a time
        self._telling: asyncio.Task[None] | None = None
        self._settling: asyncio.Task[None] | None = None
        self._changed: Callable[[Standing], None] = lambda standing: None
        self._told: Standing | None = None
        network.desk.take_over = self.take_over
        network.board.listeners.append(self._wake.set)
        network.board.on_conflict = self._on_conflict

    # -- the coordinator

    @property
    def standing(self) -> Standing:
        """Where this node stands now."""
        record = self._record
        if record is None:
            return Standing("unknown", why=self._problem)
        if self._serving:
            return Standing(
                "master",
                record.epoch,
                self._node,
                "; ".join(filter(None, (self._why, self._problem))),
                FOREVER,
                self._serve_after_seconds,
            )
        if record.master == self._node:
            return Standing("unknown", record.epoch, "", self._problem or self._why_unfit)
        if not record.master:
            why = f"the settings name {self._named} now, from which no word has come yet"
            return Standing("follower", record.epoch, "", why)
        view = self._network.board.newest
        why = view.why if view is not None and view.epoch == record.epoch else ""
        why = f"{record.master} is the master: {why or 'as last known'}"
        return Standing(
            "follower", record.epoch, record.master, "; ".join(filter(None, (why, self._problem)))
        )

    async def run(self, changed: Callable[[Standing], None]) -> None:
        """Works until it is cancelled."""
        self._changed = changed
        try:
            await self._load()
            while True:
                self._wake.clear()
                await self._consider()
                self._tell()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_SECONDS if self._problem else None):
                        await self._wake.wait()
        finally:
            for task in (self._telling, self._settling):
                if task is not None:
                    task.cancel()

    def set_fit(self, fit: bool, why: str = "") -> None:
        """Whether this node may become the master; one that is the master stays it."""
        self._fit, self._why_unfit = fit, why
        self._wake.set()

    def peers(self) -> tuple[PeerContact, ...]:
        """All other nodes."""
        return tuple(self._network.contact(name) for name in self._network.links)

    async def hand_over(self, to: str) -> None:
        """Makes another node the master, which has its new epoch on disk when this returns.

        Raises:
            ClusterError: ``cluster.not-master``, ``cluster.no-such-node``, ``cluster.unreachable``, or why the other
                node does not want to; this node is the master still.
        """
        async with self._lock:
            record = self._record
            if record is None or not self._serving:
                raise ClusterError(
                    f"{self._node} is not the master, so it has nothing to hand over",
                    code="cluster.not-master",
                )
            if to not in self._network.links:
                raise ClusterError(
                    f"{to} cannot become the master",
                    why="it is not another node of this cluster",
                    hint=f"choose one of {', '.join(self._network.links)}",
                    code="cluster.no-such-node",
                )
            epoch = await self._ask_to_take_over(to, record.epoch)
            self._serving = False
            self._network.board.withdraw()
            self._network.board.seed(epoch, to, f"{self._node} handed over to it")
            await self._note(MasterRecord(epoch, to, self._named))

    async def promote(self) -> None:
        """Makes this node the master, by an epoch higher than any that this node and those it can reach have seen.

        Raises:
            ClusterError: ``cluster.unfit``, ``cluster.superseded``.
            KvtierError: the record is damaged or cannot be written; nothing has changed.
        """
        async with self._lock:
            if self._serving:
                return
            self._check_may_serve()
            replaced = self._network.board.newest
            reached = await self._network.greet(self._network.links, self._ask_seconds)
            assert self._record is not None
            epoch = max(self._record.epoch, self._network.board.posted.order[0]) + 1
            # Who was reached stops what it runs when it hears of this; who was not is the operator's concern.
            stops = replaced is not None and replaced.master in reached
            unreached = sorted(set(self._network.links) - reached)
            why = "promoted by an operator"
            if unreached:
                why += f"; not reached at that time: {', '.join(unreached)}"
            await self._become(epoch, why, REPLACED_STOPS_SECONDS if stops else 0.0)

    async def close(self) -> None:
        """Nothing is held."""
        await asyncio.sleep(0)

    async def take_over(self, sender: str, epoch: int) -> int:
        """The present master wants this node to be the next one. The epoch that is on disk now.

        Asked twice, it answers the same: the first answer may have been lost.

        Raises:
            ClusterError: ``cluster.not-master``: it is not the master as far as is known here; ``cluster.unfit``.
            StateError: the record cannot be written.
        """
        async with self._lock:
            record = self._record
            if record is not None and self._serving and record.epoch == epoch + 1:
                return record.epoch
            self._check_may_serve()
            assert record is not None
            if epoch < record.epoch or (epoch == record.epoch and sender != record.master):
                raise ClusterError(
                    f"{sender} cannot hand over: the master is {record.master or 'not known'} in epoch {record.epoch}",
                    code="cluster.not-master",
                )
            await self._become(epoch + 1, f"{sender} handed over to it", 0.0)
            return epoch + 1

    # -- inside

    async def _load(self) -> None:
        """The record, or what the settings say. While the file cannot be read this node is nobody's master."""
        while True:
            try:
                record = await asyncio.to_thread(self._store.load)
                if record is None:
                    record = MasterRecord(1, self._named, self._named)
                    await asyncio.to_thread(self._store.save, record)
            except KvtierError as error:
                if self._problem != str(error):
                    _log.error(error.message, why=error.why, hint=error.hint)
                self._problem = str(error)
                self._tell()
                await asyncio.sleep(RETRY_SECONDS)
            else:
                break
        self._problem = ""
        self._record = record
        if record.master and record.named == self._named:
            self._network.board.seed(record.epoch, record.master, "as last known before a restart")

    async def _consider(self) -> None:
        """What the record, the settings and the board say, and what follows from it."""
        async with self._lock:
            assert self._record is not None
            if self._unsaved:
                await self._note(self._record)
            if self._record.named != self._named:
                await self._renamed()
            view = self._network.board.newest
            record = self._record
            if view is not None and (
                view.epoch > record.epoch or (view.epoch == record.epoch and not record.master)
            ):
                if self._serving:
                    _log.warning("replaced as the master", by=view.master, epoch=view.epoch, why=view.why)
                self._serving = False
                await self._note(MasterRecord(view.epoch, view.master, self._named))
            if self._record.master == self._node and not self._serving and self._fit:
                await self._begin()

    async def _begin(self) -> None:
        """Serves by the record, unless one of the others knows better."""
        assert self._record is not None
        self._problem = "asks the other nodes whether there is a later master"
        self._tell()
        reached = await self._network.greet(self._network.links, self._ask_seconds)
        self._problem = ""
        newest = self._network.board.newest
        if newest is not None and newest.epoch >= self._record.epoch and newest.master != self._node:
            await self._note(MasterRecord(newest.epoch, newest.master, self._named))
            return
        self._why = "named in the settings" if self._record.epoch == 1 else "it was the master before"
        if not reached and self._network.links:
            self._why += "; no other node could be asked whether there is a later master"
        self._serve(0.0)

    async def _renamed(self) -> None:
        """The settings name another master than when the record was written: that is an operator's word too."""
        record = self._record
        assert record is not None
        if self._named != self._node:
            await self._note(MasterRecord(record.epoch, "", self._named))
            return
        if not self._fit:
            return
        self._problem = "named anew in the settings: asks the other nodes for the highest epoch"
        self._tell()
        await self._network.greet(self._network.links, self._ask_seconds)
        epoch = max(record.epoch, self._network.board.posted.order[0]) + 1
        self._problem = ""
        try:
            await self._become(epoch, "named anew in the settings", REPLACED_STOPS_SECONDS)
        except KvtierError as error:
            self._problem = str(error)

    async def _become(self, epoch: int, why: str, wait_seconds: float) -> None:
        """On disk first; then it counts, and everybody is told."""
        record = MasterRecord(epoch, self._node, self._named)
        await asyncio.to_thread(self._store.save, record)
        self._record, self._unsaved, self._problem, self._why = record, False, "", why
        self._serve(wait_seconds)
        if not self._network.board.mine:
            raise ClusterError(
                "a later master has been named at the same time",
                why=f"epoch {self._network.board.posted.order[0]} is known now, and this was to be {epoch}",
                hint="see kvtierctl status; try again if it is still wanted",
                code="cluster.superseded",
            )

    def _serve(self, wait_seconds: float) -> None:
        record = self._record
        assert record is not None
        view = ClusterView(record.epoch, self._node, since_unix_seconds=time.time(), why=self._why)
        self._serve_after_seconds = self._now() + wait_seconds if wait_seconds else 0.0
        self._serving = self._network.board.publish(view)
        self._tell()
        if self._serving:
            if self._telling is not None:
                self._telling.cancel()
            self._telling = asyncio.create_task(self._tell_everybody(record.epoch))
        else:
            self._wake.set()

    async def _tell_everybody(self, epoch: int) -> None:
        """Until each of the others has heard of this epoch: a replaced master above all, whenever it comes back."""
        untold = set(self._network.links)
        pause = FIRST_TELL_SECONDS
        while untold and self._serving and self._record is not None and self._record.epoch == epoch:
            untold -= await self._network.greet(untold)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_TELL_SECONDS)

    async def _ask_to_take_over(self, to: str, epoch: int) -> int:
        """The call may have done its work and its answer be lost, so it is asked twice, and looked at in the end."""
        network = self._network
        for last in (False, True):
            try:
                return await network.take_over(to, epoch, HAND_OVER_SECONDS)
            except ClusterError as error:
                if error.stable_code != "cluster.unreachable":
                    raise
                await network.reach(to, HAND_OVER_SECONDS)
                newest = network.board.newest
                if newest is not None and newest.epoch == epoch + 1 and newest.master == to:
                    return newest.epoch
                if last:
                    raise
        raise AssertionError

    async def _note(self, record: MasterRecord) -> None:
        """Follows at once; that it cannot be written down is no reason to go on serving."""
        self._record, self._unsaved = record, True
        self._tell()
        try:
            await asyncio.to_thread(self._store.save, record)
        except KvtierError as error:
            self._problem = str(error)
        else:
            self._unsaved, self._problem = False, ""

    def _check_may_serve(self) -> None:
        if self._record is None:
            raise ClusterError(
                f"{self._node} cannot become the master", why=self._problem, code="cluster.unfit"
            )
        if not self._fit:
            raise ClusterError(
                f"{self._node} cannot become the master", why=self._why_unfit, code="cluster.unfit"
            )

    def _on_conflict(self, view: ClusterView, source: str) -> None:
        """Two nodes were promoted while they could not see each other, and both took the same epoch.

        The one whose name sorts first goes on, by a new word; the other one hears of that.
        """
        record = self._record
        if record is None or not self._serving or view.epoch != record.epoch or view.master < self._node:
            return
        if self._settling is None or self._settling.done():
            self._settling = asyncio.create_task(self._settle(view))

    async def _settle(self, rival: ClusterView) -> None:
        async with self._lock:
            record = self._record
            if not self._serving or record is None or record.epoch != rival.epoch:
                return
            why = f"{self._node} and {rival.master} were both promoted under epoch {rival.epoch}; {self._node} goes on"
            _log.warning(why)
            try:
                await self._become(record.epoch + 1, why, 0.0)
            except KvtierError as error:
                self._problem = str(error)

    def _tell(self) -> None:
        standing = self.standing
        if standing != self._told:
            self._told = self._network.standing = standing
            self._changed(standing)
