"""PURE: whether this node's clients came back to the present MetaService, and who is started anew when not.

Clients come back by themselves in some seconds, or not at all: a link that does not break, a file that was not read, a lost
role report, memory that the others have let go of. So after each change each client is looked at until it was back once,
and after a deadline those that were not are rolled: pool holders first, then engines, one at a time, and only when
newcomers may join. Each once for one MetaService, and when that did not help the first engine, no other one is.

A client that is lost later, with no change of MetaService, is not this module's concern.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from kvtierd.cluster.standing import PoolRank

DEADLINE_SECONDS = (
    30.0  # from when the MetaService answers; measured 2 s through an endpoint, 7.2 to 11 s without
)
LONGEST_ROLL_SECONDS = 1800.0  # of one unit: large models load for many minutes
Kind = Literal["pool", "engine"]


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """A rank of the pool that a client must have again: ``role`` "" for any, with ``brings_bytes`` of memory."""

    rank: int
    role: str = ""
    brings_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class ClientSeen:
    """One client of the pool on this node: a unit, with one process that has a rank or several.

    Attributes:
        unit: Its unit's id.
        kind: A pool holder or an engine.
        instance: Its present run; ``None``: it does not run, and whoever starts it starts it at the right place.
        ready: The supervisor says so.
        over: It was stopped or has failed for good: nobody waits for it.
        follows: Something leads it; one that follows nothing is started anew without waiting for it.
        linked: It has its links with the master's MetaService; ``None``: that cannot be seen.
        lost: Why it cannot come back; "" when it may.
        members: Its ranks, as far as they are known.
    """

    unit: str
    kind: Kind
    instance: str | None
    ready: bool = True
    over: bool = False
    follows: bool = True
    linked: bool | None = None
    lost: str = ""
    members: tuple[Member, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """One look.

    Attributes:
        now_seconds: A monotonic clock.
        epoch: Of the master that clients have to be with.
        up: Its MetaService answers.
        open: Newcomers may join.
        clients: All clients of this node.
        ranks: The pool's members by rank, as that MetaService sees them; ``None``: not known.
        life: Which MetaService process of that master it is; "" where that is not known.
    """

    now_seconds: float
    epoch: int
    up: bool
    open: bool
    clients: tuple[ClientSeen, ...]
    ranks: Mapping[int, PoolRank] | None = None
    life: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Roll:
    """This unit is started anew, drained where it is an engine."""

    unit: str
    kind: Kind
    why: str


def why_not_back(client: ClientSeen, ranks: Mapping[int, PoolRank] | None) -> str:
    """What is wrong with a client that runs; "" when it is back, as far as can be seen."""
    if client.lost:
        return client.lost
    if client.linked is False:
        return "it has no link with the MetaService of the present master"
    if ranks is None:
        return ""
    return next((text for member in client.members if (text := _wrong_member(member, ranks))), "")


def _wrong_member(member: Member, ranks: Mapping[int, PoolRank]) -> str:
    found = ranks.get(member.rank)
    if found is None:
        return f"the MetaService knows nothing of its rank {member.rank}"
    if member.role and found.role != member.role:
        return f"its rank {member.rank} has the role {found.role}, not {member.role}"
    if not found.active:
        return f"its rank {member.rank} is not active"
    if found.memory_bytes < member.brings_bytes:
        return f"its rank {member.rank} brings {found.memory_bytes} bytes of {member.brings_bytes}"
    return ""


class Comeback:
    """Feed it looks with ``step``; start anew what it returns, drained.

    Args:
        settled_epoch: The epoch under which an earlier daemon found all clients back: who is not there now has left since.

    Attributes:
        missing: Unit -> why it is not back, as of the last look.
        settled: Nobody is missing, or everything that could be done has been.
        no_help: Why no further engine is rolled: the first one that was is not back either; "" otherwise.
    """

    def __init__(self, settled_epoch: int = 0) -> None:
        self.missing: dict[str, str] = {}
        self.settled = False
        self.no_help = ""
        self._settled_epoch = settled_epoch
        self._fresh = True  # nothing was seen yet
        self._key: tuple[int, str] = (0, "")
        self._up_since_seconds: float | None = None
        self._before: dict[str, str] = {}  # unit -> the run that has to come back to this MetaService
        self._away: set[tuple[str, str]] = set()  # units and runs that had no link before the change
        self._rolled: dict[str, str | None] = {}  # unit -> the run that was told to end
        self._rolled_at_seconds = 0.0  # the last of them

    @property
    def epoch(self) -> int:
        """Of the last look."""
        return self._key[0]

    @property
    def waited_for(self) -> int:
        """Clients that are not back and are expected to come by themselves."""
        return sum(unit not in self._rolled for unit in self.missing)

    def step(self, look: Look) -> tuple[Roll, ...]:
        """Takes a look into account; at most one unit to roll."""
        # A life that is not known says nothing; the first that is known belongs to the era that has begun.
        another = look.epoch != self._key[0] or (look.life and self._key[1] and look.life != self._key[1])
        if another or not look.up:
            self._up_since_seconds = None
            self._rolled, self.no_help = {}, ""
        self._key = (look.epoch, look.life or ("" if another else self._key[1]))
        if look.up and self._up_since_seconds is None:
            self._begin(look)
        running = {c.unit: c for c in look.clients if c.instance is not None}
        self.missing = {
            unit: text
            for unit, c in running.items()
            if self._is_expected(c) and (text := self._wrong(c, look))
        }
        self.settled = look.up and all(unit in self._rolled for unit in self.missing)
        if not look.up:
            return ()
        for unit in [u for u in self._before if u not in self.missing and u in running]:
            del self._before[unit]  # back, or started anew at the right place
        if self.settled:
            self._away = {(c.unit, c.instance or "") for c in running.values() if c.linked is False}
        return self._roll(look)

    def _begin(self, look: Look) -> None:
        self._up_since_seconds = look.now_seconds
        # A new daemon in an epoch in which all were back: a client that is away has left by itself since.
        known = self._fresh and look.epoch == self._settled_epoch
        self._fresh = False
        self._before = {} if known else {
            c.unit: c.instance
            for c in look.clients
            if c.instance is not None and (c.unit, c.instance) not in self._away
        }  # fmt: skip

    def _is_expected(self, client: ClientSeen) -> bool:
        if self._up_since_seconds is None:
            return (client.unit, client.instance) not in self._away
        return self._before.get(client.unit) == client.instance

    def _roll(self, look: Look) -> tuple[Roll, ...]:
        assert self._up_since_seconds is not None
        if not look.open or self._one_is_down(look) or self._did_not_help(look):
            return ()
        late = look.now_seconds - self._up_since_seconds >= DEADLINE_SECONDS
        for client in sorted(look.clients, key=lambda c: c.kind == "engine"):
            if (
                client.unit in self.missing
                and client.unit not in self._rolled
                and (late or not client.follows)
            ):
                self._rolled[client.unit] = client.instance
                self._rolled_at_seconds = look.now_seconds
                return (Roll(client.unit, client.kind, self.missing[client.unit]),)
        return ()

    def _wrong(self, client: ClientSeen, look: Look) -> str:
        if not look.up:
            return "the MetaService of the present master does not answer yet"
        text = why_not_back(client, look.ranks)
        return text if client.follows or not text else f"nothing leads it to another master: {text}"

    def _one_is_down(self, look: Look) -> bool:
        """One that was rolled is not ready again yet. One that takes too long keeps the others waiting no more."""
        if look.now_seconds - self._rolled_at_seconds >= LONGEST_ROLL_SECONDS:
            return False
        now = {c.unit: c for c in look.clients}
        return any(
            (c := now.get(unit)) is not None and not c.over and (c.instance in {None, run} or not c.ready)
            for unit, run in self._rolled.items()
        )

    def _did_not_help(self, look: Look) -> bool:
        """An engine that was started anew and is ready has no link either: the fault is elsewhere."""
        for client in look.clients:
            run = self._rolled.get(client.unit)
            if (
                run is not None
                and client.kind == "engine"
                and client.instance not in {None, run}
                and client.ready
                and client.linked is False
            ):
                self.no_help = f"{client.unit} was started anew and is not back either"
                self.settled = True
                return True
        return False
