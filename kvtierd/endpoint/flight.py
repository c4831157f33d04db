"""What the callers behind one connection wait for: requests sent, held back, or given up. Pure."""

from __future__ import annotations

from collections.abc import Callable

from kvtierd.memcache import framing
from kvtierd.memcache.framing import Frame, Opcode

MAX_IN_FLIGHT = 16384
MAX_HELD_BYTES = 4 * 1024 * 1024

Key = tuple[int, int]  # sequence number and opcode: only both together name a request
_BATCH_UPDATE = int(Opcode.BATCH_UPDATE)
# Callers of these must not wait for a silent server. BATCH_UPDATE ends a call on data.
URGENT_OPCODES = framing.DATA_OPCODES | {_BATCH_UPDATE}


def miss(frame: Frame, keys: int) -> bytes:
    """The answer that makes the client compute instead."""
    return framing.miss_answer(frame.opcode, frame.sequence, keys)


class Flight:
    """The requests of one connection that have no answer yet.

    ``in_flight`` maps a request to its number of keys. ``held`` are whole requests that were not sent on: frame, keys,
    since when. A request that was *given up* has been answered by us; the server's own answer, should it still come,
    is for nobody.
    """

    __slots__ = ("_given_up", "_held_bytes", "held", "in_flight")

    def __init__(self) -> None:
        self.in_flight: dict[Key, int] = {}
        self.held: list[tuple[Frame, int, float]] = []
        self._given_up: set[Key] = set()
        self._held_bytes = 0

    def __bool__(self) -> bool:
        return bool(self.in_flight or self.held)

    @property
    def too_much(self) -> bool:
        """The client asks more than is answered."""
        return len(self.in_flight) > MAX_IN_FLIGHT or self._held_bytes > MAX_HELD_BYTES

    @property
    def awaited(self) -> frozenset[Key]:
        """Every request that the server may still answer."""
        return frozenset(self.in_flight) | self._given_up

    @property
    def abandoned(self) -> bool:
        """Whether answers may still come that are for nobody."""
        return bool(self._given_up)

    @property
    def urgent(self) -> bool:
        """Whether a call on data waits for the server."""
        return any(opcode in URGENT_OPCODES for _, opcode in self.in_flight)

    def hold(self, frame: Frame, keys: int, now: float) -> None:
        """Keeps a request back."""
        self.held.append((frame, keys, now))
        self._held_bytes += len(frame.raw)

    def release(self) -> list[tuple[Frame, int, float]]:
        """Everything that was held, once."""
        held, self.held, self._held_bytes = self.held, [], 0
        return held

    def give_up(self, sequence: int, opcode: int) -> bool:
        """Notes that the server's answer to this is for nobody. False when there are too many of these."""
        if len(self._given_up) >= MAX_IN_FLIGHT:
            return False
        self._given_up.add((sequence, opcode))
        return True

    def is_for_nobody(self, sequence: int, opcode: int) -> bool:
        """Whether this answer belongs to a request that was given up; true once for each."""
        if (sequence, opcode) not in self._given_up:
            return False
        self._given_up.discard((sequence, opcode))
        return True

    def give_up_calls(self, make: Callable[[int, int, int], bytes]) -> list[bytes]:
        """An answer of ours for every call on data that was sent; what belongs to registration waits on."""
        answers: list[bytes] = []
        for (sequence, opcode), keys in list(self.in_flight.items()):
            if opcode in URGENT_OPCODES and self.give_up(sequence, opcode):
                del self.in_flight[sequence, opcode]
                answers.append(make(opcode, sequence, keys))
        return answers

    def take_answers(self, make: Callable[[int, int, int], bytes]) -> list[bytes]:
        """An answer of ours for everything; nothing waits any more."""
        answers = [make(opcode, sequence, keys) for (sequence, opcode), keys in self.in_flight.items()]
        answers += [miss(frame, keys) for frame, keys, _ in self.release()]
        self.in_flight.clear()
        return answers

    def forget(self) -> None:
        """The client is gone: nobody waits."""
        self.in_flight.clear()
        self.release()
        self._given_up.clear()
