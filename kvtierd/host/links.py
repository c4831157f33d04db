"""Which TCP connections a process and its children have, from /proc."""

from __future__ import annotations

from collections.abc import Iterable

import psutil

Address = tuple[str, int]


def links_to(pid: int, targets: Iterable[Address]) -> frozenset[Address] | None:
    """Those of the targets that the process, or a child of it, has an established connection with.

    ``None``: it cannot be told, since a process belongs to another user. One that has ended has none.
    """
    wanted = frozenset(targets)
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return frozenset()
    found: set[Address] = set()
    hidden = False
    for member in family:
        try:
            connections = member.net_connections(kind="tcp")
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        except psutil.AccessDenied:
            hidden = True
            continue
        found |= {
            (c.raddr.ip.removeprefix("::ffff:"), c.raddr.port)
            for c in connections
            if c.status == psutil.CONN_ESTABLISHED
        }
    seen = frozenset(found & wanted)
    return None if hidden and seen != wanted else seen
