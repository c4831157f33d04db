"""The D-Bus connection to systemd: calls with deadlines, signals from systemd only, and connected again by itself.

Units do not notice when the message bus goes away, and nor must the daemon: calls fail with ``unit.no-bus`` until the
bus is back, and whoever listens is told then that it has missed something.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import structlog
from dbus_fast.aio.message_bus import MessageBus
from dbus_fast.constants import BusType, MessageType
from dbus_fast.errors import AuthError, DBusError
from dbus_fast.message import Message
from dbus_fast.unpack import unpack_variants

from kvtierd.errors import UnitError

SYSTEMD = "org.freedesktop.systemd1"
MANAGER = f"{SYSTEMD}.Manager"
MANAGER_PATH = "/org/freedesktop/systemd1"
CONNECT_LIMIT_SECONDS = 3.0
CALL_LIMIT_SECONDS = 10.0
RETRY_SECONDS = 0.05
FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS = 0.1, 5.0
# systemd is being executed again, or has not come back to a bus that was restarted: soon it answers.
_PASSING = frozenset(
    f"org.freedesktop.DBus.Error.{name}"
    for name in ("NoReply", "ServiceUnknown", "NameHasNoOwner", "Disconnected", "TimedOut", "Timeout")
)

_log = structlog.get_logger(__name__)


class SystemdRefusedError(Exception):
    """systemd answered with an error. ``name`` is D-Bus's, without the part before the last dot."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name.rpartition(".")[2]
        self.text = text


class LostCallError(Exception):
    """It is not known whether the call was carried out."""


class SystemdBus:
    """One connection, made when it is first needed.

    Args:
        on_signal: ``(path, member, body)`` of each signal of systemd that was asked for; must not block.
        on_gap: Signals may have been missed: the connection is new, or systemd was executed again.
    """

    def __init__(self, on_signal: Callable[[str, str, list[Any]], None], on_gap: Callable[[], None]) -> None:
        self._on_signal = on_signal
        self._on_gap = on_gap
        self._bus: MessageBus | None = None
        self._owner = ""  # systemd's unique name: anybody may send us signals
        self._watched: set[str] = set()
        self._connecting = asyncio.Lock()
        self._keeping: asyncio.Task[None] | None = None
        self._subscribing: asyncio.Future[None] | None = None
        self._closed = False
        self._why = "it has not been tried yet"

    @property
    def connected(self) -> bool:
        """Whether signals arrive just now."""
        return self._bus is not None and self._bus.connected and bool(self._owner)

    async def manager(self, member: str, signature: str = "", *body: Any, once: bool = False) -> list[Any]:
        """Calls a method of ``org.freedesktop.systemd1.Manager``; see ``call``."""
        return await self.call(MANAGER_PATH, MANAGER, member, signature, list(body), once=once)

    async def properties(self, path: str) -> dict[str, Any]:
        """All properties of all interfaces of this object."""
        (found,) = await self.call(path, "org.freedesktop.DBus.Properties", "GetAll", "s", [""])
        return dict(found)

    async def call(
        self,
        path: str,
        interface: str,
        member: str,
        signature: str,
        body: Sequence[Any],
        *,
        once: bool = False,
    ) -> list[Any]:
        """One call, repeated while systemd is away for a moment unless ``once``.

        Raises:
            SystemdRefusedError: systemd's own no.
            LostCallError: With ``once``: it may have been carried out or not.
            UnitError: ``unit.no-bus``: neither the bus nor systemd answers.
        """
        deadline = asyncio.get_running_loop().time() + CALL_LIMIT_SECONDS
        while True:
            bus = await self._connect()
            message = Message(
                destination=SYSTEMD,
                path=path,
                interface=interface,
                member=member,
                signature=signature,
                body=list(body),
            )
            try:
                async with asyncio.timeout(max(0.1, deadline - asyncio.get_running_loop().time())):
                    reply = await bus.call(message)
            except (TimeoutError, OSError, EOFError, DBusError) as error:
                passing = f"{type(error).__name__}: {error}"
            else:
                if reply.message_type is not MessageType.ERROR:
                    return list(unpack_variants(reply.body))
                name, text = reply.error_name or "", str(reply.body[0]) if reply.body else ""
                if name not in _PASSING:
                    raise SystemdRefusedError(name, text)
                passing = text or name
            if once:
                raise LostCallError(passing)
            if asyncio.get_running_loop().time() > deadline:
                raise _no_bus(f"systemd does not answer: {passing}")
            await asyncio.sleep(RETRY_SECONDS)

    async def watch(self, path: str) -> None:
        """Asks for the property changes of this object, once a connection."""
        if path in self._watched:
            return
        await self._add_match(
            await self._connect(),
            f"type='signal',sender='{SYSTEMD}',path='{path}',"
            "interface='org.freedesktop.DBus.Properties',member='PropertiesChanged'",
        )
        self._watched.add(path)

    async def close(self) -> None:
        """Ends the connection."""
        self._closed = True
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        self._drop()

    # --- the connection ---

    async def _connect(self) -> MessageBus:
        """The connection, which is made by the first caller; later it is made again in the background only."""
        if self._bus is not None and self._bus.connected:
            return self._bus
        if self._closed:
            raise _no_bus("the backend is closed")
        async with self._connecting:
            if self._bus is not None and self._bus.connected:
                return self._bus
            if self._keeping is None:
                await self._connect_now()
                self._keeping = asyncio.create_task(self._keep_connected(), name="systemd bus")
        if self._bus is None or not self._bus.connected:
            raise _no_bus(self._why)
        return self._bus

    async def _connect_now(self) -> None:
        self._drop()
        bus = None
        try:
            async with asyncio.timeout(CONNECT_LIMIT_SECONDS):
                bus = await MessageBus(bus_type=BusType.SYSTEM).connect()
                bus.add_message_handler(self._take)
                await self._add_match(
                    bus,
                    "type='signal',sender='org.freedesktop.DBus',interface='org.freedesktop.DBus',"
                    f"member='NameOwnerChanged',arg0='{SYSTEMD}'",
                )
                for member in ("JobRemoved", "UnitNew", "UnitRemoved"):
                    await self._add_match(
                        bus, f"type='signal',sender='{SYSTEMD}',interface='{MANAGER}',member='{member}'"
                    )
                await self._meet_systemd(bus)
        except (TimeoutError, OSError, EOFError, AuthError, DBusError, UnitError) as error:
            self._why = str(error) or type(error).__name__
            if bus is not None:
                bus.disconnect()
            raise _no_bus(self._why) from error
        self._bus = bus

    async def _meet_systemd(self, bus: MessageBus) -> None:
        """Learns systemd's unique name and asks it for its signals. It may not be back on the bus yet: no error."""
        reply = await bus.call(_to_bus("GetNameOwner", SYSTEMD))
        self._owner = str(reply.body[0]) if reply.message_type is not MessageType.ERROR else ""
        if self._owner:
            await bus.call(
                Message(destination=SYSTEMD, path=MANAGER_PATH, interface=MANAGER, member="Subscribe")
            )

    async def _keep_connected(self) -> None:
        backoff = FIRST_BACKOFF_SECONDS
        while True:
            bus = self._bus
            if bus is not None and bus.connected:
                with contextlib.suppress(Exception):
                    await bus.wait_for_disconnect()  # type: ignore[no-untyped-call]
                self._why = "the message bus ended the connection"
                _log.warning("the message bus is away; units go on")
                self._drop()
                self._on_gap()
            try:
                async with self._connecting:
                    await self._connect_now()
            except UnitError:
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, LONGEST_BACKOFF_SECONDS)
            else:
                backoff = FIRST_BACKOFF_SECONDS
                _log.info("the message bus is back")
                self._on_gap()

    def _drop(self) -> None:
        bus, self._bus, self._owner = self._bus, None, ""
        self._watched.clear()
        if bus is not None:
            bus.disconnect()

    @staticmethod
    async def _add_match(bus: MessageBus, rule: str) -> None:
        try:
            async with asyncio.timeout(CALL_LIMIT_SECONDS):
                reply = await bus.call(_to_bus("AddMatch", rule))
        except (TimeoutError, OSError, EOFError, DBusError) as error:
            raise _no_bus(str(error) or type(error).__name__) from error
        if reply.message_type is MessageType.ERROR:
            raise _no_bus(f"the message bus refuses to pass on signals: {reply.body}")

    def _take(self, message: Message) -> None:
        if message.message_type is not MessageType.SIGNAL:
            return
        if message.sender == "org.freedesktop.DBus" and message.member == "NameOwnerChanged":
            if message.body[0] == SYSTEMD:
                self._owner = str(message.body[2])
                self._on_gap()
                if self._owner and self._bus is not None:
                    self._subscribing = asyncio.ensure_future(self._subscribe_again(self._bus))
            return
        if message.sender == self._owner and self._owner and message.path and message.member:
            self._on_signal(message.path, message.member, list(unpack_variants(message.body)))

    async def _subscribe_again(self, bus: MessageBus) -> None:
        with contextlib.suppress(TimeoutError, OSError, EOFError, DBusError):
            async with asyncio.timeout(CALL_LIMIT_SECONDS):
                await self._meet_systemd(bus)
        self._on_gap()


def _to_bus(member: str, argument: str) -> Message:
    return Message(
        destination="org.freedesktop.DBus",
        path="/org/freedesktop/DBus",
        interface="org.freedesktop.DBus",
        member=member,
        signature="s",
        body=[argument],
    )


def _no_bus(why: str) -> UnitError:
    return UnitError(
        "systemd cannot be reached over D-Bus",
        why=why,
        hint="Units that run go on; look at `systemctl status dbus`.",
        code="unit.no-bus",
    )
