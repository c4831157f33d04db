"""What kvtierd sets in MemCache's files, as immutable values. Rendering checks them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

DEFAULT_LOG_PATH = "/var/log/memcache_hybrid"


class _Conf(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class MetaConf(_Conf):
    """mmc-meta.conf, for the MetaService.

    ``metrics_url`` is always written ``http://host:port`` here; rendering gives 1.0.0 its bare form. ``log_path`` is
    absolute and resolved; MemCache appends ``/logs``. Thresholds are per cent of the capacity. ``lease_ttl_ms`` None
    leaves MemCache's default; releases before 1.2 do not know it. ``extra`` holds further keys as they are written.
    """

    meta_service_url: str = "tcp://127.0.0.1:5000"
    config_store_url: str = "tcp://127.0.0.1:6000"
    metrics_url: str = "http://127.0.0.1:8000"
    log_level: str = "info"
    log_path: str = DEFAULT_LOG_PATH
    evict_threshold_high: int = 90
    evict_threshold_low: int = 80
    lease_ttl_ms: int | None = None
    extra: dict[str, str] = Field(default_factory=dict)


class LocalConf(_Conf):
    """mmc-local.conf, for one rank: a pool holder or an engine's process.

    Sizes are bytes for this rank, multiples of the protocol's alignment. ``dram_size_bytes`` 0 is a rank that only
    uses the pool. ``max_dram_size_bytes`` is the largest ``dram_size_bytes`` of all ranks and must be the same on all;
    None takes this rank's own. Releases before 1.1 do not know it.
    """

    meta_service_url: str = "tcp://127.0.0.1:5000"
    config_store_url: str = "tcp://127.0.0.1:6000"
    world_size: int = 256
    protocol: str
    hcom_url: str = "tcp://127.0.0.1:7000"
    dram_size_bytes: int
    max_dram_size_bytes: int | None = None
    hbm_size_bytes: int = 0
    log_level: str = "info"
    extra: dict[str, str] = Field(default_factory=dict)
