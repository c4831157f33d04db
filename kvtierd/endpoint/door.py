"""What happens to a connection before it is relayed: who is it, may it come in, is there anyone to talk to.

A client that must wait is kept waiting with its connection accepted and its handshake unanswered. Measured with
real clients: ``init`` then simply takes longer (held for 250 s and more) and completes within 40 ms of the release.
Refused instead, ``init`` fails at once on the meta port (-1) and hangs in retries on the config-store port.

To another node's MetaService the way leads through the door of that node's endpoint as well: it may keep a newcomer
waiting, and it tells a provider that is back alone that it cannot be taken back (see ``hop``).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import time
from collections.abc import Iterator

from kvtierd.endpoint.actions import LinkTimes, Mode
from kvtierd.endpoint.clients import ClientProcess, Identity
from kvtierd.endpoint.config import EndpointConfig
from kvtierd.endpoint.dial import Dialer, HopRefused, MetaGoneError
from kvtierd.endpoint.hop import Answer, Port, Verdict
from kvtierd.endpoint.identity import HostPort, find_client
from kvtierd.endpoint.link import Link
from kvtierd.endpoint.pump import ClientConnection, ServerConnection
from kvtierd.endpoint.relay import MetaConnection
from kvtierd.endpoint.state import EndpointState
from kvtierd.endpoint.targets import PeerTarget
from kvtierd.endpoint.watcher import BackendWatcher
from kvtierd.memcache import framing

_log = logging.getLogger(__name__)
DIAL_SECONDS = 2.0
RETRY_SECONDS = 0.05
HOP_RETRY_SECONDS = 0.25
CARRY_PATIENCE_SECONDS = 0.3  # then a caller has waited long enough for the MetaService to come back
LOOK_AGAIN_SECONDS = 0.5


class Refused(Exception):  # noqa: N818
    """The connection cannot be let in; the text says why."""


class Signal:
    """Wakes all who wait, each time something changed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wakes everyone who waits now."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_seconds: float) -> None:
        """Until the next ``notify``, or the time-out."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._event.wait()
        except TimeoutError:
            pass


class Doorman:
    """Takes connections from accept to relay. One task per connection, only for that stretch."""

    def __init__(
        self,
        config: EndpointConfig,
        state: EndpointState,
        dialer: Dialer,
        watcher: BackendWatcher,
        changed: Signal,
    ) -> None:
        self._config = config
        self._state = state
        self._dialer = dialer
        self._watcher = watcher
        self._changed = changed
        # A cut network must not end a registration earlier than the connection.
        registration = max(10.0, config.hop_seconds + 5.0) if config.peers else 10.0
        self._times = LinkTimes(
            silence=config.silence_seconds, hold=config.hold_seconds, registration_silence=registration
        )
        self._finder = concurrent.futures.ThreadPoolExecutor(1, "identity")
        self.waiting = 0

    def close(self) -> None:
        """Lets the worker thread end."""
        self._finder.shutdown(wait=False, cancel_futures=True)

    async def let_in(self, connection: ClientConnection) -> None:
        """The whole way in. Raises ``Refused``; the caller closes the connection then."""
        client = await self._identify(connection)
        connection.client = client
        client.links += 1
        client.disconnected_at = None
        if isinstance(connection, MetaConnection):
            await self._meta(connection, client)
        else:
            await self._config_store(connection, client)

    async def _identify(self, connection: ClientConnection) -> ClientProcess:
        remote: HostPort = connection.transport.get_extra_info("peername")[:2]
        local: HostPort = connection.transport.get_extra_info("sockname")[:2]
        known = [c.identity.pid for c in self._state.clients if c.identity.is_process]
        try:
            identity, name = await asyncio.get_running_loop().run_in_executor(
                self._finder, find_client, remote, local, known
            )
        except RuntimeError:  # the executor is closing
            raise Refused("the endpoint is stopping") from None
        return self._state.clients.obtain(identity, name, time.time())

    # -- the meta port ---------------------------------------------------------------------------

    async def _meta(self, connection: MetaConnection, client: ClientProcess) -> None:
        try:
            hello = await read_handshake(connection, self._config.handshake_seconds)
            client.rank = framing.parse_client_handshake(hello)
            client.has_rank = client.rank is not None
        except framing.FramingError as error:
            _log.warning("client %s: %s; relayed without a look inside", _who(client), error)
            await self._plain(connection, client, str(error))
            return
        deadline = time.monotonic() + self._config.waiting_seconds
        while True:
            if not await self._wait(connection, client, deadline, may_deliver=True):
                link = Link(client, self._state.link_mode, time.monotonic(), self._times, connected=False)
                connection.start_link(link, None, framing.HANDSHAKE_ACCEPTED)
                return
            generation = self._state.generation
            reached = await self._dial(connection, client, Port.META)
            if reached is None:
                continue
            server, answer = reached
            try:
                greeting = await server.shake_hands(hello, self._config.silence_seconds)
            except OSError:
                server.abort()
                self._watcher.doubt()
                await asyncio.sleep(RETRY_SECONDS)
                continue
            if generation != self._state.generation or not self._open_for(client):
                server.abort()  # the master has changed meanwhile, or the door was closed
                continue
            if not greeting.startswith(framing.HANDSHAKE_ACCEPTED):
                connection.transport.write(greeting)
                server.abort()
                raise Refused(f"the MetaService refused the handshake with {greeting[:2].hex()}")
            self._state.joined(client)
            self._note_era(client, Port.META, answer)
            connection.start_link(
                Link(client, self._state.link_mode, time.monotonic(), self._times), server, greeting
            )
            return

    async def _plain(self, connection: MetaConnection, client: ClientProcess, reason: str) -> None:
        deadline = time.monotonic() + self._config.waiting_seconds
        while True:
            await self._wait(connection, client, deadline, plain=True)
            reached = await self._dial(connection, client, Port.META)
            if reached is not None:
                break
        self._state.joined(client)
        link = Link.plain(client, time.monotonic(), self._times, reason)
        connection.start_link(link, reached[0], b"")

    # -- the config-store port -------------------------------------------------------------------

    async def _config_store(self, connection: ClientConnection, client: ClientProcess) -> None:
        deadline = time.monotonic() + self._config.waiting_seconds
        while True:
            await self._wait(connection, client, deadline)
            reached = await self._dial(connection, client, Port.CONFIG_STORE)
            if reached is not None:
                self._note_era(client, Port.CONFIG_STORE, reached[1])
                connection.attach(reached[0])
                return

    # -- both ------------------------------------------------------------------------------------

    async def _wait(
        self,
        connection: ClientConnection,
        client: ClientProcess,
        deadline: float,
        *,
        may_deliver: bool = False,
        plain: bool = False,
    ) -> bool:
        """Until the client may be connected. False: it should be shaken hands with by us, to deliver answers."""
        if self._open_for(client, plain=plain):
            return True
        with self._counted(client):
            while not self._open_for(client, plain=plain):
                now = time.monotonic()
                if connection.ended:
                    raise Refused("the client gave up waiting")
                if now >= deadline:
                    raise Refused(f"waited {self._config.waiting_seconds:g} s in vain ({self._why(client)})")
                if (
                    may_deliver
                    and client.carried_since is not None
                    and now - client.carried_since > CARRY_PATIENCE_SECONDS
                ):
                    return False
                await self._changed.wait(min(LOOK_AGAIN_SECONDS, deadline - now))
        return True

    @contextlib.contextmanager
    def _counted(self, client: ClientProcess) -> Iterator[None]:
        """A place in the waiting room. Raises ``Refused`` when there is none."""
        if self.waiting >= self._config.waiting_room:
            raise Refused(f"the waiting room is full ({self._config.waiting_room} connections)")
        self.waiting += 1
        client.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1
            client.waiting -= 1

    def _open_for(self, client: ClientProcess, *, plain: bool = False) -> bool:
        state = self._state
        if state.route is None or not state.backend.reachable or not state.admits(client):
            return False
        return not plain or state.link_mode is not Mode.RECOVER

    def _why(self, client: ClientProcess) -> str:
        if client.stranded:
            return "its memory is lost to the pool until the process is started anew"
        if not self._state.backend.reachable:
            return f"no MetaService: {self._state.backend.last_error}"
        return "admission is for survivors" if not self._state.admits(client) else f"mode {self._state.mode}"

    async def _dial(
        self, connection: ClientConnection, client: ClientProcess, port: Port
    ) -> tuple[ServerConnection, Answer | None] | None:
        """A connection for this client. ``None``: not now, look again whether it may be connected."""
        server: ServerConnection | None = None

        def opener() -> ServerConnection:
            nonlocal server
            server = ServerConnection(connection)
            return server

        generation = self._state.generation
        try:
            answer = await self._dialer.open(
                port, opener, DIAL_SECONDS, era=_era_of(client), joined=client.joined
            )
        except HopRefused as refusal:
            await self._refused_there(client, refusal.answer)
            return None
        except OSError as error:
            _log.info("no connection for %s: %s", _who(client), error)
            self._watcher.doubt()
            hop = isinstance(self._state.target, PeerTarget) and not isinstance(error, MetaGoneError)
            await asyncio.sleep(HOP_RETRY_SECONDS if hop else RETRY_SECONDS)
            return None
        assert server is not None
        if generation != self._state.generation or not self._open_for(client):
            server.abort()
            return None
        if answer is not None and answer.life != self._state.backend.life:
            server.abort()  # another MetaService than the one known here: that is to be noticed first
            self._watcher.doubt()
            await asyncio.sleep(RETRY_SECONDS)
            return None
        return server, answer

    def _note_era(self, client: ClientProcess, port: Port, answer: Answer | None) -> None:
        if answer is not None and client.eras.get(port) != answer.era:
            client.eras[port] = answer.era
            self._state.revision += 1

    async def _refused_there(self, client: ClientProcess, answer: Answer) -> None:
        if answer.verdict == Verdict.LATE_RETURN:
            if self._state.strand(client):
                _log.warning(
                    "client %s brings memory and lost its connection alone: the others do not take it back, "
                    "so it waits until it is started anew",
                    _who(client),
                )
            return
        if answer.verdict != Verdict.NOT_ADMITTED:
            self._watcher.doubt()
        with self._counted(client):
            await asyncio.sleep(LOOK_AGAIN_SECONDS)


async def read_handshake(connection: ClientConnection, seconds: float) -> bytes:
    """The client's 16 bytes. Raises ``FramingError`` as soon as they cannot be a handshake, taking none; ``Refused``."""
    deadline = time.monotonic() + seconds
    while True:
        early = bytes(connection.early[: framing.CLIENT_HANDSHAKE_BYTES])
        if not framing.HANDSHAKE_MAGIC.startswith(early[:4]):
            raise framing.FramingError(f"not a MetaService handshake: {early.hex()}")
        if len(early) == framing.CLIENT_HANDSHAKE_BYTES:
            del connection.early[: framing.CLIENT_HANDSHAKE_BYTES]
            return early
        left = deadline - time.monotonic()
        if connection.ended or left <= 0:
            raise Refused(f"{len(early)} bytes of a handshake, then nothing")
        connection.early_arrived.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left):
                await connection.early_arrived.wait()


def _era_of(client: ClientProcess) -> int:
    """The era in which it joined with both its links. Only a process that brings memory is missed when one breaks."""
    era = client.eras.get(Port.META, 0)
    return era if client.provider and client.joined and client.eras.get(Port.CONFIG_STORE) == era else 0


def _who(client: ClientProcess) -> str:
    identity: Identity = client.identity
    return f"{client.name or '?'} (pid {identity.pid})" if identity.is_process else identity.address
