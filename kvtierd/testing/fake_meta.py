"""A MetaService to test against: the answers of memcache_hybrid 1.3.0 over HTTP, without MemCache.

The shapes are those recorded from the real one. Its quirks are kept: a refusal is status 200 with ``success: false``,
HEAD is 405, and a request with ``Connection: close`` or of HTTP/1.0 gets an answer without a body.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

from kvtierd.testing.loopback import Answer, LoopbackServer, Request

_NO_WORLD_SIZE = 2**32 - 1
_TIMESTAMP = 1_700_000_000
_MIB = 1024**2


@dataclasses.dataclass(frozen=True, slots=True)
class FakeRank:
    """One member of the pool.

    Args:
        rank: Its number.
        role: ``provider`` (brings memory), ``proxy`` (brings none) or ``unknown`` (back, its role report lost).
        total_bytes: The DRAM it brings; 0 has no segment.
        used_bytes: How much of that is taken.
        heartbeat_ms: Age of its last heartbeat; ``None``: none was seen.
    """

    rank: int
    role: str = "provider"
    total_bytes: int = 64 * _MIB
    used_bytes: int = 0
    heartbeat_ms: int | None = 100

    @classmethod
    def proxy(cls, rank: int) -> FakeRank:
        """A member that brings no memory."""
        return cls(rank, role="proxy", total_bytes=0)


class FakeMetaService(LoopbackServer):
    """The HTTP side of a MetaService. Change its attributes at any time; the next answer shows it.

    Args:
        ranks: Who is in the pool.
        keys: Keys that it says the pool holds.
        world_size: As in mmc-meta.conf; it shows once the first rank has joined.
        port: A port, or 0 for a free one; see ``port`` and ``url``.

    Attributes:
        service_ready: What /health says.
        requests: What was asked, the newest 1000.
    """

    def __init__(
        self,
        ranks: Iterable[FakeRank] = (),
        *,
        keys: Iterable[str] = (),
        world_size: int = 16,
        port: int = 0,
    ) -> None:
        self.ranks: tuple[FakeRank, ...] = tuple(ranks)
        self.keys: tuple[str, ...] = tuple(keys)
        self.world_size = world_size
        self.service_ready = True
        super().__init__(port=port)

    def lose_role(self, rank: int) -> None:
        """The rank came back and its role report was lost: new clients would hang."""
        self.ranks = tuple(
            dataclasses.replace(r, role="unknown", heartbeat_ms=None) if r.rank == rank else r
            for r in self.ranks
        )

    def answer(self, request: Request) -> Answer:
        """The answer of the real service."""
        if request.method != "GET":
            return Answer(405)
        answer = self._page(request.path)
        bodiless = request.http_1_0 or "close" in request.headers.get("connection", "").lower()
        return answer._replace(no_body=bodiless)

    def _page(self, path: str) -> Answer:
        ranks = self.ranks
        match path:
            case "/health":
                return _json(_health(ready=self.service_ready))
            case "/api/v1/capacity/usage":
                return _json(_capacity(ranks))
            case "/api/v1/capacity/segment_remaining":
                return _json(_segments(ranks))
            case "/api/v1/mf/cluster_status":
                return _json(_cluster(ranks, self.world_size if ranks else _NO_WORLD_SIZE))
            case "/metrics":
                return Answer(body=_metrics(ranks).encode(), content_type="text/plain")
            case "/get_all_keys":
                return Answer(
                    body="".join(f"{key}\n" for key in self.keys).encode(), content_type="text/plain"
                )
            case "/livez":
                return Answer(body=b"OK", content_type="text/plain")
        if path.startswith("/api/v1/"):
            return _json({"error_message": "Segment not found", "success": False, "timestamp": _TIMESTAMP})
        return Answer(404)


def _json(value: Any) -> Answer:
    return Answer(body=json.dumps(value, separators=(",", ":")).encode())


def _health(*, ready: bool) -> dict[str, Any]:
    return {
        "ha_state": "unknown",
        "leader_address": "unknown",
        "role": "unknown",
        "service_ready": ready,
        "status": "ok" if ready else "not_ready",
        "view_version": 0,
    }


def _capacity(ranks: Sequence[FakeRank]) -> dict[str, Any]:
    total, used = sum(r.total_bytes for r in ranks), sum(r.used_bytes for r in ranks)
    return {
        "cpu": _usage(total, used),
        "data_source_ready": True,
        "degraded": False,
        "npu": _usage(0, 0),
        "timestamp": _TIMESTAMP,
    }


def _usage(total_bytes: int, used_bytes: int) -> dict[str, Any]:
    return {
        "free_bytes": total_bytes - used_bytes,
        "total_bytes": total_bytes,
        "usage_ratio": used_bytes / total_bytes if total_bytes else 0.0,
        "used_bytes": used_bytes,
    }


def _segments(ranks: Sequence[FakeRank]) -> dict[str, Any]:
    segments = [
        {
            "fragmentation_bytes": 0,
            "medium": "DRAM",
            "remaining_bytes": r.total_bytes - r.used_bytes,
            "remaining_ratio": (r.total_bytes - r.used_bytes) / r.total_bytes,
            "segment_name": f"rank-{r.rank}-dram",
            "total_bytes": r.total_bytes,
            "used_bytes": r.used_bytes,
        }
        for r in ranks
        if r.total_bytes
    ]
    return {"data_source_ready": True, "degraded": False, "segments": segments, "timestamp": _TIMESTAMP}


def _cluster(ranks: Sequence[FakeRank], world_size: int) -> dict[str, Any]:
    numbers = [r.rank for r in ranks]
    links = len(ranks) * (len(ranks) - 1)
    lost = any(r.role == "unknown" for r in ranks)
    server = {
        "aliveRanks": numbers,
        "backendAliveRanks": [],
        "groupManager": {
            "linkSummary": {
                "abnormalLinks": links if lost else 0,
                "activeRanks": len(ranks),
                "completionRate": 0.0 if lost else 1.0,
                "connectedLinks": 0 if lost else links,
                "expectedLinks": links,
            },
            "maxRanks": 1024,
            "ranks": [{"rank": r.rank, "role": r.role, "state": "RANK_ACTIVE"} for r in ranks],
        },
        "lastHeartbeat": [
            {"rank": r.rank, "sinceLastMs": r.heartbeat_ms} for r in ranks if r.heartbeat_ms is not None
        ],
        "listen": "127.0.0.1:26009",
        "reconnectedRanks": numbers,
        "state": "SS_NORMAL" if ranks else "SS_INITED",
        "worldSize": world_size,
    }
    return {"mf_cluster": [{"connect": True, "model": 1, "server": server, "type": "tcp"}], "status": "ok"}


def _metrics(ranks: Sequence[FakeRank]) -> str:
    total, used = sum(r.total_bytes for r in ranks), sum(r.used_bytes for r in ranks)
    return (
        "# TYPE memcache_total_capacity_bytes gauge\n"
        f'memcache_total_capacity_bytes{{medium="dram"}} {total}\n'
        "# TYPE memcache_allocated_bytes gauge\n"
        f'memcache_allocated_bytes{{medium="dram"}} {used}\n'
    )
