"""PURE: whether this node's clients came to the present MetaService by themselves, and who is started anew when not.

For clusters without endpoints. Clients follow another master in 7 to 11 s, or not at all: a link that does not break, a
file that was not read, a lost role report. So each is looked at, and after a deadline those that are not back are rolled:
pool holders first, then engines, one at a time, and only when newcomers may join. Each once for one MetaService.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from kvtierd.cluster.standing import PoolRank
from kvtierd.memcache.answers import PROVIDER

DEADLINE_SECONDS = 30.0  # from when the MetaService answers; measured 7.2 to 11 s
LONGEST_ROLL_SECONDS = 1800.0  # of one unit: large models load for many minutes
Kind = Literal["pool", "engine"]


@dataclasses.dataclass(frozen=True, slots=True)
class ClientSeen:
    """One client of the pool on this node.

    Attributes:
        unit: Its unit's id.
        kind: A pool holder or an engine.
        instance: Its present run; ``None``: it does not run, and whoever starts it starts it at the right place.
        ready: The supervisor says so.
        over: It was stopped or has failed for good: nobody waits for it.
        follows: Something leads it; one that follows nothing is started anew without waiting for it.
        linked: It has its links with the master's MetaService; ``None``: that cannot be seen.
        rank: Its rank, where it is known.
        brings_bytes: The memory that it must bring.
    """

    unit: str
    kind: Kind
    instance: str | None
    ready: bool = True
    over: bool = False
    follows: bool = True
    linked: bool | None = None
    rank: int | None = None
    brings_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """One look.

    Attributes:
        now_seconds: A monotonic clock.
        epoch: Of the master that clients were led to.
        up: Its MetaService answers.
        open: Newcomers may join.
        clients: All clients of this node.
        ranks: The pool's members by rank, as that MetaService sees them; ``None``: not known.
    """

    now_seconds: float
    epoch: int
    up: bool
    open: bool
    clients: tuple[ClientSeen, ...]
    ranks: Mapping[int, PoolRank] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Roll:
    """This unit is started anew, drained where it is an engine."""

    unit: str
    kind: Kind
    why: str


def why_not_back(client: ClientSeen, ranks: Mapping[int, PoolRank] | None) -> str:
    """What is wrong with a client that runs; "" when it is back, as far as can be seen."""
    if client.linked is False:
        return "it has no link with the MetaService of the present master"
    if client.rank is None or ranks is None:
        return ""
    found = ranks.get(client.rank)
    if found is None:
        return f"the MetaService knows nothing of its rank {client.rank}"
    if client.kind == "pool" and found.role != PROVIDER:
        return f"its rank {client.rank} has the role {found.role}, not {PROVIDER}"
    if not found.active:
        return f"its rank {client.rank} is not active"
    if found.memory_bytes < client.brings_bytes:
        return f"its rank {client.rank} brings {found.memory_bytes} bytes of {client.brings_bytes}"
    return ""


class Comeback:
    """Feed it looks with ``step``; start anew what it returns, drained.

    Attributes:
        missing: Unit -> why it is not back, as of the last look.
        settled: Nobody is missing, or everything that could be done has been.
    """

    def __init__(self) -> None:
        self.missing: dict[str, str] = {}
        self.settled = False
        self._epoch = 0
        self._up_since_seconds: float | None = None
        self._before: dict[str, str] = {}  # unit -> the run that was there when this MetaService came up
        self._rolled: dict[str, str | None] = {}  # unit -> the run that was told to end
        self._rolled_at_seconds = 0.0  # the last of them

    @property
    def waited_for(self) -> int:
        """Clients that are not back and are expected to come by themselves."""
        return sum(unit not in self._rolled for unit in self.missing)

    def step(self, look: Look) -> tuple[Roll, ...]:
        """Takes a look into account; at most one unit to roll."""
        if look.epoch != self._epoch or not look.up:
            self._epoch = look.epoch
            self._up_since_seconds = None
            self._rolled = {}
        if look.up and self._up_since_seconds is None:
            self._up_since_seconds = look.now_seconds
            self._before = {c.unit: c.instance for c in look.clients if c.instance is not None}
        self.missing = {
            c.unit: text
            for c in look.clients
            # One that was started since then was started at the right place, and its probes say how it does.
            if c.instance is not None
            and c.instance == self._before.get(c.unit, c.instance)
            and (text := self._wrong(c, look))
        }
        self.settled = look.up and all(unit in self._rolled for unit in self.missing)
        if self._up_since_seconds is None or not look.open or self._one_is_down(look):
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
