"""Whom a node follows: the newest view that its fence lets through, and the standing that comes of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from kvtierd.cluster.epoch_store import SeenEpochStore
from kvtierd.cluster.refusals import Refusals
from kvtierd.cluster.standing import ClusterView
from kvtierd.cluster.view_board import ViewBoard
from kvtierd.errors import KvtierError

RETRY_SECONDS = 2.0


class Following:
    """Admits the board's views one by one, each later epoch on disk before it counts.

    Args:
        store: The fence. A file that is damaged is a ``problem`` until it can be read.

    Attributes:
        view: The newest view that was admitted.
        problem: Why none can be; "" when there is no reason.
    """

    def __init__(self, board: ViewBoard, store: SeenEpochStore, refusals: Refusals) -> None:
        self.view: ClusterView | None = None
        self.problem = ""
        self._board = board
        self._store = store
        self._refusals = refusals
        self._wake = asyncio.Event()
        board.listeners.append(self._wake.set)

    async def run(self, changed: Callable[[], None]) -> None:
        """Works until it is cancelled; ``changed`` is called when ``view`` or ``problem`` is another."""
        loaded = False
        while True:
            self._wake.clear()
            before = self.view, self.problem
            try:
                if not loaded:
                    await asyncio.to_thread(self._store.load)
                    loaded = True
                await self._admit()
                self.problem = ""
            except KvtierError as error:
                self.problem = str(error)
            if (self.view, self.problem) != before:
                changed()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_SECONDS if self.problem else None):
                    await self._wake.wait()

    async def _admit(self) -> None:
        view = self._board.newest
        if view is None or view == self.view:
            return
        if self.view is None or (view.epoch, view.master) != (self.view.epoch, self.view.master):
            admitted = await asyncio.to_thread(self._store.admit, view.epoch, view.master)
            if not admitted:
                why = (
                    f"{view.master} in epoch {view.epoch}; this node has followed {self._store.master} "
                    f"in epoch {self._store.epoch}"
                )
                self._refusals.note(view.master, "fenced", why)
                return
        self.view = view
