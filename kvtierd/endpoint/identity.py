"""Which process is at the other end of a local TCP connection.

TCP has no SO_PEERCRED. The kernel's sock_diag gives the inode of one socket by its four-tuple (about 20 us);
the owner is then found under /proc, first among the processes already known, then among all. Everything here
blocks and is called from one worker thread. Nothing here raises: what cannot be found gives ``None``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

from kvtierd.endpoint.clients import Identity

_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_NETLINK_SOCK_DIAG = 4
_NLMSG_HEADER = struct.Struct("=IHHII")
_ANY_STATE = 0xFFFF_FFFF
_NO_COOKIE = b"\xff" * 8
_INODE_OFFSET = _NLMSG_HEADER.size + 68
_MAX_PROCESSES = 100_000
_LISTEN_STATE = "0A"

HostPort = tuple[str, int]


def socket_inode(local: HostPort, remote: HostPort) -> int | None:
    """The inode of the TCP socket on this host that is bound to ``local`` and connected to ``remote``."""
    try:
        family = socket.AF_INET6 if ":" in local[0] else socket.AF_INET
        source, destination = (socket.inet_pton(family, end[0]).ljust(16, b"\0") for end in (local, remote))
        request = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 0, _ANY_STATE)
        request += (
            struct.pack("!HH", local[1], remote[1]) + source + destination + struct.pack("=I", 0) + _NO_COOKIE
        )
        header = _NLMSG_HEADER.pack(
            _NLMSG_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0
        )
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as netlink:
            netlink.settimeout(1.0)
            netlink.send(header + request)
            answer = netlink.recv(4096)
        if _NLMSG_HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
            return None
        inode: int = struct.unpack_from("=I", answer, _INODE_OFFSET)[0]
    except (OSError, struct.error):
        return None
    return inode or None


def identity_of(pid: int) -> Identity | None:
    """The process with this id now; ``None`` if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        return Identity(pid, int(stat[stat.rindex(b")") + 2 :].split()[19]))
    except (OSError, ValueError, IndexError):
        return None


def is_alive(identity: Identity) -> bool:
    """Whether that very process still runs. A client known only by address counts as alive."""
    return not identity.is_process or identity_of(identity.pid) == identity


def process_name(pid: int) -> str:
    """The kernel's short name of the process, empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    return ""


def owner_of_inode(inode: int, known: Iterable[int] = ()) -> int | None:
    """The process that holds this socket: known ones first, then the oldest id that does.

    A forked child may hold its parent's socket too; ids grow, so the lowest is usually the one that opened it.
    """
    wanted = f"socket:[{inode}]"
    for pid in known:
        if _holds(pid, wanted):
            return pid
    try:
        pids = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())  # noqa: PTH208
    except OSError:
        return None
    return next((pid for pid in pids[:_MAX_PROCESSES] if _holds(pid, wanted)), None)


def _holds(pid: int, wanted: str) -> bool:
    folder = f"/proc/{pid}/fd"
    try:
        descriptors = os.listdir(folder)  # noqa: PTH208
    except OSError:
        return False
    for descriptor in descriptors:
        try:
            if os.readlink(f"{folder}/{descriptor}") == wanted:  # noqa: PTH115
                return True
        except OSError:
            continue
    return False


def find_client(remote: HostPort, local: HostPort, known: Iterable[int] = ()) -> tuple[Identity, str]:
    """The client at ``remote`` of a connection accepted at ``local``, and its name.

    Falls back to the host address, without a port: a client in another namespace keeps its identity when it
    connects again, at the price that all clients behind one address count as one.
    """
    inode = socket_inode(remote, local)
    pid = owner_of_inode(inode, known) if inode else None
    identity = identity_of(pid) if pid else None
    if identity is None:
        return Identity(address=remote[0]), ""
    return identity, process_name(identity.pid)


def port_owner(port: int) -> str:
    """Who listens on this port, for an error message: ``python3 (pid 42)``, or empty if it cannot be told."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN_STATE and int(fields[1].rpartition(":")[2], 16) == port:
                    pid = owner_of_inode(int(fields[9]))
                    return f"{process_name(pid)} (pid {pid})" if pid else ""
    return ""
