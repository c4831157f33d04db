"""What the settings say of the cluster, held against this node."""

from __future__ import annotations

from kvtierd.mmc_conf.urls import MmcUrl
from kvtierd.plan.remarks import Remarks
from kvtierd.settings import Settings


def check_cluster(settings: Settings, node: str, remarks: Remarks) -> None:
    """Refuses what cannot work, or is open to anybody, on this node of the cluster."""
    cluster, meta = settings.cluster, settings.meta
    if any(p.witness and p.name == node for p in cluster.peers):
        remarks.refuse(
            "cluster.witness",
            f"this node ({node}) is a witness: it only votes and runs nothing",
            "start kvtierd with --witness there, or take witness = true out",
        )
    beyond = [e for e in cluster.etcd.endpoints if not _is_local(e)]
    if cluster.mode == "etcd" and cluster.etcd.tls is None and beyond and not cluster.insecure:
        remarks.refuse(
            "cluster.etcd-plain",
            f"etcd at {beyond[0]} would be talked to without TLS: anybody in the network could name the master",
            "write [cluster.etcd] tls = { ca, cert, key }, or [cluster] insecure = true",
        )
    if cluster.mode in {"lease", "etcd"} and meta.runner == "docker":
        remarks.refuse(
            "cluster.guard-container",
            f"in mode {cluster.mode} the MetaService cannot run in a container: the guard that ends it together with its"
            " lease kills a process, and the container would go on",
            'write [meta] runner = "host", or mode = "static"',
        )
    if cluster.mode != "standalone" and meta.endpoint == "relay":
        addresses = [p.address for p in cluster.nodes]
        if len(set(addresses)) != len(addresses):
            remarks.refuse(
                "cluster.same-address", "two nodes have the same address", "correct [cluster] peers"
            )


def _is_local(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    return MmcUrl("", host.strip("[]"), int(port)).reach == "loopback"
