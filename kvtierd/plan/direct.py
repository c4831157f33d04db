"""PURE: how clients without a local endpoint come to another master (``[meta] endpoint = "direct"`` in a cluster).

A client of MemCache leaves a MetaService only when its link breaks. Then it dials what its configuration says, and that
must have changed by then. There are three ways, and which of them works is a matter of release and kind of client:

- *conf*: the addresses in its mmc-local.conf are rewritten while it runs. Clients with memory access take that (measured on
  1.3.0: dialled at the next reconnect, about 11 s; since 1.1.3 by that release's ``dynamic_config`` keys). One that only
  looks up (``init_bm=False``: vLLM's scheduler) still dials the old address a minute later (measured).
- *alias*: the addresses have a host name, and what /etc/hosts says of it is changed. All kinds of clients follow (measured
  on 1.3.0: 7.2 to 7.4 s). Releases before 1.2 resolve a name once, at the start.
- *restart*: what nothing else reaches is started anew, one at a time.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from typing import Final, Literal

from kvtierd.errors import ConfError
from kvtierd.mmc_conf.keyspec import V1_1_3, V1_2
from kvtierd.mmc_conf.versions import MmcVersion, resolve_version
from kvtierd.plan.addresses import bracketed
from kvtierd.plan.inventory import Record
from kvtierd.plan.model import DirectClient, DirectPlan, Means, NodePlan, UnitSpec
from kvtierd.plan.remarks import Remarks
from kvtierd.settings import Settings

CONF_SINCE: Final = V1_1_3
NAMES_SINCE: Final = V1_2
Kind = Literal["pool", "full", "any"]
"""``pool``: a pool holder; ``full``: an engine all of whose clients have memory access and read mmc-local.conf; ``any``: one
that has others, or does not say."""

_LABEL = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)")


class Way(Record):
    """How one kind of client follows, and why this way."""

    means: Means
    why: str


def way_of(version: str, kind: Kind, *, alias: bool) -> Way:
    """The way for one kind of client.

    Args:
        version: MemCache's; "" or one that is not known: nothing is taken for granted.
        kind: What the client is.
        alias: Whether a line in /etc/hosts is allowed.
    """
    known = _known(version)
    if known is None:
        return Way(
            means="restart",
            why=f"MemCache {version or 'of an unknown version'} is not known to follow a change",
        )
    rewritten = f"MemCache {known} takes new addresses from its file while it runs"
    if kind == "pool":
        # Its file is its own, and no file of the host is touched for it.
        if known >= CONF_SINCE:
            return Way(means="conf", why=f"{rewritten}, and a pool holder is a full client")
        return Way(means="restart", why=f"MemCache {known} reads its file once, at the start")
    if alias and known >= NAMES_SINCE:
        return Way(
            means="alias",
            why=f"MemCache {known} looks the name up again when it reconnects, whatever the client",
        )
    no_name = f"MemCache {known} looks a name up once" if known < NAMES_SINCE else "[meta] host_alias is off"
    if kind == "full" and known >= CONF_SINCE:
        return Way(means="conf", why=f"{rewritten}, and all clients of this engine are full ones; {no_name}")
    if known < CONF_SINCE:
        return Way(means="restart", why=f"MemCache {known} reads its file once, at the start; {no_name}")
    return Way(
        means="restart",
        why="a rewritten file does not reach clients without memory access, and this engine may have such; "
        + no_name,
    )


def names_work(version: str) -> bool:
    """Whether clients of this release look a host name up again when they reconnect."""
    known = _known(version)
    return known is not None and known >= NAMES_SINCE


def _known(version: str) -> MmcVersion | None:
    try:
        return resolve_version(version) if version else None
    except ConfError:
        return None


def alias_name(cluster: str) -> str:
    """The name that stands for the master of a cluster."""
    return f"kvtierd-meta.{cluster}"


def is_direct_cluster(settings: Settings) -> bool:
    """Whether clients of several nodes talk to the master's MetaService without endpoints."""
    return settings.meta.endpoint == "direct" and settings.cluster.mode != "standalone"


def uses_alias(settings: Settings, version: str) -> bool:
    """Whether engines are given the host name instead of an address."""
    return is_direct_cluster(settings) and settings.meta.host_alias and names_work(version)


def check_direct(settings: Settings, version: str, remarks: Remarks) -> None:
    """What must not be done without the endpoint becomes a refusal."""
    cluster, meta = settings.cluster, settings.meta
    _check_tls(settings, remarks)
    if not is_direct_cluster(settings):
        return
    addresses = {p.name: p.address for p in cluster.nodes}
    if not meta.tls and not cluster.insecure and not all(map(_is_loopback, addresses.values())):
        remarks.refuse(
            "direct.insecure",
            'endpoint = "direct" would have the MetaService listen beyond loopback without TLS: anybody in the network could'
            " read and write the cached KV, and empty the pool",
            'write [meta] tls = true (certificates: kvtierctl certs), or endpoint = "relay"; or take the risk in writing:'
            " [cluster] insecure = true",
        )
    if not uses_alias(settings, version):
        return
    name = alias_name(cluster.name)
    if not all(map(_LABEL.fullmatch, name.split("."))):
        remarks.refuse(
            "direct.alias-name",
            f"{name} is not a host name: the name of the cluster cannot be a part of one",
            "give [cluster] name small letters, digits and '-' only, or write [meta] host_alias = false",
        )
    unnumbered = sorted(n for n, a in addresses.items() if not _is_number(a))
    if unnumbered:
        remarks.refuse(
            "direct.address",
            f"the address of {unnumbered[0]} ({addresses[unnumbered[0]]}) is a name; a line of /etc/hosts needs a number",
            "write numbers in [cluster] peers, or [meta] host_alias = false",
        )
    for engine in settings.engine:
        hosts = next((m for m in engine.mounts if m.split(":")[1:2] == ["/etc/hosts"]), None)
        if hosts is not None:
            remarks.refuse(
                "direct.hosts-mounted",
                f"engine {engine.name} has a hosts file of its own ({hosts}), which kvtierd would not change",
                "take this mount out, or write [meta] host_alias = false",
            )


def _check_tls(settings: Settings, remarks: Remarks) -> None:
    if not settings.meta.tls:
        return
    if settings.meta.endpoint == "relay":
        remarks.refuse(
            "meta.tls-relay",
            '[meta] tls = true goes with endpoint = "direct" only: the endpoint reads MemCache\'s frames, on loopback, and'
            " mutual TLS between the nodes is its own",
            "take tls out of [meta]; traffic between nodes is encrypted all the same",
        )
    boxed = ["[meta]"] if settings.meta.runner == "docker" else []
    boxed += [f"engine {e.name}" for e in settings.engine if e.runner == "docker"]
    if boxed:
        remarks.refuse(
            "meta.tls-container",
            f"[meta] tls = true and a container ({boxed[0]}): the host's OpenSSL need not fit into an image",
            'run it with runner = "host", or write endpoint = "relay"',
        )
    users = {settings.meta.user, *(e.user for e in settings.engine)}
    if len(users) > 1:
        shown = ", ".join(sorted(u or "kvtierd's own" for u in users))
        remarks.refuse(
            "meta.tls-users",
            f"[meta] tls = true, and MemCache would run as several users ({shown}): it reads a key that only one can read",
            "give [meta] and every [[engine]] the same user",
        )


def _is_number(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def _is_loopback(address: str) -> bool:
    return _is_number(address) and ipaddress.ip_address(address).is_loopback


# -- the plan of one node


def plan_direct(
    settings: Settings, version: str, master: str, units: Iterable[UnitSpec], follow: Mapping[str, bool]
) -> DirectPlan | None:
    """How each client of this node follows; ``None`` when there is no change of master to follow without an endpoint.

    Args:
        settings: The settings.
        version: MemCache's.
        master: The node that the files of this plan point to.
        units: Those of the plan.
        follow: Engines' ids that use the pool -> whether their drivers say that all their clients are full ones and read
            mmc-local.conf.
    """
    if not is_direct_cluster(settings):
        return None
    clients = []
    for unit in units:
        if unit.kind != "pool" and unit.id not in follow:
            continue
        kind: Kind = "pool" if unit.kind == "pool" else "full" if follow[unit.id] else "any"
        way = way_of(version, kind, alias=settings.meta.host_alias)
        clients.append(DirectClient(unit=unit.id, means=way.means, why=way.why))
    return DirectPlan(
        alias=alias_name(settings.cluster.name) if uses_alias(settings, version) else "",
        master=master,
        addresses={p.name: p.address for p in settings.cluster.nodes},
        port=settings.meta.port,
        config_store_port=settings.meta.config_store_port,
        clients=tuple(clients),
    )


def repointed(plan: NodePlan, master: str) -> NodePlan:
    """The same plan for another master: the addresses that clients dial are exchanged, wherever they stand.

    The MetaService's own file and kvtierd's client beside it keep theirs: they are this node's.
    """
    direct, meta = plan.direct, plan.meta
    if direct is None or meta is None or master == direct.master or master not in direct.addresses:
        return plan
    before = _urls(direct, direct.master)
    after = _urls(direct, master)

    def exchanged(text: str) -> str:
        for old, new in zip(before, after, strict=True):
            text = re.sub(re.escape(old) + r"(?!\d)", new, text)
        return text

    files = tuple(
        f if f.path.endswith(OWN_FILES) else f.model_copy(update={"content": exchanged(f.content)})
        for f in plan.files
    )
    units = tuple(
        u
        if u.kind not in {"pool", "engine"}
        else u.model_copy(
            update={
                "argv": tuple(map(exchanged, u.argv)),
                "env": {name: exchanged(value) for name, value in u.env.items()},
            }
        )
        for u in plan.units
    )
    return plan.model_copy(
        update={
            "master": master,
            "files": files,
            "units": units,
            "direct": direct.model_copy(update={"master": master}),
            "meta": meta.model_copy(
                update={
                    "client_meta_url": exchanged(meta.client_meta_url),
                    "client_config_store_url": exchanged(meta.client_config_store_url),
                }
            ),
        }
    )


OWN_FILES: Final = ("mmc-meta.conf", "mmc-local-admin.conf")
MASTER_MARK: Final = "<master>"


def without_master(text: str, direct: DirectPlan | None) -> str:
    """A file's text with the master's addresses taken out: another master makes no other file of it."""
    if direct is None:
        return text
    for url in _urls(direct, direct.master):
        text = re.sub(re.escape(url) + r"(?!\d)", MASTER_MARK, text)
    return text


def _urls(direct: DirectPlan, node: str) -> tuple[str, str]:
    host = bracketed(direct.addresses[node])
    return f"tcp://{host}:{direct.port}", f"tcp://{host}:{direct.config_store_port}"
