"""Rules over several keys of one file: ports, thresholds, memory, TLS, exposure.

A rule speaks only when the values it needs are readable; unreadable ones have been reported already. Values that
a file does not set take part with their defaults, since MemCache uses them: a port may collide with a default one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtierd.mmc_conf.keys import TLS_FILES, TLS_PREFIXES
from kvtierd.mmc_conf.keyspec import V1_1, FileKind, ValueType
from kvtierd.mmc_conf.lookup import find_key, keys_of
from kvtierd.mmc_conf.parse import Entry
from kvtierd.mmc_conf.problems import ConfProblem, PathLookup, Severity
from kvtierd.mmc_conf.sizes import align_up, alignment_bytes, format_mmc_size, parse_mmc_size
from kvtierd.mmc_conf.urls import MAX_PORT, MmcUrl, UrlError, parse_url
from kvtierd.mmc_conf.values import parse_bool, read_url
from kvtierd.mmc_conf.versions import MmcVersion

META_URL = "ock.mmc.meta_service_url"
META_STORE_URL = "ock.mmc.meta_service.config_store_url"
METRICS_URL = "ock.mmc.meta_service.metrics_url"
LOCAL_STORE_URL = "ock.mmc.local_service.config_store_url"
HCOM_URL = "ock.mmc.local_service.hcom_url"
HIGH = "ock.mmc.evict_threshold_high"
LOW = "ock.mmc.evict_threshold_low"
PROTOCOL = "ock.mmc.local_service.protocol"
DRAM = "ock.mmc.local_service.dram.size"
HBM = "ock.mmc.local_service.hbm.size"
MAX_OF = {DRAM: "ock.mmc.local_service.max.dram.size", HBM: "ock.mmc.local_service.max.hbm.size"}
NO_CLIENT_ONLY_RANKS_UNTIL = V1_1
"""Up to this release a rank must bring memory: dram.size and hbm.size must not both be 0."""

WHY_LOOPBACK = "MemCache's HTTP service has no authentication, and PUT and DELETE on it change the pool"


@dataclass
class ConfView:
    """The values of one file, with defaults, for the rules.

    ``entries`` is by key, what this release does not know left out. ``defaults`` go before those of the key table and
    make the keys optional that conf files must have; they are for SGLang's JSON.
    """

    kind: FileKind
    version: MmcVersion
    entries: Mapping[str, Entry]
    defaults: Mapping[str, str] = field(default_factory=dict)
    path_info: PathLookup | None = None
    problems: list[ConfProblem] = field(default_factory=list)

    def text(self, name: str) -> str | None:
        """The value as written, else the default of this release; None when the release has no such key."""
        entry = self.entries.get(name)
        if entry is not None:
            return entry.value
        if name in self.defaults:
            return self.defaults[name]
        spec = find_key(self.kind, name)
        return spec.default_in(self.version) if spec is not None and spec.known_in(self.version) else None

    def number(self, name: str) -> int | None:
        """The value as an integer, None when it is none."""
        text = self.text(name)
        try:
            return int(text) if text is not None and len(text) < 20 else None
        except ValueError:
            return None

    def size(self, name: str) -> int | None:
        """The value in bytes, None when it is no size or not set."""
        text = self.text(name)
        try:
            return parse_mmc_size(text) if text is not None else None
        except ValueError:
            return None

    def flag(self, name: str) -> bool:
        """Whether a boolean is on."""
        text = self.text(name)
        return text is not None and parse_bool(text) is True

    def url(self, name: str) -> MmcUrl | None:
        """The value as an address, None when it is none. A bare metrics_url counts, as MemCache takes it."""
        text, spec = self.text(name), find_key(self.kind, name)
        if text is None or spec is None:
            return None
        try:
            return read_url(spec, text, self.kind, self.version)
        except UrlError:
            if spec.type is not ValueType.METRICS_URL:
                return None
        try:
            return parse_url(text, ("",), min_port=1)
        except UrlError:
            return None

    def report(self, name: str, code: str, message: str, hint: str, severity: Severity = "error") -> None:
        """Adds a problem at the line of the key, or without a line when the file does not set it."""
        entry = self.entries.get(name)
        line, column, shown = (entry.line, entry.column, entry.shown) if entry else (None, None, name)
        self.problems.append(ConfProblem(line, shown, code, message, hint, severity, column))

    def last_set(self, *names: str) -> str:
        """The key to blame: the one of these that stands last in the file, else the first."""
        present = [name for name in names if name in self.entries]
        return max(present, key=lambda n: self.entries[n].line or 0) if present else names[0]


def check_meta_rules(view: ConfView, *, allow_exposed: bool) -> None:
    """All rules of the meta file; problems are added to the view."""
    _check_required(view)
    _check_thresholds(view)
    _check_meta_ports(view)
    _check_exposure(view, allow_exposed=allow_exposed)
    _check_tls(view)
    _check_meta_details(view)


def check_local_rules(view: ConfView, *, a3: bool) -> None:
    """All rules of the local file; problems are added to the view."""
    _check_required(view)
    _check_memory(view, a3=a3)
    _check_tls(view)
    store, meta = view.url(LOCAL_STORE_URL), view.url(META_URL)
    if store and meta and store.port == meta.port:
        _report_same_port(view, META_URL, LOCAL_STORE_URL, meta.port)
    if (
        view.flag("ock.mmc.local_service.storage.enabled")
        and not (view.text("ubsio.disk.path") or "").strip()
    ):
        view.report(
            "ock.mmc.local_service.storage.enabled",
            "ssd-without-disk",
            "the SSD tier is on but ubsio.disk.path is not set; UBS IO then uses memory only",
            "set ubsio.disk.path to the block devices, or storage.enabled to false",
            "warning",
        )


def _check_required(view: ConfView) -> None:
    for spec in keys_of(view.kind, view.version):
        if (
            spec.required_in(view.version)
            and spec.name not in view.entries
            and spec.name not in view.defaults
        ):
            view.report(
                spec.name,
                "missing-key",
                f"{spec.name} is not set; MemCache {view.version} refuses a file without it",
                f"add a line '{spec.name} = ...'",
            )


def _check_thresholds(view: ConfView) -> None:
    high, low = view.number(HIGH), view.number(LOW)
    if high is None or low is None or low < high or not (1 <= high <= 99 and 1 <= low <= 98):
        return
    default = next((name for name in (HIGH, LOW) if name not in view.entries), None)
    said = f" ({default.removeprefix('ock.mmc.')} is the default)" if default else ""
    view.report(
        view.last_set(HIGH, LOW),
        "thresholds",
        f"evict_threshold_low {low} is not below evict_threshold_high {high}{said}; the MetaService does not start",
        f"set {LOW} below {high}" if high > 1 else f"set {HIGH} to 2 or more and {LOW} below it",
    )


def _check_meta_ports(view: ConfView) -> None:
    names = (META_URL, META_STORE_URL, METRICS_URL)
    used: dict[int, str] = {}
    for name in names:
        url = view.url(name)
        if url is None:
            continue
        if url.port in used:
            _report_same_port(view, used[url.port], name, url.port)
        used.setdefault(url.port, name)


def _report_same_port(view: ConfView, first: str, second: str, port: int) -> None:
    blamed = view.last_set(first, second)
    other = first if blamed == second else second
    other_entry = view.entries.get(other)
    where = f"line {other_entry.line}" if other_entry and other_entry.line else "the default"
    view.report(
        blamed,
        "same-port",
        f"port {port} is also used by {other} ({where}); the MetaService does not start",
        f"give each its own port, for example {port + 1 if port < MAX_PORT else port - 1}",
    )


def _check_exposure(view: ConfView, *, allow_exposed: bool) -> None:
    severity: Severity = "warning" if allow_exposed else "error"
    for name in (META_URL, META_STORE_URL, METRICS_URL):
        url = view.url(name)
        if url is None or url.reach == "loopback":
            continue
        where = {"any": "on every interface", "public": "on a public address"}.get(url.reach)
        if name == METRICS_URL:
            view.report(
                name,
                "exposed",
                f"the HTTP service listens {where or 'beyond loopback'} ({url}). {WHY_LOOPBACK}",
                "write 127.0.0.1 and let kvtierd export the metrics, or allow it explicitly",
                severity if where else "warning",
            )
        elif where:
            view.report(
                name,
                "exposed",
                f"the service listens {where} ({url}); without TLS everyone who reaches it can join the pool",
                "write 127.0.0.1 behind the endpoint, or the address of the cluster's own network",
                severity,
            )


def _check_tls(view: ConfView) -> None:
    """A block that is off is not looked at, by MemCache neither."""
    for prefix in TLS_PREFIXES:
        if not view.flag(f"{prefix}.enable"):
            continue
        missing = [
            n
            for n in (f"{prefix}.{part}" for part in ("ca.path", "cert.path", "key.path"))
            if not view.text(n)
        ]
        if missing:
            view.report(
                f"{prefix}.enable",
                "tls-incomplete",
                f"TLS is on but {', '.join(missing)} is not set; MemCache refuses to start",
                f"set {', '.join(missing)}, or turn TLS off",
            )
        for name in TLS_FILES:
            _check_tls_file(view, f"{prefix}.{name}")


def _check_tls_file(view: ConfView, name: str) -> None:
    path = view.text(name)
    if view.path_info is None or not path or not path.startswith("/"):
        return
    info = view.path_info(path)
    if info.symlink_target is not None:
        view.report(
            name,
            "symlink",
            f"{path!r} is a symbolic link to {info.symlink_target!r}; MemCache refuses it",
            "write the path that the link leads to, or copy the file (certbot and Kubernetes use links)",
        )
    elif not info.exists:
        view.report(
            name,
            "missing-file",
            f"{path!r} does not exist; MemCache refuses to start",
            "write the path of a file",
        )


def _check_meta_details(view: ConfView) -> None:
    shards = view.number("ock.mmc.meta_service.lru_shard_count")
    if shards is not None and 1 <= shards <= 1024 and shards & (shards - 1):
        view.report(
            "ock.mmc.meta_service.lru_shard_count",
            "not-a-power-of-two",
            f"{shards} is not a power of two; the MetaService does not start",
            f"write {1 << (shards.bit_length() - 1)} or {1 << shards.bit_length()}",
        )
    if view.flag("ock.mmc.kv_events.enable") and not view.text("ock.mmc.kv_events.endpoint"):
        view.report(
            "ock.mmc.kv_events.enable",
            "events-without-endpoint",
            "KV events are on but have no endpoint; none are published",
            "set ock.mmc.kv_events.endpoint, or turn them off",
            "warning",
        )
    watermark, high = view.number("ock.mmc.rewarm.dram_watermark"), view.number(HIGH)
    if watermark is not None and high is not None and 5 <= watermark <= high:
        view.report(
            "ock.mmc.rewarm.dram_watermark",
            "thresholds",
            f"dram_watermark {watermark} is not above evict_threshold_high {high}; the MetaService does not start",
            "raise it, or lower evict_threshold_high",
        )
    if view.flag("ock.mmc.meta.ha.enable"):
        view.report(
            "ock.mmc.meta.ha.enable",
            "foreign-election",
            "this turns on MemCache's election for Kubernetes; kvtierd elects the master itself",
            "write false",
            "warning",
        )


def _check_memory(view: ConfView, *, a3: bool) -> None:
    protocol = (view.text(PROTOCOL) or "").lower()
    dram, hbm = view.size(DRAM), view.size(HBM)
    step_bytes = alignment_bytes(protocol, a3=a3)
    if protocol:
        for name in (DRAM, HBM, *MAX_OF.values()):
            _check_alignment(view, name, protocol, step_bytes, a3=a3)
    for name, limit_name in MAX_OF.items():
        size, limit = view.size(name), view.size(limit_name)
        if size is None or limit is None:
            continue
        if align_up(size, step_bytes) > align_up(limit, step_bytes):
            view.report(
                limit_name,
                "size-above-max",
                f"{name} is {format_mmc_size(size)}, more than {limit_name} ({format_mmc_size(limit)}); MemCache refuses it",
                f"set {limit_name} to the largest {name.rpartition('.local_service.')[2]} of all ranks",
            )
    if dram == 0 and hbm == 0:
        _check_client_only(view)
    if protocol == "host_shm" and hbm:
        view.report(HBM, "protocol-memory", "host_shm takes no HBM; MemCache refuses it", f"set {HBM} to 0")


def _check_alignment(view: ConfView, name: str, protocol: str, step_bytes: int, *, a3: bool) -> None:
    size, entry = view.size(name), view.entries.get(name)
    if not size or entry is None or size % step_bytes == 0:
        return
    rounded = format_mmc_size(align_up(size, step_bytes))
    below = format_mmc_size(size - size % step_bytes)
    step = format_mmc_size(step_bytes)
    what = f"MemCache takes {rounded} in its place"
    if a3 and size % alignment_bytes(protocol) == 0:
        what = "on A3 the pool does not start with it"
    reason = "on A3" if a3 else f"for {protocol}"
    view.report(
        name,
        "size-unaligned",
        f"{entry.value!r} is not a multiple of {step}, as it must be {reason}; {what}",
        f"write {below} or {rounded}" if below != "0" else f"write {rounded}",
        "error" if a3 else "warning",
    )


def _check_client_only(view: ConfView) -> None:
    limit = view.size(MAX_OF[DRAM])
    if view.version <= NO_CLIENT_ONLY_RANKS_UNTIL:
        view.report(
            DRAM,
            "no-memory",
            f"dram.size and hbm.size are both 0; MemCache {view.version} refuses a rank that brings no memory",
            "give the rank memory, or use 1.1.1 or later",
        )
    elif not limit and not view.size(MAX_OF[HBM]):
        view.report(
            DRAM,
            "no-memory",
            "dram.size and hbm.size are both 0 and no max.dram.size is set; the pool does not start with that",
            f"set {MAX_OF[DRAM]} to the dram.size of the ranks that bring memory",
        )
