"""The key table: every key of mmc-meta.conf and mmc-local.conf, by MemCache release.

Where the facts come from:

* which file knows a key, its type, its range and its choices: the parsers of the PyPI wheels 1.0.0 to 1.0.4,
  1.1.0 to 1.1.6, 1.2.0, 1.2.1 and 1.3.0 were run with each key and values of the wrong type, too small and too big, and
  their answers read. ``since`` and ``until`` are therefore exact to the patch;
* defaults: ``MetaConfig`` and ``LocalConfig`` of the wheels from 1.1.0 on, the sample files in the wheels, and for
  1.0 upstream's memcache_config.md of that time. The defaults of the eviction thresholds (70/60 before 1.1.0) were
  measured by setting one of the two;
* hot reload: measured on 1.3.0. That 1.1.3 to 1.2.1 reload the addresses of the local file is inferred from their
  ``dynamic_config`` keys;
* ``ubsio.*``: the names are those in libbio_server.so of 1.2.0 and 1.3.0, types and ranges are those of UBS IO's
  configuration reference. MemCache accepts any ``ubsio.*`` key unseen, also in the meta file, where it does nothing;
* ``ock.mmc.rewarm.dram_watermark`` exists in 1.2.0 only. No other ``ock.mmc.rewarm.*`` key was ever released.
"""

from __future__ import annotations

from kvtierd.mmc_conf.keyspec import (
    INT32_MAX,
    LAST_1_1,
    V1_0,
    V1_0_1,
    V1_0_2,
    V1_1,
    V1_1_3,
    V1_2,
    V1_2_1,
    V1_3,
    FileKind,
    KeySpec,
    ValueType,
)
from kvtierd.mmc_conf.versions import MmcVersion

_BOTH: tuple[FileKind, ...] = ("meta", "local")
_META: tuple[FileKind, ...] = ("meta",)
_LOCAL: tuple[FileKind, ...] = ("local",)
_TLS_PATH_MAX_BYTES = 255
_LOG_PATH_MAX_BYTES = 1023

PROTOCOLS_1_0 = ("host_rdma", "host_urma", "host_tcp", "device_rdma", "device_sdma")
PROTOCOLS_1_0_2 = (*PROTOCOLS_1_0, "host_shm")
PROTOCOLS_1_2 = (*PROTOCOLS_1_0_2, "device_urma", "device_uboe")


def _always(default: str | None) -> tuple[tuple[MmcVersion, str | None], ...]:
    return ((V1_0, default),)


def _flag(
    name: str, kinds: tuple[FileKind, ...], since: MmcVersion, default: str = "false", note: str = ""
) -> KeySpec:
    return KeySpec(name, kinds, ValueType.BOOL, since, defaults=_always(default), note=note)


def _number(
    name: str,
    kinds: tuple[FileKind, ...],
    since: MmcVersion,
    low: int,
    high: int,
    default: int | None,
    note: str = "",
) -> KeySpec:
    text = None if default is None else str(default)
    return KeySpec(name, kinds, ValueType.INT, since, defaults=_always(text), low=low, high=high, note=note)


def _choice(
    name: str, kinds: tuple[FileKind, ...], since: MmcVersion, choices: tuple[str, ...], default: str
) -> KeySpec:
    return KeySpec(name, kinds, ValueType.ENUM, since, defaults=_always(default), choices=((V1_0, choices),))


def _text(
    name: str, kinds: tuple[FileKind, ...], since: MmcVersion, default: str = "", note: str = ""
) -> KeySpec:
    return KeySpec(name, kinds, ValueType.TEXT, since, defaults=_always(default), note=note)


def _tls(
    prefix: str, kinds: tuple[FileKind, ...], since: MmcVersion, *, package: bool = True
) -> tuple[KeySpec, ...]:
    """The keys of one TLS block. Key, certificate and CA must be real files, no symbolic links."""
    names = ["ca.path", "ca.crl.path", "cert.path", "key.path", "key.pass.path", "decrypter.path"]
    if package:
        names.append("package.path")
    return (
        _flag(f"{prefix}.enable", kinds, since),
        *(
            KeySpec(
                f"{prefix}.{name}",
                kinds,
                ValueType.PATH,
                since,
                defaults=_always(""),
                max_bytes=_TLS_PATH_MAX_BYTES,
            )
            for name in names
        ),
    )


# Below each of the prefixes, beside "enable".
TLS_FILES = (
    "ca.path",
    "ca.crl.path",
    "cert.path",
    "key.path",
    "key.pass.path",
    "package.path",
    "decrypter.path",
)
TLS_PREFIXES = (
    "ock.mmc.tls",
    "ock.mmc.config_store.tls",
    "ock.mmc.metrics.tls",
    "ock.mmc.local_service.hcom.tls",
)
"""The TLS blocks. A block that is on needs ``ca.path``, ``cert.path`` and ``key.path``."""

_SHARED = (
    KeySpec(
        "ock.mmc.meta_service_url",
        _BOTH,
        ValueType.URL,
        defaults=_always("tcp://127.0.0.1:5000"),
        hot_since={"local": V1_1_3},
        note="must be the same in both files; a live change reaches full clients only, at their next reconnect",
    ),
    KeySpec(
        "ock.mmc.log_level",
        _BOTH,
        ValueType.ENUM,
        defaults=_always("info"),
        choices=((V1_0, ("debug", "info", "warn", "error")),),
        hot_since={"meta": V1_3},
    ),
    *_tls("ock.mmc.tls", _BOTH, V1_0),
    *_tls("ock.mmc.config_store.tls", _BOTH, V1_0),
    KeySpec(
        "ock.mmc.ubs_io.enable",
        _BOTH,
        ValueType.BOOL,
        V1_1,
        LAST_1_1,
        _always("false"),
        note="the SSD tier of 1.1",
    ),
)

_META_KEYS = (
    KeySpec(
        "ock.mmc.meta_service.config_store_url",
        _META,
        ValueType.URL,
        defaults=_always("tcp://127.0.0.1:6000"),
        note="the local file calls it ock.mmc.local_service.config_store_url",
    ),
    KeySpec(
        "ock.mmc.meta_service.metrics_url",
        _META,
        ValueType.METRICS_URL,
        defaults=((V1_0, "127.0.0.1:8000"), (V1_0_1, "http://127.0.0.1:8000")),
        note="HTTP without authentication that can also write: keep it on loopback",
    ),
    _flag(
        "ock.mmc.meta.ha.enable",
        _META,
        V1_0,
        note="the election of MemCache on Kubernetes; kvtierd has its own",
    ),
    KeySpec(
        "ock.mmc.log_path",
        _META,
        ValueType.PATH,
        defaults=((V1_0, "."), (V1_0_1, "/var/log/memcache_hybrid")),
        max_bytes=_LOG_PATH_MAX_BYTES,
        note="MemCache appends /logs; a relative path is taken from the directory above Python's bin",
    ),
    _number("ock.mmc.log_rotation_file_size", _META, V1_0, 1, 500, 20, "MB"),
    _number("ock.mmc.log_rotation_file_count", _META, V1_0, 1, 50, 50),
    KeySpec(
        "ock.mmc.evict_threshold_high",
        _META,
        ValueType.INT,
        defaults=((V1_0, "70"), (V1_1, "90")),
        low=1,
        high=99,
        hot_since={"meta": V1_3},
        note="per cent of the capacity; 1.0 also takes 100, which means no eviction before the pool is full",
    ),
    KeySpec(
        "ock.mmc.evict_threshold_low",
        _META,
        ValueType.INT,
        defaults=((V1_0, "60"), (V1_1, "80")),
        low=1,
        high=98,
        hot_since={"meta": V1_3},
        note="per cent of the capacity; must be below evict_threshold_high",
    ),
    _choice("ock.mmc.log_output_target", _META, V1_2, ("screen", "file", "both"), "file"),
    KeySpec(
        "ock.mmc.meta.lease_ttl_ms",
        _META,
        ValueType.INT,
        V1_2,
        defaults=_always("10000"),
        low=1,
        high=INT32_MAX,
        hot_since={"meta": V1_3},
        note="milliseconds that a blob stays leased to a reader or writer",
    ),
    _number(
        "ock.mmc.meta_service.metrics_report_interval_seconds", _META, V1_2, 0, 86400, 30, "0 turns it off"
    ),
    *_tls("ock.mmc.metrics.tls", _META, V1_2),
    _flag("ock.mmc.kv_events.enable", _META, V1_2),
    KeySpec("ock.mmc.kv_events.endpoint", _META, ValueType.ENDPOINT, V1_2, defaults=_always("")),
    _text("ock.mmc.kv_events.model_name", _META, V1_2),
    _text("ock.mmc.kv_events.tenant_id", _META, V1_2, "default"),
    _number("ock.mmc.kv_events.block_size", _META, V1_2, -INT32_MAX - 1, INT32_MAX, 0),
    _number("ock.mmc.kv_events.queue_capacity", _META, V1_2, -INT32_MAX - 1, INT32_MAX, 65536),
    _flag("ock.mmc.kv_events.hash_as_int", _META, V1_2, "true"),
    _number("ock.mmc.kv_events.transport", _META, V1_3, 0, 0, 0),
    _number("ock.mmc.storage.pending_wait.timeout", _META, V1_2, 1, 60000, None),
    _flag("ock.mmc.storage.prefetch.enabled", _META, V1_2),
    _number("ock.mmc.storage.async_flush.batch_limit", _META, V1_2_1, 8, 1024, None),
    _number("ock.mmc.storage.async_flush.interval_ms", _META, V1_2_1, 200, 1000, None),
    KeySpec(
        "ock.mmc.meta.backup.enable",
        _META,
        ValueType.BOOL,
        V1_1_3,
        V1_2,
        _always("false"),
        note="gone in 1.2.1",
    ),
    KeySpec(
        "ock.mmc.rewarm.dram_watermark",
        _META,
        ValueType.INT,
        V1_2,
        V1_2,
        low=5,
        high=95,
        note="gone in 1.2.1, though vllm-ascend's sample still sets it; must be above evict_threshold_high",
    ),
    _number("ock.mmc.evict_check_interval_seconds", _META, V1_3, 0, 86400, 5),
    _number("ock.mmc.evict_yield_interval", _META, V1_3, 0, 100000, 0),
    _number("ock.mmc.evict_yield_duration_us", _META, V1_3, 0, 10000, 100),
    _number("ock.mmc.defrag_evict_threshold", _META, V1_3, 1, 99, 70),
    _flag("ock.mmc.meta_service.alloc.max_value_mode.enabled", _META, V1_3),
    _choice("ock.mmc.meta_service.lru_type", _META, V1_3, ("lru", "sharded_lru"), "sharded_lru"),
    _number("ock.mmc.meta_service.lru_shard_count", _META, V1_3, 1, 1024, 16, "a power of two"),
    _choice(
        "ock.mmc.meta_service.storage.metadata_mode", _META, V1_3, ("aggregated", "separated"), "aggregated"
    ),
    _flag("ock.mmc.zmq.enable_curve", _META, V1_3),
    KeySpec("ock.mmc.zmq.private_key", _META, ValueType.TEXT, V1_3, defaults=_always(""), secret=True),
    _text("ock.mmc.zmq.public_key", _META, V1_3),
    _flag("ock.mmc.dynamic_config.enable", _META, V1_3, "true"),
    _number("ock.mmc.dynamic_config.interval", _META, V1_3, 1, 300, 5, "seconds"),
)

_LOCAL_KEYS = (
    KeySpec(
        "ock.mmc.local_service.config_store_url",
        _LOCAL,
        ValueType.URL,
        defaults=_always("tcp://127.0.0.1:6000"),
        hot_since={"local": V1_1_3},
        note="must be ock.mmc.meta_service.config_store_url of the meta file",
    ),
    KeySpec(
        "ock.mmc.local_service.world_size",
        _LOCAL,
        ValueType.INT,
        defaults=((V1_0, "16"), (V1_1, "256")),
        low=1,
        high=1024,
        note="the most ranks ever; a change needs a restart of the MetaService",
    ),
    KeySpec(
        "ock.mmc.local_service.protocol",
        _LOCAL,
        ValueType.ENUM,
        choices=((V1_0, PROTOCOLS_1_0), (V1_0_2, PROTOCOLS_1_0_2), (V1_2, PROTOCOLS_1_2)),
        required=(V1_0, None),
    ),
    KeySpec(
        "ock.mmc.local_service.hcom_url",
        _LOCAL,
        ValueType.URL,
        defaults=_always("tcp://127.0.0.1:7000"),
        min_port=1024,
        note="each rank adds its number to the port",
    ),
    KeySpec(
        "ock.mmc.local_service.dram.size",
        _LOCAL,
        ValueType.SIZE,
        required=(V1_0, None),
        note="per rank, not per host",
    ),
    KeySpec(
        "ock.mmc.local_service.hbm.size", _LOCAL, ValueType.SIZE, defaults=_always("0"), required=(V1_0, V1_0)
    ),
    KeySpec(
        "ock.mmc.local_service.max.dram.size",
        _LOCAL,
        ValueType.SIZE,
        V1_1,
        note="the largest dram.size of all ranks; without it a rank takes its own dram.size",
    ),
    KeySpec(
        "ock.mmc.local_service.max.hbm.size",
        _LOCAL,
        ValueType.SIZE,
        V1_1,
        note="the largest hbm.size of all ranks",
    ),
    *_tls("ock.mmc.local_service.hcom.tls", _LOCAL, V1_0, package=False),
    _flag("ock.mmc.local_service.storage.enabled", _LOCAL, V1_2, note="the SSD tier, with the ubsio.* keys"),
    _flag("ock.mmc.local_service.dram.best_effort.enabled", _LOCAL, V1_2),
    _text("ock.mmc.local_service.backend_id", _LOCAL, V1_2),
    _text("ock.mmc.local_service.config_store_url_domain", _LOCAL, V1_2, note="MemCache fills it in itself"),
    _text("ock.mmc.local_service.tag", _LOCAL, V1_3),
    _text("ock.mmc.local_service.tag_op_info", _LOCAL, V1_3),
    _number("ock.mmc.client.retry_milliseconds", _LOCAL, V1_0, 0, 600000, 0),
    _number(
        "ock.mmc.client.timeout.seconds",
        _LOCAL,
        V1_0,
        1,
        600,
        60,
        "does not bound calls to a MetaService that hangs",
    ),
    _number("ock.mmc.client.read_thread_pool.size", _LOCAL, V1_0, 1, 64, 32),
    _number("ock.mmc.client.write_thread_pool.size", _LOCAL, V1_0, 1, 64, 4),
    KeySpec(
        "ock.mmc.client.aggregate.io", _LOCAL, ValueType.BOOL, defaults=((V1_0, "false"), (V1_1, "true"))
    ),
    _number("ock.mmc.client.aggregate.num", _LOCAL, V1_1, 1, 131072, 122),
    KeySpec("ock.mmc.client.batch_option.chunk.size", _LOCAL, ValueType.SIZE, V1_2, defaults=_always("8MB")),
    _number("ock.mmc.client.batch_option.chunk.count", _LOCAL, V1_2, 1, 64, 3),
    _flag("ock.mmc.dynamic_config.enable", _LOCAL, V1_1_3, "true"),
    _number("ock.mmc.dynamic_config.interval", _LOCAL, V1_1_3, 1, 300, 5, "seconds"),
)

KEYS: tuple[KeySpec, ...] = (*_SHARED, *_META_KEYS, *_LOCAL_KEYS)
"""Every ``ock.mmc.*`` key of every release. A name can occur twice, once for each file."""
