"""The endpoint process: listeners, links, the watcher, commands and the state file, tied together."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import time
from typing import Any

from kvtierd.endpoint.config import Address, EndpointConfig, Target
from kvtierd.endpoint.control import ControlServer
from kvtierd.endpoint.door import Doorman, Refused, Signal
from kvtierd.endpoint.identity import is_alive, port_owner
from kvtierd.endpoint.link import Link, LinkState, Mode
from kvtierd.endpoint.relay import ClientConnection, MetaConnection, StoreConnection
from kvtierd.endpoint.state import Admission, EndpointState
from kvtierd.endpoint.statefile import load_state, save_state
from kvtierd.endpoint.watcher import BackendWatcher
from kvtierd.errors import EndpointError

_log = logging.getLogger(__name__)
HURRIED_TICK_SECONDS = 0.003
PENDING_TICK_SECONDS = 0.02
IDLE_TICK_SECONDS = 0.1
SAVE_EVERY_SECONDS = 0.5
WIND_UP_SECONDS = 1.0
BACKLOG = 512
PORT_TAKEN = "endpoint.port-taken"
_COMMANDS: dict[str, frozenset[str]] = {
    "status": frozenset(),
    "set_target": frozenset({"meta", "config_store"}),
    "serve": frozenset(),
    "recover": frozenset(),
    "quiesce": frozenset({"timeout_seconds", "quiet_seconds"}),
    "admit": frozenset({"who"}),
    "cut": frozenset(),
}


def bind(address: Address) -> socket.socket:
    """A listening socket. Raises ``EndpointError``, ``endpoint.port-taken`` when somebody else has the port."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    # With the protocol named, asyncio sets TCP_NODELAY on what it accepts; without, answers wait 40 ms for an ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address.host, address.port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise EndpointError(
                f"cannot listen on {address}: {error.strerror or error}", code="endpoint.listen"
            ) from error
        owner = port_owner(address.port)
        raise EndpointError(
            f"port {address} is taken" + (f" by {owner}" if owner else ""),
            hint="stop that process, or change the port in [meta]",
            code=PORT_TAKEN,
        ) from error
    return listener


class EndpointService:
    """The running endpoint. ``start`` binds everything, ``run`` serves until ``stop`` is called."""

    def __init__(self, config: EndpointConfig) -> None:
        self._config = config
        self.state = EndpointState(
            config.target,
            purge_on_unclean=config.purge_on_unclean,
            quiesce_limit_seconds=config.quiesce_limit_seconds,
        )
        self._changed = Signal()
        self._watcher = BackendWatcher(self.state, config.silence_seconds, self._backend_changed)
        self._doorman = Doorman(config, self.state, self._watcher, self._changed)
        self._control = ControlServer(config.control_socket, self._command)
        self._connections: set[ClientConnection] = set()
        self._doors: dict[ClientConnection, asyncio.Task[None]] = {}
        self._servers: list[asyncio.Server] = []
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()  # a deadline of milliseconds has begun
        self._started_unix_seconds = time.time()
        self._refused = 0
        self._refusal_logged_at = 0.0
        self._saved_revision = -1
        self._applied_mode = Mode.SERVE
        self._quiescing = False

    # -- life ------------------------------------------------------------------------------------

    async def start(self, listeners: tuple[socket.socket, socket.socket]) -> None:
        """Restores the state and opens the control socket and both ports (meta, config store)."""
        saved = load_state(self._config.state_file)
        if saved is not None:
            try:
                self.state.restore(saved, time.monotonic(), time.time())
            except (EndpointError, KeyError, ValueError, TypeError, AttributeError) as error:
                _log.warning("state file %s is damaged (%r): starting anew", self._config.state_file, error)
            self.state.clients.forget_ended(is_alive)
        self._applied_mode = self.state.mode
        await self._control.start()
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
            asyncio.create_task(self._save_for_ever(), name="saver"),
            asyncio.create_task(self._stopping.wait(), name="stop"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for server in self._servers:
                server.close()
            await self._wind_up()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._control.close()
            if (value := self._unsaved()) is not None:
                self._save(value)
            self._doorman.close()

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
        if len(self._connections) >= self._config.max_connections:
            self._refuse(connection, f"{self._config.max_connections} connections are open already")
            return
        self._connections.add(connection)
        task = asyncio.create_task(self._let_in(connection))
        self._doors[connection] = task
        task.add_done_callback(lambda _: self._doors.pop(connection, None))

    async def _let_in(self, connection: ClientConnection) -> None:
        try:
            await self._doorman.let_in(connection)
            self._hurry.set()
        except Refused as refusal:
            self._refuse(connection, str(refusal))
        except Exception:  # noqa: BLE001 - one client's trouble must not be everyone's
            _log.exception("a connection could not be let in")
            connection.transport.abort()

    def _refuse(self, connection: ClientConnection, why: str) -> None:
        self._refused += 1
        now = time.monotonic()
        if now - self._refusal_logged_at > 1.0:  # one line a second, whatever a hostile client does
            self._refusal_logged_at = now
            peer = connection.transport.get_extra_info("peername")
            _log.warning("refused a connection from %s: %s (%d so far)", peer, why, self._refused)
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

    def _links(self) -> list[tuple[MetaConnection, Link]]:
        return [
            (c, c.link) for c in self._connections if isinstance(c, MetaConnection) and c.link is not None
        ]

    def _backend_changed(self) -> None:
        """The watcher asked, and this is how it is now."""
        if self.state.backend.reachable:
            for connection, link in self._links():
                if link.state is LinkState.ORPHAN:
                    connection.cut()
            self._hurry.set()
        self._apply_mode()
        self._changed.notify()

    def _apply_mode(self) -> None:
        if self.state.mode is self._applied_mode:
            return
        self._applied_mode = self.state.mode
        _log.warning("mode %s: %s", self.state.mode, self.state.mode_reason)
        now = time.monotonic()
        for connection, link in self._links():
            connection.run(link.set_mode(self.state.mode, now))

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
        for connection, link in self._links():
            if link.hurried or link.pending or not connection.reading:
                connection.tick(now)
            if link.hurried:
                pause = HURRIED_TICK_SECONDS
            elif link.pending:
                pause = min(pause, PENDING_TICK_SECONDS)
        if self.state.expire(now):
            self._apply_mode()
        return pause

    # -- commands --------------------------------------------------------------------------------

    async def _command(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if command not in _COMMANDS:
            raise EndpointError(
                f"unknown command {command!r}", hint=f"known: {', '.join(_COMMANDS)}", code="endpoint.request"
            )
        unknown = set(arguments) - _COMMANDS[command]
        if unknown:
            raise EndpointError(f"{command} takes no {min(unknown)!r}", code="endpoint.request")
        match command:
            case "status":
                return self.status()
            case "set_target":
                return self._set_target(arguments)
            case "serve" | "recover":
                (self.state.serve if command == "serve" else self.state.recover)()
                self._apply_mode()
                self._changed.notify()
                return {"mode": self.state.mode.value}
            case "quiesce":
                return await self._quiesce(
                    _seconds(arguments, "timeout_seconds", None, 600.0),
                    _seconds(arguments, "quiet_seconds", 0.5, 60.0),
                )
            case "admit":
                return self._admit(arguments.get("who"))
            case _:
                return {"cut": self._cut()}

    def _set_target(self, arguments: dict[str, Any]) -> dict[str, Any]:
        target = Target.parse(arguments)
        if {target.meta, target.config_store} & {self._config.listen.meta, self._config.listen.config_store}:
            raise EndpointError("the target is the endpoint itself", code="endpoint.request")
        self.state.set_target(target)
        self._watcher.doubt()
        return {"target": self.state.target.as_dict()}

    def _admit(self, who: object) -> dict[str, Any]:
        try:
            admission = Admission(str(who))
        except ValueError:
            raise EndpointError(
                f'who: expected "survivors" or "all", got {who!r}', code="endpoint.request"
            ) from None
        self.state.admit(admission)
        self._changed.notify()
        return {"admission": admission.value, "waiting": self._doorman.waiting}

    def _cut(self) -> int:
        connected = [c for c in self._connections if c not in self._doors]
        for connection in connected:
            connection.cut()
        self._hurry.set()
        return len(connected)

    async def _quiesce(self, timeout_seconds: float, quiet_seconds: float) -> dict[str, Any]:
        if self._quiescing:
            raise EndpointError("another quiesce is under way", code="endpoint.busy")
        started = time.monotonic()
        self._quiescing = True
        try:
            self.state.quiesce(started)
            self._apply_mode()
            while (now := time.monotonic()) - started < timeout_seconds:
                if self.state.mode is not Mode.QUIESCE:
                    raise EndpointError(
                        f"the quiesce was overtaken by mode {self.state.mode.value}",
                        why=self.state.mode_reason,
                        code="endpoint.not-quiet",
                    )
                if self._quiet_for(now, started) >= quiet_seconds:
                    self.state.mark_quiesced()
                    return {"mode": self.state.mode.value, "took_seconds": now - started}
                await asyncio.sleep(PENDING_TICK_SECONDS / 2)
        except asyncio.CancelledError:
            self._end_quiesce()
            raise
        finally:
            self._quiescing = False
        in_flight = sum(len(link.in_flight) for _, link in self._links())
        self._end_quiesce()
        raise EndpointError(
            f"not quiet within {timeout_seconds:g} s: {in_flight} requests in flight",
            hint="try again with more time, or stop without it and let the pool be purged",
            code="endpoint.not-quiet",
        )

    def _end_quiesce(self) -> None:
        if self.state.mode is Mode.QUIESCE and not self.state.quiesced:
            self.state.serve()
            self._apply_mode()

    def _quiet_for(self, now: float, started: float) -> float:
        last = started
        for _, link in self._links():
            if link.in_flight or link.state is LinkState.PLAIN:
                return 0.0
            last = max(last, link.traffic_at)
        return now - last

    # -- status ----------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The answer to ``status``.

        ``mode``, ``mode_reason``, ``quiesced``, ``admission``, ``target`` {meta, config_store}, ``backend`` {reachable,
        reachable_since_unix_seconds, last_error, deaths}, ``survivors`` {expected, back}: processes that had joined
        and still run, and how many of them have a link to the present MetaService; ``connections``, ``waiting``,
        ``orphans`` (links without a MetaService), ``plain_relay`` {count, reasons}, ``refused``, ``started_unix_seconds``,
        ``clients``: a list of ``ClientProcess.as_dict``, connected ones first, and ``totals`` in the same counters.
        """
        self.state.clients.forget_ended(is_alive)
        links = self._links()
        plain = [link for _, link in links if link.state is LinkState.PLAIN]
        back = {id(c.client) for c, _ in links if c.server is not None}
        survivors = self.state.clients.survivors()
        rows = sorted(self.state.clients, key=lambda c: (-c.links, c.connected_unix_seconds))
        return {
            "mode": self.state.mode.value,
            "mode_reason": self.state.mode_reason,
            "quiesced": self.state.quiesced,
            "admission": self.state.admission.value,
            "target": self.state.target.as_dict(),
            "backend": self.state.backend.as_dict(),
            "survivors": {"expected": len(survivors), "back": sum(id(c) in back for c in survivors)},
            "connections": len(self._connections),
            "waiting": self._doorman.waiting,
            "orphans": sum(c.server is None for c, _ in links),
            "plain_relay": {
                "count": len(plain),
                "reasons": sorted({link.plain_reason for link in plain})[:8],
            },
            "refused": self._refused,
            "started_unix_seconds": self._started_unix_seconds,
            # A dead process's config-store connection stays until the MetaService lets go of it.
            "clients": [
                row | {"connected": row["connected"] and is_alive(client.identity)}
                for client, row in ((client, client.as_dict()) for client in rows)
            ],
            "totals": self.state.clients.totals().as_dict(),
        }

    # -- the state file --------------------------------------------------------------------------

    async def _save_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SAVE_EVERY_SECONDS)
            if (value := self._unsaved()) is not None:
                await asyncio.to_thread(self._save, value)

    def _unsaved(self) -> dict[str, Any] | None:
        """What has to be saved, taken on the loop: beside it, clients could come and go while it is collected."""
        if self.state.revision == self._saved_revision:
            return None
        self._saved_revision = self.state.revision
        return self.state.to_save()

    def _save(self, value: dict[str, Any]) -> None:
        try:
            save_state(self._config.state_file, value)
        except EndpointError as error:
            _log.error("%s", error)


def _seconds(arguments: dict[str, Any], name: str, default: float | None, most: float) -> float:
    value = arguments.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise EndpointError(
            f"{name}: expected seconds from 0 to {most:g}, got {value!r}", code="endpoint.request"
        )
    return float(value)
