"""The ``ubsio.*`` keys of the SSD tier, which MemCache hands to UBS IO unseen.

The names are those of libbio_server.so in the wheels 1.2.0 and 1.3.0 (releases before 1.2 refuse them); types, ranges
and defaults are those of UBS IO's configuration reference for one host. A key that UBS IO does not know is dropped
without a word, so an unknown one is an error here.
"""

from __future__ import annotations

from kvtierd.mmc_conf.keyspec import INT32_MAX, V1_2, V1_2_1, V1_3, FileKind, KeySpec, ValueType
from kvtierd.mmc_conf.versions import MmcVersion

_LOCAL: tuple[FileKind, ...] = ("local",)
_PREFIX = "ubsio."


def _default(value: str | None) -> tuple[tuple[MmcVersion, str | None], ...]:
    return ((V1_2, value),)


def _int(
    name: str, low: int, high: int, default: int | None, since: MmcVersion = V1_2, note: str = ""
) -> KeySpec:
    text = None if default is None else str(default)
    return KeySpec(
        _PREFIX + name, _LOCAL, ValueType.INT, since, defaults=_default(text), low=low, high=high, note=note
    )


def _flag(name: str, default: str, note: str = "", since: MmcVersion = V1_2) -> KeySpec:
    return KeySpec(_PREFIX + name, _LOCAL, ValueType.BOOL, since, defaults=_default(default), note=note)


def _choice(name: str, choices: tuple[str, ...], default: str) -> KeySpec:
    return KeySpec(
        _PREFIX + name, _LOCAL, ValueType.ENUM, V1_2, defaults=_default(default), choices=((V1_2, choices),)
    )


def _any(name: str, since: MmcVersion = V1_2, until: MmcVersion | None = None, note: str = "") -> KeySpec:
    return KeySpec(_PREFIX + name, _LOCAL, ValueType.TEXT, since, until, note=note)


# Known by name only: taken from the library, not described anywhere.
_UNDESCRIBED = (
    "cm.copy_num",
    "cm.initial.nodes_count",
    "cm.pts_count",
    "cm.register_perm_timeout_sec",
    "cm.register_timeout_sec",
    "cm.zk_host",
    "net.data.ip_mask",
    "net.data.listen_port",
    "net.data.protocol",
    "net.data.segment_size",
    "net.ipc.data.busy_polling_mode",
    "net.ipc.data.workers_count",
    "net.request.executor.queue.size",
    "net.request.executor.thread.num",
    "net.rpc.data.busy_polling_mode",
    "net.rpc.data.workers_count",
    "net.tls.ca.cert.path",
    "net.tls.ca.crl.path",
    "net.tls.server.cert.path",
    "net.tls.server.decrypter.lib.path",
    "net.tls.server.key.pass.path",
    "net.tls.server.key.path",
    "net.tls.server.ssl.lib.dir",
    "prometheus.enable",
    "prometheus.exposer",
    "prometheus.scrape_interval_sec",
    "underfs.ceph.cfg.path",
    "underfs.ceph.cluster",
    "underfs.ceph.pool",
    "underfs.ceph.user",
    "underfs.hdfs.name_node",
    "underfs.hdfs.working_path",
    "wcache.compaction_threshold",
    "wcache.negotiate.delay",
    "wcache.partition_count",
    "work.io.alignsize",
    "work.net.timeout",
    "work.scene",
    "cache.mem_read_write_ratio",
    "cache.disk_read_write_ratio",
)

UBSIO_KEYS: tuple[KeySpec, ...] = (
    KeySpec(
        "ubsio.disk.path",
        _LOCAL,
        ValueType.TEXT,
        V1_2,
        defaults=_default(""),
        note="block devices separated by colons; nothing else may use them; without one only memory is used",
    ),
    _int("mem.size_in_gb", 0, 3072, 10, note="GB for each process that has DRAM"),
    _int("standalone.device_count", 0, 16, 0, note="how many processes of this host have DRAM"),
    _flag("standalone.force_new_disk", "false", note="wipes the disks at every start"),
    _int("segment.size_in_mb", 1, 16, 4),
    _int("sdkmem.size_in_mb", 0, 4194304, 0),
    _choice("log.level", ("error", "warn", "info", "debug", "trace"), "info"),
    _flag("net.tls.enable.switch", "false"),
    _flag("trace.enable", "true"),
    _flag("data.crc.enable", "false"),
    _flag("cache.qos.enable", "false"),
    _flag("cli_tools.enable", "false"),
    _int("wcache.evict_water_level", 0, 100, 0),
    _int("wcache.disk_evict_water_level", 0, 100, 90),
    _int("rcache.evict_water_level", 0, 100, 90),
    _choice("bdm.io_engine", ("sync", "io_uring"), "sync"),
    _int("bdm.batch_read.window_keys", 1, 1024, 128),
    _int("bdm.batch_read.window_bytes_mb", 1, 1024, 64),
    _int("bdm.batch_read.temp_pool_mb", 0, 65535, 0),
    _int("work.io.timeout", 60, 300, 60, note="seconds"),
    _int("batchget.thread.num", 8, 512, 32),
    # "local" is not in the reference, but 1.3.0 has underfs.local.root_path.
    _choice("underfs.file_system_type", ("none", "ceph", "hdfs", "local"), "none"),
    _any("bdm.batch_read.pipeline_depth", until=V1_2_1),
    _any("bdm.batch_read.standalone.use_scratch_pool", until=V1_2_1),
    KeySpec(
        "ubsio.standalone.device_id_gather_timeout_sec",
        _LOCAL,
        ValueType.INT,
        V1_2,
        V1_2_1,
        low=1,
        high=INT32_MAX,
    ),
    _int("batch_read.pipeline_depth", 1, 64, 4, since=V1_3),
    _flag("batch_read.standalone.use_scratch_pool", "true", since=V1_3),
    _any("batch_read.copy_workers", since=V1_3),
    _any("bdm.io_uring.sqpoll_mode", since=V1_3),
    _any("bdm.sync.worker_num", since=V1_3),
    _any("log.path", since=V1_3),
    _any("underfs.batch_read.worker_num", since=V1_3),
    _any("underfs.local.root_path", since=V1_3),
    *(_any(name) for name in _UNDESCRIBED),
)
