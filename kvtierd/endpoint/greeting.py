"""The first bytes on the config-store port, put in order. Pure.

When a rank connects again, the config store answers its 16-byte hello with two bytes, and asks for its role in a frame.
Two threads of the server send these, in either order (both were recorded); and a client that is asked before it has
finished its own side of the handshake never answers. Either way its role stays ``unknown`` and later joiners hang: 4
of 10 restarts with two ranks. With the answer first and the question a moment later it was none of 48.
"""

from __future__ import annotations

from kvtierd.memcache import framing

_MOST_BODY_BYTES = 0xFFFF  # of the question; two bytes of answer in front shift the length beyond this


class StoreGreeting:
    """Splits what the server sends at first into what the client gets now and what it gets after a moment."""

    __slots__ = ("_buffer", "answered")

    def __init__(self) -> None:
        self._buffer = b""
        self.answered = False

    def feed(self, data: bytes) -> bytes:
        """Bytes from the server; gives those for the client now."""
        self._buffer += data
        if self.answered:
            return b""
        if not framing.HANDSHAKE_ACCEPTED.startswith(self._buffer[: framing.SERVER_HANDSHAKE_BYTES]):
            self.answered = True  # a refusal, or a protocol not known here: nothing to put in order
            return self.finish()
        start = self._answer_at()
        if start is None:
            return b""
        end = start + framing.SERVER_HANDSHAKE_BYTES
        answer = self._buffer[start:end]
        self._buffer = self._buffer[:start] + self._buffer[end:]
        self.answered = True
        return answer

    def finish(self) -> bytes:
        """Everything that is left: the moment is over."""
        rest, self._buffer = self._buffer, b""
        return rest

    def _answer_at(self) -> int | None:
        size = len(self._buffer)
        if size == framing.SERVER_HANDSHAKE_BYTES:
            return 0
        if size < framing.HEADER_BYTES:
            return None
        body_bytes = framing.HEADER.unpack_from(self._buffer)[2]
        if not 0 < body_bytes <= _MOST_BODY_BYTES:
            return 0
        start: int = framing.HEADER_BYTES + body_bytes
        return start if size >= start + framing.SERVER_HANDSHAKE_BYTES else None
