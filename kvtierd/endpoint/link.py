"""One client connection on the meta port as a state machine. No I/O, no clock: events in, actions out.

States::

    RELAY --server lost--> ORPHAN --cut--> LEAVING --quiet--> LEFT --client gone--> CLOSED
      |                                       |                ^
      +--cut--> LEAVING                       +--forced--> HOLDING (answers withheld)
      +--framing not understood--> PLAIN (bytes pass unchanged)

A server that says nothing for a while, with calls on data in flight, is *silent*: the calls are answered with errors,
new ones at once as misses, and the connection is kept. When the server speaks again everything goes on; its answers
to what was given up are dropped. The connection is given up only after a long silence, because a pool holder that loses
it and comes back may not be taken back by the others (measured; see ``hop``).

An ORPHAN keeps its client: every request is answered at once, so no caller blocks while the MetaService is
away. Only when a MetaService is there again is the client sent to it, by closing the connection (clients
dial again within milliseconds of a FIN and register anew). The close happens when the client is quiet. If it
never is, answers are withheld until all of its threads wait for one; then comes the FIN, and the answers on the
client's next connection: a thread that is woken at the very moment of the FIN may take a number for a request
that never gets out (seen in 3 of 4 runs with four busy threads). What still slips through is caught twice:
requests that arrive behind the FIN (``ClientProcess.carry``) and numbers that never arrive (``Numbers``).
"""

from __future__ import annotations

from collections.abc import Callable

from kvtierd.endpoint.actions import (
    Action,
    CloseClient,
    DropServer,
    FinishClient,
    LinkState,
    LinkTimes,
    Mode,
    RetireServer,
    SendClient,
    SendServer,
)
from kvtierd.endpoint.clients import ClientProcess
from kvtierd.endpoint.flight import MAX_IN_FLIGHT, URGENT_OPCODES, Flight, miss
from kvtierd.memcache import framing
from kvtierd.memcache.framing import Frame, Opcode

_REGISTER, _BATCH_UPDATE = int(Opcode.REGISTER), int(Opcode.BATCH_UPDATE)


class Link:
    """The state machine. Every event method returns the actions to carry out, in order.

    Args:
        client: the process, for its counters and carried answers.
        mode: the endpoint's mode; ``set_mode`` changes it.
        rank: from the handshake; ``None`` for a client without one.
        connected: the handshake with the server is done. False makes an ORPHAN from birth, which exists only to
            deliver carried answers while there is no MetaService.
    """

    def __init__(
        self, client: ClientProcess, mode: Mode, now: float, times: LinkTimes, *, connected: bool = True
    ) -> None:
        self.client = client
        self.state = LinkState.RELAY if connected else LinkState.ORPHAN
        self.plain_reason = ""
        self.silent = False  # the server has said nothing for too long
        self.traffic_at = now  # last frame to or from the MetaService
        self._flight = Flight()
        self._server_requests: set[tuple[int, int]] = set()
        self._from_client = framing.FrameDecoder()
        self._from_server = framing.FrameDecoder()
        self._mode = mode
        self._times = times
        self._heard_at = now  # server spoke, or the first request went out to a server with nothing to do
        self._client_spoke_at = now
        self._entered_at = now
        self._settles_at: float | None = now + times.settle
        self._has_server = connected
        self._deliveries: list[bytes] = []
        self._farewell = False
        self._born_at = now
        # Whether the numbers behind the last one were tried: only on a link that follows another, and not where
        # several processes may be behind one address.
        self._guessed = not (client.identity.is_process and client.numbers.next_ones())

    @classmethod
    def plain(cls, client: ClientProcess, now: float, times: LinkTimes, reason: str) -> Link:
        """A connection whose handshake is not ours: bytes pass unchanged from the start."""
        link = cls(client, Mode.SERVE, now, times)
        link.state, link.plain_reason = LinkState.PLAIN, reason
        return link

    # -- what the shell may ask ------------------------------------------------------------------

    @property
    def hurried(self) -> bool:
        """A deadline of milliseconds is running: tick often."""
        return (
            self._settles_at is not None
            or not self._guessed
            or self.state
            in (
                LinkState.LEAVING,
                LinkState.HOLDING,
                LinkState.LEFT,
            )
        )

    @property
    def pending(self) -> bool:
        """Something waits for an answer: tick at the usual pace."""
        gaps = self.client.identity.is_process and self.client.numbers.gaps
        return bool(self._flight) or self.silent or gaps

    @property
    def in_flight(self) -> dict[tuple[int, int], int]:
        """Requests that the server has and has not answered: sequence number and opcode, number of keys."""
        return self._flight.in_flight

    @property
    def congested(self) -> bool:
        """The client asks more than is answered: stop reading from it for now."""
        return self._flight.too_much

    @property
    def open(self) -> bool:
        """The client may still be sent something."""
        return self.state not in (LinkState.LEFT, LinkState.CLOSED)

    def passes_from_client(self, data: bytes) -> bool:
        """``client_data(data)`` will answer exactly ``[SendServer(data)]``.

        So the shell may send first and tell the link behind it: what the link writes down about a frame is then not
        on the way of the frame.
        """
        return (
            self.state is LinkState.RELAY
            and self._mode is Mode.SERVE
            and self._has_server
            and not self.silent
            and not self._from_client.pending_bytes
            and framing.is_one_frame(data)
        )

    def passes_from_server(self, data: bytes) -> bool:
        """``server_data(data)`` will answer exactly ``[SendClient(data)]``; see ``passes_from_client``."""
        return (
            self.state is LinkState.RELAY
            and self._has_server
            and not self._flight.abandoned
            and not self._from_server.pending_bytes
            and framing.is_one_frame(data)
        )

    # -- events ----------------------------------------------------------------------------------

    def client_data(self, data: bytes, now: float) -> list[Action]:
        """Bytes from the client."""
        self.client.counters.bytes_from_client += len(data)
        if self.state is LinkState.PLAIN:
            return [SendServer(data)]
        if self.state is LinkState.CLOSED:
            return []
        self._client_spoke_at = now
        return self._decode(self._from_client, data, self._client_frame, now)

    def server_data(self, data: bytes, now: float) -> list[Action]:
        """Bytes from the MetaService."""
        if not self._has_server:
            return []
        self._heard_at = now
        self.silent = False
        if self.state is LinkState.PLAIN:
            self.client.counters.bytes_to_client += len(data)
            return [SendClient(data)]
        self.traffic_at = now
        return self._decode(self._from_server, data, self._server_frame, now)

    def client_lost(self) -> list[Action]:
        """The client closed or its connection broke.

        What the MetaService has asked it and has no answer to is answered with errors: else the MetaService waits 60 s for
        each, does not hear that the connection is gone, and hangs.
        """
        if self.state is LinkState.CLOSED:
            return []
        plain = self.state is LinkState.PLAIN
        self._enter(LinkState.CLOSED, self._entered_at)
        self.client.detach(self)
        actions: list[Action] = []
        if self._has_server:
            retire = RetireServer(
                self._from_server.rest, frozenset(self._server_requests), self._flight.awaited
            )
            actions.append(DropServer() if plain else retire)
        self._flight.forget()
        self._has_server = False
        return [*actions, CloseClient()]

    def server_lost(self, now: float) -> list[Action]:
        """The MetaService closed the connection, or it broke."""
        if not self._has_server:
            return []
        self._has_server = self.silent = False
        if self.state is LinkState.PLAIN:
            self._enter(LinkState.CLOSED, now)
            return [DropServer(), CloseClient()]
        if self.state is LinkState.RELAY:
            self._enter(LinkState.ORPHAN, now)
        return [DropServer(), *self._answer_everything(framing.error_answer)]

    def cut(self, now: float, *, farewell: bool = False) -> list[Action]:
        """Send the client away so that it connects anew; in-flight requests get their answers first if they can.

        ``farewell``: nobody will be here for its next connection, so every answer must go out on this one.
        """
        self._farewell = farewell
        if self.state is LinkState.PLAIN:
            self._enter(LinkState.CLOSED, now)
            return [DropServer(), CloseClient()]
        if self.state in (LinkState.RELAY, LinkState.ORPHAN):
            self._enter(LinkState.LEAVING, now)
        return []

    def set_mode(self, mode: Mode, now: float) -> list[Action]:
        """The endpoint changed its mode: held requests go on or are answered."""
        self._mode = mode
        if self.state is LinkState.PLAIN and mode is Mode.RECOVER:
            return self.cut(now)  # what is not understood cannot be filtered
        if mode is Mode.QUIESCE or self.state is not LinkState.RELAY:
            return []
        actions: list[Action] = []
        for frame, keys, _ in self._flight.release():
            actions += self._data_request(frame, keys, now)
        return actions

    def deliver(self, answer: bytes) -> list[Action]:
        """A carried answer for this process: sent when the client has settled."""
        if self._settles_at is not None:
            self._deliveries.append(answer)
            return []
        return [self._to_client(answer)] if self.open else []

    def tick(self, now: float) -> list[Action]:
        """Time passed."""
        actions: list[Action] = []
        if self._settles_at is not None and now >= self._settles_at:
            self._settles_at = None
            if self._deliveries and self.open:
                actions.append(self._to_client(b"".join(self._deliveries)))
            self._deliveries.clear()
        actions += self._fill_gaps(now)
        since = now - self._entered_at
        match self.state:
            case LinkState.RELAY:
                actions += self._notice_silence(now)
                actions += self._expire_held(now)
            case LinkState.ORPHAN:
                actions += self._expire_held(now)
            case LinkState.LEAVING:
                quiet = now - max(self._client_spoke_at, self._entered_at)
                if not self.in_flight and quiet >= self._times.quiet_gap:
                    return [*actions, *self._leave(now)]
                if since >= self._times.force_after:
                    self._enter(LinkState.HOLDING, now)
            case LinkState.HOLDING:
                if since >= self._times.withhold:
                    return [*actions, *self._leave(now)]
            case LinkState.LEFT:
                if since >= self._times.linger:
                    self._enter(LinkState.CLOSED, now)
                    actions.append(CloseClient(abort=True))
            case _:
                pass
        return actions

    # -- frames ----------------------------------------------------------------------------------

    def _decode(
        self,
        decoder: framing.FrameDecoder,
        data: bytes,
        handle: Callable[[Frame, float], list[Action]],
        now: float,
    ) -> list[Action]:
        actions: list[Action] = []
        try:
            for frame in decoder.feed(data):
                actions += handle(frame, now)
            if actions and decoder.pending_bytes:
                decoder.feed(b"")  # raises if what follows the good frames is refused
        except framing.FramingError as error:
            actions += self._go_plain(str(error), now)
        return actions

    def _client_frame(self, frame: Frame, now: float) -> list[Action]:
        key = (frame.sequence, frame.opcode)
        if self._server_requests and key in self._server_requests:
            self._server_requests.discard(key)
            return [SendServer(frame.raw)] if self._has_server else []
        self.client.numbers.note(frame.sequence, now)
        counters = self.client.counters
        counters.requests += 1
        keys = framing.key_count(frame.opcode, frame.raw)
        if frame.opcode in framing.LOOKUP_OPCODES:
            counters.lookups += keys
        elif frame.opcode in framing.READ_OPCODES:
            counters.reads += keys
        if self.state is LinkState.LEFT:
            self.client.carry(miss(frame, keys), now)
            return []
        if frame.opcode == _REGISTER and framing.brings_memory(frame.raw):
            self.client.provider = True
        if frame.opcode in framing.DATA_OPCODES:
            self.client.seen_data_request = True
            if self._mode is not Mode.SERVE or self.state is LinkState.HOLDING:
                return self._data_request(frame, keys, now)
        return self._forward(frame, keys, now)

    def _data_request(self, frame: Frame, keys: int, now: float) -> list[Action]:
        if self.state is LinkState.HOLDING or (self._mode is Mode.QUIESCE and self._has_server):
            return self._hold(frame, keys, now)
        if self._mode is Mode.SERVE:
            return self._forward(frame, keys, now)
        return [self._synthetic(miss(frame, keys))]

    def _hold(self, frame: Frame, keys: int, now: float) -> list[Action]:
        self._flight.hold(frame, keys, now)
        return []

    def _forward(self, frame: Frame, keys: int, now: float) -> list[Action]:
        if not self._has_server:
            if self.state is LinkState.HOLDING:
                return self._hold(frame, keys, now)
            return [self._synthetic(miss(frame, keys))]
        if self.silent and frame.opcode in URGENT_OPCODES:
            answer = self._synthetic(miss(frame, keys))
            if frame.opcode == _BATCH_UPDATE and self._flight.give_up(frame.sequence, frame.opcode):
                return [SendServer(frame.raw), answer]  # it ends what the server has begun
            return [answer]
        if not self.in_flight:
            self._heard_at = now
        self.traffic_at = now
        self.in_flight[frame.sequence, frame.opcode] = keys
        return [SendServer(frame.raw)]

    def _server_frame(self, frame: Frame, now: float) -> list[Action]:
        opcode, raw = frame.opcode, frame.raw
        if self._flight.abandoned and self._flight.is_for_nobody(frame.sequence, opcode):
            return []
        keys = self.in_flight.pop((frame.sequence, opcode), None)
        if keys is None:
            if len(self._server_requests) < MAX_IN_FLIGHT:
                self._server_requests.add((frame.sequence, opcode))
        elif opcode in framing.LOOKUP_OPCODES:
            self.client.counters.lookup_hits += framing.lookup_hits(opcode, raw, keys)
        elif opcode in framing.WRITE_OPCODES:
            self.client.counters.writes += framing.granted_keys(opcode, raw, keys)
        elif opcode in framing.READ_OPCODES:
            self.client.counters.read_hits += framing.granted_keys(opcode, raw, keys)
        return [self._to_client(raw)] if self.open else []

    def _go_plain(self, reason: str, now: float) -> list[Action]:
        self.plain_reason = reason
        if self.state is not LinkState.RELAY or self._mode is Mode.RECOVER:
            return [*self.client_lost()]
        self._enter(LinkState.PLAIN, now)
        self.in_flight.clear()
        actions: list[Action] = [SendServer(frame.raw) for frame, _, _ in self._flight.release()]
        if self._from_client.rest:
            actions.append(SendServer(self._from_client.rest))
        if self._from_server.rest:
            actions.append(SendClient(self._from_server.rest))
        return actions

    # -- answers of our own ----------------------------------------------------------------------

    def _notice_silence(self, now: float) -> list[Action]:
        quiet = now - self._heard_at
        if not (self.in_flight or self.silent) or quiet <= self._times.silence:
            return []
        if quiet > self._times.registration_silence:
            return self.server_lost(now)
        if not self._flight.urgent:
            return []
        self.silent = True
        return self._send_answers(self._flight.give_up_calls(framing.error_answer))

    def _fill_gaps(self, now: float) -> list[Action]:
        """Wakes callers whose requests never got out, see ``Numbers``."""
        client = self.client
        if not client.identity.is_process or not self.open or self.state is LinkState.PLAIN:
            return []
        numbers = client.numbers.take_missing(now - self._times.missing)
        if not self._guessed and now - self._born_at > self._times.missing:
            self._guessed = True
            if not self.pending and now - self._client_spoke_at > self._times.missing / 2:
                numbers += client.numbers.next_ones()  # perhaps quiet because its only thread is stuck
        if not numbers:
            return []
        return [self._to_client(b"".join(framing.wake_up(number) for number in numbers))]

    def _leave(self, now: float) -> list[Action]:
        """FIN, and the answers with it or on the client's next link."""
        self.client.detach(self)
        if self._farewell or not self.client.identity.is_process:
            actions = self._answer_everything(framing.miss_answer)
        else:
            actions = []
            for answer in self._flight.take_answers(framing.miss_answer):
                self.client.carry(answer, now)
        actions.append(FinishClient())
        if self._has_server:
            actions.append(DropServer())
            self._has_server = False
        self._enter(LinkState.LEFT, now)
        return actions

    def _answer_everything(self, make: Callable[[int, int, int], bytes]) -> list[Action]:
        return self._send_answers(self._flight.take_answers(make))

    def _send_answers(self, answers: list[bytes]) -> list[Action]:
        self.client.counters.synthetic_answers += len(answers)
        return [self._to_client(b"".join(answers))] if answers else []

    def _expire_held(self, now: float) -> list[Action]:
        held = self._flight.held
        if not held or now - held[0][2] < self._times.hold:
            return []
        return [self._synthetic(miss(frame, keys)) for frame, keys, _ in self._flight.release()]

    def _synthetic(self, answer: bytes) -> Action:
        self.client.counters.synthetic_answers += 1
        return self._to_client(answer)

    def _to_client(self, data: bytes) -> SendClient:
        self.client.counters.bytes_to_client += len(data)
        return SendClient(data)

    def _enter(self, state: LinkState, now: float) -> None:
        self.state = state
        self._entered_at = now
