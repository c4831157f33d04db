"""The newest view of the cluster that this node has: from itself when it is the master, otherwise from any peer.

Every node serves what its board holds to whoever asks, so a node that cannot reach the master learns of it from the
others. A later epoch replaces an earlier one, never the other way round; within an epoch the master counts its
changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from kvtierd.cluster.clock import boottime_seconds
from kvtierd.cluster.refusals import Refusals
from kvtierd.cluster.standing import FOREVER, ClusterView

UNCONFIRMED_SECONDS = 1e9  # the age of a view that no master has confirmed since this node was started
BARE = 0  # revision of a view of which only epoch and master are known


@dataclasses.dataclass(frozen=True, slots=True)
class Posted:
    """What is on the board: a view (``None``: no master is known) and its revision within the epoch."""

    view: ClusterView | None = None
    revision: int = BARE

    @property
    def order(self) -> tuple[int, int]:
        """Of two, the one with the higher order is the newer."""
        return (self.view.epoch if self.view else 0), self.revision


class ViewBoard:
    """One node's board. All calls come from one asyncio loop.

    Args:
        node: This node.
        peers: All nodes of the cluster; a view that names another one as the master is refused.

    Attributes:
        posted: What is on it.
        listeners: Called when that changes, and when this node is no longer the one who says it.
        mine_until_seconds: This node's lease: what it published counts as a master's word until then.
        on_conflict: Called with a view of the same epoch that names another master, and who offered it.
    """

    def __init__(
        self,
        node: str,
        peers: AbstractSet[str],
        refusals: Refusals,
        *,
        now: Callable[[], float] = boottime_seconds,
    ) -> None:
        self._node = node
        self._peers = peers
        self._refusals = refusals
        self._now = now
        self._mine = False
        self._confirmed_seconds = now()
        self._highest_of: dict[str, int] = {}
        self._bell = asyncio.Event()
        self.posted = Posted()
        self.mine_until_seconds = FOREVER
        self.listeners: list[Callable[[], None]] = []
        self.on_conflict: Callable[[ClusterView, str], None] = lambda view, source: None

    @property
    def newest(self) -> ClusterView | None:
        """The newest view, ``None`` while no master is known."""
        return self.posted.view

    @property
    def mine(self) -> bool:
        """This node is the master, and the view is its own."""
        return self._mine and self._now() < self.mine_until_seconds

    def age_seconds(self) -> float:
        """How long ago the master itself said so, as far as is known here; 0 on the master."""
        since = self.mine_until_seconds if self._mine else self._confirmed_seconds
        return max(0.0, self._now() - since)

    # -- on the master

    def publish(self, view: ClusterView) -> bool:
        """Posts this node's own view. False: a later epoch is known, or this epoch is somebody else's; then nothing is.

        Publishing what is posted already does nothing.
        """
        current = self.posted.view
        if current is not None and (
            view.epoch < current.epoch or (view.epoch == current.epoch and view.master != current.master)
        ):
            return False
        if self._mine and view == current:
            return True
        revision = self.posted.revision + 1 if current and current.epoch == view.epoch else BARE + 1
        self._mine = True
        self._post(view, revision)
        return True

    def withdraw(self) -> None:
        """This node is not the master any more. The view stays until a newer one comes, and grows old."""
        if self._mine:
            self._confirmed_seconds = min(self._now(), self.mine_until_seconds)
            self._mine = False
            self._tell()

    # -- from elsewhere

    def seed(self, epoch: int, master: str, why: str) -> None:
        """What this node remembers from before its start: just epoch and master, nobody has confirmed it yet."""
        if epoch > self.posted.order[0]:
            self._confirmed_seconds = self._now() - UNCONFIRMED_SECONDS
            self._post(ClusterView(epoch, master, why=why), BARE)

    def offer(self, view: ClusterView | None, revision: int, age_seconds: float, source: str) -> bool:
        """A peer says this. Whether it is news; if not it may still confirm what is posted."""
        if view is None:
            return False
        if view.master not in self._peers:
            self._refusals.note(source, "unknown-master", f"it names {view.master}, which is not listed")
            return False
        current = self.posted.view
        current_epoch = current.epoch if current is not None else 0
        if view.epoch < current_epoch:
            self._note_lower(view, revision, source, current_epoch)
            return False
        self._highest_of[source] = max(view.epoch, self._highest_of.get(source, 0))
        if current is None or view.epoch > current_epoch:
            self._mine = False
            self._confirmed_seconds = self._now() - age_seconds
            self._post(view, revision)
            return True
        if view.master != current.master:
            self._refusals.note(
                source,
                "epoch-conflict",
                f"it names {view.master} as the master in epoch {view.epoch}; here it is {current.master}",
            )
            self.on_conflict(view, source)
            return False
        if self._mine:
            if revision > self.posted.revision:
                # From before this kvtierd was started: the others wait for a revision after that one.
                self._post(current, revision + 1)
            return False
        self._confirm(age_seconds)
        if revision <= self.posted.revision:
            return False
        self._post(view, revision)
        return True

    async def changed(self, since: Posted, seconds: float) -> Posted:
        """What is posted when it is no longer ``since``, or when the time is up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.posted is since:
                    await self._bell.wait()
        return self.posted

    def _note_lower(self, view: ClusterView, revision: int, source: str, current_epoch: int) -> None:
        """A peer that has just not heard yet is nothing to log; one that has known better, or believes in itself, is."""
        believes = view.master == source and revision > BARE
        if believes or view.epoch < self._highest_of.get(source, 0):
            why = f"it offers epoch {view.epoch} with {view.master} as the master; epoch {current_epoch} is known here"
            self._refusals.note(source, "lower-epoch", why)

    def _confirm(self, age_seconds: float) -> None:
        self._confirmed_seconds = max(self._confirmed_seconds, self._now() - age_seconds)

    def _post(self, view: ClusterView, revision: int) -> None:
        self.posted = Posted(view, revision)
        bell, self._bell = self._bell, asyncio.Event()
        bell.set()
        self._tell()

    def _tell(self) -> None:
        for listener in self.listeners:
            listener()
