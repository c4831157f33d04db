"""Client processes as the endpoint knows them: identity, counters, bounded table. Pure.

MemCache numbers requests per process and not per connection, a process has one client at most, and only a
process that already has a rank may come back before the others: so the process is what is remembered.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

MAX_CARRIED_ANSWERS = 1024
MAX_TABLE_ENTRIES = 256
MAX_MISSING = 1024
MAX_JUMP = 4096  # a bigger step in the numbers is not a gap but a new count
GUESS_AHEAD = 8

ClientKind = Literal["P", "F", "S", "?"]


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """A client process: pid and start time (clock ticks since boot), or only an address.

    A client whose process cannot be found (another network or pid namespace) has ``pid`` 0 and its host address.
    """

    pid: int = 0
    start_ticks: int = 0
    address: str = ""

    @property
    def is_process(self) -> bool:
        """Whether the process behind the connection was found."""
        return self.pid > 0


@dataclasses.dataclass(slots=True)
class Counters:
    """What passed, counted in keys where a call is about keys. Hits are answers that found the key.

    A ``get`` of the client library is a lookup (for the size) and a read; ``get_into`` and its batch forms, which
    the engines use behind a lookup, are reads alone. So the hit rate that means something to an engine is
    ``lookup_hits / lookups``.
    """

    lookups: int = 0
    lookup_hits: int = 0
    reads: int = 0
    read_hits: int = 0
    writes: int = 0  # keys that were given room
    requests: int = 0
    synthetic_answers: int = 0
    bytes_from_client: int = 0
    bytes_to_client: int = 0

    def add(self, other: Counters) -> None:
        """Adds ``other`` to this."""
        for field in dataclasses.fields(Counters):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def as_dict(self) -> dict[str, int]:
        """The counters by name."""
        return dataclasses.asdict(self)


class Numbers:
    """The sequence numbers of one process: which were given out and never arrived.

    A thread that takes a number just as its connection closes may never get the request out, and then waits 60 s
    for an answer. The process counts up by one for all its threads and links, so such a request is a gap.
    """

    __slots__ = ("_highest", "_missing")

    def __init__(self) -> None:
        self._highest = 0
        self._missing: dict[int, float] = {}  # number -> when the gap was noticed

    def note(self, number: int, now: float) -> None:
        """A request with this number arrived."""
        step = number - self._highest
        if step == 1:
            self._highest = number
        elif step > 1:
            if self._highest and step <= MAX_JUMP and len(self._missing) + step <= MAX_MISSING:
                for missing in range(self._highest + 1, number):
                    self._missing[missing] = now
            self._highest = number
        else:
            self._missing.pop(number, None)

    @property
    def gaps(self) -> bool:
        """Whether some number is missing now."""
        return bool(self._missing)

    def take_missing(self, older_than: float) -> list[int]:
        """Numbers whose gap was noticed before that time, once."""
        if not self._missing:
            return []
        taken = [number for number, since in self._missing.items() if since <= older_than]
        for number in taken:
            del self._missing[number]
        return taken

    def next_ones(self) -> range:
        """Numbers that may have been given out behind the highest one that arrived."""
        return range(self._highest + 1, self._highest + 1 + GUESS_AHEAD) if self._highest else range(0)


@dataclasses.dataclass(slots=True, eq=False)
class ClientProcess:
    """One client process.

    ``joined``: the MetaService once shook hands with it on the meta port, so it has (or, for S clients, needs
    no) rank: such a process is a survivor when the MetaService comes back. ``deliver`` is set while one of its
    links can take answers; answers to requests that crossed a close wait in ``carried`` until then.

    ``rank``: its rank in the pool, as it says when it connects; ``None`` for S clients and before that. ``provider``: it
    brings memory into the pool. ``eras`` says, for each port, in which era (see ``hop``) of a master's
    endpoint it was connected last. ``stranded``: a provider whose link broke while those of others did not. The others
    have let go of its memory and never take the same process back: it has to be restarted.
    """

    identity: Identity
    name: str = ""
    joined: bool = False
    connected_unix_seconds: float = 0.0
    disconnected_at: float | None = None  # monotonic
    links: int = 0
    waiting: int = 0
    has_rank: bool | None = None
    rank: int | None = None
    provider: bool = False
    stranded: bool = False
    eras: dict[int, int] = dataclasses.field(default_factory=dict)  # port -> era
    seen_data_request: bool = False
    counters: Counters = dataclasses.field(default_factory=Counters)
    carried: collections.deque[bytes] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=MAX_CARRIED_ANSWERS)
    )
    carried_since: float | None = None
    numbers: Numbers = dataclasses.field(default_factory=Numbers)
    deliver: Callable[[bytes], None] | None = None
    _deliverer: object = None

    def attach(self, link: object, deliver: Callable[[bytes], None]) -> None:
        """``link`` is the newest one that can take answers."""
        self._deliverer, self.deliver = link, deliver

    def detach(self, link: object) -> None:
        """``link`` can take no more; without effect if a newer one took its place."""
        if self._deliverer is link:
            self._deliverer = self.deliver = None

    @property
    def kind(self) -> ClientKind:
        """A guess: S has no rank; F has one and asks for data; P only contributes memory."""
        if self.has_rank is None:
            return "?"
        if not self.has_rank:
            return "S"
        return "F" if self.seen_data_request else "P"

    def carry(self, answer: bytes, now: float) -> None:
        """Answers a request that arrived behind our FIN: on the process's live link, or on its next one."""
        self.counters.synthetic_answers += 1
        if self.deliver is not None:
            self.deliver(answer)
            return
        self.carried.append(answer)
        if self.carried_since is None:
            self.carried_since = now

    def take_carried(self) -> bytes:
        """All waiting answers, once."""
        answers = b"".join(self.carried)
        self.carried.clear()
        self.carried_since = None
        return answers

    def as_dict(self) -> dict[str, Any]:
        """One row of ``status``."""
        return {
            "pid": self.identity.pid,
            "address": self.identity.address,
            "name": self.name,
            "kind": self.kind,
            "joined": self.joined,
            "connected": self.links > 0,
            "links": self.links,
            "waiting": self.waiting,
            "rank": self.rank,
            "provider": self.provider,
            "stranded": self.stranded,
            "connected_since_unix_seconds": self.connected_unix_seconds,
            **self.counters.as_dict(),
        }


class ClientTable:
    """All known client processes, at most ``limit`` of them, and totals that never go down.

    A full table drops the entry that has been disconnected longest; its counts stay in the totals. Connected
    entries are never dropped: the connection limit bounds those.
    """

    def __init__(self, limit: int = MAX_TABLE_ENTRIES) -> None:
        self._limit = limit
        self._clients: dict[Identity, ClientProcess] = {}
        self._dropped = Counters()

    def __iter__(self) -> Iterator[ClientProcess]:
        return iter(self._clients.values())

    def __len__(self) -> int:
        return len(self._clients)

    def get(self, identity: Identity) -> ClientProcess | None:
        """The entry, if known."""
        return self._clients.get(identity)

    def obtain(self, identity: Identity, name: str, unix_seconds: float) -> ClientProcess:
        """The entry for this identity, made if need be."""
        client = self._clients.get(identity)
        if client is None:
            self._make_room()
            client = ClientProcess(identity, name=name, connected_unix_seconds=unix_seconds)
            self._clients[identity] = client
        return client

    def forget_ended(self, is_alive: Callable[[Identity], bool]) -> int:
        """Un-joins processes that no longer run, so that nobody waits for them. Returns how many."""
        ended = [c for c in self._clients.values() if c.joined and not c.links and not is_alive(c.identity)]
        for client in ended:
            client.joined = False
        return len(ended)

    def survivors(self) -> list[ClientProcess]:
        """Every process that has joined and is not known to have ended."""
        return [client for client in self._clients.values() if client.joined]

    def totals(self) -> Counters:
        """The sum over all clients, dropped ones included."""
        totals = dataclasses.replace(self._dropped)
        for client in self._clients.values():
            totals.add(client.counters)
        return totals

    def _make_room(self) -> None:
        while len(self._clients) >= self._limit:
            idle = [c for c in self._clients.values() if not c.links and not c.waiting]
            if not idle:
                return
            oldest = min(idle, key=lambda c: (c.joined, c.disconnected_at or 0.0))
            self._dropped.add(oldest.counters)
            del self._clients[oldest.identity]
