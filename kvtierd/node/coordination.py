"""From settings to a coordinator and its network: which way of naming a master, and the files that each keeps.

``STATE/cluster/`` holds what must outlive a reboot: a voter's epoch, the master of mode static, the highest epoch
followed. ``RUNTIME/lease-epoch`` says under which epoch the guard was armed last, for the daemon after this one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import socket
from collections.abc import Callable
from pathlib import Path

import psutil

from kvtierd import __version__
from kvtierd.cluster.announcer import Announcer
from kvtierd.cluster.election_messages import HeldLease
from kvtierd.cluster.epoch_store import EpochStore, SeenEpochStore
from kvtierd.cluster.etcd import etcd_coordinator
from kvtierd.cluster.following import Following
from kvtierd.cluster.hello import NodeFacts
from kvtierd.cluster.lease import LeaseCoordinator, elector_config
from kvtierd.cluster.master_store import MasterStore
from kvtierd.cluster.network import PeerNetwork
from kvtierd.cluster.observer import ObserverCoordinator
from kvtierd.cluster.standing import Coordinator
from kvtierd.cluster.static import StaticCoordinator
from kvtierd.cluster.tls import PeerTls
from kvtierd.errors import ClusterError
from kvtierd.plan.model import NodePlan
from kvtierd.plan.units import LEASE_FILE
from kvtierd.settings import Settings
from kvtierd.units.guard_file import now_seconds, read_deadline

HASH_SEED = "PYTHONHASHSEED"
LEASE_EPOCH_FILE = "lease-epoch"


@dataclasses.dataclass(frozen=True, slots=True)
class Coordination:
    """A node's part in its cluster, ready to run: ``network.run()`` and ``coordinator.run()``, both until cancelled."""

    network: PeerNetwork
    coordinator: Coordinator
    security: PeerTls
    fence: Following | None  # where the coordinator does not keep the highest epoch itself: to be run as well


def make_coordination(
    settings: Settings,
    node: str,
    facts: Callable[[], NodeFacts],
    *,
    witness: bool = False,
    meta_runs: bool = False,
) -> Coordination:
    """Connects to nothing yet.

    Args:
        settings: With a ``[cluster]`` that is not standalone.
        node: This node's name among the peers.
        facts: What it says of itself to the others.
        witness: It only votes.
        meta_runs: The MetaService of an earlier daemon runs on here, under the lease that its guard knows.

    Raises:
        ClusterError: the settings are not safe.
    """
    cluster = settings.cluster
    directory = Path(settings.paths.state) / "cluster"
    security = PeerTls(cluster)
    network = PeerNetwork(cluster, node, security, facts=facts)
    if cluster.mode == "static":
        static = StaticCoordinator(network, MasterStore(directory / "master.json", cluster.name))
        return Coordination(network, static, security, None)
    seen = SeenEpochStore(directory / "seen-epoch.json", cluster.name)
    following = Following(network.board, seen, network.refusals)
    held = held_lease(Path(settings.paths.runtime)) if meta_runs else None
    coordinator: Coordinator
    if cluster.mode == "etcd":
        highest, master = seen.load(), seen.master
        named = MasterStore(directory / "master.json", cluster.name).load()
        if named is not None and named.epoch > highest:  # the mode was static before
            highest, master = named.epoch, named.master
        coordinator = etcd_coordinator(
            settings,
            node,
            highest_epoch=highest,
            highest_master=master,
            held_epoch=held.epoch if held is not None else 0,
            fence=lambda: (seen.epoch, seen.master),
            heard=Announcer(network).hear,
        )
        return Coordination(network, coordinator, security, following)
    if node in cluster.voters:
        config = elector_config(cluster, node)
        coordinator = LeaseCoordinator(
            config,
            network,
            EpochStore(directory / "epoch.json", config),
            following,
            witness=witness,
            held=held,
        )
    else:
        coordinator = ObserverCoordinator(network, following)
    return Coordination(network, coordinator, security, None)


def name_of_witness(settings: Settings) -> str:
    """This machine's name among the peers: as written, or by its address.

    Raises:
        ClusterError: it is not there, or not as a witness.
    """
    mine = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    peers = settings.cluster.peers
    by_address = next((p.name for p in peers if p.address in mine), "")
    name = settings.node.name or by_address or socket.gethostname()
    peer = next((p for p in peers if p.name == name), None)
    if peer is None or not peer.witness:
        witnesses = ", ".join(p.name for p in peers if p.witness) or "none"
        raise ClusterError(
            f"this machine ({name}) is no witness of the cluster",
            hint=f"witnesses in [cluster] peers: {witnesses}; without --witness it is a node like the others",
            code="cluster.no-witness",
        )
    return name


def held_lease(runtime: Path) -> HeldLease | None:
    """The lease that the guard still enforces; ``None``: none, or one of another boot."""
    until = read_deadline(str(runtime / LEASE_FILE))
    if until is None or until <= now_seconds():
        return None
    with contextlib.suppress(OSError, ValueError):
        return HeldLease(int((runtime / LEASE_EPOCH_FILE).read_text(encoding="ascii")), until)
    return None


def facts_of(plan: NodePlan | None, settings: Settings) -> NodeFacts:
    """What this node tells the others of its settings and its plan, as far as it must fit together with theirs."""
    if plan is None:
        return NodeFacts("", version=__version__, settings_digest=settings_digest(settings))
    seeds = {u.env[HASH_SEED] for u in plan.units if u.kind == "engine" and HASH_SEED in u.env}
    return NodeFacts(
        plan.node,
        version=__version__,
        memcache_version=plan.memcache_version,
        hash_seed=",".join(sorted(seeds)),
        world_size=plan.pool.world_size,
        protocol=plan.pool.protocol,
        settings_digest=settings_digest(settings),
    )


def settings_digest(settings: Settings) -> str:
    """Of what must be the same on all nodes; sizes, ports and engines of one node are its own affair."""
    cluster = settings.cluster.model_dump(mode="json", exclude={"tls", "etcd"})
    if settings.cluster.mode == "etcd":
        # Two nodes that ask two etcds, or look at other keys, elect two masters.
        etcd = settings.cluster.etcd
        cluster["etcd"] = {"endpoints": sorted(etcd.endpoints), "prefix": etcd.prefix}
    # Without endpoints every node dials every other one's MetaService.
    direct = ("port", "config_store_port", "tls") if settings.meta.endpoint == "direct" else ()
    agreed = {
        "cluster": cluster,
        "pool": settings.pool.model_dump(
            mode="json",
            include={"placement", "protocol", "evict_high", "evict_low", "purge_on_unclean", "world_size"},
        ),
        "meta": settings.meta.model_dump(
            mode="json", include={"endpoint", "lease_ttl", "hcom_port", *direct}
        ),
    }
    return hashlib.sha256(json.dumps(agreed, sort_keys=True).encode()).hexdigest()[:16]
