"""SGLang's two pieces of JSON: the MetaService's file and the storage backend's extra configuration.

``python -m sglang.srt.mem_cache.storage.npu_memcache.start_meta_service --config_path FILE`` sets each key of FILE as
an attribute of ``memcache_hybrid.MetaConfig``; ``--hicache-storage-backend-extra-config JSON`` does so with
``LocalConfig``, after taking SGLang's own keys out. Wrong types are a traceback, unknown keys only a warning in a log.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from kvtierd.errors import ConfError
from kvtierd.mmc_conf.attributes import META_ATTRIBUTES
from kvtierd.mmc_conf.model import LocalConf, MetaConf
from kvtierd.mmc_conf.problems import ConfProblem
from kvtierd.mmc_conf.sglang_check import check_sglang_meta, check_sglang_storage
from kvtierd.mmc_conf.sizes import format_mmc_size
from kvtierd.mmc_conf.versions import MmcVersion, resolve_version

JsonValue = str | int | bool | float | dict[str, int]


class _Json(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    extra: dict[str, JsonValue] = Field(default_factory=dict)

    def values(self) -> dict[str, JsonValue]:
        """What is set, by attribute name, ``extra`` last."""
        own: dict[str, Any] = self.model_dump(exclude_none=True, exclude={"extra"})
        overlap = sorted(own.keys() & self.extra.keys())
        if overlap:
            raise ConfError(
                f"{overlap[0]} is set by kvtierd and cannot be set again as an extra key",
                hint="use kvtierd's own setting for it",
                code="conf.extra-conflict",
            )
        return {**own, **self.extra}


class SglangMetaConf(_Json):
    """metaservice_config.json: the attributes of ``MetaConfig`` that kvtierd sets; ``extra`` holds further ones."""

    meta_service_url: str = "tcp://127.0.0.1:5000"
    config_store_url: str = "tcp://127.0.0.1:6000"
    metrics_url: str = "http://127.0.0.1:8000"
    log_level: str | None = None
    log_path: str | None = None
    evict_threshold_high: int | None = None
    evict_threshold_low: int | None = None
    lease_ttl_ms: int | None = None

    @classmethod
    def from_meta(cls, conf: MetaConf) -> SglangMetaConf:
        """The same configuration as mmc-meta.conf, without its extra keys, which have other names here."""
        return cls(**conf.model_dump(exclude={"extra"}))


class SglangStorageConf(_Json):
    """The storage backend's extra configuration for one SGLang process.

    Sizes are MemCache's text ("50GB"): LocalConfig takes no numbers for them. ``prefetch_threshold`` is in tokens.
    """

    meta_service_url: str = "tcp://127.0.0.1:5000"
    config_store_url: str = "tcp://127.0.0.1:6000"
    log_level: str = "info"
    world_size: int = 256
    protocol: str
    dram_size: str
    max_dram_size: str | None = None
    hbm_size: str | None = None
    hcom_url: str | None = None
    prefetch_threshold: int | None = None
    prefetch_timeout_base: float | None = None
    prefetch_timeout_per_ki_token: float | None = None
    init_bm: bool | None = None
    check_server: bool | None = None
    extra_backend_tag: str | None = None

    @classmethod
    def from_local(cls, conf: LocalConf, *, prefetch_threshold: int | None = None) -> SglangStorageConf:
        """The same configuration as mmc-local.conf, without its extra keys, which have other names here."""
        limit_bytes = conf.dram_size_bytes if conf.max_dram_size_bytes is None else conf.max_dram_size_bytes
        return cls(
            meta_service_url=conf.meta_service_url,
            config_store_url=conf.config_store_url,
            log_level=conf.log_level,
            world_size=conf.world_size,
            protocol=conf.protocol,
            dram_size=format_mmc_size(conf.dram_size_bytes),
            max_dram_size=format_mmc_size(limit_bytes),
            hbm_size=format_mmc_size(conf.hbm_size_bytes) if conf.hbm_size_bytes else None,
            hcom_url=conf.hcom_url,
            prefetch_threshold=prefetch_threshold,
        )


def render_sglang_meta(
    conf: SglangMetaConf, version: str | MmcVersion, *, allow_exposed: bool = False
) -> str:
    """The text of metaservice_config.json; what this release does not know of ``conf`` is left out, but not of ``extra``.

    Raises:
        ConfError: ``conf.<code>`` with the checker's code.
    """
    known = resolve_version(version)
    values = {
        name: value
        for name, value in conf.values().items()
        if name in conf.extra or META_ATTRIBUTES[name].known_in(known)
    }
    text = json.dumps(values, indent=4) + "\n"
    _refuse("metaservice_config.json", check_sglang_meta(text.encode(), known, allow_exposed=allow_exposed))
    return text


def render_sglang_storage(conf: SglangStorageConf, version: str | MmcVersion, *, a3: bool = False) -> str:
    """The JSON for ``--hicache-storage-backend-extra-config``, on one line; the caller passes it as one argument.

    Raises:
        ConfError: ``conf.<code>`` with the checker's code; also for a size that is not aligned.
    """
    known = resolve_version(version)
    text = json.dumps(conf.values())
    _refuse("SGLang's storage configuration", check_sglang_storage(text.encode(), known, a3=a3))
    return text


def _refuse(what: str, problems: tuple[ConfProblem, ...]) -> None:
    for problem in problems:
        if problem.severity == "error" or problem.code == "size-unaligned":
            where = f"{problem.key}: " if problem.key and problem.key not in problem.message else ""
            raise ConfError(
                f"{what}: {where}{problem.message}", hint=problem.hint, code=f"conf.{problem.code}"
            )
