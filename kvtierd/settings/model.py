"""The schema of the settings: every key, its type, its default, and what it is for.

Descriptions are for operators: error hints and the reference are made from them. A key exists only
when something reads it.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from kvtierd.quantities import parse_cpu_list, parse_duration, parse_size

Size = Annotated[int, BeforeValidator(parse_size)]
Duration = Annotated[float, BeforeValidator(parse_duration)]
Port = Annotated[int, Field(ge=1025, le=65535)]

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62})")


def _absolute(value: object) -> object:
    if isinstance(value, str) and not value.startswith("/"):
        raise ValueError(f"{value!r} is not an absolute path")
    return value


def _unit_name(value: object) -> object:
    if isinstance(value, str) and not _NAME.fullmatch(value):
        raise ValueError(f"{value!r} is not a name: small letters, digits, '.', '_' and '-', at most 63")
    return value


AbsolutePath = Annotated[str, BeforeValidator(_absolute)]
UnitName = Annotated[str, BeforeValidator(_unit_name)]


class Section(BaseModel):
    """Base of all tables: immutable, unknown keys are errors.

    Not pydantic's strict mode: values from the environment arrive as text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")


class RunnerSettings(Section):
    """What [meta] and [[engine]] share: as a process of the host, or in a container."""

    runner: Literal["host", "docker"] = Field(
        "host", description="host: as a process; docker: in a container"
    )
    image: str | None = Field(
        None, description="container image (runner = docker)",
        examples=["quay.io/ascend/vllm-ascend:releases-v0.13.0-openeuler"],
    )  # fmt: skip
    mounts: tuple[str, ...] = Field(
        (),
        description="further bind mounts, source:target[:ro] (runner = docker)",
        examples=[["/data/weights:/root/.cache"]],
    )

    @model_validator(mode="after")
    def _container(self) -> Self:
        if self.runner == "docker" and not self.image:
            raise ValueError("runner docker needs an image")
        if self.runner == "host" and (self.image or self.mounts):
            written = "image" if self.image else "mounts"
            raise ValueError(
                f'{written} is for a container; write runner = "docker" as well, or leave it out'
            )
        # A word of docker's command line: one that begins with a dash would be an option.
        if self.image and not re.fullmatch(r"[\w][\w./:@+-]*", self.image):
            raise ValueError(f"image {self.image!r} is not the name of an image")
        wrong = [m for m in self.mounts if not re.fullmatch(r"/[^:]*:/[^:]*(:ro)?", m)]
        if wrong:
            raise ValueError(f"mount {wrong[0]!r} is not of the form /source:/target[:ro]")
        return self


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


class PeerSettings(Section):
    """One entry of [cluster] peers."""

    name: UnitName = Field(description="node name", examples=["host-a"])
    address: str = Field(description="address of the node", examples=["10.0.0.1"])
    voter: bool = Field(True, description="takes part in elections (mode lease)")
    witness: bool = Field(
        False, description="only votes: a machine without NPUs and MemCache, which runs kvtierd --witness"
    )

    @model_validator(mode="after")
    def _address(self) -> Self:
        if not self.address or any(c.isspace() for c in self.address):
            raise ValueError(f"{self.address!r} is not an address")
        if self.witness and not self.voter:
            raise ValueError("a witness that is no voter does nothing; leave it out")
        return self


class TlsSettings(Section):
    """[cluster] tls: this node's certificate; kvtierctl certs makes them."""

    ca: AbsolutePath = Field(
        "/etc/kvtierd/tls/ca.pem", description="certificate that all nodes' certificates are signed with"
    )
    cert: AbsolutePath = Field("/etc/kvtierd/tls/node.pem", description="this node's certificate")
    key: AbsolutePath = Field("/etc/kvtierd/tls/node.key", description="its key, readable by root only")


class EtcdTlsSettings(Section):
    """[cluster.etcd] tls: certificates for talking to etcd; without this table there is no TLS, which is for loopback.

    An etcd with users (``auth enable``) takes the certificate's common name for the user's.
    """

    ca: AbsolutePath = Field(
        "/etc/kvtierd/tls/etcd-ca.pem", description="signs the certificates of etcd's members"
    )
    cert: AbsolutePath = Field("/etc/kvtierd/tls/etcd.pem", description="this node's certificate as a client")
    key: AbsolutePath = Field("/etc/kvtierd/tls/etcd.key", description="its key, readable by root only")


class EtcdSettings(Section):
    """[cluster] etcd: an etcd that you run, for mode etcd."""

    endpoints: tuple[str, ...] = Field(
        (), description="host:port of its members", examples=[["10.0.0.1:2379", "10.0.0.2:2379"]]
    )
    prefix: str = Field("/kvtierd", description="its keys are under PREFIX/NAME OF THE CLUSTER/")
    tls: EtcdTlsSettings | None = None

    @model_validator(mode="after")
    def _well_formed(self) -> Self:
        for endpoint in self.endpoints:
            host, _, port = endpoint.rpartition(":")
            if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise ValueError(
                    f"{endpoint!r} is not HOST:PORT (without http://; TLS is for the table tls to say)"
                )
        if len(set(self.endpoints)) != len(self.endpoints):
            raise ValueError("an endpoint is given twice")
        if not self.prefix.startswith("/"):
            raise ValueError(f"prefix {self.prefix!r} does not begin with /")
        return self


class ClusterSettings(Section):
    """[cluster]: several hosts, one pool."""

    mode: Literal["standalone", "static", "lease", "etcd"] = Field(
        "standalone",
        description="standalone: one host; static: the named master; lease: 3 or 5 voters elect it; etcd: by your etcd",
        examples=["standalone", "static", "lease", "etcd"],
    )
    name: UnitName = Field("kvtier", description="name of the cluster", examples=["prod-1"])
    master: UnitName | None = Field(None, description="the master, mode static", examples=["host-a"])
    peers: tuple[PeerSettings, ...] = Field(
        (), description="all nodes of the cluster, this one included",
        examples=[[{"name": "host-a", "address": "10.0.0.1"}]],
    )  # fmt: skip
    lease: Duration = Field(
        6.0,
        ge=1.0,
        le=60.0,
        description="how long a master may be out of touch (modes lease, etcd)",
        examples=["6s"],
    )
    port: Port = Field(5500, description="port the nodes' daemons talk to each other at", examples=[5500])
    endpoint_port: Port = Field(
        5501, description="port the nodes' endpoints reach the master's at", examples=[5501]
    )
    tls: TlsSettings = TlsSettings()
    insecure: bool = Field(
        False,
        description="talk between nodes without certificates: anybody in the network can read and write the KV",
    )
    etcd: EtcdSettings = EtcdSettings()

    @property
    def nodes(self) -> tuple[PeerSettings, ...]:
        """The peers that may run engines and hold a part of the pool."""
        return tuple(p for p in self.peers if not p.witness)

    @property
    def voters(self) -> tuple[str, ...]:
        """The peers that elect, by name, in the order of the settings."""
        return tuple(p.name for p in self.peers if p.voter)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [p.name for p in self.peers]
        if len(set(names)) != len(names):
            raise ValueError("two peers have the same name")
        if self.mode == "standalone" and self.peers:
            raise ValueError('peers are given but mode is "standalone"; write mode = "static"')
        if self.mode != "standalone" and not self.peers:
            raise ValueError(f"mode {self.mode} needs peers")
        if self.mode == "static" and (self.master is None or self.master not in names):
            raise ValueError(f"mode static needs master = one of the peers ({', '.join(names)})")
        if self.mode == "static" and any(p.witness and p.name == self.master for p in self.peers):
            raise ValueError("a witness cannot be the master")
        if self.mode in {"lease", "etcd"} and self.master is not None:
            raise ValueError(f"mode {self.mode} elects its master; leave master out")
        if self.mode == "lease" and len(self.voters) not in {3, 5}:
            raise ValueError(_why_not_voters(self.voters))
        if self.mode == "etcd" and not self.etcd.endpoints:
            raise ValueError("mode etcd needs etcd = { endpoints = [...] }")
        if self.mode != "lease" and any(p.witness for p in self.peers):
            raise ValueError("a witness only votes, which is for mode lease")
        return self


def _why_not_voters(voters: tuple[str, ...]) -> str:
    listed = ", ".join(voters) or "none"
    if len(voters) < 3:
        return (
            f"mode lease needs 3 or 5 voters ({listed}): two that lose sight of each other cannot know which of them"
            ' still serves; for two hosts write mode = "static", or add a third machine with witness = true'
        )
    return (
        f"mode lease needs 3 or 5 voters, not {len(voters)} ({listed}): write voter = false for the others;"
        " they follow the master all the same"
    )


class EngineSettings(RunnerSettings):
    """[[engine]]: one inference engine on this host."""

    name: UnitName = Field(description="name of the engine", examples=["qwen3"])
    plugin: str = Field(
        description="which engine driver runs it", examples=["vllm-ascend", "sglang", "refengine"]
    )
    model: str = Field(
        "", description="model path or name, as the engine takes it", examples=["/data/weights/Qwen3-32B"]
    )
    nodes: tuple[UnitName, ...] = Field(
        (), description="nodes that run it; default: every node that reads this file", examples=[["host-a"]]
    )
    devices: tuple[Annotated[int, Field(ge=0, le=63)], ...] = Field(
        (), description="NPU devices (dies) it uses", examples=[[0, 1]]
    )
    port: Port | None = Field(None, description="its HTTP port; default: the driver's", examples=[8113])
    host: str = Field(
        "127.0.0.1", description="address its HTTP server listens on", examples=["127.0.0.1", "0.0.0.0"]
    )
    user: str | None = Field(None, description="user that runs it; default: kvtierd's own")
    group: UnitName | None = Field(
        None, description="engines of one group replace each other: a rolling restart keeps one of them ready",
        examples=["chat"],
    )  # fmt: skip
    role: Literal["both", "prefill", "decode"] = Field(
        "both", description="its part in prefill/decode disaggregation", examples=["both", "prefill"]
    )
    version: str | None = Field(
        None, pattern=r"^\d+(\.\d+)*[\w.+-]*$", description="version of the engine; default: as installed",
        examples=["0.13.0"],
    )  # fmt: skip
    l2: Size | None = Field(
        None,
        description="host memory for the engine's own second tier, for the whole engine",
        examples=["64GiB"],
    )
    l3_switch: bool = Field(
        False,
        description="its L3 can be taken off and on while it runs (kvtierctl l3); for SGLang this sets an admin key",
        examples=[True],
    )
    shm_size: str = Field(
        "500g", description="size of the container's /dev/shm (runner = docker)", examples=["500g"]
    )
    python: AbsolutePath | None = Field(
        None, description="its interpreter; default: [meta] python", examples=["/usr/bin/python3"]
    )
    cpus: str = Field(
        "auto",
        description="CPUs it may use: auto (those of its devices' NUMA nodes), all, or a list",
        examples=["auto", "all", "0-23,96-119"],
    )
    nice: int = Field(
        0, ge=-20, le=19, description="its priority: -20 is the highest, 19 the lowest", examples=[5]
    )
    memory_max: Size | None = Field(
        None,
        description="most host memory it may take before the kernel ends it; not hugepages. Needs systemd or docker",
        examples=["256GiB"],
    )
    args: dict[str, Any] = Field(
        default_factory=dict,
        description="the engine's own options, by their name",
        examples=[{"max-model-len": 32768}],
    )
    env: dict[str, str] = Field(
        default_factory=dict,
        description="environment on top of what kvtierd sets",
        examples=[{"HCCL_BUFFSIZE": "1024"}],
    )

    @model_validator(mode="after")
    def _host(self) -> Self:
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            raise ValueError(f"host {self.host!r} is not an IP address") from None
        if len(set(self.devices)) != len(self.devices):
            raise ValueError("devices names one device twice")
        if self.cpus not in {"auto", "all"}:
            parse_cpu_list(self.cpus)
        return self


RuleName = Literal[
    "meta-hung",
    "failed-loads",
    "failed-loads-everywhere",
    "host-short",
    "engine-unregistered",
    "alloc-failing",
    "thresholds",
    "pool-unbalanced",
    "pool-small",
    "pool-idle",
    "l3-attach",
    "idle-memory",
    "zero-hits",
    "l2-costs",
]
"""The rules by which kvtierd decides, in the order of their urgency."""

Percent = Annotated[int, Field(ge=1, le=99)]
Share = Annotated[float, Field(ge=0, le=1)]


class PolicySettings(Section):
    """[policy]: what kvtierd may change by itself, when, and how often. docs/observability.md explains each rule."""

    dry_run: bool = Field(False, description="say what would be done, and do nothing")
    off: tuple[RuleName, ...] = Field(
        (), description="rules that are switched off", examples=[["pool-small", "pool-idle"]]
    )
    window: Duration = Field(
        300.0, description="the window that rules read rates from: 1m, 5m or 1h", examples=["1m"]
    )
    stale: Duration = Field(30.0, ge=1.0, description="figures older than this count as unknown")

    actions_per_hour: int = Field(6, ge=0, le=1000, description="most actions an hour, of all rules together")
    disruptive_per_hour: int = Field(
        4, ge=0, le=1000, description="of these, most that restart something or throw keys away"
    )
    engine_actions_per_hour: int = Field(3, ge=0, le=1000, description="most actions an hour on one engine")
    cooldown: Duration = Field(900.0, description="least time between two actions of one rule on one target")
    settle: Duration = Field(
        600.0, description="after an action its target is left alone that long, except when it is urgent"
    )
    reversal: Duration = Field(
        7200.0, description="an action is not taken back by its opposite earlier, except when it is urgent"
    )
    deadline: Duration = Field(
        900.0,
        description="an action that has not ended by then counts as failed; nothing else is done beside it before",
    )
    advise_every: Duration = Field(21600.0, description="advice that still holds is repeated that often")

    grow_turnovers: float = Field(
        1.0, gt=0, description="pool-small: turnovers of the pool per hour from which it counts as too small"
    )
    grow_hit_rate: Share = Field(
        0.7, description="pool-small: with a hit rate above this one the pool is large enough"
    )
    grow_hit_rate_drop: Share = Field(
        0.1,
        description="pool-small: or with one that fell by so much against the last hour's, however high it is",
    )
    grow_hold: Duration = Field(
        600.0,
        description="pool-small, pool-unbalanced, zero-hits: that long it must have been so",
    )
    grow_step: Size = Field(
        0, description="pool-small, pool-unbalanced: size of an added holder; 0: a quarter of the pool"
    )
    grow_holders: int = Field(
        4, ge=0, le=64, description="pool-small: most holders that are added on one node"
    )
    grow_gain: Share = Field(
        0.02, description="pool-small: a growth that raises the hit rate by less was futile"
    )
    futile: Duration = Field(
        21600.0,
        description="pool-small: no growth for so long after two that were futile, nor on a host that was short",
    )
    min_queries: int = Field(
        200, ge=1, description="rules on hit rates: fewer keys looked up in the window say nothing"
    )

    idle_use: Share = Field(0.4, description="pool-idle: use of the pool below which it counts as too large")
    idle_hold: Duration = Field(3600.0, description="pool-idle, idle-memory: that long it must have been so")
    short_hold: Duration = Field(
        30.0, description="host-short: a host must have had less than its reserve for that long"
    )
    unbalanced: Share = Field(
        0.4, description="pool-unbalanced: difference in use between the fullest and the emptiest node"
    )
    idle_room: Share = Field(
        0.25, description="idle-memory: share of a host's memory that could go into the pool and does not"
    )

    value_headroom: float = Field(
        4.0, gt=0, description="thresholds: values of mean size that must fit above evict_high on a segment"
    )
    failed_allocations: Share = Field(
        0.01, description="thresholds: share of allocations in the window that fail, from which it acts"
    )
    evict_high_least: Percent = Field(70, description="thresholds: evict_high is never set lower")
    evict_high_most: Percent = Field(90, description="thresholds: evict_high is never set higher")

    meta_hung: Duration = Field(
        30.0, description="meta-hung: a MetaService that runs and has not answered for that long is restarted"
    )
    alloc_failing: Share = Field(
        0.5, description="alloc-failing: share of allocations that fail though there is room"
    )
    alloc_hold: Duration = Field(
        120.0, description="alloc-failing, thresholds: that long it must have been so"
    )

    unregistered: Literal["restart", "detach", "advise"] = Field(
        "restart", description="engine-unregistered: what to do with an engine that lost its registration"
    )
    unregistered_hold: Duration = Field(
        60.0, description="engine-unregistered: that long it may take to come back by itself"
    )
    failed_loads: Literal["detach", "restart", "advise"] = Field(
        "detach", description="failed-loads: what to do with an engine whose KV loads go on failing"
    )
    failed_loads_most: int = Field(
        10,
        ge=1,
        description="failed-loads: failed KV loads in the window from which it acts; the first one is said",
    )
    failed_loads_everywhere: Literal["purge", "advise"] = Field(
        "advise", description="failed-loads-everywhere: what to do when all engines' KV loads fail"
    )
    attach_after: Duration = Field(
        1800.0, description="l3-attach: L3 comes back after that long; each time it fails again doubles it"
    )

    zero_hits_tokens: int = Field(
        100_000, ge=1, description="zero-hits: tokens asked of L3 in the last hour without one hit"
    )
    repeat_hit_rate: Share = Field(
        0.05, description="zero-hits: hit rate of L1 or L2 that shows that prefixes do repeat"
    )
    l2_hit_rate: Share = Field(
        0.02, description="l2-costs: hit rate of L2 over the last hour below which it counts as useless"
    )
    l2_ratio: float = Field(
        4.0, gt=1, description="l2-costs: the pool must give so many times more hits for the same memory"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.window not in {60.0, 300.0, 3600.0}:
            raise ValueError(f"window is 1m, 5m or 1h, not {self.window:g}s")
        if self.evict_high_least > self.evict_high_most:
            raise ValueError(
                f"evict_high_least ({self.evict_high_least}) must not be above evict_high_most ({self.evict_high_most})"
            )
        if self.reversal < self.settle:
            raise ValueError("reversal must not be shorter than settle")
        return self


class ObserveTlsSettings(TlsSettings):
    """[observe] tls: certificates for the exporter; whoever asks it must show one that ``ca`` has signed."""

    ca: AbsolutePath = Field(
        "/etc/kvtierd/tls/ca.pem", description="signs the certificates of those who may ask"
    )


def _listen_address(value: object) -> object:
    if value == "off" or not isinstance(value, str):
        return value
    host, _, port = value.rpartition(":")
    try:
        ipaddress.ip_address("127.0.0.1" if host == "localhost" else host.strip("[]"))
        usable = port.isascii() and port.isdigit() and 1024 < int(port) <= 65535
    except ValueError:
        usable = False
    if not usable or (":" in host) != host.startswith("["):
        raise ValueError(f'{value!r} is not an address to listen on, such as 127.0.0.1:9476, and not "off"')
    return value


class ObserveSettings(Section):
    """[observe]: how often kvtierd looks, and where it shows what it sees."""

    interval: Duration = Field(1.0, description="time between two looks at metrics", examples=["1s"])
    exporter: Annotated[str, BeforeValidator(_listen_address)] = Field(
        "127.0.0.1:9476",
        description="where /metrics and the status page are; beyond loopback only with tls; off: nowhere",
        examples=["127.0.0.1:9476", "off"],
    )
    tls: ObserveTlsSettings | None = Field(
        None,
        description="mutual TLS for the exporter",
        examples=[
            {
                "ca": "/etc/kvtierd/tls/ca.pem",
                "cert": "/etc/kvtierd/tls/node.pem",
                "key": "/etc/kvtierd/tls/node.key",
            }
        ],
    )

    @model_validator(mode="after")
    def _plain_only_on_loopback(self) -> Self:
        host = self.exporter.rpartition(":")[0].strip("[]")
        loopback = self.exporter == "off" or host == "localhost" or ipaddress.ip_address(host).is_loopback
        if not loopback and self.tls is None:
            raise ValueError(
                f"exporter {self.exporter} would show this node to anybody in the network; "
                "write tls = { ca, cert, key } as well, or an address on loopback"
            )
        return self


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
