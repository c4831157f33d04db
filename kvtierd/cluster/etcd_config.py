"""PURE: the numbers of mode etcd, and how they follow from each other. Seconds are of ``CLOCK_BOOTTIME``.

The promise that makes it safe: etcd deletes the master's key no earlier than one TTL after it has *received* the request
that began or renewed the lease, by the clock of etcd's leader, and longer when its leadership changes. The master gives
up one term after it has *sent* that request, by its own clock. So the key outlives the master when a term by a slow clock
is no longer than a TTL by a fast one: ``term * (1 + drift) <= ttl * (1 - drift)``. TTLs are whole seconds, so the term is
what gives way: with a lease of 6 s the TTL is 7 s and the term 5.7 s.
"""

from __future__ import annotations

import dataclasses
import math

from kvtierd.errors import ClusterError

SHORTEST_TTL_SECONDS = 2  # what etcd makes of less, with its default election timeout


@dataclasses.dataclass(frozen=True, slots=True)
class EtcdConfig:
    """What all nodes must agree on, and who this one is.

    Attributes:
        cluster: Name of the cluster.
        node: This node, one of ``nodes``.
        nodes: All that may become the master.
        endpoints: ``host:port`` of etcd's members.
        prefix: Its keys are under ``<prefix>/<cluster>/``.
        lease_seconds: For how long at most a master may be out of touch.
        drift: How far a clock's rate may be off, as a part of 1 (the same as between voters, mode lease).
        kill_margin_seconds: By then after the end of its term the guard has killed the MetaService.

    Raises:
        ClusterError: ``cluster.no-such-node``: ``node`` is not one of ``nodes``.
    """

    cluster: str
    node: str
    nodes: tuple[str, ...]
    endpoints: tuple[str, ...]
    prefix: str = "/kvtierd"
    lease_seconds: float = 6.0
    drift: float = 0.1
    kill_margin_seconds: float = 1.0

    def __post_init__(self) -> None:
        """Refuses what can never work."""
        if self.node not in self.nodes:
            raise ClusterError(
                f"this node ({self.node}) is not among the peers: {', '.join(self.nodes)}",
                hint="add it to [cluster] peers, or write [node] name",
                code="cluster.no-such-node",
            )

    @property
    def stretch(self) -> float:
        """How much longer a time may be by one clock than by another."""
        return (1.0 + self.drift) / (1.0 - self.drift)

    @property
    def ttl_seconds(self) -> int:
        """What etcd is asked for."""
        return max(SHORTEST_TTL_SECONDS, math.floor(self.lease_seconds * self.stretch))

    def term_seconds(self, ttl_seconds: int) -> float:
        """How long a master may go on after it sent the request that etcd granted this TTL for."""
        return min(self.lease_seconds, ttl_seconds / self.stretch)

    @property
    def kill_wait_seconds(self) -> float:
        """A new master waits so long after its predecessor's key has gone: the guard kills by a clock of its own."""
        return self.kill_margin_seconds * self.stretch

    @property
    def blind_wait_seconds(self) -> float:
        """It waits so long when etcd does not know whether there was a predecessor."""
        return self.lease_seconds * self.stretch + self.kill_wait_seconds

    # -- times that only decide how soon, never whether it is safe

    @property
    def renew_seconds(self) -> float:
        """A master renews so long after it sent what was granted last; the others look as often."""
        return self.term_seconds(self.ttl_seconds) / 3

    @property
    def attempt_seconds(self) -> float:
        """One request to one member may take so long."""
        return max(0.3, self.lease_seconds / 6)

    @property
    def head_start_seconds(self) -> int:
        """After a switchover only its target may become the master for so long."""
        return max(SHORTEST_TTL_SECONDS, math.ceil(self.lease_seconds / 2))

    @property
    def longest_pause_seconds(self) -> float:
        """Between two rounds of all members when none answers."""
        return min(2.0, self.renew_seconds)
