"""Election messages on their way to voters: each in a task of its own, a bounded number to each voter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvtierd.cluster.election_messages import AnyMessage
from kvtierd.cluster.network import PeerNetwork
from kvtierd.errors import ClusterError

MOST_SENDS = (
    8  # to one voter that have not been answered; one too many gets lost, as the network might lose it
)
REACH_SECONDS = 2.0


class Outbox:
    """Sends, and hands back what the voters answer.

    Args:
        answered: Takes each answer; may raise ``ClusterError`` when it is not wanted any more.
    """

    def __init__(
        self, network: PeerNetwork, timeout_seconds: float, answered: Callable[[AnyMessage], None]
    ) -> None:
        self._network = network
        self._timeout_seconds = timeout_seconds
        self._answered = answered
        self._sends: dict[asyncio.Task[None], str] = {}

    def send(self, to: str, message: AnyMessage) -> None:
        """Sends it; whether it arrives is not known."""
        if sum(receiver == to for receiver in self._sends.values()) >= MOST_SENDS:
            return
        task = asyncio.create_task(self._exchange(to, message))
        self._sends[task] = to
        task.add_done_callback(lambda done: self._sends.pop(done, None))

    async def settle(self, seconds: float) -> None:
        """Waits until what is on its way has been answered, or the time is up."""
        if self._sends:
            await asyncio.wait(list(self._sends), timeout=seconds)

    def cancel(self) -> None:
        """Drops what is on its way."""
        for task in self._sends:
            task.cancel()

    async def _exchange(self, to: str, message: AnyMessage) -> None:
        try:
            for answer in await self._network.elect(to, message, self._timeout_seconds):
                self._answered(answer)
        except ClusterError:
            return  # the link says why; the elector asks again


async def check_successor(
    network: PeerNetwork, others: tuple[str, ...], to: str, promise_seconds: float
) -> None:
    """Whether a voter can take mastership over now; better known before anything is given up.

    Args:
        network: This node's.
        others: The other voters.
        to: The one that is to become the master.
        promise_seconds: For so long a voter that has just started stays silent.

    Raises:
        ClusterError: ``cluster.no-such-node``, ``cluster.unreachable``.
    """
    witnesses = {peer.name for peer in network.settings.peers if peer.witness}
    candidates = [name for name in others if name not in witnesses]
    if to not in candidates:
        raise ClusterError(
            f"{to} cannot become the master",
            why="it is a witness, which only votes" if to in witnesses else "it is not another voter",
            hint=f"choose one of {', '.join(candidates)}",
            code="cluster.no-such-node",
        )
    if not await network.reach(to, REACH_SECONDS):
        raise ClusterError(
            f"{to} cannot be reached, so it cannot become the master",
            why=network.contact(to).problem,
            hint="choose another node; nothing was given up",
            code="cluster.unreachable",
        )
    up_seconds = network.uptime_seconds(to)
    if up_seconds < promise_seconds:
        raise ClusterError(
            f"{to} cannot become the master yet",
            why=f"it was started {up_seconds:.0f} s ago; a voter waits for {promise_seconds:.0f} s first",
            hint="try again in a moment; nothing was given up",
            code="cluster.unreachable",
        )
