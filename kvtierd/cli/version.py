"""kvtierctl version."""

from __future__ import annotations

import importlib.metadata
import platform

from kvtierd import __version__
from kvtierd.cli.common import JsonOption, SettingsOption, SocketOption, connect, print_json
from kvtierd.errors import KvtierError


def version(
    settings: SettingsOption = None, socket: SocketOption = None, as_json: JsonOption = False
) -> None:
    """Show the versions of kvtierctl, the daemon, Python and MemCache.

    JSON: kvtierctl, daemon (null when it cannot be reached), python, memcache_hybrid, memfabric_hybrid (null when
    not installed beside kvtierd; engines may have their own).
    """
    daemon = None
    try:
        with connect(settings, socket) as client:
            daemon = client.version().version
    except KvtierError:
        daemon = None
    found = {
        "kvtierctl": __version__,
        "daemon": daemon,
        "python": platform.python_version(),
        "memcache_hybrid": _installed("memcache-hybrid"),
        "memfabric_hybrid": _installed("memfabric-hybrid"),
    }
    if as_json:
        print_json(found)
        return
    for name, value in found.items():
        print(f"{name:<17} {value or '-'}")


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
