"""Where the MetaService and its config store listen, and which ports that takes."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from kvtierd.plan.hardware import uses_hcom
from kvtierd.plan.model import MetaAddress, PoolPlan
from kvtierd.plan.ports import PortPlan
from kvtierd.plan.units import ENDPOINT_ID, META_ID
from kvtierd.settings import ClusterSettings, MetaSettings, Settings

LOOPBACK = "127.0.0.1"
DEFAULT_METRICS_PORT = 8000


def plan_addresses(
    settings: Settings,
    ports: PortPlan,
    pool: PoolPlan,
    *,
    scheme: str = "http",
    has_meta: bool,
    node: str,
    master: str,
    alias: str = "",
    engine_ports: AbstractSet[int],
) -> MetaAddress:
    """Claims this node's ports for the MetaService and the endpoint before it.

    Args:
        settings: the settings.
        ports: where the ports are claimed.
        pool: the pool, for the links between its ranks.
        scheme: of the MetaService's HTTP service.
        has_meta: the MetaService is in this node's plan.
        node: this node, where its MetaService listens.
        master: the node whose MetaService clients talk to without an endpoint of their own.
        alias: the host name that stands for the master, where engines are given one.
        engine_ports: ports that engines will claim; defaults give way to them.
    """
    meta = settings.meta
    relay = meta.endpoint == "relay"
    alone = settings.cluster.mode == "standalone"
    bind = LOOPBACK if relay or alone else node_address(settings.cluster, node)
    dial = alias or (LOOPBACK if relay or alone else node_address(settings.cluster, master))
    owner = ENDPOINT_ID if relay else META_ID
    written = {p for p in (meta.metrics_port, meta.backend_port, meta.backend_config_store_port) if p}
    links = _link_ports(meta, pool)
    written |= {meta.port, meta.config_store_port, *links, *engine_ports}
    if relay or has_meta:
        ports.claim(meta.port, owner, "MetaService for engines", address=bind, setting="[meta] port")
        ports.claim(
            meta.config_store_port, owner, "config store for engines", address=bind,
            setting="[meta] config_store_port",
        )  # fmt: skip
    server_port, server_store_port = meta.port, meta.config_store_port
    metrics_port = meta.metrics_port or DEFAULT_METRICS_PORT
    if has_meta:
        if relay:
            server_port = _backend(ports, meta.backend_port, meta.port, "MetaService behind the endpoint",
                                   "[meta] backend_port", written)  # fmt: skip
            server_store_port = _backend(
                ports, meta.backend_config_store_port, meta.config_store_port, "config store behind the endpoint",
                "[meta] backend_config_store_port", written,
            )  # fmt: skip
        if meta.metrics_port:
            ports.claim(metrics_port, META_ID, "MetaService HTTP", setting="[meta] metrics_port")
        else:
            metrics_port = ports.claim_default(
                metrics_port, META_ID, "MetaService HTTP", setting="[meta] metrics_port", avoid=written
            )
    for port in links:
        ports.claim(port, "pool", "links between ranks", setting="[meta] hcom_port")
    return MetaAddress(
        client_meta_url=f"tcp://{bracketed(dial)}:{meta.port}",
        client_config_store_url=f"tcp://{bracketed(dial)}:{meta.config_store_port}",
        server_meta_url=f"tcp://{bracketed(bind)}:{server_port}",
        server_config_store_url=f"tcp://{bracketed(bind)}:{server_store_port}",
        metrics_url=f"{scheme}://{LOOPBACK}:{metrics_port}",
    )


def bracketed(host: str) -> str:
    """A host as it stands before a port."""
    return f"[{host}]" if ":" in host else host


def node_address(cluster: ClusterSettings, node: str) -> str:
    """The address of a node; loopback for one that is not among the peers (there are none, or no master is known)."""
    return next((p.address for p in cluster.peers if p.name == node), LOOPBACK)


def _backend(
    ports: PortPlan, wanted: int | None, beside: int, purpose: str, setting: str, written: set[int]
) -> int:
    if wanted:
        return ports.claim(wanted, META_ID, purpose, setting=setting)
    return ports.claim_default(beside + 1, META_ID, purpose, setting=setting, avoid=written)


def _link_ports(meta: MetaSettings, pool: PoolPlan) -> range:
    """One for each rank, from [meta] hcom_port on, for the protocols that need them."""
    ranks = pool.providers + pool.clients if uses_hcom(pool.protocol) else 0
    return range(meta.hcom_port, meta.hcom_port + ranks)
