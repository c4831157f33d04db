"""How a node that is not the master follows the view: from the master if it can, otherwise from any peer that has it.

One stream at a time. When it ends the last view stays and grows old, and the next peer is tried: the master first,
then voters, then anybody, each no sooner than its own back-off allows.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

from kvtierd.cluster.clock import boottime_seconds
from kvtierd.cluster.peer_link import Offer, PeerLink
from kvtierd.cluster.peer_wire import SILENCE_SECONDS
from kvtierd.cluster.view_board import ViewBoard
from kvtierd.errors import ClusterError

STREAM_SECONDS = 600.0  # then it is opened anew; every call has a deadline
FIRST_BACKOFF_SECONDS = 0.2
LONGEST_BACKOFF_SECONDS = 10.0
IGNORANT_SECONDS = 2.0  # as long as no master is known no peer is watched for longer
IDLE_SECONDS = 5.0  # looks again this often when nothing calls for it sooner


class ViewStream:
    """Keeps ``board`` up to date.

    Args:
        links: By name, all peers.
        first: Peers to turn to when the master cannot be reached: voters hear of a new one first.
        hint: The node that is probably the master, before any view says so; "" for none.

    Attributes:
        source: The peer whose stream is open; "" for none.
        opened: How many streams were opened.
    """

    def __init__(
        self,
        node: str,
        links: Mapping[str, PeerLink],
        board: ViewBoard,
        *,
        first: Sequence[str] = (),
        hint: Callable[[], str] = lambda: "",
        now: Callable[[], float] = boottime_seconds,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self._node = node
        self._links = links
        self._board = board
        self._first = [name for name in first if name in links]
        self._hint = hint
        self._now = now
        self._silence_seconds = silence_seconds
        self._failures: dict[str, int] = {}
        self._failed_seconds: dict[str, float] = {}
        self._retry_seconds: dict[str, float] = {}
        self._last_master = ""
        self._wake = asyncio.Event()
        self.source = ""
        self.opened = 0
        board.listeners.append(self._wake.set)

    def look_again(self) -> None:
        """The hint has changed."""
        self._wake.set()

    async def run(self) -> None:
        """Works until it is cancelled."""
        while True:
            target = "" if self._board.mine else self._choose()
            if target:
                await self._watch(target)
            else:
                await self._sleep(self._next_try_seconds())

    # -- whom to watch

    def _master(self) -> str:
        """Whom to watch rather than anybody else, as far as is known."""
        for name in (self._hint(), self._board.newest.master if self._board.newest else ""):
            if name in self._links:
                return name
        return ""

    def _choose(self) -> str:
        master = self._master()
        if master and self._is_due(master):
            return master
        for group in (self._first, list(self._links)):
            due = [name for name in group if name != master and self._is_due(name)]
            if due:
                return random.choice(due)
        return ""

    def _is_due(self, name: str) -> bool:
        """It has not failed lately, or has been heard from since."""
        failed = self._failed_seconds.get(name)
        if failed is None or self._now() >= self._retry_seconds[name]:
            return True
        contact = self._links[name].last_contact_seconds
        return contact is not None and contact > failed

    def _next_try_seconds(self) -> float:
        if self._board.mine or not self._retry_seconds:
            return IDLE_SECONDS
        return min(IDLE_SECONDS, max(0.05, min(self._retry_seconds.values()) - self._now()))

    def _patience_seconds(self, target: str) -> float:
        """How long to wait for word from ``target``: no longer than until the master may be tried again."""
        master = self._master()
        if master in {"", target} or self._is_due(master):
            return self._silence_seconds
        return min(self._silence_seconds, max(0.0, self._retry_seconds[master] - self._now()))

    def _should_move(self, target: str) -> bool:
        """The master is somebody else and may be reachable, or is this node itself."""
        if self._board.mine:
            return True
        master = self._master()
        return master not in {"", target} and self._is_due(master)

    # -- watching

    async def _watch(self, target: str) -> None:
        self.opened += 1
        stream = self._links[target].watch(STREAM_SECONDS * random.uniform(0.8, 1.0))
        reading = self._read(stream)
        opened_seconds = heard_seconds = self._now()
        try:
            while True:
                ignorant = self._board.newest is None
                await self._sleep(
                    min(self._patience_seconds(target), IGNORANT_SECONDS if ignorant else math.inf)
                )
                if reading.done():
                    offer = reading.result()
                    heard_seconds = self._now()
                    self._succeeded(target)
                    self._board.offer(offer.view, offer.revision, offer.age_seconds, target)
                    reading = self._read(stream)
                elif self._now() - heard_seconds >= self._silence_seconds:
                    # Even a view on which nothing changes comes every few seconds.
                    self._failed(target)
                    return
                elif ignorant and self._now() - opened_seconds >= IGNORANT_SECONDS:
                    self._failed(target)  # it knows of no master either; somebody else may
                    return
                if self._should_move(target):
                    return
        except ClusterError:
            # A server ends a stream in good order when it stops, or when this node has opened newer ones.
            self._failed(target)
        finally:
            self.source = ""
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await stream.aclose()

    def _read(self, stream: AsyncGenerator[Offer]) -> asyncio.Task[Offer]:
        async def read() -> Offer:
            try:
                return await anext(stream)
            except StopAsyncIteration:
                raise ClusterError("the stream was ended", code="cluster.unreachable") from None

        reading = asyncio.create_task(read())
        reading.add_done_callback(lambda _: self._wake.set())
        return reading

    async def _sleep(self, seconds: float) -> None:
        """Until the time is up, or something has happened."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        self._wake.clear()
        master = self._master()
        if master != self._last_master:
            self._last_master = master
            self._failed_seconds.pop(master, None)  # whatever it was before, it is worth a try now

    def _succeeded(self, target: str) -> None:
        self.source = target
        self._failures.pop(target, None)
        self._failed_seconds.pop(target, None)

    def _failed(self, target: str) -> None:
        failures = self._failures[target] = min(self._failures.get(target, 0) + 1, 10)
        backoff = min(LONGEST_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2**failures)
        self._failed_seconds[target] = self._now()
        self._retry_seconds[target] = self._now() + backoff * random.uniform(0.5, 1.0)
