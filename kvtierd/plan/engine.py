"""What the planner asks an engine plugin, as values: the context it gives and the launch it gets back.

The plugin API proper is ``kvtierd.hookspecs``; the value types live here because the planner owns them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from pydantic import Field

from kvtierd.plan.inventory import Inventory, Record
from kvtierd.plan.model import FileSpec, Note, Readiness, Refusal, RestartPolicy, StopPolicy

API_VERSION = 1


class EngineContext(Record):
    """Everything a driver may use to launch one engine. All paths are absolute.

    ``local_conf_path`` is the mmc-local.conf this engine must use (environment ``MMC_LOCAL_CONFIG_PATH``).
    ``python`` is the interpreter the settings name for the engine, else the one kvtierd runs in.
    ``memcache_env`` holds the library paths MemCache needs in that interpreter; merge it into ``env``.
    """

    name: str
    node: str
    series: str
    model: str
    devices: tuple[int, ...] = ()
    host: str = "127.0.0.1"
    port: int
    python: str
    args: dict[str, Any] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)
    memcache_env: dict[str, str] = Field(default_factory=dict)
    local_conf_path: str
    meta_service_url: str
    config_store_url: str
    pool_placement: str
    work_dir: str
    inventory: Inventory


class EngineLaunch(Record):
    """How to run the engine: what a driver answers. ``env`` is complete, nothing is inherited."""

    argv: tuple[str, ...]
    env: dict[str, str] = Field(default_factory=dict)
    files: tuple[FileSpec, ...] = ()
    extra_ports: dict[str, int] = Field(default_factory=dict)  # purpose -> port
    clients: int = 1  # MemCache ranks it opens (full clients; init_bm=False clients have no rank)
    readiness: Readiness = Readiness()
    restart: RestartPolicy = RestartPolicy()
    stop: StopPolicy = StopPolicy()
    notes: tuple[Note, ...] = ()
    refusals: tuple[Refusal, ...] = ()


class EngineObservation(Record):
    """What an engine says of itself, in one shape for all engines. ``None`` is unknown, never zero.

    Token counters count since the engine's start.
    """

    l1_query_tokens: int | None = None
    l1_hit_tokens: int | None = None
    l2_query_tokens: int | None = None
    l2_hit_tokens: int | None = None
    l3_query_tokens: int | None = None
    l3_hit_tokens: int | None = None
    l1_capacity_tokens: int | None = None
    l1_used_ratio: float | None = None
    running: int | None = None
    waiting: int | None = None


def only_samples(metrics_text: str, names: Collection[str]) -> str:
    """The lines of a Prometheus text that are samples of these names, for ``EngineDriver.observe``.

    Engines export hundreds of series and a driver reads a handful: parsing only those costs a tenth of the time.
    Comment lines go too, so a parser sees the samples as untyped, under their full names.
    """
    kept = []
    for line in metrics_text.splitlines():
        end = min((i for i in (line.find("{"), line.find(" ")) if i >= 0), default=len(line))
        if line[:end] in names:
            kept.append(line)
    return "\n".join(kept) + "\n" if kept else ""


class EngineDriver(Protocol):
    """One kind of engine. Methods are pure or bounded: the daemon calls them with a time limit."""

    name: str
    api_version: int
    default_port: int

    def launch(self, context: EngineContext) -> EngineLaunch:
        """The launch of one engine. Pure: no I/O."""
        ...

    def metrics_url(self, context: EngineContext) -> str | None:
        """Where the engine's Prometheus metrics are, or ``None`` when it has none."""
        ...

    def observe(self, metrics_text: str) -> EngineObservation:
        """Reads one scrape (Prometheus text format). Pure. Raises ValueError on a body it cannot read."""
        ...
