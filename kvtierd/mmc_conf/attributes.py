"""The attributes of ``MetaConfig`` and ``LocalConfig``, which SGLang's JSON uses as keys.

Read from the wheels 1.1.0, 1.1.6, 1.2.0, 1.2.1 and 1.3.0 (1.0 has neither class). Most are keys of the conf files under
another name; types are strict, as pybind raises TypeError for any other: a size is a string, a number is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvtierd.mmc_conf.keys import TLS_FILES
from kvtierd.mmc_conf.keyspec import V1_1, V1_3, FileKind, KeySpec, ValueType
from kvtierd.mmc_conf.lookup import find_key
from kvtierd.mmc_conf.versions import MmcVersion

JsonType = Literal["string", "integer", "boolean", "number", "object"]


@dataclass(frozen=True, slots=True)
class Attribute:
    """One JSON key. ``spec`` is the conf key it stands for, None for a key that only SGLang or pybind knows."""

    name: str
    types: tuple[JsonType, ...]
    spec: KeySpec | None = None
    since: MmcVersion = V1_1

    def known_in(self, version: MmcVersion) -> bool:
        """Whether the class of this release has the attribute."""
        return self.since <= version and (self.spec is None or self.spec.known_in(version))


_TLS = ("enable", *TLS_FILES)
_BLOCK_TLS = {f"tls_{name.replace('.', '_')}": f"ock.mmc.tls.{name}" for name in _TLS}
_STORE_TLS = {
    f"config_store_tls_{name.replace('.', '_')}": f"ock.mmc.config_store.tls.{name}" for name in _TLS
}
_HCOM_TLS = {
    f"hcom_tls_{name.replace('.', '_')}": f"ock.mmc.local_service.hcom.tls.{name}"
    for name in _TLS
    if name != "package.path"
}
_META = {
    "meta_service_url": "ock.mmc.meta_service_url",
    "config_store_url": "ock.mmc.meta_service.config_store_url",
    "metrics_url": "ock.mmc.meta_service.metrics_url",
    "ha_enable": "ock.mmc.meta.ha.enable",
    "backup_enable": "ock.mmc.meta.backup.enable",
    "log_level": "ock.mmc.log_level",
    "log_path": "ock.mmc.log_path",
    "log_output_target": "ock.mmc.log_output_target",
    "log_rotation_file_size": "ock.mmc.log_rotation_file_size",
    "log_rotation_file_count": "ock.mmc.log_rotation_file_count",
    "evict_threshold_high": "ock.mmc.evict_threshold_high",
    "evict_threshold_low": "ock.mmc.evict_threshold_low",
    "evict_check_interval_seconds": "ock.mmc.evict_check_interval_seconds",
    "evict_yield_interval": "ock.mmc.evict_yield_interval",
    "evict_yield_duration_us": "ock.mmc.evict_yield_duration_us",
    "defrag_evict_threshold": "ock.mmc.defrag_evict_threshold",
    "lease_ttl_ms": "ock.mmc.meta.lease_ttl_ms",
    "lru_shard_count": "ock.mmc.meta_service.lru_shard_count",
    "kv_events_enable": "ock.mmc.kv_events.enable",
    "kv_events_endpoint": "ock.mmc.kv_events.endpoint",
    "kv_events_model_name": "ock.mmc.kv_events.model_name",
    "kv_events_tenant_id": "ock.mmc.kv_events.tenant_id",
    "kv_events_block_size": "ock.mmc.kv_events.block_size",
    "kv_events_queue_capacity": "ock.mmc.kv_events.queue_capacity",
    "kv_events_hash_as_int": "ock.mmc.kv_events.hash_as_int",
    "kv_events_transport_type": "ock.mmc.kv_events.transport",
    "zmq_enable_curve": "ock.mmc.zmq.enable_curve",
    "zmq_private_key": "ock.mmc.zmq.private_key",
    "zmq_public_key": "ock.mmc.zmq.public_key",
    "ubs_io_enable": "ock.mmc.ubs_io.enable",
    **_BLOCK_TLS,
    **_STORE_TLS,
}
_LOCAL = {
    "meta_service_url": "ock.mmc.meta_service_url",
    "config_store_url": "ock.mmc.local_service.config_store_url",
    "log_level": "ock.mmc.log_level",
    "world_size": "ock.mmc.local_service.world_size",
    "protocol": "ock.mmc.local_service.protocol",
    "hcom_url": "ock.mmc.local_service.hcom_url",
    "dram_size": "ock.mmc.local_service.dram.size",
    "hbm_size": "ock.mmc.local_service.hbm.size",
    "max_dram_size": "ock.mmc.local_service.max.dram.size",
    "max_hbm_size": "ock.mmc.local_service.max.hbm.size",
    "backend_id": "ock.mmc.local_service.backend_id",
    "tag": "ock.mmc.local_service.tag",
    "tag_op_info": "ock.mmc.local_service.tag_op_info",
    "client_retry_milliseconds": "ock.mmc.client.retry_milliseconds",
    "client_timeout_seconds": "ock.mmc.client.timeout.seconds",
    "read_thread_pool_size": "ock.mmc.client.read_thread_pool.size",
    "write_thread_pool_size": "ock.mmc.client.write_thread_pool.size",
    "aggregate_io": "ock.mmc.client.aggregate.io",
    "aggregate_num": "ock.mmc.client.aggregate.num",
    "ubs_io_enable": "ock.mmc.ubs_io.enable",
    **_BLOCK_TLS,
    **_STORE_TLS,
    **_HCOM_TLS,
}

_SGLANG_STORAGE: Mapping[str, tuple[JsonType, ...]] = {
    # npu_memcache's own
    "device_id": ("integer", "object", "string"),
    "init_bm": ("boolean",),
    "conf_file_path": ("string",),
    "check_server": ("boolean",),
    "metrics_url": ("string",),
    "memcache_metrics_url": ("string",),
    "extra_backend_tag": ("string",),
    # HiCache's, for every storage backend
    "prefetch_threshold": ("integer",),
    "prefetch_timeout_base": ("number",),
    "prefetch_timeout_per_ki_token": ("number",),
    "hicache_storage_pass_prefix_keys": ("boolean",),
}
"""Keys of ``--hicache-storage-backend-extra-config`` that are SGLang's own, not LocalConfig's."""


def _attribute(kind: FileKind, name: str, key: str) -> Attribute:
    spec = find_key(kind, key)
    if spec is None:
        raise LookupError(f"{name} stands for {key}, which is not in the key table")
    json_type: dict[ValueType, JsonType] = {ValueType.BOOL: "boolean", ValueType.INT: "integer"}
    return Attribute(name, (json_type.get(spec.type, "string"),), spec)


META_ATTRIBUTES: Mapping[str, Attribute] = {
    # 0 is lru, 1 is sharded_lru; the conf file has it as text.
    "lru_type": Attribute("lru_type", ("integer",), since=V1_3),
    **{name: _attribute("meta", name, key) for name, key in _META.items()},
}
STORAGE_ATTRIBUTES: Mapping[str, Attribute] = {
    **{name: _attribute("local", name, key) for name, key in _LOCAL.items()},
    **{name: Attribute(name, types) for name, types in _SGLANG_STORAGE.items()},
}


def class_defaults(kind: FileKind, version: MmcVersion) -> Mapping[str, str]:
    """What a ``LocalConfig`` begins with where a conf file has no default, by conf key."""
    if kind == "meta":
        return {}
    return {
        "ock.mmc.local_service.protocol": "host_rdma",
        "ock.mmc.local_service.dram.size": "1GB",
        "ock.mmc.local_service.max.dram.size": "64GB" if version < V1_3 else "1TB",
        "ock.mmc.local_service.max.hbm.size": "0",
    }


def json_type_of(value: Any) -> str:
    """The JSON name of a decoded value's type; a boolean is no integer here."""
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case dict():
            return "object"
        case list():
            return "array"
        case _:
            return "null"


def fits(value: Any, types: tuple[JsonType, ...]) -> bool:
    """Whether a decoded value has one of the types. An integer is a number too."""
    found = json_type_of(value)
    return found in types or (found == "integer" and "number" in types)
