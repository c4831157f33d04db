"""PURE: what a node knows of its cluster, and what every way of naming a master looks like to the daemon.

There are four ways (``[cluster] mode``): standalone, static, lease, etcd. Each is a ``Coordinator``; the daemon and the
tests know nothing else of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, Protocol

Role = Literal["master", "follower", "unknown"]
FOREVER = float("inf")


@dataclasses.dataclass(frozen=True, slots=True)
class PoolRank:
    """A member of the pool as the master's MetaService sees it: ``active`` in its role, with so much memory of its own."""

    rank: int
    role: str
    active: bool = True
    memory_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class ClusterView:
    """What a master publishes and every peer follows.

    Attributes:
        epoch: The fencing token: whoever has seen a higher one refuses this view.
        master: Name of the node whose MetaService is the cluster's.
        address: Where that node can be reached by the others.
        meta_service_url: What a client without a local endpoint would write, ``tcp://host:port``.
        config_store_url: The same for the config store.
        since_unix_seconds: When this master began.
        why: How it became the master, in words.
        tier_state: What the master says of the tier: "down", "meta_up", "pool_ready", "joinable".
        served_life: The MetaService process that everybody may use: survivors are back, and what had to be purged is. An
            endpoint that sees another life of the MetaService holds its clients back until this says the same number.
            Without endpoints any text says that.
        pool_ranks: Members of the pool, by rank, as its MetaService sees them.
    """

    epoch: int
    master: str
    address: str = ""
    meta_service_url: str = ""
    config_store_url: str = ""
    since_unix_seconds: float = 0.0
    why: str = ""
    tier_state: str = "down"
    served_life: str = ""
    pool_ranks: tuple[PoolRank, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Standing:
    """Where this node stands, as its coordinator sees it. Seconds are of CLOCK_BOOTTIME.

    Attributes:
        role: "unknown": the coordinator cannot tell at present; what runs goes on, nothing new starts.
        epoch: Of the master's term; 0 while none is known.
        master: Its node; "" while none is known.
        why: In words, for status and events.
        until_seconds: A master's lease ends then: its MetaService must be dead. ``FOREVER`` without a lease.
        serve_after_seconds: A master may start its MetaService then, not before.
    """

    role: Role
    epoch: int = 0
    master: str = ""
    why: str = ""
    until_seconds: float = FOREVER
    serve_after_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class PeerContact:
    """One other member of the election as the coordinator sees it, for ``kvtierctl peers``."""

    name: str
    voter: bool
    last_contact_seconds: float | None  # ago; None: never
    problem: str = ""


class Coordinator(Protocol):
    """One way of naming a master. All calls come from one asyncio loop."""

    mode: str

    @property
    def standing(self) -> Standing:
        """Where this node stands now."""
        ...

    async def run(self, changed: Callable[[Standing], None]) -> None:
        """Works until it is cancelled; ``changed`` is called with every new standing, a renewed lease included.

        Losing what it depends on (peers, etcd) is not an error: the standing says so.

        Raises:
            KvtierError: it can never work as configured.
        """
        ...

    def set_fit(self, fit: bool, why: str = "") -> None:
        """Whether this node may become the master; a witness, a node without a MetaService and a paused one may not."""
        ...

    def peers(self) -> tuple[PeerContact, ...]:
        """The others that take part in naming the master."""
        ...

    async def hand_over(self, to: str) -> None:
        """Gives mastership to this node. Called on the master, when its MetaService *has been stopped*.

        Raises:
            ClusterError: ``cluster.not-master``, ``cluster.no-such-node``, ``cluster.unreachable``.
        """
        ...

    async def promote(self) -> None:
        """Makes this node the master by an operator's word. Only for ways that do not elect.

        Raises:
            ClusterError: ``cluster.elects``: this mode elects its master itself.
        """
        ...

    async def close(self) -> None:
        """Lets go of connections; does not give mastership up."""
        ...
