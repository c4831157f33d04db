"""Typed models to the text of mmc-meta.conf and mmc-local.conf, and back.

What is rendered is checked like a file that a person wrote, so that nothing is ever written that MemCache refuses
or reads otherwise. Only keys that the release knows are written, since it ends on any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvtierd.errors import ConfError
from kvtierd.mmc_conf.check import check_local, check_meta
from kvtierd.mmc_conf.keyspec import KIND_NAMES, FileKind
from kvtierd.mmc_conf.lookup import find_key
from kvtierd.mmc_conf.model import LocalConf, MetaConf
from kvtierd.mmc_conf.parse import parse_conf, printable
from kvtierd.mmc_conf.problems import ConfProblem
from kvtierd.mmc_conf.rules import (
    DRAM,
    HBM,
    HCOM_URL,
    HIGH,
    LOCAL_STORE_URL,
    LOW,
    MAX_OF,
    META_STORE_URL,
    META_URL,
    METRICS_URL,
    PROTOCOL,
)
from kvtierd.mmc_conf.sizes import format_mmc_size, parse_mmc_size
from kvtierd.mmc_conf.values import BARE_METRICS_VERSION, LOG_PATH
from kvtierd.mmc_conf.versions import MmcVersion, resolve_version

LEASE_TTL = "ock.mmc.meta.lease_ttl_ms"
LOG_LEVEL = "ock.mmc.log_level"
WORLD_SIZE = "ock.mmc.local_service.world_size"
_HTTP = "http://"
# Warnings about a file that a person wrote are reasons not to write one ourselves.
_ALSO_REFUSED = frozenset(
    {"size-unaligned", "url-form", "url-old-form", "url-trailing", "odd-character", "path-form"}
)


def render_meta(
    conf: MetaConf,
    version: str | MmcVersion,
    *,
    allow_exposed: bool = False,
    assume_version: str | None = None,
) -> str:
    """The text of an mmc-meta.conf for this release of MemCache.

    Args:
        conf: What to set.
        version: The MemCache that will read the file.
        allow_exposed: Allow an HTTP service on all interfaces or a public address. It has no authentication and can
            write, so that is refused otherwise.
        assume_version: The known version whose keys to use when ``version`` is unknown.

    Raises:
        ConfError: ``conf.<code>`` with the checker's code: the version is unknown, a value is wrong, or a key of
            ``extra`` is unknown, of another release, of the other file, or one that ``conf`` sets itself.
    """
    known = resolve_version(version, assume=assume_version)
    metrics_url = conf.metrics_url
    if known <= BARE_METRICS_VERSION:
        metrics_url = metrics_url.removeprefix(_HTTP)
    elif not metrics_url.startswith((_HTTP, "https://")):
        metrics_url = _HTTP + metrics_url
    settings = {
        META_URL: conf.meta_service_url,
        META_STORE_URL: conf.config_store_url,
        METRICS_URL: metrics_url,
        LOG_LEVEL: conf.log_level,
        LOG_PATH: conf.log_path,
        HIGH: str(conf.evict_threshold_high),
        LOW: str(conf.evict_threshold_low),
        LEASE_TTL: None if conf.lease_ttl_ms is None else str(conf.lease_ttl_ms),
    }
    text = _render("meta", known, settings, conf.extra)
    _refuse("meta", check_meta(text.encode(), known, allow_exposed=allow_exposed))
    return text


def render_local(
    conf: LocalConf, version: str | MmcVersion, *, a3: bool = False, assume_version: str | None = None
) -> str:
    """The text of an mmc-local.conf for this release of MemCache. ``a3``: the host is an A3 (all sizes align to 1 GB).

    Raises:
        ConfError: as for ``render_meta``; also for a size that is not aligned, since MemCache would take more.
    """
    known = resolve_version(version, assume=assume_version)
    limit_bytes = conf.dram_size_bytes if conf.max_dram_size_bytes is None else conf.max_dram_size_bytes
    hbm = find_key("local", HBM)
    hbm_is_wanted = conf.hbm_size_bytes != 0 or (hbm is not None and hbm.required_in(known))
    settings = {
        META_URL: conf.meta_service_url,
        LOCAL_STORE_URL: conf.config_store_url,
        HCOM_URL: conf.hcom_url,
        LOG_LEVEL: conf.log_level,
        WORLD_SIZE: str(conf.world_size),
        PROTOCOL: conf.protocol,
        DRAM: _size(DRAM, conf.dram_size_bytes),
        MAX_OF[DRAM]: _size(MAX_OF[DRAM], limit_bytes),
        HBM: _size(HBM, conf.hbm_size_bytes) if hbm_is_wanted else None,
    }
    text = _render("local", known, settings, conf.extra)
    _refuse("local", check_local(text.encode(), known, a3=a3))
    return text


def read_meta(data: bytes, version: str | MmcVersion, *, allow_exposed: bool = False) -> MetaConf:
    """The model of an mmc-meta.conf: what ``render_meta`` gave, or a person's file without errors.

    Raises:
        ConfError: ``conf.<code>`` for the file's first error.
    """
    known = resolve_version(version)
    _refuse("meta", check_meta(data, known, allow_exposed=allow_exposed), strict=False)
    values = _values("meta", data)
    defaults = MetaConf()
    metrics_url = values.pop(METRICS_URL, defaults.metrics_url)
    lease = values.pop(LEASE_TTL, None)
    return MetaConf(
        meta_service_url=values.pop(META_URL, defaults.meta_service_url),
        config_store_url=values.pop(META_STORE_URL, defaults.config_store_url),
        metrics_url=metrics_url if "://" in metrics_url else _HTTP + metrics_url,
        log_level=values.pop(LOG_LEVEL, defaults.log_level).lower(),
        log_path=values.pop(LOG_PATH, _default("meta", LOG_PATH, known)),
        evict_threshold_high=int(values.pop(HIGH, _default("meta", HIGH, known))),
        evict_threshold_low=int(values.pop(LOW, _default("meta", LOW, known))),
        lease_ttl_ms=None if lease is None else int(lease),
        extra=values,
    )


def read_local(data: bytes, version: str | MmcVersion) -> LocalConf:
    """The model of an mmc-local.conf; see ``read_meta``."""
    known = resolve_version(version)
    _refuse("local", check_local(data, known), strict=False)
    values = _values("local", data)
    defaults = LocalConf(protocol="", dram_size_bytes=0)
    limit = values.pop(MAX_OF[DRAM], None)
    return LocalConf(
        meta_service_url=values.pop(META_URL, defaults.meta_service_url),
        config_store_url=values.pop(LOCAL_STORE_URL, defaults.config_store_url),
        world_size=int(values.pop(WORLD_SIZE, _default("local", WORLD_SIZE, known))),
        protocol=values.pop(PROTOCOL).lower(),
        hcom_url=values.pop(HCOM_URL, defaults.hcom_url),
        dram_size_bytes=parse_mmc_size(values.pop(DRAM)),
        max_dram_size_bytes=None if limit is None else parse_mmc_size(limit),
        hbm_size_bytes=parse_mmc_size(values.pop(HBM, "0")),
        log_level=values.pop(LOG_LEVEL, defaults.log_level).lower(),
        extra=values,
    )


def _render(
    kind: FileKind, version: MmcVersion, settings: Mapping[str, str | None], extra: Mapping[str, str]
) -> str:
    overlap = sorted(settings.keys() & extra.keys())
    if overlap:
        raise ConfError(
            f"{overlap[0]} is set by kvtierd and cannot be set again as an extra key of {KIND_NAMES[kind]}",
            hint="use kvtierd's own setting for it",
            code="conf.extra-conflict",
        )
    lines = [
        f"# {KIND_NAMES[kind]} for MemCache {version}, written by kvtierd. Changes made here are overwritten."
    ]
    for name, value in settings.items():
        spec = find_key(kind, name)
        if value is not None and spec is not None and spec.known_in(version):
            lines.append(_line(name, value))
    if extra:
        lines += ["# From the settings, as they are.", *(_line(name, extra[name]) for name in sorted(extra))]
    return "\n".join(lines) + "\n"


def _line(name: str, value: str) -> str:
    """One entry. A value must not be able to end its line, begin a comment or lose blanks."""
    for what, text in (("key", name), ("value", value)):
        if (
            not text.isprintable()
            or text != text.strip()
            or "#" in text
            or (what == "key" and ("=" in text or not text))
        ):
            shown = printable(name)
            spec = find_key("meta", name) or find_key("local", name)
            about = (
                f"{printable(value)!r}" if what == "value" and not (spec and spec.secret) else f"the {what}"
            )
            raise ConfError(
                f"{shown}: {about} cannot be written to MemCache's files",
                why="'#', line ends, control characters and blanks at the ends have no spelling there",
                hint=f"choose another {what}",
                code="conf.unwritable",
            )
    return f"{name} = {value}" if value else f"{name} ="


def _size(name: str, size_bytes: int) -> str:
    if size_bytes < 0:
        raise ConfError(
            f"{name} cannot be negative ({size_bytes})", hint="give 0 or more bytes", code="conf.bad-size"
        )
    return format_mmc_size(size_bytes)


def _refuse(kind: FileKind, problems: Iterable[ConfProblem], *, strict: bool = True) -> None:
    for problem in problems:
        if problem.severity == "error" or (strict and problem.code in _ALSO_REFUSED):
            where = f"{problem.key}: " if problem.key and problem.key not in problem.message else ""
            raise ConfError(
                f"{KIND_NAMES[kind]}: {where}{problem.message}",
                hint=problem.hint,
                code=f"conf.{problem.code}",
            )


def _values(kind: FileKind, data: bytes) -> dict[str, str]:
    return {e.key: e.value for e in parse_conf(data).entries if find_key(kind, e.key) is not None}


def _default(kind: FileKind, name: str, version: MmcVersion) -> str:
    spec = find_key(kind, name)
    return (spec.default_in(version) if spec else None) or ""
