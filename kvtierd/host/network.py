"""Network interfaces with their addresses, and the TCP ports that are listened on.

On this host psutil answers. Under another root only what files tell is known: no addresses, no port owners.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import struct

import psutil

from kvtierd.host.view import HostView
from kvtierd.plan.inventory import Nic, PortOwner

_LISTEN = "0A"  # the state's number in /proc/net/tcp


def read_nics(view: HostView) -> tuple[Nic, ...]:
    """The interfaces, sorted by name; link-local IPv6 addresses are left out, since they need a zone to be used.

    Raises:
        OSError: the kernel does not answer.
    """
    if not view.live:
        return tuple(_nic_from_files(view, name) for name in view.names("/sys/class/net"))
    addresses = psutil.net_if_addrs()
    stats = psutil.net_if_stats()
    nics = []
    for name in sorted(addresses.keys() | stats.keys()):
        stat = stats.get(name)
        nics.append(
            Nic(
                name=name,
                addresses=tuple(
                    entry.address
                    for entry in addresses.get(name, ())
                    if entry.family in (socket.AF_INET, socket.AF_INET6) and "%" not in entry.address
                ),
                up=stat.isup if stat else False,
                speed_mbit=stat.speed if stat and stat.speed > 0 else None,
            )
        )
    return tuple(nics)


def read_ports(view: HostView) -> tuple[PortOwner, ...]:
    """The listening TCP sockets, sorted by port. The owner is ``None`` where we may not look (not root).

    Raises:
        OSError: the kernel does not answer.
    """
    if not view.live:
        sockets = {
            (address, port)
            for name in ("/proc/net/tcp", "/proc/net/tcp6")
            for address, port in parse_listeners(view.text(name) or "")
        }
        return tuple(
            PortOwner(address=address, port=port)
            for address, port in sorted(sockets, key=lambda item: (item[1], item[0]))
        )
    owners: dict[tuple[int, str], PortOwner] = {}
    for connection in psutil.net_connections("tcp"):
        if connection.status != psutil.CONN_LISTEN or not connection.laddr:
            continue
        key = (connection.laddr.port, connection.laddr.ip)
        # Forked servers share a socket; the lowest pid is the one that opened it.
        known = owners.get(key)
        if known is None or (
            connection.pid is not None and (known.pid is None or connection.pid < known.pid)
        ):
            owners[key] = PortOwner(
                address=connection.laddr.ip, port=connection.laddr.port, pid=connection.pid
            )
    return tuple(_named(owners[key]) for key in sorted(owners))


def process_name(pid: int) -> str | None:
    """The name of a process, ``None`` when it has gone or may not be looked at."""
    try:
        return psutil.Process(pid).name()
    except (psutil.Error, OSError):
        return None


def parse_listeners(text: str) -> list[tuple[str, int]]:
    """(address, port) of the listening sockets in ``/proc/net/tcp`` or ``tcp6``; odd lines are skipped."""
    found = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 4 or fields[3] != _LISTEN:
            continue
        match = re.fullmatch(r"([0-9A-F]{8}|[0-9A-F]{32}):([0-9A-F]{4})", fields[1])
        if match:
            found.append((_address(match[1]), int(match[2], 16)))
    return found


def _address(digits: str) -> str:
    """The kernel prints addresses as 32-bit words in the order of the machine: little-endian on both of ours."""
    words = [int(digits[start : start + 8], 16) for start in range(0, len(digits), 8)]
    return str(ipaddress.ip_address(struct.pack(f"<{len(words)}I", *words)))


def _named(owner: PortOwner) -> PortOwner:
    if owner.pid is None:
        return owner
    return owner.model_copy(update={"process": process_name(owner.pid)})


def _nic_from_files(view: HostView, name: str) -> Nic:
    here = f"/sys/class/net/{name}"
    speed = view.integer(f"{here}/speed")
    return Nic(
        name=name,
        up=view.text(f"{here}/operstate") in ("up", "unknown"),  # lo says "unknown"
        speed_mbit=speed if speed is not None and speed > 0 else None,
    )
