"""Does the MetaService listen where its configuration says? MemCache ignores misspelt keys and binds defaults."""

from __future__ import annotations

import asyncio
from collections.abc import Set as AbstractSet

from kvtierd.errors import MemcacheError
from kvtierd.memcache.listening import listening_addresses


async def check_listening(expected: AbstractSet[tuple[str, int]], pid: int) -> str | None:
    """``None`` when the process listens on all expected (address, port) pairs, else what is missing."""
    try:
        bound = await asyncio.to_thread(listening_addresses, pid)
    except MemcacheError as error:
        return error.message
    missing = sorted(f"{address}:{port}" for address, port in expected - bound)
    if not missing:
        return None
    others = sorted(f"{address}:{port}" for address, port in bound - expected)
    text = f"it does not listen on {', '.join(missing)}"
    return text + (f" but on {', '.join(others)}" if others else "")
