"""Unit specifications for what kvtierd itself runs: endpoint, MetaService, pool holders.

Times come from measurements on MemCache 1.3.0: a MetaService is up in about 0.8 s, needs 4 to 5 s to stop, and
can open its ports and still give up within 3 s, hence the hold-off.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from kvtierd.errors import UsageError
from kvtierd.plan.environment import merge_env
from kvtierd.plan.inventory import MemcacheInstall
from kvtierd.plan.model import (
    HttpProbe,
    LogProbe,
    MetaAddress,
    PoolPlan,
    Readiness,
    RestartPolicy,
    StopPolicy,
    TcpProbe,
    UnitSpec,
)
from kvtierd.plan.toolchain import Toolchain

ENDPOINT_ID = "kvtier-endpoint-main"
META_ID = "kvtier-meta-main"

# Texts of MemCache and of our start script after which another try cannot help.
META_FATAL = (
    "Invalid key",
    "was empty or in wrong type",
    "exists more than once",
    "is a symlink",
)
# Of our own start scripts (78: no usable MemCache or configuration) and the emulation's launcher (77: not allowed).
FATAL_EXITS = (77, 78)


def pool_id(index: int) -> str:
    """The unit id of the n-th pool holder of this node."""
    return f"kvtier-pool-{index}"


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
    install: MemcacheInstall | None,
    python: str,
    machine: str,
    conf_path: str,
    env: dict[str, str],
    user: str | None,
) -> UnitSpec:
    """The MetaService, by wheel or by run package."""
    if install is not None and install.runtime == "binary":
        program = install.executable or f"{install.home}/{machine}-linux/bin/mmc_meta_service"
        command: tuple[str, ...] = (program,)
    else:
        command = (python, toolchain.run_meta_script)
    prefix = toolchain.emulation.prefix if toolchain.emulation else ()
    return UnitSpec(
        id=META_ID,
        kind="meta",
        name="main",
        argv=(*prefix, *command),
        env=merge_env(toolchain.base_env, env, {"MMC_META_CONFIG_PATH": conf_path}),
        user=user,
        files=(conf_path,),
        ports=(
            _port(address.server_meta_url),
            _port(address.server_config_store_url),
            _port(address.metrics_url),
        ),
        namespace=toolchain.emulation.root if toolchain.emulation else None,
        readiness=Readiness(
            # What the answer says, and whose it is, the daemon checks beside this.
            probes=(HttpProbe(url=f"{address.metrics_url}/health"),),
            deadline_seconds=30,
            holdoff_seconds=3,
            interval_seconds=0.1,
            timeout_seconds=2,
            liveness_seconds=10,
        ),
        restart=RestartPolicy(
            first_seconds=0.1,
            longest_seconds=30,
            limit=20,
            fatal_patterns=META_FATAL,
            fatal_exit_codes=FATAL_EXITS,
        ),
        stop=StopPolicy(timeout_seconds=15),
    )


def pool_unit(
    toolchain: Toolchain,
    index: int,
    planned: PoolPlan,
    *,
    python: str,
    conf_path: str,
    env: dict[str, str],
    user: str | None,
    emulated: bool,
    after: tuple[str, ...],
) -> UnitSpec:
    """A pool holder: a LocalService in a process of its own that only contributes DRAM."""
    prefix = toolchain.emulation.prefix if toolchain.emulation else ()
    return UnitSpec(
        id=pool_id(index),
        kind="pool",
        name=str(index),
        argv=(*prefix, python, toolchain.run_pool_script, "--device", str(index)),
        env=merge_env(toolchain.base_env, env, {"MMC_LOCAL_CONFIG_PATH": conf_path}),
        user=user,
        devices=() if emulated else (index,),
        files=(conf_path,),
        after=after,
        namespace=toolchain.emulation.root if toolchain.emulation else None,
        readiness=Readiness(
            probes=(LogProbe(contains="kvtierd-pool ready"),),
            # Reserving and registering hundreds of GiB takes its time on hardware.
            deadline_seconds=60 if emulated else 300,
        ),
        restart=RestartPolicy(
            first_seconds=0.5,
            longest_seconds=60,
            limit=20,
            fatal_exit_codes=FATAL_EXITS,
        ),
        stop=StopPolicy(timeout_seconds=15),
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
