"""PURE: what the status page shows, as JSON, and the hour of history that its sparklines are made of."""

from __future__ import annotations

import collections
import json
from typing import Any, Final

from kvtierd.observe.declared import WINDOW_NAMES
from kvtierd.observe.families import Exported
from kvtierd.observe.picture import EnginePicture, Picture, PoolPicture, Tier

HISTORY_SECONDS: Final = 3600.0
HISTORY_POINTS: Final = 240
MOST_EVENTS: Final = 50
MOST_SHOWN: Final = 128
MOST_TEXT_CHARS: Final = 500
_TIERS: Final[tuple[Tier, ...]] = ("L1", "L2", "L3")
_PLACES: Final = {"L1": "device memory", "L2": "host memory of the engine", "L3": "pool"}


class History:
    """One point every 15 s, for an hour: hit rates of the last minute by tier, and evicted keys a second."""

    def __init__(self) -> None:
        self._points: collections.deque[tuple[float, dict[str, float | None]]] = collections.deque(
            maxlen=HISTORY_POINTS
        )

    def add(self, picture: Picture) -> None:
        """Takes a point, if it is time for one."""
        if self._points:
            since = picture.now_seconds - self._points[-1][0]
            if 0 <= since < HISTORY_SECONDS / HISTORY_POINTS:
                return
            if since < 0:
                self._points.clear()
        minute = picture.tiers.get(60, {})
        figures: dict[str, float | None] = {
            tier: minute[tier].hit_rate if tier in minute else None for tier in _TIERS
        }
        window = picture.pool.windows.get(60) if picture.pool is not None else None
        figures["evicted"] = window.evicted_keys_per_second if window is not None else None
        self._points.append((picture.now_seconds, figures))

    def as_dict(self, now_seconds: float) -> dict[str, list[float | None]]:
        """Ages in seconds, oldest first, and beside them the figures."""
        points = [(at, figures) for at, figures in self._points if now_seconds - at <= HISTORY_SECONDS]
        found: dict[str, list[float | None]] = {
            "age_seconds": [round(now_seconds - at, 1) for at, _ in points]
        }
        for name in (*_TIERS, "evicted"):
            found[name] = [_rounded(figures[name]) for _, figures in points]
        return found


def status_json(state: Exported, history: History) -> bytes:
    """The status as JSON; ``null`` is unknown."""
    return json.dumps(_status(state, history), separators=(",", ":"), allow_nan=False).encode()


def _status(state: Exported, history: History) -> dict[str, Any]:
    picture = state.picture
    return {
        "version": state.version,
        "node": picture.node if picture is not None else "",
        "at": state.now_unix_seconds,
        "age_seconds": state.now_seconds - picture.now_seconds if picture is not None else None,
        "cluster": {
            "role": state.cluster.role,
            "master": state.cluster.master,
            "epoch": state.cluster.epoch,
            "paused": state.cluster.paused,
        },
        "tier": {"state": state.tier.state, "reasons": [_text(r) for r in state.tier.reasons[:8]]},
        "tiers": _tiers(picture) if picture is not None else [],
        "saved_tokens": picture.saved_tokens if picture is not None else None,
        "pool": _pool(picture.pool) if picture is not None and picture.pool is not None else None,
        "units": [
            {
                "id": unit.id,
                "kind": unit.kind,
                "name": unit.name,
                "state": str(unit.state),
                "reason": _text(unit.reason or ""),
                "restarts": unit.restarts,
                "since": unit.since_unix_seconds,
            }
            for unit in state.units[:MOST_SHOWN]
        ],
        "engines": [_engine(e) for e in picture.engines[:MOST_SHOWN]] if picture is not None else [],
        "problems": [_text(p) for p in (*state.problems, *(picture.problems if picture is not None else ()))][
            :MOST_SHOWN
        ],
        "events": [
            {
                "id": event.id,
                "at": event.at_unix_seconds,
                "severity": event.severity,
                "kind": event.kind,
                "unit": event.unit,
                "message": _text(event.message),
            }
            for event in list(state.events)[-MOST_EVENTS:]
        ],
        "history": history.as_dict(state.now_seconds),
    }


def _tiers(picture: Picture) -> list[dict[str, Any]]:
    """The tiers that any engine says something of, L1 and L3 always."""
    seen = {tier for tiers in picture.tiers.values() for tier in tiers} | {"L1", "L3"}
    return [
        {
            "name": tier,
            "where": _PLACES[tier],
            "hit_rate": {
                name: _rounded(picture.tiers[window][tier].hit_rate)
                if tier in picture.tiers.get(window, {})
                else None
                for window, name in WINDOW_NAMES.items()
            },
        }
        for tier in _TIERS
        if tier in seen
    ]


def _pool(pool: PoolPicture) -> dict[str, Any]:
    minute = pool.windows.get(60)
    return {
        "capacity_bytes": pool.capacity_bytes,
        "used_bytes": pool.used_bytes,
        "stored_keys": pool.stored_keys,
        "segments": len(pool.segments),
        "hung_seconds": round(pool.hung_seconds, 1),
        "evicted_keys_per_second": _rounded(minute.evicted_keys_per_second) if minute is not None else None,
        "turnovers_per_hour": _rounded(minute.turnovers_per_hour) if minute is not None else None,
        "failed_allocations": minute.failed_allocations if minute is not None else None,
    }


def _engine(engine: EnginePicture) -> dict[str, Any]:
    return {
        "unit": engine.unit,
        "ready": engine.ready,
        "problem": _text(engine.problem),
        "registered": engine.registered,
        "l3_detached": engine.l3_detached,
        "waiting": engine.waiting,
        "running": engine.running,
        "ttft_p50_seconds": _rounded(engine.ttft_p50_seconds),
        "ttft_p95_seconds": _rounded(engine.ttft_p95_seconds),
        "failed_loads": engine.failed_loads,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _text(text: str) -> str:
    return text[:MOST_TEXT_CHARS].encode("utf-8", "replace").decode()
