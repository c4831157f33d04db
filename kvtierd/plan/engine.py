"""What the planner asks an engine plugin, as values: the context it gives and the launch it gets back.

The plugin API proper is ``kvtierd.hookspecs``; the value types live here because the planner owns them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, Protocol

from pydantic import Field

from kvtierd.mmc_conf.model import LocalConf, MetaConf
from kvtierd.plan.inventory import Inventory, Record
from kvtierd.plan.model import (
    FileSpec,
    HttpCall,
    Note,
    PoolPlan,
    Readiness,
    Refusal,
    RestartPolicy,
    StopPolicy,
    Tier,
)
from kvtierd.plan.remarks import Remarks
from kvtierd.plan.samples import Sample, only_samples, read_buckets, read_samples

__all__ = [
    "API_VERSION",
    "ENGINE_BASE_ENV",
    "OLDEST_API_VERSION",
    "EngineContext",
    "EngineDriver",
    "EngineLaunch",
    "EngineObservation",
    "HttpCall",
    "Remarks",
    "Sample",
    "Tier",
    "TierTokens",
    "only_samples",
    "read_buckets",
    "read_samples",
]

API_VERSION = 1
OLDEST_API_VERSION = 1
"""Drivers written for this version or a later one work; an older one than ``API_VERSION`` works with a warning."""

ENGINE_BASE_ENV: Final[Mapping[str, str]] = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONUNBUFFERED": "1",
}
"""What an engine in Python needs at the least; a launch's ``env`` inherits nothing."""


class EngineContext(Record):
    """Everything a driver may use to launch one engine. All paths are absolute.

    ``local_conf_path`` is the mmc-local.conf this engine must use (environment ``MMC_LOCAL_CONFIG_PATH``).
    ``local_conf`` and ``meta_conf`` are what that file and the MetaService's say, as values, for an engine that takes
    MemCache's configuration in a form of its own (``meta_conf`` has the addresses behind the endpoint).
    ``python`` is the interpreter the settings name for the engine, else the one kvtierd runs in.
    ``memcache_env`` holds the library paths MemCache needs in that interpreter; merge it into ``env``.

    ``version`` is that of the driver's ``package`` in ``python``, or what the settings say; ``None`` is unknown: say so
    in a note, do not guess. ``index`` counts the engines of this node from 0. ``nodes`` are the nodes that run this
    engine, in the settings' order (one that spans hosts has its head first), ``node_index`` is this node's place,
    ``addresses`` their addresses by name, ``nic`` this node's interface for traffic between them. ``role`` is for
    prefill/decode disaggregation. ``l2_bytes`` is the host memory for an engine's own second tier, for the whole engine.
    ``runner`` "docker": ``argv`` is what runs inside the image; kvtierd wraps it. ``l3_switch``: the operator wants to
    take L3 off and on while the engine runs, so the launch has to make that possible.
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
    local_conf: LocalConf = LocalConf(protocol="", dram_size_bytes=0)
    meta_conf: MetaConf = MetaConf()
    meta_service_url: str
    config_store_url: str
    pool_placement: str
    pool: PoolPlan = PoolPlan()
    work_dir: str
    inventory: Inventory
    version: str | None = None
    index: int = 0
    nodes: tuple[str, ...] = ()
    node_index: int = 0
    addresses: dict[str, str] = Field(default_factory=dict)
    nic: str | None = None
    role: Literal["both", "prefill", "decode"] = "both"
    l2_bytes: int | None = None
    runner: Literal["host", "docker"] = "host"
    l3_switch: bool = False

    @property
    def url(self) -> str:
        """The engine's API as seen from this host, without a slash at the end."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


class EngineLaunch(Record):
    """How to run the engine: what a driver answers. ``env`` is complete, nothing is inherited."""

    argv: tuple[str, ...]
    env: dict[str, str] = Field(default_factory=dict)
    files: tuple[FileSpec, ...] = ()
    extra_ports: dict[str, int] = Field(default_factory=dict)  # purpose -> port
    serves_http: bool = True  # False: a part without an API of its own, e.g. a headless follower
    clients: int | None = (
        None  # MemCache ranks it opens (init_bm=False has no rank); None: one a device, at least one
    )
    follows_conf: bool = (
        False  # all its MemCache clients are full ones and read local_conf_path: a change in it reaches them
    )
    readiness: Readiness = Readiness()
    restart: RestartPolicy = RestartPolicy()
    stop: StopPolicy = StopPolicy()
    notes: tuple[Note, ...] = ()
    refusals: tuple[Refusal, ...] = ()


class EngineObservation(Record):
    """What an engine says of itself, in one shape for all engines. ``None`` is unknown, never zero.

    Token counters count since the engine's start. ``*_window_rate`` are the engine's own recent rates (0 to 1), as its
    log line says them: for show, never for decisions. ``kv_tokens`` is the room of the L1 cache in tokens,
    ``kv_tokens_by_concurrency`` the same by its "maximum concurrency" figure where the two can differ (hybrid
    models). ``kv_blocks`` is that room in blocks, from an engine that does not say how many tokens a block has.
    ``kv_pool_tokens``: ``kv_memory_bytes`` is that of one of the engine's pools, which has room for so many tokens (a
    hybrid model has several). ``l3_written_tokens`` are those that L3 has taken since the engine's start. ``ttft_buckets``
    is the histogram of the time to the first token since then: upper bound in seconds (infinity last) -> how many
    requests took at most that. ``fatal`` is a sign that the engine cannot go on, in
    its own words.
    """

    l1_query_tokens: int | None = None
    l1_hit_tokens: int | None = None
    l2_query_tokens: int | None = None
    l2_hit_tokens: int | None = None
    l3_query_tokens: int | None = None
    l3_hit_tokens: int | None = None
    l3_written_tokens: int | None = None
    l1_capacity_tokens: int | None = None
    l2_capacity_tokens: int | None = None
    l1_used_ratio: float | None = None
    running: int | None = None
    waiting: int | None = None
    l1_window_rate: float | None = None
    l3_window_rate: float | None = None
    kv_tokens: int | None = None
    kv_tokens_by_concurrency: int | None = None
    kv_memory_bytes: int | None = None
    kv_blocks: int | None = None
    kv_pool_tokens: int | None = None
    failed_loads: int | None = None
    ttft_buckets: dict[float, int] | None = None
    fatal: str | None = None


class TierTokens(Record):
    """Which tier served how many prompt tokens of one request. ``None`` is unknown."""

    prompt: int | None = None
    l1: int | None = None
    l2: int | None = None
    l3: int | None = None
    computed: int | None = None


class EngineDriver(Protocol):
    """One kind of engine. Methods are pure or bounded: the daemon calls them with a time limit."""

    name: str
    api_version: int
    default_port: int
    package: (
        str | None
    )  # the distribution whose version in the engine's interpreter counts, e.g. "vllm-ascend"
    versions: str  # the versions of it that this driver knows, a PEP 440 specifier; "" = any

    def launch(self, context: EngineContext) -> EngineLaunch:
        """The launch of one engine. Pure: no I/O."""
        ...

    def metrics_url(self, context: EngineContext) -> str | None:
        """Where the engine's Prometheus metrics are, or ``None`` when it has none."""
        ...

    def observe(self, metrics_text: str) -> EngineObservation:
        """Reads one scrape (Prometheus text format). Pure. Raises ValueError on a body it cannot read."""
        ...

    def read_line(self, line: str) -> EngineObservation | None:
        """What one line of the engine's output says, ``None`` for nothing. Pure, and quick: it sees every line."""
        ...

    def generation(self, context: EngineContext) -> HttpCall:
        """A request that makes the engine generate one token: readiness is proved by its answer."""
        ...

    def generated(self, body: bytes) -> str:
        """The text in the answer to ``generation``. Pure. Raises ValueError when there is none."""
        ...

    def tokens(self, body: bytes) -> TierTokens:
        """Which tier served the prompt of a completed request, from its (unstreamed) answer. Pure."""
        ...

    def flush(self, context: EngineContext, tiers: frozenset[Tier]) -> tuple[HttpCall, ...]:
        """The requests that empty these tiers of this engine.

        Raises:
            ValueError: it cannot flush one of them without the others; the text says which.
        """
        ...

    def l3_switch(self, context: EngineContext, *, on: bool) -> tuple[HttpCall, ...]:
        """The requests that attach (``on``) or detach L3 while the engine runs. Both twice in a row must do no harm.

        Raises:
            ValueError: it cannot, with this context (``context.l3_switch`` is off) or ever; the text says why.
        """
        ...
