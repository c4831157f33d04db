"""Is the MetaService up? It must say so itself, and listen where its configuration says.

MemCache ignores misspelt keys and binds defaults, and an answer on the metrics port may come from somebody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from kvtierd.errors import MemcacheError
from kvtierd.host.containers import container_pid
from kvtierd.http_get import TlsFiles
from kvtierd.memcache.health import Address, MetaObservation, meta_conditions
from kvtierd.memcache.listening import listening_addresses
from kvtierd.memcache.rest import MetaClient
from kvtierd.plan.model import MemcacheTls

HEALTH_SECONDS = 2.0


async def check_meta(
    metrics_url: str,
    expected: Collection[Address],
    pid: int,
    *,
    container: tuple[str, str] | None = None,
    tls: MemcacheTls | None = None,
) -> str | None:
    """``None`` when the process is a MetaService that is up, else what stands against it.

    Args:
        metrics_url: Where its HTTP service should be.
        expected: Every address that it must listen on.
        pid: Its process.
        tls: How it is asked, where MemCache's TLS is on.
        container: Name and docker program when it runs in a container: then ``pid`` is docker's client.
    """
    if container is not None:
        inside = await asyncio.to_thread(container_pid, *container)
        if inside is None:
            return f"docker does not say which process the container {container[0]} has"
        pid = inside
    try:
        listening = await asyncio.to_thread(listening_addresses, pid)
    except MemcacheError as error:
        return error.message
    try:
        health = await MetaClient(metrics_url, timeout_seconds=HEALTH_SECONDS, tls=tls_files(tls)).health()
    except MemcacheError:
        health = None
    verdict = meta_conditions(MetaObservation(str(pid), health, listening), expected)
    return None if verdict.ok else "; ".join(verdict.reasons)


def tls_files(tls: MemcacheTls | None) -> TlsFiles | None:
    """How the MetaService's HTTP service is asked; ``None``: without TLS."""
    return TlsFiles(**tls.http.model_dump()) if tls is not None and tls.http is not None else None
