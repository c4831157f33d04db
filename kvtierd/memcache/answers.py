"""PURE: what the MetaService answers over HTTP, as values.

The shapes are those of memcache_hybrid 1.3.0, recorded in tests/fixtures/memcache. Unknown fields are ignored,
so that a newer version may say more; a missing or ill-typed field is an error.
"""

from __future__ import annotations

import re
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvtierd.errors import MemcacheError

Count = Annotated[int, Field(ge=0)]

PROVIDER = "provider"
"""The role of a rank that brings memory: a pool holder, or an engine with dram.size set."""
PROXY = "proxy"
"""The role of a rank that brings none: an engine with dram.size 0."""
UNKNOWN_ROLE = "unknown"
"""A rank that is back but whose role report was lost. New clients hang until its connection is cut."""
ACTIVE = "RANK_ACTIVE"

_NO_WORLD_SIZE = 2**32 - 1
_SEGMENT_NAME = re.compile(r"rank-(\d+)-(\w+)")
_MOST_SHOWN_CHARS = 200


class Answer(BaseModel):
    """Base of all answers: immutable, unknown fields ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)


class MetaHealth(Answer):
    """/health. It says nothing of capacity: a healthy MetaService can be an empty one."""

    status: str
    service_ready: bool
    role: str = ""
    ha_state: str = ""
    leader_address: str = ""
    view_version: int = 0

    @property
    def ok(self) -> bool:
        """Whether the MetaService calls itself ready."""
        return self.status == "ok" and self.service_ready


class MediumUsage(Answer):
    """One medium of the pool, in bytes, over all ranks."""

    total_bytes: Count
    used_bytes: Count
    free_bytes: Count


class Capacity(Answer):
    """/api/v1/capacity/usage. ``dram`` and ``hbm`` are MemCache's ``cpu`` and ``npu``."""

    dram: MediumUsage = Field(alias="cpu")
    hbm: MediumUsage = Field(alias="npu")
    data_source_ready: bool = True
    degraded: bool = False


class Segment(Answer):
    """The part of the pool that one rank brings, on one medium."""

    name: str = Field(alias="segment_name")
    medium: str
    total_bytes: Count
    used_bytes: Count
    remaining_bytes: Count
    fragmentation_bytes: Count = 0

    @property
    def rank(self) -> int | None:
        """The rank that brings it, from its name (``rank-0-dram``); ``None`` for a name of another form."""
        match = _SEGMENT_NAME.fullmatch(self.name)
        return int(match[1]) if match else None


class Rank(Answer):
    """One member of the pool as the config store sees it. Clients without memory access have no rank."""

    rank: Count
    role: str
    state: str


class ClusterStatus(Answer):
    """/api/v1/mf/cluster_status: who is in the pool, in which role.

    ``alive`` are the ranks with a live connection. ``world_size`` is ``None`` until the first rank has joined.
    """

    ranks: tuple[Rank, ...] = ()
    alive: frozenset[int] = frozenset()
    heartbeat_age_seconds: dict[int, float] = Field(default_factory=dict)
    world_size: int | None = None
    listen: tuple[str, ...] = ()
    state: str = ""

    def rank(self, number: int) -> Rank | None:
        """The member with this rank, if it is there."""
        return next((r for r in self.ranks if r.rank == number), None)

    def roles(self) -> dict[int, str]:
        """Rank -> role: what to expect again after a restart of the MetaService."""
        return {r.rank: r.role for r in self.ranks}


class _Failure(Answer):
    success: bool
    error_message: str = ""


class _SegmentList(Answer):
    segments: tuple[Segment, ...]


class _Group(Answer):
    ranks: tuple[Rank, ...] = ()


class _Heartbeat(Answer):
    rank: Count
    since_last_ms: float = Field(alias="sinceLastMs")


class _StoreServer(Answer):
    alive_ranks: tuple[int, ...] = Field(default=(), alias="aliveRanks")
    group: _Group = Field(default=_Group(), alias="groupManager")
    heartbeats: tuple[_Heartbeat, ...] = Field(default=(), alias="lastHeartbeat")
    listen: str = ""
    state: str = ""
    world_size: int = Field(default=_NO_WORLD_SIZE, alias="worldSize")


class _Store(Answer):
    server: _StoreServer | None = None


class _ClusterAnswer(Answer):
    stores: tuple[_Store, ...] = Field(alias="mf_cluster")


AnswerT = TypeVar("AnswerT", bound=Answer)


def parse_health(body: bytes) -> MetaHealth:
    """Reads /health. Raises ``MemcacheError`` on anything else."""
    return _parse(MetaHealth, body, "/health")


def parse_capacity(body: bytes) -> Capacity:
    """Reads /api/v1/capacity/usage. Raises ``MemcacheError`` on anything else."""
    return _parse(Capacity, body, "/api/v1/capacity/usage")


def parse_segments(body: bytes) -> tuple[Segment, ...]:
    """Reads /api/v1/capacity/segment_remaining, by name. Raises ``MemcacheError`` on anything else."""
    found = _parse(_SegmentList, body, "/api/v1/capacity/segment_remaining").segments
    return tuple(sorted(found, key=lambda segment: segment.name))


def parse_cluster_status(body: bytes) -> ClusterStatus:
    """Reads /api/v1/mf/cluster_status, by rank. Raises ``MemcacheError`` on anything else."""
    answer = _parse(_ClusterAnswer, body, "/api/v1/mf/cluster_status")
    servers = [store.server for store in answer.stores if store.server is not None]
    world_sizes = [s.world_size for s in servers if s.world_size != _NO_WORLD_SIZE]
    return ClusterStatus(
        ranks=tuple(sorted((r for s in servers for r in s.group.ranks), key=lambda r: r.rank)),
        alive=frozenset(rank for s in servers for rank in s.alive_ranks),
        heartbeat_age_seconds={h.rank: h.since_last_ms / 1000 for s in servers for h in s.heartbeats},
        world_size=max(world_sizes, default=None),
        listen=tuple(s.listen for s in servers if s.listen),
        state=" ".join(s.state for s in servers if s.state),
    )


def parse_keys(body: bytes) -> tuple[str, ...]:
    """Reads /get_all_keys: one key a line, in no order."""
    return tuple(line for line in body.decode(errors="replace").splitlines() if line)


def _parse(kind: type[AnswerT], body: bytes, path: str) -> AnswerT:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _not_an_answer(body, path, error) from error


def _not_an_answer(body: bytes, path: str, error: ValidationError) -> MemcacheError:
    try:
        failure = _Failure.model_validate_json(body)
    except ValidationError:
        failure = None
    if failure is not None and not failure.success:
        return MemcacheError(
            f"the MetaService refused {path}: {failure.error_message or 'no reason given'}",
            code="memcache.refused",
        )
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "the body"
    return MemcacheError(
        f"the MetaService's answer to {path} cannot be read: {where}: {first['msg']}",
        why=f"it begins with {body[:_MOST_SHOWN_CHARS].decode(errors='replace')!r}",
        hint="is something else listening on the metrics port, or is this an unknown MemCache version?",
        code="memcache.answer",
    )
