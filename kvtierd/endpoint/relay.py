"""The protocol of a client connection on the meta port: bytes go through a ``Link``."""

from __future__ import annotations

import time
from typing import cast

from kvtierd.endpoint.actions import (
    Action,
    CloseClient,
    DropServer,
    FinishClient,
    LinkState,
    RetireServer,
    SendClient,
    SendServer,
)
from kvtierd.endpoint.link import Link
from kvtierd.endpoint.pump import ClientConnection, ConnectionEvents, ServerConnection
from kvtierd.endpoint.retirement import retire
from kvtierd.memcache import framing


class MetaConnection(ClientConnection):
    """A client connection on the meta port: bytes go through a ``Link`` once there is one."""

    def __init__(self, events: ConnectionEvents) -> None:
        super().__init__(events)
        self.link: Link | None = None

    def start_link(self, link: Link, server: ServerConnection | None, greeting: bytes) -> None:
        """The handshake is done: ``greeting`` goes to the client, early bytes into the link."""
        self.link, self.server = link, server
        link.client.attach(link, self._deliver)
        self.transport.write(greeting[: framing.SERVER_HANDSHAKE_BYTES])
        self.run(link.deliver(link.client.take_carried()))
        if len(greeting) > framing.SERVER_HANDSHAKE_BYTES:
            self.run(link.server_data(greeting[framing.SERVER_HANDSHAKE_BYTES :], time.monotonic()))
        if self.early:
            early = bytes(self.early)
            self.early.clear()
            self.run(link.client_data(early, time.monotonic()))
        if server is not None:
            server.begin()
        self.regulate()

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        link, server = self.link, self.server
        if link is None:
            super().data_received(data)
            return
        if server is not None and link.passes_from_client(data):
            server.write(data)  # on its way first, written down behind it
            link.client_data(data, time.monotonic())
        else:
            self.run(link.client_data(data, time.monotonic()))
        if link.congested:
            self.regulate()

    def server_data(self, data: bytes) -> None:
        """Bytes from the MetaService."""
        link = self.link
        if link is None:
            return
        if link.passes_from_server(data) and not self.transport.is_closing():
            self.transport.write(data)
            link.server_data(data, time.monotonic())
        else:
            self.run(link.server_data(data, time.monotonic()))
        if not self.reading:
            self.regulate()

    def server_gone(self) -> None:
        """The MetaService closed this connection."""
        self.server = None
        self._events.backend_lost()
        if self.link is not None:
            self.run(self.link.server_lost(time.monotonic()))

    def eof_received(self) -> bool:
        """The client closed."""
        self.ended = True
        if self.link is not None:
            self.run(self.link.client_lost())
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        if self.link is not None:
            self.run(self.link.client_lost())
        super().connection_lost(exc)

    def wants_bytes(self) -> bool:
        """Also false while the client does not read its answers, or asks more than is answered."""
        if self.link is None:
            return super().wants_bytes()
        if self.link.state is LinkState.LEFT:
            return True
        blocked = self.write_paused or self.link.congested
        return not blocked and (self.server is None or not self.server.write_paused)

    def cut(self, *, farewell: bool = False) -> None:
        """Close in a quiet moment."""
        if self.link is None:
            self.transport.close()
        else:
            self.run(self.link.cut(time.monotonic(), farewell=farewell))

    def tick(self, now: float) -> None:
        """Time passed."""
        if self.link is not None:
            actions = self.link.tick(now)
            if actions:
                self.run(actions)
                if self.link.silent or isinstance(actions[0], DropServer):
                    self._events.backend_lost()
            if not self.reading:
                self.regulate()

    def run(self, actions: list[Action]) -> None:
        """Carries out what the link decided."""
        for action in actions:
            kind = type(action)
            if kind is SendServer:
                if self.server is not None:
                    self.server.write(cast("SendServer", action).data)
            elif kind is SendClient:
                if not self.transport.is_closing():
                    self.transport.write(cast("SendClient", action).data)
            else:
                self._run_rare(action)

    def _run_rare(self, action: Action) -> None:
        match action:
            case DropServer():
                server, self.server = self.server, None
                if server is not None:
                    server.abort()
            case RetireServer():
                server, self.server = self.server, None
                if server is not None:
                    retire(server.transport, action)
            case FinishClient():
                if not self.transport.is_closing():
                    self.transport.write_eof()
                self.regulate()
            case CloseClient(abort=True):
                self.transport.abort()
            case CloseClient():
                self.transport.close()
            case _:
                raise AssertionError(action)

    def _deliver(self, answer: bytes) -> None:
        if self.link is not None:
            self.run(self.link.deliver(answer))
