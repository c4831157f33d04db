"""What the load is sent to: an address, or an engine that this host's daemon runs."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from kvtierd.control.client import ControlClient
from kvtierd.errors import UnitError, WorkloadError
from kvtierd.workload.load.counters import EngineCounters, driver_for


class Target(NamedTuple):
    """Where to send requests, and where the engine's counters are read, if they can be."""

    url: str
    counters: EngineCounters | None
    engine: str = ""


def address_target(url: str, metrics_url: str | None, kind: str | None) -> Target:
    """A server by its address; its counters when it is told of which kind it is.

    Raises:
        WorkloadError: a metrics address without a kind.
        PluginError: no plugin reads that kind.
    """
    if metrics_url and not kind:
        raise WorkloadError(
            "in which form are the metrics?", hint="--engine-kind vllm, sglang or refengine", code="load.kind"
        )
    if not kind:
        return Target(url, None)
    where = metrics_url or url.rstrip("/").removesuffix("/v1") + "/metrics"
    return Target(url, EngineCounters(where, driver_for(kind)))


def engine_target(client: ControlClient, name: str) -> Target:
    """An engine of this host by its name.

    Raises:
        UnitError: there is no such engine, or it serves no HTTP.
        DaemonUnreachableError: there is no daemon to ask.
    """
    unit = engine_unit(client, name)
    base_url = (unit.get("talk") or {}).get("base_url")
    if not base_url:
        raise UnitError(f"the engine {name!r} serves no HTTP here", code="unit.no-http")
    metrics, plugin = unit.get("metrics_url"), unit.get("plugin")
    counters = EngineCounters(metrics, driver_for(plugin)) if metrics and plugin else None
    return Target(base_url, counters, name)


def engine_unit(client: ControlClient, name: str) -> dict[str, Any]:
    """The planned unit of an engine.

    Raises:
        UnitError: there is none.
    """
    units = [u for u in json.loads(client.plan_json()).get("units", []) if u.get("kind") == "engine"]
    for unit in units:
        if name in {
            unit["id"],
            unit["id"].removeprefix("kvtier-"),
            unit["id"].removeprefix("kvtier-engine-"),
        }:
            return dict(unit)
    known = ", ".join(u["id"].removeprefix("kvtier-engine-") for u in units) or "none"
    raise UnitError(f"there is no engine named {name!r} here", hint=f"engines: {known}", code="unit.unknown")
