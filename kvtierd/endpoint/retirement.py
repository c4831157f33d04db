"""What is left of a client that died: for a moment the endpoint answers the MetaService in its place.

The MetaService copies what it knows of a rank's blobs to that rank (opcode REPLICATE) and waits for the answer. When the
rank dies first, it waits for the answer before it lets go of the rank, under the lock that registration, heartbeats and its
REST API need: a pool holder that is killed while it owes such an answer hangs the whole MetaService, until its restart
(every time with a holder that was frozen first; 5 of 12 with one killed at once on a loaded machine; MemCache 1.3.0).
So its questions are answered with an error: those that were open, and those it asks before it sees the connection close.
"""

from __future__ import annotations

import asyncio

from kvtierd.endpoint.actions import RetireServer
from kvtierd.memcache import framing

RETIREMENT_SECONDS = 0.25  # the config-store connection of the same client breaks within this
MOST_ANSWERS = 16384


class Retirement:
    """Bytes from the MetaService in, answers out. No I/O, no clock."""

    def __init__(self, start: RetireServer) -> None:
        self._awaited = start.awaited
        self._decoder = framing.FrameDecoder()
        self._answers_left = MOST_ANSWERS
        answers = [framing.error_answer(opcode, sequence, 0) for sequence, opcode in sorted(start.unanswered)]
        self.first = b"".join(answers) + self.feed(start.rest)

    def feed(self, data: bytes) -> bytes:
        """The answers to the requests that these bytes complete; what the dead client had asked for is dropped.

        Raises:
            FramingError: this is not the protocol, or more is asked than is answered.
        """
        answers = [
            framing.error_answer(frame.opcode, frame.sequence, 0)
            for frame in self._decoder.feed(data)
            if (frame.sequence, frame.opcode) not in self._awaited
        ]
        self._answers_left -= len(answers)
        if self._answers_left < 0:
            raise framing.FramingError("the MetaService asks without end")
        return b"".join(answers)


class _RetiredServer(asyncio.Protocol):
    """The connection to the MetaService, without a client behind it."""

    def __init__(self, transport: asyncio.Transport, retirement: Retirement) -> None:
        self._transport = transport
        self._retirement = retirement

    def data_received(self, data: bytes) -> None:
        try:
            answers = self._retirement.feed(data)
        except framing.FramingError:
            self._transport.abort()
            return
        if answers:
            self._transport.write(answers)

    def eof_received(self) -> bool:
        return False


def retire(transport: asyncio.Transport, start: RetireServer) -> None:
    """Takes the connection over and closes it when its time is up."""
    if transport.is_closing():
        return
    try:
        retirement = Retirement(start)
    except framing.FramingError:
        transport.abort()
        return
    transport.set_protocol(_RetiredServer(transport, retirement))
    if not transport.is_reading():
        transport.resume_reading()
    if retirement.first:
        transport.write(retirement.first)
    asyncio.get_running_loop().call_later(RETIREMENT_SECONDS, transport.abort)
