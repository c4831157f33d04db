"""The endpoint process: listeners, links, the watcher, commands and the state file, tied together."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import socket
import time
from pathlib import Path

from kvtierd.endpoint.actions import LinkState, Mode
from kvtierd.endpoint.certificates import Certificates
from kvtierd.endpoint.config import EndpointConfig, load_config
from kvtierd.endpoint.control import ControlServer
from kvtierd.endpoint.dial import Dialer
from kvtierd.endpoint.door import Doorman, Refused, Signal
from kvtierd.endpoint.identity import is_alive
from kvtierd.endpoint.inbound import PeerGate
from kvtierd.endpoint.link import Link
from kvtierd.endpoint.listeners import BACKLOG
from kvtierd.endpoint.pump import ClientConnection, StoreConnection
from kvtierd.endpoint.relay import MetaConnection
from kvtierd.endpoint.saver import StateSaver
from kvtierd.endpoint.state import EndpointState
from kvtierd.endpoint.targets import AnyTarget
from kvtierd.endpoint.watcher import BackendWatcher
from kvtierd.errors import EndpointError

_log = logging.getLogger(__name__)
HURRIED_TICK_SECONDS = 0.003
PENDING_TICK_SECONDS = 0.02
IDLE_TICK_SECONDS = 0.1
WIND_UP_SECONDS = 1.0


class EndpointService:
    """The running endpoint. ``start`` binds everything, ``run`` serves until ``stop`` is called."""

    def __init__(self, config: EndpointConfig, config_path: Path | None = None) -> None:
        self.config = config
        self._config_path = config_path
        self.state = EndpointState(
            config.target,
            purge_on_unclean=config.purge_on_unclean,
            quiesce_limit_seconds=config.quiesce_limit_seconds,
            cluster=config.cluster,
        )
        self.certificates = None if config.tls is None else Certificates(config.tls)
        self.changed = Signal()
        self.dialer = Dialer(config, self.state, self.certificates)
        self.dialer.on_higher_epoch = self._heard_of_epoch
        self._watcher = BackendWatcher(self.state, self.dialer, config.silence_seconds, self._backend_changed)
        self.doorman = Doorman(config, self.state, self.dialer, self._watcher, self.changed)
        self.gate = PeerGate(config, self.state, self._watcher, self.certificates, self._see_epoch)
        self._saver = StateSaver(config.state_file, self.state)
        self._control: ControlServer | None = None
        self._connections: set[ClientConnection] = set()
        self._doors: dict[ClientConnection, asyncio.Task[None]] = {}
        self._servers: list[asyncio.Server] = []
        self._background: set[asyncio.Task[None]] = set()
        self._epoch_lock = asyncio.Lock()
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()  # a deadline of milliseconds has begun
        self.started_unix_seconds = time.time()
        self.refused = 0
        self._refusal_logged_at = 0.0
        self._applied_mode = Mode.SERVE

    # -- life ------------------------------------------------------------------------------------

    async def start(
        self, listeners: tuple[socket.socket, socket.socket], control: ControlServer | None = None
    ) -> None:
        """Restores the state and opens the control socket and both ports (meta, config store)."""
        self._saver.restore()
        self.state.clients.forget_ended(is_alive)
        self._applied_mode = self.state.link_mode
        if control is not None:
            await control.start()
            self._control = control
        loop = asyncio.get_running_loop()
        for listener, kind in zip(listeners, (MetaConnection, StoreConnection), strict=True):
            self._servers.append(
                await loop.create_server(
                    lambda kind=kind: kind(self),  # type: ignore[misc]
                    sock=listener,
                    backlog=BACKLOG,
                )
            )

    async def run(self) -> None:
        """Serves until ``stop``, then winds up every link."""
        tasks = [
            asyncio.create_task(self._watcher.run(), name="watcher"),
            asyncio.create_task(self._tick_for_ever(), name="ticker"),
            asyncio.create_task(self._saver.run(), name="saver"),
            asyncio.create_task(self._stopping.wait(), name="stop"),
        ]
        listening = asyncio.create_task(self.gate.run(), name="peers")
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for server in self._servers:
                server.close()
            listening.cancel()
            self.gate.close()
            await self._wind_up()
            for task in (*tasks, *self._background):
                task.cancel()
            await asyncio.gather(*tasks, listening, *self._background, return_exceptions=True)
            if self._control is not None:
                await self._control.close()
            self._saver.save_now()
            self.doorman.close()

    def stop(self) -> None:
        """Asks ``run`` to end."""
        self._stopping.set()

    async def _wind_up(self) -> None:
        for door in list(self._doors.values()):
            door.cancel()
        for connection in list(self._connections):
            connection.cut(farewell=True)
        deadline = time.monotonic() + WIND_UP_SECONDS
        while self._connections and time.monotonic() < deadline:
            self._tick()
            await asyncio.sleep(HURRIED_TICK_SECONDS)
        for connection in list(self._connections):
            connection.transport.abort()
        await asyncio.sleep(0)

    # -- connections -----------------------------------------------------------------------------

    def opened(self, connection: ClientConnection) -> None:
        """A client was accepted."""
        if len(self._connections) >= self.config.max_connections:
            self._refuse(connection, f"{self.config.max_connections} connections are open already")
            return
        self._connections.add(connection)
        task = asyncio.create_task(self._let_in(connection))
        self._doors[connection] = task
        task.add_done_callback(lambda _: self._doors.pop(connection, None))

    async def _let_in(self, connection: ClientConnection) -> None:
        try:
            await self.doorman.let_in(connection)
            self._hurry.set()
        except Refused as refusal:
            self._refuse(connection, str(refusal))
        except Exception:  # noqa: BLE001 - one client's trouble must not be everyone's
            _log.exception("a connection could not be let in")
            connection.transport.abort()

    def _refuse(self, connection: ClientConnection, why: str) -> None:
        self.refused += 1
        now = time.monotonic()
        if now - self._refusal_logged_at > 1.0:  # one line a second, whatever a hostile client does
            self._refusal_logged_at = now
            peer = connection.transport.get_extra_info("peername")
            _log.warning("refused a connection from %s: %s (%d so far)", peer, why, self.refused)
        connection.transport.close()

    def backend_lost(self) -> None:
        """A connection to the MetaService ended: find out whether it is there."""
        self._hurry.set()
        self._watcher.doubt()

    def gone(self, connection: ClientConnection) -> None:
        """A client connection is over."""
        self._connections.discard(connection)
        door = self._doors.pop(connection, None)
        if door is not None:
            door.cancel()
        client = connection.client
        if client is not None:
            client.links -= 1
            if client.links <= 0:
                client.disconnected_at = time.monotonic()

    @property
    def connection_count(self) -> int:
        """Accepted connections of clients, on both ports."""
        return len(self._connections)

    def links(self) -> list[tuple[MetaConnection, Link]]:
        """The links of this host's clients."""
        return [
            (c, c.link) for c in self._connections if isinstance(c, MetaConnection) and c.link is not None
        ]

    def all_links(self) -> list[tuple[MetaConnection, Link]]:
        """The links of this host's clients and of peers."""
        return self.links() + self.gate.meta_links()

    def _backend_changed(self) -> None:
        """The watcher asked, and this is how it is now."""
        if self.state.backend.reachable:
            for connection, link in self.links():
                if link.state is LinkState.ORPHAN:
                    connection.cut()
            self._hurry.set()
        self.mode_changed()

    def mode_changed(self) -> None:
        """Mode or admission may have changed: links are told, and everyone who waits looks again."""
        mode = self.state.link_mode
        if mode is not self._applied_mode:
            self._applied_mode = mode
            _log.warning(
                "mode %s: %s", mode, self.state.mode_reason if mode is self.state.mode else "no master"
            )
            now = time.monotonic()
            for connection, link in self.all_links():
                connection.run(link.set_mode(mode, now))
        self.changed.notify()

    def quiet_for(self, now: float, started: float) -> float:
        """For how long nothing has been on its way to or from the MetaService, ``started`` at the earliest."""
        last = started
        for _, link in self.all_links():
            if link.in_flight or link.state is LinkState.PLAIN:
                return 0.0
            last = max(last, link.traffic_at)
        return now - last

    def cut(self) -> int:
        """Has every client connect anew, those of peers too and all together (see ``hop``). How many links."""
        connected = [c for c in self._connections if c not in self._doors]
        for connection in connected:
            connection.cut()
        self.state.new_era(secrets.randbits(63) | 1)
        self._hurry.set()
        return len(connected) + self.gate.drop()

    # -- the master changes ----------------------------------------------------------------------

    async def set_target(self, target: AnyTarget | None, epoch: int | None) -> None:
        """The daemon says who is master. On disk before anything is done. Raises ``EndpointError`` (see ``epochs``)."""
        async with self._epoch_lock:
            epochs = self.state.epochs.told_target(epoch, target)
            told = None if self.state.suspended else self.state.target
            if (epochs, target) == (self.state.epochs, told):
                return  # again: no reason to ask the MetaService
            if epochs != self.state.epochs:
                await self._saver.save_epochs(epochs, target)
            if self.state.set_target(target, epochs):
                self._leave_master()
            self._master_changed()

    async def _see_epoch(self, epoch: int) -> None:
        """Another endpoint named this epoch."""
        async with self._epoch_lock:
            epochs = self.state.epochs.saw(epoch)
            if epochs == self.state.epochs:
                return
            try:
                await self._saver.save_epochs(epochs, self.state.target)
            except EndpointError as error:
                _log.error("%s", error)  # what was seen is true all the same
            self.state.see_epoch(epochs)
            if epochs.outdated:
                _log.warning("epoch %d has begun: this endpoint waits to be told its master", epoch)
            self._master_changed()

    def _heard_of_epoch(self, epoch: int) -> None:
        task = asyncio.create_task(self._see_epoch(epoch))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _leave_master(self) -> None:
        """Drops every link to the MetaService of before, at once; what was in flight is answered with errors."""
        self.gate.drop()
        now = time.monotonic()
        for connection in list(self._connections):
            if connection in self._doors:
                continue  # it finds out by itself
            if isinstance(connection, MetaConnection):
                if connection.link is not None:
                    connection.run(connection.link.server_lost(now))
            else:
                connection.cut()
        self._hurry.set()

    def _master_changed(self) -> None:
        self.mode_changed()
        self._watcher.doubt()

    async def reload(self) -> list[str]:
        """Reads the configuration file again; only ``peers`` may have changed. Returns their names.

        Raises:
            EndpointError: the file is wrong (``endpoint.config``), or something else in it has changed
                (``endpoint.restart-needed``).
        """
        if self._config_path is None:
            raise EndpointError("there is no configuration file", code="endpoint.request")
        config = await asyncio.to_thread(load_config, self._config_path)
        if dataclasses.replace(config, peers=self.config.peers) != self.config:
            changed = [
                field.name
                for field in dataclasses.fields(config)
                if field.name != "peers" and getattr(config, field.name) != getattr(self.config, field.name)
            ]
            raise EndpointError(
                f"{', '.join(changed)}: cannot change while the endpoint runs",
                hint="restart the endpoint",
                code="endpoint.restart-needed",
            )
        self.config = self.dialer.config = config
        self.gate.peers_changed(config)
        self._watcher.doubt()
        return [peer.name for peer in config.peers]

    # -- time ------------------------------------------------------------------------------------

    async def _tick_for_ever(self) -> None:
        while True:
            pause = self._tick()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._hurry.wait()
                await asyncio.sleep(min(pause, HURRIED_TICK_SECONDS))
            self._hurry.clear()

    def _tick(self) -> float:
        """Moves every link on; the time until the next tick."""
        now = time.monotonic()
        pause = IDLE_TICK_SECONDS
        for connection, link in self.all_links():
            if link.hurried or link.pending or not connection.reading:
                connection.tick(now)
            if link.hurried:
                pause = HURRIED_TICK_SECONDS
            elif link.pending:
                pause = min(pause, PENDING_TICK_SECONDS)
        if self.state.expire(now):
            self.mode_changed()
        return pause
