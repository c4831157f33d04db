"""The nodes of a cluster: do they agree, can they elect a master, and do they believe each other?"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any

from kvtierd.checks import Group, Outcome, Patient, absent, fail, note, ok, unknown, warn, worst
from kvtierd.cluster.election_config import ElectorConfig
from kvtierd.cluster.hello import WRONG_CLOCK_SECONDS
from kvtierd.cluster.identity import check_identity
from kvtierd.doctor.looking import here, own_name, shown
from kvtierd.errors import ClusterError
from kvtierd.settings import Settings
from kvtierd.settings.cluster import ClusterSettings

GROUP = Group("cluster")
SHORT_LEASE_SECONDS = 3.0
LONG_LEASE_SECONDS = 20.0
WRONG_RESULTS = ("hash_seed", "world_size", "protocol")
"""Of what peers must agree on: without it there are no hits, or no pool."""
FINE_FOR_A_WHILE = ("version",)


@GROUP.check(
    "self",
    title="This node is one of the peers",
    why="A node that does not find itself among the peers belongs to no cluster: it plans as if it were alone, or not at all.",
    fix='[node] name = "..." as in [cluster] peers; the host name counts when it is not written',
)
async def self_(patient: Patient) -> Outcome:
    """By name, or by an address of this host."""
    cluster = _cluster(patient)
    if cluster is None:
        return absent("one host: there is no cluster")
    name = await _own_name(patient)
    names = [peer.name for peer in cluster.peers]
    return ok(name) if name in names else fail(f"{name} is not one of {', '.join(names)}")


@GROUP.check(
    "addresses",
    title="Peers have addresses that others can reach, each its own",
    why="127.0.0.1 means another host on each node: it finds itself there, and the cluster never forms.",
    fix="write the address of the cluster's own network for each peer",
)
def addresses(patient: Patient) -> Outcome:
    """Loopback, unspecified and doubled addresses. Names are not resolved."""
    cluster = _cluster(patient)
    if cluster is None:
        return absent("one host: there is no cluster")
    found, seen = [], dict[str, str]()
    for peer in cluster.peers:
        reach = _reach(peer.address)
        if reach:
            found.append(fail(f"{peer.name}: {peer.address} is {reach}"))
        elif peer.address in seen:
            found.append(fail(f"{peer.name} and {seen[peer.address]} have the same address {peer.address}"))
        seen.setdefault(peer.address, peer.name)
    return worst(found, ", ".join(f"{p.name} {p.address}" for p in cluster.peers))


@GROUP.check(
    "voters",
    title="The loss of one host leaves somebody who takes over",
    why="Two hosts that lose sight of each other cannot know whether the other still serves. In mode static nobody takes over by"
    " itself: until somebody promotes a node, every lookup is a miss.",
    fix='a third machine without NPUs as { name = "...", address = "...", witness = true } and mode = "lease"; until then, when'
    " the master is lost: kvtierctl promote --force",
)
def voters(patient: Patient) -> Outcome:
    """Mode, number of voters, and voters that fall together."""
    cluster = _cluster(patient)
    if cluster is None:
        return absent("one host: there is no cluster")
    if cluster.mode == "static":
        return note(
            f"{len(cluster.nodes)} hosts with the fixed master {cluster.master}: nobody takes over by itself"
        )
    if cluster.mode == "etcd":
        count = len(cluster.etcd.endpoints)
        return (
            ok(f"etcd with {count} members")
            if count >= 3
            else warn(f"etcd with {count} member(s) cannot lose one")
        )
    quorum = len(cluster.voters) // 2 + 1
    return ok(
        f"{len(cluster.voters)} voters, {quorum} of them elect: {len(cluster.voters) - quorum} may be lost"
    )


@GROUP.check(
    "lease",
    title="The lease leaves time for a slow answer",
    why="A master that cannot renew in time must stop its MetaService. Two renewals have to fit into a lease, or one slow disk or"
    " lost packet costs the master; and as long as it lasts nobody else may serve.",
    fix='[cluster] lease = "6s"; lower it only in a quiet network with disks that sync in milliseconds',
)
def lease(patient: Patient) -> Outcome:
    """The times that follow from [cluster] lease."""
    cluster = _cluster(patient)
    if cluster is None or cluster.mode not in {"lease", "etcd"}:
        return absent("no lease: mode is " + (cluster.mode if cluster else "standalone"))
    if cluster.mode == "etcd":
        times = None
        seconds = cluster.lease
    else:
        try:
            times = ElectorConfig(cluster.name, cluster.voters[0], cluster.voters, cluster.lease)
        except ClusterError as error:
            return fail(error.message, error.hint)
        seconds = times.lease_seconds
    told = f"lease {seconds:g} s"
    if times is not None:
        told += (
            f": renewed after {times.renew_seconds:.2g} s, tried again every {times.retry_seconds:.2g} s; a lost master is"
            f" replaced after {times.promise_seconds:.2g} s at the earliest"
        )
    if seconds < SHORT_LEASE_SECONDS:
        return warn(
            f"{told}; a stop of {seconds / 3 * 2:.2g} s (disk, network, a frozen machine) costs the master its role"
        )
    return note(f"{told}; so long every lookup is a miss") if seconds > LONG_LEASE_SECONDS else ok(told)


@GROUP.check(
    "insecure",
    title="Nodes prove to each other who they are",
    why="With insecure = true anybody in the network can be a node: read and write all cached KV, which are users' prompts, and"
    " take mastership.",
    fix="kvtierctl certs init; kvtierctl certs issue for each node; then remove insecure",
)
def insecure(patient: Patient) -> Outcome:
    """[cluster] insecure, and etcd without TLS beyond loopback."""
    cluster = _cluster(patient)
    if cluster is None:
        return absent("one host: there is no cluster")
    found = [warn("[cluster] insecure = true")] if cluster.insecure else []
    far = [e for e in cluster.etcd.endpoints if _reach(e.rpartition(":")[0].strip("[]")) != "loopback"]
    if cluster.mode == "etcd" and cluster.etcd.tls is None and far:
        found.append(
            warn(f"etcd is asked without TLS: {', '.join(far)}", "[cluster.etcd] tls = { ca, cert, key }")
        )
    return worst(found, "certificates on both sides")


@GROUP.check(
    "certificate",
    title="This node's certificate is one that the others accept",
    why="Nodes refuse a certificate that is expired, another node's, or of another authority. Links that are up stay up, so it"
    " shows at the next restart or switchover, when it is needed.",
    fix="kvtierctl certs show FILE; kvtierctl certs issue NODE makes a new one; no restart is needed",
)
async def certificate(patient: Patient) -> Outcome:
    """The node shakes hands with itself; who can read the key is another check's."""
    settings, cluster = patient.settings, _cluster(patient)
    if settings is None or cluster is None or cluster.insecure:
        return absent("no certificates are used")
    name = await _own_name(patient)
    looked_at = _on_this_machine(patient, settings)
    problems = await patient.look(
        "cluster.certificate", lambda: check_identity(looked_at, node=name, now_unix_seconds=patient.now_unix)
    )
    found = []
    for problem in problems:
        text = shown(patient.view, problem.message)
        if problem.code == "certs.key-readable":
            continue
        if problem.code == "certs.unreadable" and "Permission denied" in text:
            found.append(unknown(text, "run it as root"))
        else:
            found.append((fail if problem.fatal else warn)(text, shown(patient.view, problem.hint)))
    return worst(found, cluster.tls.cert)


def _on_this_machine(patient: Patient, settings: Settings) -> Settings:
    """The same settings with the certificates' files where they are on the machine that doctor runs on."""
    if patient.view.live:
        return settings
    tls = settings.cluster.tls
    places = {name: str(here(patient.view, getattr(tls, name))) for name in ("ca", "cert", "key")}
    cluster = settings.cluster.model_copy(update={"tls": tls.model_copy(update=places)})
    return settings.model_copy(update={"cluster": cluster})


@GROUP.check(
    "agree",
    title="All nodes have the same settings and versions",
    why="With another PYTHONHASHSEED the same prompt has other keys: no hit across hosts, and no error. Ranks with another"
    " world_size or protocol do not find each other; another version of MemCache may not speak with this one.",
    fix="the same settings file and packages on every node, then kvtierctl reload; kvtierctl peers shows what differs",
)
def agree(patient: Patient) -> Outcome:
    """What a running kvtierd knows of the others' seed, world size, protocol, settings and versions."""
    peers = _peers(patient)
    if not peers:
        return absent("no kvtierd of a cluster answers here")
    found = []
    for peer in peers:
        for text in peer.get("differences") or ():
            what = str(text).partition(" ")[0]
            make = fail if what in WRONG_RESULTS else note if what in FINE_FOR_A_WHILE else warn
            found.append(make(f"{peer.get('name')}: {text}"))
    return worst(found, f"{len(peers)} nodes agree")


@GROUP.check(
    "reached",
    title="Every node is reached, and there is a master",
    why="A node that is not reached takes no part: its memory is missing from the pool, and with too few of them there is no master.",
    fix="kvtierctl peers on that node; systemctl status kvtierd; the ports of [cluster] port and endpoint_port in the firewall",
)
def reached(patient: Patient) -> Outcome:
    """By a running kvtierd's word."""
    peers = _peers(patient)
    if not peers or patient.daemon is None:
        return absent("no kvtierd of a cluster answers here")
    found = [warn(f"{p.get('name')}: {p['problem']}") for p in peers if p.get("problem")]
    master = patient.daemon.peers.get("master")
    if not master:
        found.append(fail(f"no master is known: {patient.daemon.peers.get('why') or 'no reason is known'}"))
    return worst(found, f"{len(peers)} nodes, master {master}")


@GROUP.check(
    "clock",
    title="The nodes' clocks agree",
    why="Leases do not mind. Certificates do, and whoever reads the logs of two nodes side by side.",
    fix="systemctl enable --now chronyd on every node, with the same servers",
)
def clock(patient: Patient) -> Outcome:
    """Offsets that a running kvtierd has measured."""
    offsets = {
        str(p.get("name")): float(p["clock_offset_seconds"])
        for p in _peers(patient)
        if p.get("clock_offset_seconds") is not None
    }
    if not offsets:
        return absent("no kvtierd of a cluster answers here, or it has measured none")
    bad = [
        warn(f"{name}'s clock is {abs(offset):.1f} s {'ahead' if offset > 0 else 'behind'}")
        for name, offset in offsets.items()
        if abs(offset) > WRONG_CLOCK_SECONDS
    ]
    return worst(bad, f"at most {max(map(abs, offsets.values())):.2f} s apart")


def _cluster(patient: Patient) -> ClusterSettings | None:
    settings = patient.settings
    return None if settings is None or settings.cluster.mode == "standalone" else settings.cluster


def _peers(patient: Patient) -> list[Mapping[str, Any]]:
    peers = patient.daemon.peers.get("peers") if patient.daemon is not None else None
    return [peer for peer in peers or () if isinstance(peer, Mapping)]


async def _own_name(patient: Patient) -> str:
    inventory = await patient.inventory()
    mine = frozenset(address for nic in inventory.nics for address in nic.addresses)
    return own_name(patient, inventory.hostname, mine)


def _reach(address: str) -> str:
    """What is wrong with an address for others; "" when nothing is, or it is a name."""
    if address == "localhost":
        return "loopback"
    try:
        number = ipaddress.ip_address(address.strip("[]"))
    except ValueError:
        return ""
    return "loopback" if number.is_loopback else "no address to reach" if number.is_unspecified else ""
