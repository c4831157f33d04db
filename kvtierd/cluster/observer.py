"""A node that takes no part in naming the master: it follows whatever view the others have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvtierd.cluster.following import Following
from kvtierd.cluster.network import PeerNetwork
from kvtierd.cluster.standing import PeerContact, Standing
from kvtierd.errors import ClusterError


class ObserverCoordinator:
    """Mode lease, for nodes that are no voters.

    Args:
        network: This node's; the caller runs it.
        following: What is followed, and the fence.
    """

    mode = "lease"

    def __init__(self, network: PeerNetwork, following: Following) -> None:
        self._network = network
        self._following = following

    @property
    def standing(self) -> Standing:
        """Follows the newest view, however old it is: without a newer one there is nobody else to follow."""
        view, problem = self._following.view, self._following.problem
        if problem:
            return Standing("unknown", why=problem)
        if view is None:
            return Standing("unknown", why="no peer has told this node of a master yet")
        if view.master == self._network.node:
            # It was a voter once, or another node of its name is.
            return Standing(
                "unknown", view.epoch, why="the others take this node for the master, but it has no vote"
            )
        return Standing("follower", view.epoch, view.master, f"{view.master} is the master: {view.why}")

    async def run(self, changed: Callable[[Standing], None]) -> None:
        """Works until it is cancelled."""

        def tell() -> None:
            self._network.standing = self.standing
            changed(self.standing)

        tell()
        await self._following.run(tell)

    def set_fit(self, fit: bool, why: str = "") -> None:
        """It never becomes the master."""

    def peers(self) -> tuple[PeerContact, ...]:
        """The voters."""
        voters = self._network.settings.voters
        return tuple(self._network.contact(name) for name in voters if name != self._network.node)

    async def hand_over(self, to: str) -> None:
        """Raises ``cluster.not-master``."""
        raise ClusterError(
            f"{self._network.node} is not the master, so it has nothing to hand over",
            code="cluster.not-master",
        )

    async def promote(self) -> None:
        """Raises ``cluster.elects``."""
        raise elects()

    async def close(self) -> None:
        """Nothing is held."""
        await asyncio.sleep(0)


def elects() -> ClusterError:
    """Why nobody can be promoted in this mode."""
    return ClusterError(
        "the voters of this cluster elect its master; nobody can be promoted",
        hint="kvtierctl switchover NODE moves mastership; if no master is elected, kvtierctl peers says what is missing",
        code="cluster.elects",
    )
