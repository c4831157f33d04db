"""The schema of the settings: every key, its type, its default, and what it is for.

Descriptions are for operators: error hints and the reference are made from them. A key exists only
when something reads it.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kvtierd.settings.cluster import ClusterSettings
from kvtierd.settings.engine import EngineSettings
from kvtierd.settings.observe import ObserveSettings
from kvtierd.settings.policy import PolicySettings
from kvtierd.settings.section import AbsolutePath, Duration, Port, RunnerSettings, Section, Size, UnitName


class NodeSettings(Section):
    """[node]: this host."""

    name: UnitName | None = Field(
        None, description="name of this node; default: the host name", examples=["host-a"]
    )
    address: str | None = Field(
        None,
        description="address other nodes reach this one at; default: found by route",
        examples=["10.0.0.1"],
    )
    nic: str | None = Field(
        None, description="network interface for engines that span hosts", examples=["enp1s0"]
    )
    series: Literal["auto", "300I-A2", "800I-A2", "A3", "A5", "emulated"] = Field(
        "auto", description="hardware series; auto: from npu-smi", examples=["auto", "800I-A2"]
    )


class PathsSettings(Section):
    """[paths]: where kvtierd keeps things."""

    state: AbsolutePath = Field("/var/lib/kvtierd", description="state that survives a reboot")
    runtime: AbsolutePath = Field(
        "/run/kvtierd", description="sockets and process records; gone after a reboot"
    )
    logs: AbsolutePath = Field("/var/log/kvtierd", description="output of the units and MemCache's own logs")


class PoolSettings(Section):
    """[pool]: the DRAM that this host gives to the shared tier."""

    dram: Size = Field(
        description="DRAM of the whole HOST for the pool; kvtierd divides it by ranks", examples=["256GiB"]
    )
    placement: Literal["auto", "standalone", "engine"] = Field(
        "auto",
        description="who holds the memory: a pool holder of its own, or the engines",
        examples=["auto"],
    )
    holders: int = Field(
        1, ge=1, le=16, description="pool holder processes, placement standalone", examples=[1]
    )
    protocol: Literal[
        "auto",
        "device_rdma",
        "device_sdma",
        "device_urma",
        "device_uboe",
        "host_shm",
        "host_rdma",
        "host_urma",
    ] = Field("auto", description="MemCache's transport; auto: by series", examples=["auto", "device_rdma"])
    evict_high: int = Field(
        90, ge=1, le=99, description="use in percent at which eviction starts", examples=[90]
    )
    evict_low: int = Field(
        80, ge=1, le=98, description="use in percent at which eviction stops", examples=[80]
    )
    hugepages: Literal["auto", "off"] | Annotated[int, Field(ge=0)] = Field(
        "auto",
        description="auto: when the protocol needs them; off; or a number of pages",
        examples=["auto", 133120],
    )
    hugepage_size: Size | None = Field(
        None, description="page size; default: the kernel's default", examples=["2MiB"]
    )
    numa: Literal["kernel", "spread"] = Field(
        "kernel",
        description="kernel: the kernel spreads the hugepages; spread: evenly and verified by NUMA node",
    )
    headroom: Size = Field(4 * 1024**3, description="hugepage memory on top of the pool", examples=["4GiB"])
    host_free: Size = Field(
        "4GiB", validate_default=True,
        description="memory that must stay available: below it an added pool holder goes; to add one, twice as much",
        examples=["4GiB"],
    )  # fmt: skip
    host_reserve: Size | None = Field(
        None,
        description="memory that must stay for the host; default: the larger of 16 GiB and 10 % of all memory",
        examples=["8GiB"],
    )
    world_size: Annotated[int, Field(ge=1, le=1024)] | None = Field(
        None, description="most ranks the pool can ever have; default: computed with head-room", examples=[64]
    )
    purge_on_unclean: bool = Field(
        True, description="empty the pool after the MetaService died under load, before it is used again"
    )

    @model_validator(mode="after")
    def _thresholds(self) -> Self:
        if self.evict_low >= self.evict_high:
            raise ValueError(f"evict_low ({self.evict_low}) must be below evict_high ({self.evict_high})")
        return self


class MetaSettings(RunnerSettings):
    """[meta]: the MetaService, and how it and the pool holders run."""

    port: Port = Field(
        5000, description="port engines reach the MetaService at, on loopback", examples=[5000]
    )
    config_store_port: Port = Field(
        6000, description="port engines reach the config store at", examples=[6000]
    )
    metrics_port: Port | None = Field(
        None, description="HTTP port of the MetaService, loopback only; default 8000 or the next free one",
        examples=[8000],
    )  # fmt: skip
    backend_port: Port | None = Field(
        None, description="where the MetaService itself listens behind the endpoint; default: port + 1",
        examples=[5001],
    )  # fmt: skip
    backend_config_store_port: Port | None = Field(
        None, description="the same for the config store; default: config_store_port + 1", examples=[6001]
    )
    hcom_port: Port = Field(
        7000, description="first port of the ranks' own links (hcom_url)", examples=[7000]
    )
    endpoint: Literal["relay", "direct"] = Field(
        "relay",
        description="relay: engines talk to kvtierd's local endpoint; direct: to the MetaService itself",
    )
    host_alias: bool = Field(
        True,
        description="endpoint = direct in a cluster: a line of kvtierd's in /etc/hosts may lead engines to the master",
    )
    tls: bool = Field(
        False,
        description="MemCache's own TLS, with the certificates of [cluster] tls; endpoint = direct only",
    )
    openssl: AbsolutePath | None = Field(
        None,
        description="directory with libssl.so.3 and libcrypto.so.3 for MemCache's TLS; default: the host's",
        examples=["/usr/lib64"],
    )
    runtime: Literal["wheel", "binary"] = Field(
        "wheel", description="wheel: memcache-hybrid from PyPI; binary: the run package", examples=["wheel"]
    )
    python: AbsolutePath | None = Field(
        None,
        description="interpreter that has memcache-hybrid (the engines'), in the image with runner docker;"
        " default: the one kvtierd runs in, python3 in an image",
        examples=["/usr/local/python3.11.14/bin/python3"],
    )
    home: AbsolutePath = Field(
        "/usr/local/memcache_hybrid/latest",
        description="where the run package is installed (runtime = binary), in the image with runner docker",
        examples=["/usr/local/memcache_hybrid/latest"],
    )
    fabric_home: AbsolutePath = Field(
        "/usr/local/memfabric_hybrid/latest", description="the same for MemFabric (runtime = binary)"
    )
    version: str | None = Field(
        None,
        pattern=r"^\d+\.\d+(\.\d+)?$",
        description="MemCache version; default: as installed; that of an image must be written",
        examples=["1.3.0"],
    )
    user: str | None = Field(
        None,
        description="user that runs the MetaService and pool holders (with runner docker: docker's client);"
        " default: kvtierd's own",
    )
    log_level: Literal["debug", "info", "warn", "error"] = Field("info", description="MemCache's log level")
    lease_ttl: Duration = Field(10.0, description="how long a read lease on a key lasts", examples=["10s"])
    conf: dict[str, str] = Field(
        default_factory=dict,
        description="further keys for mmc-meta.conf, by their full name",
        examples=[{"ock.mmc.meta_service.lru_shard_count": "32"}],
    )
    local_conf: dict[str, str] = Field(
        default_factory=dict,
        description="further keys for mmc-local.conf, by their full name",
        examples=[{"ock.mmc.client.timeout.seconds": "30"}],
    )


class DaemonSettings(Section):
    """[daemon]: kvtierd itself."""

    backend: Literal["auto", "systemd", "shim"] = Field(
        "auto",
        description="what keeps the units: services of systemd, a shim process each, or systemd where it can be used",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="level of kvtierd's own log"
    )
    log_format: Literal["auto", "json", "console"] = Field(
        "auto", description="auto: console on a terminal, JSON elsewhere"
    )
    stop_units_on_exit: bool = Field(
        False,
        description="stop engines, pool and MetaService when kvtierd stops; the default leaves them running",
    )


class Settings(Section):
    """All settings of one node, validated. Immutable. Values from the environment are laid over by ``load``."""

    node: NodeSettings = NodeSettings()
    paths: PathsSettings = PathsSettings()
    pool: PoolSettings
    meta: MetaSettings = MetaSettings()
    cluster: ClusterSettings = ClusterSettings()
    engine: tuple[EngineSettings, ...] = ()
    observe: ObserveSettings = ObserveSettings()
    policy: PolicySettings = PolicySettings()
    daemon: DaemonSettings = DaemonSettings()

    @model_validator(mode="after")
    def _engines(self) -> Self:
        names = [e.name for e in self.engine]
        doubled = sorted({n for n in names if names.count(n) > 1})
        if doubled:
            raise ValueError(f"two engines are named {doubled[0]!r}")
        known = {p.name for p in self.cluster.peers}
        for engine in self.engine:
            unknown = [n for n in engine.nodes if known and n not in known]
            if unknown:
                raise ValueError(
                    f"engine {engine.name!r} names node {unknown[0]!r}, which is not among the peers"
                )
        return self
