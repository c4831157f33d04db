"""PURE: is the MetaService up, is the pool ready, may a new client join. No I/O, no clock.

Three different things, and the difference matters:

- META_UP: the process lives, calls itself ready, listens where it was told to, and has done so for a while (the
  hold-off of its unit). A MetaService whose metrics port is busy opens its other ports and gives up 0.5 to 3 s later.
- POOL_READY: the memory that the plan promises is there. A healthy MetaService without it stores nothing.
- JOINABLE: every rank that was there before is back in its role. A client that joins earlier is given a
  survivor's rank, and takes the whole pool with it when it leaves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import NamedTuple

from kvtierd.memcache.answers import (
    ACTIVE,
    PROVIDER,
    UNKNOWN_ROLE,
    Capacity,
    ClusterStatus,
    MetaHealth,
    Segment,
)
from kvtierd.quantities import format_size

Address = tuple[str, int]


class Verdict(NamedTuple):
    """A decision, and what stands against it. ``reasons`` is empty exactly when ``ok``."""

    ok: bool
    reasons: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class MetaObservation:
    """One look at a MetaService.

    Attributes:
        instance: Identifies the run of the process, ``None`` when it is not alive.
        health: Its answer to /health, ``None`` when there was none.
        listening: The TCP addresses it listens on.
    """

    instance: str | None
    health: MetaHealth | None
    listening: Collection[Address] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class PoolState:
    """What the MetaService says of its pool."""

    capacity: Capacity
    segments: tuple[Segment, ...]
    cluster: ClusterStatus


@dataclasses.dataclass(frozen=True, slots=True)
class ExpectedPool:
    """The pool that the plan promises: ``providers`` ranks that bring ``capacity_bytes`` of DRAM together."""

    capacity_bytes: int
    providers: int
    alignment_bytes: int


def meta_conditions(observation: MetaObservation, expected: Collection[Address]) -> Verdict:
    """What META_UP needs at one moment, without the hold-off.

    Args:
        observation: The look to judge.
        expected: The addresses that the configuration gives it. Elsewhere means that MemCache ignored a key.
    """
    reasons = []
    if observation.instance is None:
        reasons.append("the process is not alive")
    if observation.health is None:
        reasons.append("/health does not answer")
    elif not observation.health.ok:
        ready = str(observation.health.service_ready).lower()
        reasons.append(f"/health says status {observation.health.status!r}, service_ready {ready}")
    missing = [f"{host}:{port}" for host, port in expected if (host, port) not in observation.listening]
    if missing:
        text = f"it does not listen on {', '.join(missing)}"
        others = sorted(set(observation.listening) - set(expected))
        if others:
            text += f" but on {', '.join(f'{host}:{port}' for host, port in others)}"
        reasons.append(text)
    return _verdict(reasons)


def pool_ready(state: PoolState, expected: ExpectedPool, *, purge_due: bool = False) -> Verdict:
    """Whether the promised memory is there, within one alignment unit a provider.

    Args:
        state: What the MetaService says.
        expected: What the plan promises.
        purge_due: The MetaService died uncleanly and what the pool holds cannot be trusted yet.
    """
    reasons = []
    total = state.capacity.dram.total_bytes
    if expected.capacity_bytes > 0 and total == 0:
        reasons.append(f"the pool has no DRAM; {format_size(expected.capacity_bytes)} are planned")
    elif total < expected.capacity_bytes - expected.alignment_bytes * expected.providers:
        reasons.append(
            f"the pool has {format_size(total)} of DRAM; {format_size(expected.capacity_bytes)} are planned"
        )
    if purge_due:
        reasons.append("the pool must be purged first: its MetaService died uncleanly")
    return _verdict(reasons)


def joinable(state: PoolState, expected: Mapping[int, str]) -> Verdict:
    """Whether a new client may join.

    Args:
        state: What the MetaService says.
        expected: Rank -> role of every member that must be back (``ClusterStatus.roles`` from before a restart, of
            members that still live). Empty when the pool starts from nothing.

    A rank that is not expected must at least have a role: joiners also hang on a stranger's ``unknown``.
    """
    reasons = []
    with_segments = {segment.rank for segment in state.segments if segment.total_bytes > 0}
    for number, role in sorted(expected.items()):
        rank = state.cluster.rank(number)
        if rank is None:
            reasons.append(f"rank {number} ({role}) is missing")
            continue
        if rank.role == UNKNOWN_ROLE:
            reasons.append(f"the role of rank {number} is unknown; it is a {role}")
        elif rank.role != role:
            reasons.append(f"rank {number} is a {rank.role}; it should be a {role}")
        if rank.state != ACTIVE:
            reasons.append(f"rank {number} is in state {rank.state}")
        if number not in state.cluster.alive:
            reasons.append(f"rank {number} has no connection")
        if role == PROVIDER and number not in with_segments:
            reasons.append(f"the segment of rank {number} is missing")
    reasons += [
        f"the role of rank {number} is unknown"
        for number in unknown_roles(state.cluster)
        if number not in expected
    ]
    return _verdict(reasons)


def unknown_roles(cluster: ClusterStatus) -> tuple[int, ...]:
    """The ranks whose role report was lost. The cure is to cut their connections to the MetaService once."""
    return tuple(rank.rank for rank in cluster.ranks if rank.role == UNKNOWN_ROLE)


def _verdict(reasons: list[str]) -> Verdict:
    return Verdict(not reasons, tuple(reasons))
