"""On which TCP addresses a process listens, from /proc.

MemCache binds its defaults when a key is misspelt and says nothing: only the sockets tell the truth.
"""

from __future__ import annotations

import psutil

from kvtierd.errors import MemcacheError


def listening_addresses(pid: int) -> frozenset[tuple[str, int]]:
    """(address, port) of every listening TCP socket of a process and its children.

    A process that has ended listens nowhere. Costs a few milliseconds.

    Raises:
        MemcacheError: Another user's process, which this user may not look into (``memcache.listening``).
    """
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return frozenset()
    found: set[tuple[str, int]] = set()
    for member in family:
        try:
            connections = member.net_connections(kind="tcp")
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        except psutil.AccessDenied as error:
            raise MemcacheError(
                f"cannot see on which ports process {member.pid} listens",
                why="it belongs to another user",
                hint="run kvtierd as root or as the user that runs MemCache",
                code="memcache.listening",
            ) from error
        found.update(
            (c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN and c.laddr
        )
    return frozenset(found)
