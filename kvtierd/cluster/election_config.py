"""PURE: the numbers an election runs with, how they follow from each other, and what is refused.

Three numbers are chosen (lease, clock drift, kill margin); everything else follows. All seconds are of
``CLOCK_BOOTTIME``, which no step of the wall clock moves.
"""

from __future__ import annotations

import dataclasses
import hashlib

from kvtierd.errors import ClusterError

SHORTEST_LEASE_SECONDS = 1.0
LONGEST_LEASE_SECONDS = 60.0
LARGEST_DRIFT = 0.2


@dataclasses.dataclass(frozen=True, slots=True)
class ElectorConfig:
    """What every voter of a cluster must agree on, and who this one is.

    Attributes:
        cluster: Name of the cluster; requests of another one are refused.
        node: This node, one of ``voters``.
        voters: All voters, 3 or 5. The list is fixed: it changes only while every voter is stopped.
        lease_seconds: How long a master may serve after the request that a majority granted.
        drift: How far a clock's rate may be off, as a part of 1. The kernel lets a time service run the clock up to
            10 % fast or slow, and chrony uses 8.3 % of that by default while it takes out an offset.
        kill_margin_seconds: By then after the end of its lease the guard has killed the MetaService.

    Raises:
        ClusterError: ``cluster.voters``, ``cluster.lease`` (also for drift and margin).
    """

    cluster: str
    node: str
    voters: tuple[str, ...]
    lease_seconds: float = 6.0
    drift: float = 0.1
    kill_margin_seconds: float = 1.0
    # The ones below follow from those above; they are kept because they are used with every message.
    others: tuple[str, ...] = dataclasses.field(init=False)
    quorum: int = dataclasses.field(init=False)
    digest: str = dataclasses.field(init=False)
    stretch: float = dataclasses.field(init=False)
    promise_seconds: float = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Works out what follows and refuses what cannot be safe."""
        self.check()
        follows = {
            "others": tuple(voter for voter in self.voters if voter != self.node),
            "quorum": self.majority(),
            "digest": self._digest(),
            "stretch": (1.0 + self.drift) / (1.0 - self.drift),
        }
        follows["promise_seconds"] = self.lease_seconds * follows["stretch"]  # type: ignore[operator]
        for name, value in follows.items():
            object.__setattr__(self, name, value)

    def majority(self) -> int:
        """How many voters any two of which have one in common."""
        return len(self.voters) // 2 + 1

    def check(self) -> None:
        """Refuses voters and times with which an election would not be safe, or not work."""
        self._check_voters()
        if not SHORTEST_LEASE_SECONDS <= self.lease_seconds <= LONGEST_LEASE_SECONDS:
            raise ClusterError(
                f"a lease of {self.lease_seconds:g} s is not possible",
                why="a short one is lost to every hiccup, a long one leaves the tier without a master for long",
                hint=f"choose {SHORTEST_LEASE_SECONDS:g} s to {LONGEST_LEASE_SECONDS:g} s; 6s is the default",
                code="cluster.lease",
            )
        if not 0.0 <= self.drift <= LARGEST_DRIFT:
            raise ClusterError(
                f"a clock drift of {self.drift:g} is not possible",
                hint=f"it is a part of 1, at most {LARGEST_DRIFT:g}; 0.1 covers what chrony does by default",
                code="cluster.lease",
            )
        if not 0.0 < self.kill_margin_seconds <= self.lease_seconds:
            raise ClusterError(
                f"a kill margin of {self.kill_margin_seconds:g} s is not possible",
                hint="it must be above zero and at most one lease; 1s is the default",
                code="cluster.lease",
            )

    def _check_voters(self) -> None:
        count = len(self.voters)
        listed = ", ".join(self.voters) or "none"
        if len(set(self.voters)) != count:
            raise ClusterError(f"a voter is named twice: {listed}", code="cluster.voters")
        if count < 3:
            number = {0: "no voters", 1: "one voter", 2: "two voters"}[count]
            raise ClusterError(
                f"{number} cannot elect a master safely ({listed})",
                why="when two lose sight of each other neither can know whether the other still serves, so either both "
                "would serve or none; and one cannot be replaced by anybody",
                hint='for two hosts write mode = "static" and promote by hand, or add a witness: a third machine '
                "without NPUs that only votes",
                code="cluster.voters",
            )
        if count % 2 == 0:
            raise ClusterError(
                f"{count} voters are an even number ({listed})",
                why=f"a majority of {count} is {count // 2 + 1}, so they survive no more losses than {count - 1} would",
                hint=f"make one of them voter = false, so that {count - 1} vote; the others follow the master all the same",
                code="cluster.voters",
            )
        if count > 5:
            raise ClusterError(
                f"{count} voters are too many ({listed})",
                why="every renewal of the lease goes to all of them, and 5 survive the loss of two",
                hint="keep 3 or 5, in places that do not fail together, and write voter = false for the others",
                code="cluster.voters",
            )
        if self.node not in self.voters:
            raise ClusterError(
                f"{self.node} is not one of the voters ({listed})",
                hint="a node that does not vote follows the master and takes no part in elections",
                code="cluster.voters",
            )

    def _digest(self) -> str:
        """Stands for all that must be the same on every voter; the order of the voters and the lease need not be."""
        agreed = [self.cluster, f"{self.drift:g}", f"{self.kill_margin_seconds:g}", *sorted(self.voters)]
        return hashlib.sha256("\0".join(agreed).encode()).hexdigest()[:16]

    # -- times that only decide how soon, never whether it is safe

    @property
    def renew_seconds(self) -> float:
        """A master renews this long after it sent the request that was granted last."""
        return self.lease_seconds / 3

    @property
    def retry_seconds(self) -> float:
        """A master that got no majority sends again after this."""
        return self.lease_seconds / 6

    @property
    def round_seconds(self) -> float:
        """A candidate waits this long for answers, longer with every attempt that failed; a voter's fsync is in it."""
        return self.lease_seconds / 12

    @property
    def spread_seconds(self) -> float:
        """Candidates start within this time of each other, each at a place of its own."""
        return self.lease_seconds / 12

    @property
    def head_start_seconds(self) -> float:
        """After a switchover only its target may campaign for so long."""
        return self.lease_seconds / 3
