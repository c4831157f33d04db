"""What one KV block looks like in the pool: a header that says whose it is, then the numbers of all layers.

A pool can hand back bytes that are not the ones asked for: another key's block after an unclean end of the
MetaService, half a block after a torn write. Wrong keys and values give fluent, wrong answers, so nothing from the
pool is used before header, identity and checksum agree.

====== ======= ==========================================
offset bytes   field (little-endian)
====== ======= ==========================================
0      8       magic ``KVTREF\\x00\\x01``
8      8       payload bytes
16     32      model identity
48     32      block hash
80     4       CRC-32 of the payload
84     4       CRC-32 of bytes 0 to 84
88     40      zero
128    ...     payload: float32 (layers, 2, kv_heads, block_size, head_size)
====== ======= ==========================================
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

import numpy as np
import numpy.typing as npt

ByteArray = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float32]

HEADER_BYTES: Final = 128
_MAGIC: Final = b"KVTREF\x00\x01"
_HEADER: Final = struct.Struct("<8sQ32s32sI")
_CHECKSUM: Final = struct.Struct("<I")


class WrongBytesError(ValueError):
    """The pool answered with bytes that are not the block asked for; the text says what differs."""


def object_key(namespace: str, model_identity: bytes, block_hash: bytes) -> str:
    """``<namespace>@<model identity, 32 hex digits>@<block hash, 64 hex digits>``: 162 characters at most."""
    return f"{namespace}@{model_identity.hex()[:32]}@{block_hash.hex()}"


def seal(target: ByteArray, model_identity: bytes, block_hash: bytes, block: FloatArray) -> None:
    """Writes header and payload into ``target``, whose length is ``HEADER_BYTES`` + the block's bytes."""
    payload = target[HEADER_BYTES:]
    payload[:] = block.reshape(-1).view(np.uint8)
    head = _HEADER.pack(_MAGIC, payload.nbytes, model_identity, block_hash, zlib.crc32(payload.data))
    head += _CHECKSUM.pack(zlib.crc32(head))
    target[:HEADER_BYTES] = np.frombuffer(head.ljust(HEADER_BYTES, b"\0"), dtype=np.uint8)


def unseal(source: ByteArray, model_identity: bytes, block_hash: bytes, block: FloatArray) -> None:
    """Copies the payload into ``block``, once everything agrees. Raises ``WrongBytesError`` otherwise."""
    payload = source[HEADER_BYTES:]
    head = source[: _HEADER.size].tobytes()
    (head_checksum,) = _CHECKSUM.unpack_from(source[_HEADER.size :].tobytes()[: _CHECKSUM.size])
    magic, payload_bytes, identity, found_hash, checksum = _HEADER.unpack(head)
    if magic != _MAGIC:
        raise WrongBytesError("not a block of this engine")
    if zlib.crc32(head) != head_checksum:
        raise WrongBytesError("damaged header")
    if identity != model_identity:
        raise WrongBytesError("a block of another model")
    if found_hash != block_hash:
        raise WrongBytesError("another block of this model")
    if payload_bytes != payload.nbytes or payload.nbytes != block.nbytes:
        raise WrongBytesError(f"{payload_bytes} bytes of payload, expected {block.nbytes}")
    # The copy is what gets checked: what has passed can no longer change.
    block.reshape(-1).view(np.uint8)[:] = payload
    if zlib.crc32(block.reshape(-1).data) != checksum:
        raise WrongBytesError("the checksum does not match")
