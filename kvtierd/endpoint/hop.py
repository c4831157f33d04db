"""What two endpoints say to each other before the bytes of a client pass. Pure.

One port for everything; ALPN ``kvtierd-hop/1``. The node whose client wants to reach the MetaService connects and
sends one hello; the master's endpoint answers once and, unless the verdict is ``ACCEPTED``, closes. After that the
connection carries exactly what the client and the MetaService (or its config store) say.

A hello is 152 bytes, big-endian: magic ``kvth``, version u8 (1), port u8 (1 meta, 2 config store), flags u16 (1: the
client had joined before; 2: a question and no client), epoch u64, era u64, cluster and node as UTF-8 in 64 bytes each,
padded with zeros. An answer is 32 bytes: magic ``kvta``, version u8, verdict u8, two bytes of zero, the answering side's
epoch u64, life u64, era u64.

*Life* is another number for another MetaService process: lookups wait for a purge then. *Era* is another number after
all links to the MetaService broke together (the master's endpoint was restarted, or cut them all). Why it counts,
measured on MemCache 1.3.0: when the link of one process that brings memory breaks, the config store tells all others,
and they let go of its memory for ever. If that process comes back, the MetaService places values in its memory that
nobody can write or read, until the segment is full of them. With all links broken at once nobody is told, and
everything goes on. So the hello names the era of such a process's last link, and within the same era it may not return.
"""

from __future__ import annotations

import dataclasses
import enum
import struct

ALPN = "kvtierd-hop/1"
VERSION = 1
MAX_EPOCH = 2**63 - 1
_HELLO = struct.Struct("!4sBBHQQ64s64s")
_ANSWER = struct.Struct("!4sBBHQQQ")
HELLO_BYTES = _HELLO.size
ANSWER_BYTES = _ANSWER.size
_HELLO_MAGIC = b"kvth"
_ANSWER_MAGIC = b"kvta"
_JOINED, _QUESTION = 1, 2


class Port(enum.IntEnum):
    """Which of the two ports of a MetaService."""

    META = 1
    CONFIG_STORE = 2


class Verdict(enum.IntEnum):
    """What the asked endpoint says. The names, in small letters, are the reasons in ``status``."""

    ACCEPTED = 0
    STALE_EPOCH = 1  # the asking side is behind
    DEPOSED = 2  # the asked side is behind: it was master once
    NOT_MASTER = 3  # it has no MetaService of its own, and never relays for a second time
    META_GONE = 4  # it is master and its MetaService is gone
    META_SILENT = 5  # it is master and its MetaService does not answer, or was not asked yet
    OTHER_CLUSTER = 6
    UNKNOWN_PEER = 7  # not listed, or the certificate is somebody else's
    NOT_ADMITTED = 8  # a newcomer, and survivors come first
    TOO_MANY = 9
    OTHER_VERSION = 10
    LATE_RETURN = 11  # a process that brings memory, back in the same era

    @property
    def reason(self) -> str:
        """For logs and ``status``: ``stale-epoch``."""
        return self.name.lower().replace("_", "-")


class HopProtocolError(ValueError):
    """The bytes are not a hello or an answer. The text is a reason for ``status``."""


@dataclasses.dataclass(frozen=True, slots=True)
class Hello:
    """What the asking endpoint says of itself and of its client. ``era`` 0: nothing keeps this client from coming."""

    port: Port
    epoch: int
    cluster: str
    node: str
    era: int = 0
    joined: bool = False
    question: bool = False

    def encode(self) -> bytes:
        """152 bytes."""
        flags = _JOINED * self.joined | _QUESTION * self.question
        names = self.cluster.encode(), self.node.encode()
        return _HELLO.pack(_HELLO_MAGIC, VERSION, self.port, flags, self.epoch, self.era, *names)

    @classmethod
    def decode(cls, data: bytes) -> Hello:
        """Raises ``HopProtocolError``: ``not-hop``, ``other-version``."""
        if not _HELLO_MAGIC.startswith(data[:4]) or len(data) != HELLO_BYTES:
            raise HopProtocolError("not-hop")
        _, version, port, flags, epoch, era, cluster, node = _HELLO.unpack(data)
        if version != VERSION:
            raise HopProtocolError("other-version")
        try:
            return cls(
                Port(port),
                epoch,
                cluster.rstrip(b"\0").decode(),
                node.rstrip(b"\0").decode(),
                era=era,
                joined=bool(flags & _JOINED),
                question=bool(flags & _QUESTION),
            )
        except ValueError:
            raise HopProtocolError("not-hop") from None


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What the asked endpoint says: a verdict (a plain number if it is newer than this code), its epoch, life and era."""

    verdict: int
    epoch: int
    life: int = 0
    era: int = 0

    def encode(self) -> bytes:
        """32 bytes."""
        return _ANSWER.pack(_ANSWER_MAGIC, VERSION, self.verdict, 0, self.epoch, self.life, self.era)

    @classmethod
    def decode(cls, data: bytes) -> Answer:
        """Raises ``HopProtocolError``."""
        if len(data) != ANSWER_BYTES or not data.startswith(_ANSWER_MAGIC):
            raise HopProtocolError("not-hop")
        _, _, verdict, _, epoch, life, era = _ANSWER.unpack(data)
        return cls(verdict, epoch, life, era)

    @property
    def reason(self) -> str:
        """The verdict in words."""
        try:
            return Verdict(self.verdict).reason
        except ValueError:
            return f"verdict-{self.verdict}"
