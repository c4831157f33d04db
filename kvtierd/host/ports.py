"""Whether TCP ports can be bound, and who has those that cannot.

The kernel is asked by binding, since a list of sockets misses other network namespaces' rules, reserved
ranges and addresses this host does not have. The owner is looked up only for ports that are taken.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Iterable

from kvtierd.errors import HostError
from kvtierd.host.network import read_ports
from kvtierd.host.view import HostView
from kvtierd.plan.inventory import PortOwner, Record


class PortCheck(Record):
    """One port: free, or why not. ``owner`` is set when it is taken and the owner could be found."""

    address: str
    port: int
    free: bool
    reason: str = ""
    owner: PortOwner | None = None


def check_ports(wanted: Iterable[tuple[str, int]]) -> tuple[PortCheck, ...]:
    """Tries to bind each (address, port) for an instant, without listening, so that no client strays in. Never raises.

    Works without root: then the owner of another user's port is unknown, and the reason says so.
    """
    checks = [(address, port, _try_bind(address, port)) for address, port in wanted]
    listeners: tuple[PortOwner, ...] = ()
    if any(number == errno.EADDRINUSE for _, _, number in checks):
        try:
            listeners = read_ports(HostView())
        except OSError:
            listeners = ()
    return tuple(_describe(address, port, number, listeners) for address, port, number in checks)


def require_ports(wanted: Iterable[tuple[str, int]]) -> None:
    """Like ``check_ports``, for callers that cannot go on without these ports.

    Raises:
        HostError: code ``host.port-taken``; names every port that cannot be bound, and its owner.
    """
    bad = [check for check in check_ports(wanted) if not check.free]
    if bad:
        raise HostError(
            "; ".join(check.reason for check in bad),
            why="every port must be free before the unit that uses it starts",
            hint="stop the owner, or give kvtierd another port in the settings",
            code="host.port-taken",
        )


def find_owner(address: str, port: int, listeners: Iterable[PortOwner]) -> PortOwner | None:
    """The listener that keeps ``address:port`` from being bound: the same address, or a wildcard on either side."""
    on_port = [owner for owner in listeners if owner.port == port]
    for owner in on_port:
        if owner.address == address:
            return owner
    return next((o for o in on_port if _wildcard(o.address) or _wildcard(address)), None)


def _try_bind(address: str, port: int) -> int:
    """0 when the port can be had, else the errno."""
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    except ValueError:
        return errno.EINVAL
    if not 0 < port < 65536:
        return errno.EINVAL
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            # Connections in TIME_WAIT do not count: servers set this too.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind((address, port))
    except OSError as exc:
        return exc.errno or errno.EIO
    return 0


def _describe(address: str, port: int, number: int, listeners: tuple[PortOwner, ...]) -> PortCheck:
    if number == 0:
        return PortCheck(address=address, port=port, free=True)
    shown = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    owner = None
    if number == errno.EADDRINUSE:
        owner = find_owner(address, port, listeners)
        reason = f"{shown} is taken by {_who(owner)}"
    elif number == errno.EADDRNOTAVAIL:
        reason = f"{shown} cannot be bound: this host does not have the address {address}"
    elif number in (errno.EACCES, errno.EPERM):
        reason = f"{shown} cannot be bound: ports below 1024 need root (or CAP_NET_BIND_SERVICE)"
    elif number == errno.EINVAL:
        reason = f"{shown} is not a numeric address with a port from 1 to 65535"
    else:
        reason = f"{shown} cannot be bound: {os.strerror(number)}"
    return PortCheck(address=address, port=port, free=False, reason=reason, owner=owner)


def _who(owner: PortOwner | None) -> str:
    if owner is None or owner.pid is None:
        if os.geteuid() == 0:
            return "a process outside this PID namespace, or by a bound socket that does not listen"
        return "another user's process (its name can only be seen as root)"
    return f"{owner.process or 'a process'} (pid {owner.pid})"


def _wildcard(address: str) -> bool:
    return address in ("0.0.0.0", "::")
