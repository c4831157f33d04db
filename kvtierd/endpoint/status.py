"""The answer to the command ``status``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvtierd.endpoint.actions import LinkState
from kvtierd.endpoint.identity import is_alive
from kvtierd.endpoint.targets import PeerTarget, target_dict

if TYPE_CHECKING:
    from kvtierd.endpoint.service import EndpointService

PROTOCOL = 2  # 1: before epochs and peers


def lets_everybody_in(status: Mapping[str, Any]) -> bool:
    """Whether requests pass and newcomers may join, by the answer to ``status``."""
    return bool(status["mode"] == "serve" and status["admission"] == "all")


def status(service: EndpointService) -> dict[str, Any]:
    """What a daemon or an operator may want to know.

    - ``protocol``: 2; absent before epochs and peers.
    - ``mode``, ``mode_reason``, ``quiesced``, ``admission``.
    - ``target``: as in the configuration, null without a master; ``epoch``: the one that was told, 0 before the first;
      ``epoch_seen``: the highest known; ``deposed``: this host's MetaService was master and a higher epoch has begun;
      ``suspended``: there is no master, and links of before are kept.
    - ``backend`` {reachable, reachable_since_unix_seconds, last_error, deaths, life}: the same ``life`` on two nodes means
      the same MetaService process.
    - ``survivors`` {expected, back}: processes that had joined, still run and can come back, and how many of them have a
      link to the present MetaService; ``stranded``: those that cannot be taken back and have to be started anew.
    - ``connections``, ``waiting``, ``orphans`` (links without a MetaService), ``silent`` (links whose MetaService says
      nothing), ``plain_relay`` {count, reasons}, ``refused``, ``started_unix_seconds``.
    - ``outbound`` {peer, address, refused}: the hop this endpoint takes, and why the other side said no the last time; null
      without one.
    - ``inbound`` {listen, listen_error, links, refused {reason: count}, peers: [{name, address, links, links_total,
      bytes_from, bytes_to, refused {reason: count}, last_seen_unix_seconds}]}: links that come from peers.
    - ``tls`` {loaded_unix_seconds, problem}, null without.
    - ``clients``: a list of ``ClientProcess.as_dict``, connected ones first; ``back``: it has a link to the present
      MetaService; and ``totals`` in the same counters.
    """
    state = service.state
    state.clients.forget_ended(is_alive)
    links = service.links()
    plain = [link for _, link in links if link.state is LinkState.PLAIN]
    back = {id(c.client) for c, _ in links if c.server is not None}
    joined = state.clients.survivors()
    survivors = [client for client in joined if not client.stranded]
    rows = sorted(state.clients, key=lambda c: (-c.links, c.connected_unix_seconds))
    return {
        "protocol": PROTOCOL,
        "mode": state.mode.value,
        "mode_reason": state.mode_reason,
        "quiesced": state.quiesced,
        "admission": state.admission.value,
        "target": None if state.suspended else target_dict(state.target),
        "epoch": state.epochs.told,
        "epoch_seen": state.epochs.seen,
        "deposed": state.epochs.outdated and not isinstance(state.target, PeerTarget | None),
        "suspended": state.suspended,
        "backend": state.backend.as_dict(),
        "survivors": {"expected": len(survivors), "back": sum(id(c) in back for c in survivors)},
        "stranded": len(joined) - len(survivors),
        "connections": service.connection_count,
        "waiting": service.doorman.waiting,
        "orphans": sum(c.server is None for c, _ in links),
        "silent": sum(link.silent for _, link in links),
        "plain_relay": {
            "count": len(plain),
            "reasons": sorted({link.plain_reason for link in plain})[:8],
        },
        "refused": service.refused,
        "started_unix_seconds": service.started_unix_seconds,
        "outbound": _outbound(service),
        "inbound": service.gate.as_dict(),
        "tls": None if service.certificates is None else service.certificates.as_dict(),
        # A dead process's config-store connection stays until the MetaService lets go of it.
        "clients": [
            row | {"connected": row["connected"] and is_alive(client.identity), "back": id(client) in back}
            for client, row in ((client, client.as_dict()) for client in rows)
        ],
        "totals": state.clients.totals().as_dict(),
    }


def _outbound(service: EndpointService) -> dict[str, Any] | None:
    target = service.state.target
    if not isinstance(target, PeerTarget):
        return None
    peer = service.config.peer(target.peer)
    return {
        "peer": target.peer,
        "address": None if peer is None else str(peer.address),
        "refused": service.dialer.last_refusal,
    }
