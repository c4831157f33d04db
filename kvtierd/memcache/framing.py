"""The wire format on the MetaService port (MemCache 1.3.0), without I/O.

A connection starts with a handshake: the client sends 16 bytes (magic ``1b0f 0100``, four bytes of padding,
its rank as u64; clients without a rank send eight ``ff``), the server answers two bytes, ``0000`` for yes.
Then both sides send frames: a 16-byte header ``<hhIII`` (type 0, opcode, body length, sequence number, crc 0)
and a body. A body starts with version i16, message id i16, destination u32; a string is u32 length + bytes,
a vector u64 count + items.

What was measured and must not be forgotten:

- The header's second field holds the opcode in requests *and* in answers. The client uses it as an index.
- Both sides number their requests from 0x40000001, so the numbers collide. An answer belongs to a request
  when sequence number and opcode both match.
- An answer with an empty body, with a negative header field or with an unknown opcode does not wake the
  caller. An error therefore travels in the body (``error_answer``).
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

HEADER = struct.Struct("<hhIII")
HEADER_BYTES = HEADER.size
MAX_BODY_BYTES = 10 * 1024 * 1024
CLIENT_HANDSHAKE_BYTES = 16
SERVER_HANDSHAKE_BYTES = 2
HANDSHAKE_MAGIC = b"\x1b\x0f\x01\x00"
HANDSHAKE_ACCEPTED = b"\x00\x00"
NO_RANK = 0xFFFF_FFFF_FFFF_FFFF
ANONYMOUS_HANDSHAKE = HANDSHAKE_MAGIC + bytes(4) + b"\xff" * 8

RESULT_OK = 0
RESULT_NOT_LINKED = -3014  # what a client itself reports while its link is down
RESULT_NOT_FOUND = -3102

_U64 = struct.Struct("<Q")
_I32 = struct.Struct("<i")
_QUERY_ENTRY_BYTES = 20  # size u64, protection u16, blobs u8, valid u8, blob count u64
_BLOB_BYTES = 40


class Opcode(enum.IntEnum):
    """What a frame is about. The first group travels client to server, the second server to client."""

    PING = 0
    ALLOC = 1
    UPDATE = 2
    GET = 3
    REMOVE = 4
    REGISTER = 5
    IS_EXIST = 8
    BATCH_IS_EXIST = 9
    BATCH_REMOVE = 10
    UNREGISTER = 11
    BATCH_GET = 12
    QUERY = 13
    BATCH_QUERY = 14
    BATCH_ALLOC = 15
    BATCH_UPDATE = 16
    REMOVE_ALL = 18
    BATCH_UPDATE_BLOB = 19
    SSD_META_DELETE = 23
    BATCH_UPDATE_LEASE = 24
    PREFETCH = 26
    EVICT = 27
    CONFIG_QUERY = 30

    SERVER_PING = 6
    REPLICATE = 7
    BLOB_COPY = 17
    BLOB_DELETE = 20
    BATCH_BLOB_COPY = 21


# Plain numbers: an enum member costs a slow comparison for every frame that is looked up.
LOOKUP_OPCODES = frozenset(
    map(int, (Opcode.IS_EXIST, Opcode.BATCH_IS_EXIST, Opcode.QUERY, Opcode.BATCH_QUERY))
)
WRITE_OPCODES = frozenset(map(int, (Opcode.ALLOC, Opcode.BATCH_ALLOC)))
READ_OPCODES = frozenset(map(int, (Opcode.GET, Opcode.BATCH_GET)))
# Requests that begin a client's call on data. Everything else finishes such a call or keeps the pool together.
DATA_OPCODES = (
    LOOKUP_OPCODES
    | WRITE_OPCODES
    | READ_OPCODES
    | set(map(int, (Opcode.REMOVE, Opcode.BATCH_REMOVE)))
    | set(map(int, (Opcode.BATCH_UPDATE_LEASE, Opcode.PREFETCH, Opcode.EVICT)))
)

# Offset of the key vector's u64 count in the body of a batch request. BATCH_UPDATE starts with the action
# vector, which has one item per key.
_COUNT_OFFSET = {
    int(Opcode.BATCH_IS_EXIST): 8,
    int(Opcode.BATCH_REMOVE): 8,
    int(Opcode.BATCH_ALLOC): 8,
    int(Opcode.BATCH_UPDATE): 8,
    int(Opcode.BATCH_GET): 20,
    int(Opcode.BATCH_QUERY): 20,
}
_SMALLEST_ITEM_BYTES = {int(Opcode.BATCH_UPDATE): 1}  # every other vector holds strings: 4 bytes at least


class FramingError(ValueError):
    """The bytes are not this protocol, or go beyond its bounds. The text says which bytes."""


class Frame(NamedTuple):
    """One whole frame: ``raw`` is header and body as received; ``opcode`` may be one that is not known here."""

    opcode: int
    sequence: int
    raw: bytes

    @property
    def body(self) -> bytes:
        """The body alone (a copy)."""
        return self.raw[HEADER_BYTES:]


class FrameDecoder:
    """Bytes in, whole frames out; holds at most one incomplete frame.

    Raises ``FramingError`` from ``feed`` at the first header that breaks the rules; ``rest`` then gives
    everything not yet handed out, so that a relay can pass it on unchanged.
    """

    __slots__ = ("_buffer", "_needed_bytes")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._needed_bytes = HEADER_BYTES

    @property
    def rest(self) -> bytes:
        """Bytes of the incomplete (or refused) frame and all that followed."""
        return bytes(self._buffer)

    @property
    def pending_bytes(self) -> int:
        """How many bytes ``rest`` has."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that ``data`` completes, oldest first."""
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._needed_bytes:
                return []  # no copy until the frame is whole: a body that dribbles in costs its own size once
            data = bytes(self._buffer)
            self._buffer.clear()
        frames: list[Frame] = []
        start, end = 0, len(data)
        self._needed_bytes = HEADER_BYTES
        while end - start >= HEADER_BYTES:
            kind, opcode, body_bytes, sequence, _crc = HEADER.unpack_from(data, start)
            if kind != 0 or opcode < 0 or body_bytes > MAX_BODY_BYTES:
                if frames:
                    break  # hand out what was good; the next feed meets this header again and raises
                self._buffer += data
                raise FramingError(
                    f"not a MetaService frame: type {kind}, opcode {opcode}, body of {body_bytes} bytes"
                    f" (most: {MAX_BODY_BYTES})"
                )
            stop = start + HEADER_BYTES + body_bytes
            if stop > end:
                self._needed_bytes = stop - start
                break
            whole = start == 0 and stop == end
            frames.append(Frame(opcode, sequence, data if whole else data[start:stop]))
            start = stop
        if start < end:
            self._buffer += data[start:] if start else data
        return frames


def is_one_frame(data: bytes) -> bool:
    """Whether the bytes are exactly one frame that ``FrameDecoder`` accepts."""
    if len(data) < HEADER_BYTES:
        return False
    kind, opcode, body_bytes, _sequence, _crc = HEADER.unpack_from(data)
    return bool(kind == 0 and opcode >= 0 and body_bytes == len(data) - HEADER_BYTES <= MAX_BODY_BYTES)


def parse_client_handshake(data: bytes) -> int | None:
    """The client's rank, or ``None`` for a client without one.

    Raises:
        FramingError: these 16 bytes are not a handshake.
    """
    if len(data) != CLIENT_HANDSHAKE_BYTES or not data.startswith(HANDSHAKE_MAGIC):
        raise FramingError(f"not a MetaService handshake: {data[:CLIENT_HANDSHAKE_BYTES].hex()}")
    rank: int = _U64.unpack_from(data, 8)[0]
    return None if rank == NO_RANK else rank


def encode_frame(opcode: int, sequence: int, body: bytes) -> bytes:
    """Header and body as they go over the wire."""
    return HEADER.pack(0, opcode, len(body), sequence, 0) + body


def key_count(opcode: int, raw: bytes) -> int:
    """How many keys a request is about: 1 for single calls and unknown opcodes.

    A count that the body cannot hold is a lie; it gives 0.
    """
    offset = _COUNT_OFFSET.get(opcode)
    if offset is None:
        return 1
    at = HEADER_BYTES + offset
    if len(raw) < at + 8:
        return 0
    count: int = _U64.unpack_from(raw, at)[0]
    smallest = _SMALLEST_ITEM_BYTES.get(opcode, 4)
    return count if count * smallest <= len(raw) - at - 8 else 0


def brings_memory(raw: bytes) -> bool:
    """Whether a REGISTER request announces segments: rank u64, then u64 how many. Clients without memory send 0."""
    at = HEADER_BYTES + 16
    return len(raw) >= at + 8 and _U64.unpack_from(raw, at)[0] != 0


def _body_start(message_id: int) -> bytes:
    return struct.pack("<hhI", 0, message_id, 0)


def _results(message_id: int, keys: int, result: int) -> bytes:
    return _body_start(message_id) + _U64.pack(keys) + _I32.pack(result) * keys


def error_answer(opcode: int, sequence: int, keys: int, result: int = RESULT_NOT_LINKED) -> bytes:
    """A whole answer frame that wakes the caller of ``opcode`` and says ``result`` for each of its keys.

    Each kind of call has a body of its own; for QUERY and BATCH_QUERY, which have no room for a result, the
    answer is a miss. An opcode not known here gets the plain response body, which woke every kind tried.
    """
    if keys * _QUERY_ENTRY_BYTES > MAX_BODY_BYTES:
        keys = 0  # no client asks for so many; an answer must stay within the bounds of a frame
    match opcode:
        case Opcode.ALLOC | Opcode.GET:  # protection, priority, no blobs, result
            body = _body_start(1) + struct.pack("<HBBQi", 0, 0, 0, 0, result)
        case Opcode.IS_EXIST:
            body = _body_start(4) + _I32.pack(result)
        case Opcode.BATCH_IS_EXIST:
            body = _results(5, keys, result)
        case Opcode.BATCH_REMOVE:
            body = _results(6, keys, result)
        case Opcode.BATCH_UPDATE:
            body = _results(11, keys, result)
        case Opcode.BATCH_GET | Opcode.BATCH_ALLOC:  # five empty vectors, then a result per key
            body = _body_start(8) + bytes(40) + _U64.pack(keys) + _I32.pack(result) * keys
        case Opcode.QUERY:
            body = _body_start(9) + bytes(_QUERY_ENTRY_BYTES)
        case Opcode.BATCH_QUERY:
            body = _body_start(10) + _U64.pack(keys) + bytes(_QUERY_ENTRY_BYTES * keys)
        case Opcode.CONFIG_QUERY:
            body = _body_start(30) + bytes(8)
        case Opcode.PREFETCH | Opcode.EVICT:
            body = _body_start(opcode) + _I32.pack(result)
        case _:
            body = _body_start(2) + _I32.pack(result) + bytes(8)
    return encode_frame(opcode, sequence, body)


def wake_up(sequence: int) -> bytes:
    """Wakes whatever waits for this number with an error; a client without such a waiter drops it."""
    body = _body_start(2) + _I32.pack(RESULT_NOT_LINKED) + bytes(8)
    return encode_frame(Opcode.BATCH_IS_EXIST, sequence, body)


def miss_answer(opcode: int, sequence: int, keys: int) -> bytes:
    """As ``error_answer``, but a lookup or removal is told that the keys are not there."""
    absent = opcode in LOOKUP_OPCODES or opcode in (Opcode.REMOVE, Opcode.BATCH_REMOVE)
    return error_answer(opcode, sequence, keys, RESULT_NOT_FOUND if absent else RESULT_NOT_LINKED)


def lookup_hits(opcode: int, raw: bytes, keys: int) -> int:
    """How many of a lookup's keys were found, from the answer frame. A damaged answer counts as no hit."""
    try:
        if opcode == Opcode.IS_EXIST:
            return int(_I32.unpack_from(raw, HEADER_BYTES + 8)[0] == RESULT_OK)
        if opcode == Opcode.QUERY:
            return int(_U64.unpack_from(raw, HEADER_BYTES + 8)[0] != 0)
        count = _U64.unpack_from(raw, HEADER_BYTES + 8)[0]
        if count > keys:
            return 0
        at = HEADER_BYTES + 16
        if opcode == Opcode.BATCH_IS_EXIST:
            return struct.unpack_from(f"<{count}i", raw, at).count(RESULT_OK)
        hits = 0
        for _ in range(count):
            hits += _U64.unpack_from(raw, at)[0] != 0
            at += _QUERY_ENTRY_BYTES + _BLOB_BYTES * min(_U64.unpack_from(raw, at + 12)[0], 1 << 20)
    except struct.error:
        return 0
    return hits


def granted_keys(opcode: int, raw: bytes, keys: int) -> int:
    """How many keys a write was given room for, or a read was given blobs for.

    The results end the answer's body. A GET that finds nothing says so by having no blobs, with result 0.
    """
    try:
        if opcode == Opcode.GET:
            return int(_U64.unpack_from(raw, HEADER_BYTES + 12)[0] != 0)
        if opcode == Opcode.ALLOC:
            return int(_I32.unpack_from(raw, len(raw) - 4)[0] == RESULT_OK)
        return struct.unpack_from(f"<{keys}i", raw, len(raw) - 4 * keys).count(RESULT_OK) if keys else 0
    except struct.error:
        return 0
