"""Unit specifications for what kvtierd itself runs: endpoint, MetaService, pool holders.

Times come from measurements on MemCache 1.3.0: a MetaService is up in about 0.8 s, needs 4 to 5 s to stop, and
can open its ports and still give up within 3 s, hence the hold-off.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from kvtierd.errors import UsageError
from kvtierd.plan.model import (
    HttpProbe,
    HttpTls,
    LogProbe,
    MetaAddress,
    Readiness,
    RestartPolicy,
    StopPolicy,
    TcpProbe,
    UnitSpec,
)
from kvtierd.plan.place import MemcachePlace
from kvtierd.plan.toolchain import Toolchain

ENDPOINT_ID = "kvtier-endpoint-main"
META_ID = "kvtier-meta-main"
LEASE_FILE = "lease"  # in the runtime directory: until when the MetaService may run

# Texts of MemCache and of our start script after which another try cannot help.
META_FATAL = (
    "Invalid key",
    "was empty or in wrong type",
    "exists more than once",
    "is a symlink",
)
# Of our own start scripts (78: no usable MemCache or configuration) and the emulation's launcher (77: not allowed).
FATAL_EXITS = (77, 78)
STOP_SECONDS = 15.0
# Docker kills what has not ended by then; its client must still be there to hear of it.
CONTAINER_STOP_SECONDS = 12.0
# With MemCache's own TLS a first message is lost now and then, and each further try begins 28 s later (1.3.0).
TLS_JOIN_SECONDS = 180.0
HUGEPAGE_FILES = "/dev/hugepages"
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where MemCache keeps a pool's memory


def pool_id(name: int | str) -> str:
    """The unit id of a pool holder of this node: the n-th, or one that was added, by its name."""
    return f"kvtier-pool-{name}"


def engine_id(name: str) -> str:
    """The unit id of an engine."""
    return f"kvtier-engine-{name}"


def _port(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


def endpoint_unit(toolchain: Toolchain, address: MetaAddress, config_path: str) -> UnitSpec:
    """The local endpoint. It listens where engines look and needs nothing to start."""
    ports = (_port(address.client_meta_url), _port(address.client_config_store_url))
    return UnitSpec(
        id=ENDPOINT_ID,
        kind="endpoint",
        name="main",
        argv=(toolchain.python, "-m", "kvtierd.endpoint", "--config", config_path),
        env=dict(toolchain.base_env),
        files=(config_path,),
        ports=ports,
        readiness=Readiness(
            probes=tuple(TcpProbe(port=port) for port in ports), deadline_seconds=15, liveness_seconds=None
        ),
        restart=RestartPolicy(first_seconds=0.1, longest_seconds=5, limit=30),
        stop=StopPolicy(timeout_seconds=5),
    )


def meta_unit(
    toolchain: Toolchain,
    address: MetaAddress,
    *,
    place: MemcachePlace,
    conf_path: str,
    guard_file: str | None = None,
    tls: HttpTls | None = None,
) -> UnitSpec:
    """The MetaService, by wheel or by run package, on the host or in a container."""
    argv, env = place.command(
        toolchain,
        name=META_ID,
        command=(place.program,) if place.program else (place.python, toolchain.run_meta_script),
        env={**place.meta_env, "MMC_META_CONFIG_PATH": conf_path},
        stop_seconds=CONTAINER_STOP_SECONDS,
    )
    return UnitSpec(
        id=META_ID,
        kind="meta",
        name="main",
        argv=argv,
        env=env,
        user=place.user,
        files=(conf_path,),
        ports=(
            _port(address.server_meta_url),
            _port(address.server_config_store_url),
            _port(address.metrics_url),
        ),
        namespace=toolchain.namespace,
        readiness=Readiness(
            # What the answer says, and whose it is, the daemon checks beside this.
            probes=(HttpProbe(url=f"{address.metrics_url}/health", tls=tls),),
            deadline_seconds=30,
            holdoff_seconds=3,
            interval_seconds=0.1,
            timeout_seconds=2,
            liveness_seconds=10,
            kill_when_hung=True,  # what a hung MetaService knows is purged, however it ends
        ),
        restart=RestartPolicy(
            first_seconds=0.1,
            longest_seconds=30,
            limit=20,
            fatal_patterns=META_FATAL,
            fatal_exit_codes=FATAL_EXITS,
        ),
        stop=StopPolicy(timeout_seconds=STOP_SECONDS),
        guard_file=guard_file,
    )


def pool_unit(
    toolchain: Toolchain,
    index: int,
    *,
    place: MemcachePlace,
    conf_path: str,
    emulated: bool,
    hugepages: bool,
    after: tuple[str, ...],
    tls: bool = False,
    name: str = "",
) -> UnitSpec:
    """A pool holder: a LocalService in a process of its own that only contributes DRAM. ``index``: its die."""
    name = name or str(index)
    devices = () if emulated else (index,)
    patience = ("--init-deadline", f"{TLS_JOIN_SECONDS:g}") if tls else ()
    argv, env = place.command(
        toolchain,
        name=pool_id(name),
        command=(place.python, toolchain.run_pool_script, "--device", str(index), *patience),
        env={**place.pool_env, "MMC_LOCAL_CONFIG_PATH": conf_path},
        devices=devices,
        # The pool's memory lies here, and the other members of the pool on this host look for it here.
        directories=(SHARED_MEMORY, *((HUGEPAGE_FILES,) if hugepages else ())),
        stop_seconds=CONTAINER_STOP_SECONDS,
    )
    return UnitSpec(
        id=pool_id(name),
        kind="pool",
        name=name,
        argv=argv,
        env=env,
        user=place.user,
        devices=devices,
        files=(conf_path,),
        after=after,
        namespace=toolchain.namespace,
        readiness=Readiness(
            probes=(LogProbe(contains="kvtierd-pool ready"),),
            # Reserving and registering hundreds of GiB takes its time on hardware.
            deadline_seconds=max(60 if emulated else 300, TLS_JOIN_SECONDS + 30 if tls else 0),
        ),
        restart=RestartPolicy(
            first_seconds=0.5,
            longest_seconds=60,
            limit=20,
            fatal_exit_codes=FATAL_EXITS,
        ),
        stop=StopPolicy(timeout_seconds=STOP_SECONDS),
    )


def resolve_unit(name: str, known: Sequence[str]) -> str:
    """A full unit id from what an operator types: the id, ``pool-0``, ``meta``, or an engine's name.

    Raises:
        UsageError: it names no unit, or more than one.
    """
    wanted = name.removesuffix(".service")
    candidates = [wanted, f"kvtier-{wanted}", f"kvtier-{wanted}-main", f"kvtier-engine-{wanted}"]
    for candidate in candidates:
        if candidate in known:
            return candidate
    near = difflib.get_close_matches(wanted, [*(k.split("-", 2)[-1] for k in known), *known], n=1, cutoff=0.5)
    short = ", ".join(k.removeprefix("kvtier-").removesuffix("-main").removeprefix("engine-") for k in known)
    raise UsageError(
        f"there is no unit {name!r}",
        hint=(f"did you mean {near[0]!r}? " if near else "") + f"units: {short or 'none'}",
        code="unit.unknown",
    )
