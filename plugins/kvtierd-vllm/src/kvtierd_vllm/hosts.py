"""One engine over several hosts: data parallelism with a head and headless followers.

The head has the API server; every other node runs its share of the ranks and serves no HTTP. All come from the same
settings: a node's place among the engine's nodes decides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from kvtierd.plan.engine import EngineContext, Remarks
from kvtierd_vllm.arguments import count_of

DEFAULT_RPC_PORT: Final = 13389  # of the practice guide
RPC_PORT_OPTION: Final = "data-parallel-rpc-port"
API_SERVERS_OPTION: Final = "api-server-count"


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """This node's part. ``ranks`` are the data-parallel ranks on it. ``handled``: options the part has dealt with."""

    ranks: int = 1
    spans_hosts: bool = False
    headless: bool = False
    argv: tuple[str, ...] = ()
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ports: Mapping[str, int] = dataclasses.field(default_factory=dict)
    handled: frozenset[str] = frozenset()


def place(context: EngineContext, named: Mapping[str, Any], findings: Remarks) -> Placement:
    """This node's part of the engine.

    An engine spans its nodes when ``data-parallel-size`` is more than ``data-parallel-size-local``; otherwise each
    node runs one of its own.
    """
    size = count_of(named, "data-parallel-size", findings)
    local = count_of(named, "data-parallel-size-local", findings, default=size)
    if size <= local:
        # Prefill and decode send KV to each other, over the nodes' links where they are on several.
        links = _links(context, findings) if context.role != "both" and len(context.addresses) > 1 else {}
        return Placement(ranks=local, env=links)
    nodes = len(context.nodes) or 1
    if local * nodes != size:
        findings.refuse(
            "engine.data-parallel",
            f"data-parallel-size is {size}, but {nodes} node(s) with data-parallel-size-local {local} are {local * nodes}",
            "make data-parallel-size the sum over the engine's nodes",
        )
    headless = context.node_index > 0
    head = context.nodes[0] if context.nodes else context.node
    address = context.addresses.get(head)
    if address is None:
        findings.refuse(
            "engine.head-address",
            f"the address of the engine's first node {head!r} is not known",
            "name it among [cluster] peers",
        )
    port = _port(named, findings)
    argv: list[str] = []
    if headless:
        argv += ["--headless", "--data-parallel-start-rank", str(context.node_index * local)]
    argv += ["--data-parallel-address", address or "", "--data-parallel-rpc-port", str(port)]
    return Placement(
        ranks=local,
        spans_hosts=True,
        headless=headless,
        argv=tuple(argv),
        env=_links(context, findings) | {"OMP_PROC_BIND": "false", "OMP_NUM_THREADS": "10"},
        ports={} if headless else {"data-parallel RPC": port},
        # A headless node has no API servers to count: vLLM refuses the option there.
        handled=frozenset({RPC_PORT_OPTION, *({API_SERVERS_OPTION} if headless else ())}),
    )


def _links(context: EngineContext, findings: Remarks) -> dict[str, str]:
    """Interface and address for traffic between the nodes."""
    env: dict[str, str] = {}
    address = context.addresses.get(context.node)
    if address is not None:
        env["HCCL_IF_IP"] = address
    if context.nic is None:
        findings.note(
            "engine.nic-unknown",
            f"no interface of this host has the address {address}: GLOO_SOCKET_IFNAME, TP_SOCKET_IFNAME and"
            " HCCL_SOCKET_IFNAME are not set, and the libraries choose one themselves. Write [node] nic",
        )
        return env
    return env | dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME"), context.nic)


def _port(named: Mapping[str, Any], findings: Remarks) -> int:
    port = count_of(named, RPC_PORT_OPTION, findings, default=DEFAULT_RPC_PORT)
    if port > 65535:
        findings.refuse("engine.bad-argument", f"args.{RPC_PORT_OPTION} is {port}, not a port")
        return DEFAULT_RPC_PORT
    return port
