"""Tells the other nodes who the master is, for a coordinator that does not talk with them itself (mode etcd).

The daemon publishes what the master has to say in full; this is for the moments in which that would come too late: the
first word of a new master, and the end of a lease in a process that was stopped.
"""

from __future__ import annotations

import asyncio
import logging
import time

from kvtierd.cluster.network import PeerNetwork
from kvtierd.cluster.standing import ClusterView, Standing

_log = logging.getLogger(__name__)


class Announcer:
    """Hears every standing of one coordinator, and passes it on to the network of peers."""

    def __init__(self, network: PeerNetwork) -> None:
        self._network = network
        self._said_epoch = 0
        self._greetings: set[asyncio.Task[set[str]]] = set()

    def hear(self, standing: Standing) -> None:
        """A standing is in force from now on."""
        network = self._network
        network.standing = standing
        if standing.role != "master":
            network.board.withdraw()
            self._said_epoch = 0
            if standing.master:
                network.set_hint(standing.master)
            return
        # What the board says in this node's name counts no longer than the lease, whoever is late to take it down.
        network.board.mine_until_seconds = standing.until_seconds
        if standing.epoch == self._said_epoch:
            return
        self._said_epoch = standing.epoch
        view = ClusterView(standing.epoch, network.node, since_unix_seconds=time.time(), why=standing.why)
        if not network.board.publish(view):
            _log.error("a later epoch than this node's own is known: %s", network.board.newest)
        telling = asyncio.create_task(network.greet(network.links))
        self._greetings.add(telling)
        telling.add_done_callback(self._greetings.discard)
