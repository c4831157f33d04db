"""The MetaService's HTTP interface: read-only, bounded, with a deadline on every call.

Quirks of memcache_hybrid 1.3.0: errors are answered with 200 and ``success: false``, HEAD with 405, and there is no
authentication, so that the service must listen on loopback only. See ``http_get`` for those of the transport.
"""

from __future__ import annotations

from kvtierd.errors import MemcacheError
from kvtierd.http_get import HttpError, TlsFiles, fetch_text, http_get
from kvtierd.memcache.answers import (
    Capacity,
    ClusterStatus,
    MetaHealth,
    Segment,
    parse_capacity,
    parse_cluster_status,
    parse_health,
    parse_keys,
    parse_segments,
)
from kvtierd.memcache.health import PoolState

__all__ = ["MetaClient", "fetch_text"]

_HINTS = {
    "http.url": "write metrics_url as http://HOST:PORT, or https:// with [meta] tls",
    "http.tls": "MemCache reads its certificate at its start only: kvtierctl restart meta after a renewal",
    "http.unreachable": "is it running, and is metrics_url in mmc-meta.conf this address?",
    "http.timeout": "it may be overloaded, stopped by a signal, or still closing",
    "http.answer": "is something else listening on the metrics port?",
}


class MetaClient:
    """Asks one MetaService. Holds no connection and no state: it need not be closed.

    Args:
        base_url: ``http://HOST:PORT``, the ``metrics_url`` of mmc-meta.conf.
        timeout_seconds: The limit of one call, from connecting to the last byte.
        tls: For ``https://``: the service asks for a certificate too.

    Every method raises ``MemcacheError``: ``memcache.unreachable`` when nothing listens, ``memcache.timeout``,
    ``memcache.refused`` when the service says no, ``memcache.answer`` when the answer makes no sense,
    ``memcache.url`` when the address cannot work.
    """

    def __init__(self, base_url: str, *, timeout_seconds: float = 2.0, tls: TlsFiles | None = None) -> None:
        self._tls = tls
        self.base_url = base_url.rstrip("/")
        self._timeout_seconds = timeout_seconds

    async def health(self) -> MetaHealth:
        """What the MetaService says of itself."""
        return parse_health(await self.get("/health"))

    async def capacity(self) -> Capacity:
        """The pool's size and use by medium, in bytes."""
        return parse_capacity(await self.get("/api/v1/capacity/usage"))

    async def segments(self) -> tuple[Segment, ...]:
        """What each rank brings and how full it is."""
        return parse_segments(await self.get("/api/v1/capacity/segment_remaining"))

    async def cluster_status(self) -> ClusterStatus:
        """Which ranks are in the pool, in which role."""
        return parse_cluster_status(await self.get("/api/v1/mf/cluster_status"))

    async def pool_state(self) -> PoolState:
        """Capacity, segments and ranks, asked one after another (the service has no snapshot of all)."""
        return PoolState(
            capacity=await self.capacity(),
            segments=await self.segments(),
            cluster=await self.cluster_status(),
        )

    async def metrics_text(self) -> str:
        """The metrics in Prometheus text format."""
        return (await self.get("/metrics")).decode(errors="replace")

    async def keys(self) -> tuple[str, ...]:
        """All keys of the pool, in no order. For tests and small pools: a large one exceeds the body limit."""
        return parse_keys(await self.get("/get_all_keys"))

    async def get(self, path: str) -> bytes:
        """The body of one GET. Raises ``MemcacheError``."""
        try:
            answer = await http_get(
                self.base_url + path, timeout_seconds=self._timeout_seconds, tls=self._tls
            )
        except HttpError as error:
            raise MemcacheError(
                f"the MetaService does not answer: {error.message}",
                why=error.why,
                hint=_HINTS.get(error.stable_code, ""),
                code=error.stable_code.replace("http.", "memcache."),
            ) from error
        if answer.status != 200:
            raise MemcacheError(
                f"{self.base_url} answered {path} with status {answer.status}",
                hint=_HINTS["http.answer"],
                code="memcache.answer",
            )
        return answer.body
