"""PURE: an election in words, for operators."""

from __future__ import annotations

import dataclasses
from typing import Literal

from kvtierd.cluster.election_messages import Refusal

Role = Literal["follower", "probing", "requesting", "master"]


@dataclasses.dataclass(frozen=True, slots=True)
class ElectorView:
    """What an operator wants to know.

    Attributes:
        epoch: Of the lease that is held, otherwise the highest this voter has granted.
        master: Whom this voter knows as the master; "" when nobody.
        remaining_seconds: For how long its promise to that one runs, or the own lease.
        why: Why this node is not the master and does not try to be; "" when there is no reason.
        refusals: By voter: why it last refused this node, in words. Gone for a voter that has granted since.
    """

    role: Role
    epoch: int
    master: str
    remaining_seconds: float
    why: str
    refusals: dict[str, str]


def in_words(refusal: Refusal) -> str:
    """A refusal as an operator reads it."""
    seconds = f"for {refusal.remaining_seconds:.1f} s"
    return {
        "promised": f"it has promised its vote to {refusal.holder} {seconds}",
        "reserved": f"a switchover to {refusal.holder} is under way, {seconds}",
        "silent-after-boot": f"it has just started and does not vote {seconds}",
        "stale-epoch": f"it has taken part in term {refusal.epoch} already",
        "no-memory": "its epoch file is missing and it has not learned the epoch from the others yet",
        "digest-differs": "its list of voters, clock drift or kill margin is not the same as here",
        "cluster-differs": "it belongs to a cluster of another name",
        "not-a-voter": "this node is not one of its voters",
        "lease": "the length of the lease is out of range",
    }[refusal.reason]
