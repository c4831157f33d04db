"""PURE: what nodes tell each other about themselves, where two of them do not fit together, and how far clocks are apart."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import NamedTuple

KEPT_SAMPLES = 8
STEP_SECONDS = 0.5  # what two measurements contradict each other by when a clock was set between them
WRONG_CLOCK_SECONDS = 2.0  # leases do not mind; whoever compares logs of two nodes does


@dataclasses.dataclass(frozen=True, slots=True)
class HostMemory:
    """What the master must know of a host to place a pool holder there.

    Attributes:
        available_bytes, total_bytes: Memory of the host.
        headroom_bytes: What must stay for it.
        room_bytes: What one more pool holder could take; ``None``: not known.
        holders: Units of pool holders that were added beside the settings.
    """

    available_bytes: int = 0
    total_bytes: int = 0
    headroom_bytes: int = 0
    room_bytes: int | None = None
    holders: tuple[str, ...] = ()


class OwnRank(NamedTuple):
    """A rank of the pool that is a unit's of the node."""

    rank: int
    unit: str


@dataclasses.dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine makes its keys from; what is not known is ``None`` or ""."""

    unit: str
    group: str = ""
    hash_seed: str | None = None
    model: str = ""
    block_tokens: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a node says of itself.

    Attributes:
        hash_seed: PYTHONHASHSEED that its engines get. With another one the same prompt has other keys.
        world_size: How many ranks it expects in the pool.
        settings_digest: Of the settings that must agree.
        role, epoch, master: Its standing.
        uptime_seconds: Of its kvtierd.
        endpoint_life: The MetaService process that its endpoint reaches; "" for none.
        survivors_missing: Its processes that knew the MetaService before and are not back yet.
        clean_epoch: The last epoch that it ended as the master in order, with nothing in flight; 0 for none.
        memory: Of its host; ``None``: not known (yet).
        ranks: Members of the pool there.
        engines: Its engines that use the pool.
        busy_groups: Groups of engines in which its policy does something disruptive now; "*": in the whole pool.
    """

    node: str
    version: str = ""
    memcache_version: str = ""
    hash_seed: str = ""
    world_size: int = 0
    protocol: str = ""
    settings_digest: str = ""
    role: str = "unknown"
    epoch: int = 0
    master: str = ""
    uptime_seconds: float = 0.0
    endpoint_life: str = ""
    survivors_missing: int = 0
    clean_epoch: int = 0
    memory: HostMemory | None = None
    ranks: tuple[OwnRank, ...] = ()
    engines: tuple[EngineFacts, ...] = ()
    busy_groups: tuple[str, ...] = ()


def differences(mine: NodeFacts, theirs: NodeFacts) -> tuple[str, ...]:
    """Where the two must agree and do not, worst first, for operators. What either does not know is no difference."""
    found = []
    for name, mine_is, theirs_is, matters in (
        ("hash_seed", mine.hash_seed, theirs.hash_seed, "no hit of the one's KV by the other"),
        ("world_size", mine.world_size, theirs.world_size, "ranks do not find each other"),
        ("protocol", mine.protocol, theirs.protocol, "ranks do not find each other"),
        ("memcache_version", mine.memcache_version, theirs.memcache_version, "not known to work together"),
        ("settings_digest", mine.settings_digest, theirs.settings_digest, "the settings files are not the same"),
        ("version", mine.version, theirs.version, "fine during an upgrade, not for long"),
    ):  # fmt: skip
        if mine_is and theirs_is and mine_is != theirs_is:
            found.append(f"{name} is {theirs_is} there and {mine_is} here: {matters}")
    return tuple(found)


class _Sample(NamedTuple):
    offset_seconds: float
    delay_seconds: float


class ClockOffset:
    """How far a peer's wall clock is ahead, from the times of questions and answers.

    The four times of one exchange give an offset that is wrong by at most half the time on the way; of the last few
    the one with the shortest way counts.
    """

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=KEPT_SAMPLES)

    def add(self, asked: float, received: float, sent: float, elapsed_seconds: float) -> None:
        """Takes an exchange into account.

        Args:
            asked: Wall clock here when the question left.
            received, sent: Wall clock there when it arrived and when the answer left.
            elapsed_seconds: From question to answer, by a clock here that is not set.
        """
        delay = elapsed_seconds - (sent - received)
        if not 0.0 <= delay <= elapsed_seconds + WRONG_CLOCK_SECONDS:
            return  # a clock was set in the middle of it
        offset = ((received - asked) + (sent - (asked + elapsed_seconds))) / 2
        known = self.seconds
        if known is not None and abs(offset - known) > delay / 2 + self.error_seconds + STEP_SECONDS:
            self._samples.clear()  # a clock was set since: what was measured before says nothing any more
        self._samples.append(_Sample(offset, delay))

    @property
    def seconds(self) -> float | None:
        """Positive: the peer's clock is ahead. ``None``: not known."""
        if not self._samples:
            return None
        return min(self._samples, key=lambda sample: sample.delay_seconds).offset_seconds

    @property
    def error_seconds(self) -> float:
        """By so much ``seconds`` may be wrong."""
        return min((sample.delay_seconds for sample in self._samples), default=0.0) / 2

    def problem(self) -> str:
        """In words, when it is so far off that it should be looked at."""
        offset = self.seconds
        if offset is None or abs(offset) - self.error_seconds <= WRONG_CLOCK_SECONDS:
            return ""
        return f"its clock is {abs(offset):.1f} s {'ahead' if offset > 0 else 'behind'}"
