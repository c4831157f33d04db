"""PURE: what a node has to do, given where it stands, what the master says and what runs here. No I/O, no clock.

The daemon calls ``duties`` in every round of its loop and whenever something changed, and carries out the answer in
order. Nothing is remembered in here: the same values give the same duties.

The rules, and why:

- A MetaService runs only on the master, under its lease: the guard's deadline is moved first, then it may start.
- Whoever is not the master any more kills it at once. That is for speed: the guard kills it in any case.
- The target of a switchover starts its own before it is the master, under a permit of the master's that the guard
  enforces like a lease. No endpoint relays to it before it has a higher epoch, so it takes nobody's requests.
- "unknown" starts nothing and stops nothing: not to know who is the master is no reason to take anybody's tier away.
- An endpoint is pointed only forward: at the master of a higher epoch. It refuses the other direction by itself.
- An endpoint that holds its clients back is opened for the MetaService process that the master has opened, no other.
"""

from __future__ import annotations

import dataclasses

from kvtierd.cluster.standing import ClusterView, Standing

START_MARGIN_SECONDS = 0.5  # a MetaService is not started into a lease that is about to end


@dataclasses.dataclass(frozen=True, slots=True)
class MetaSeen:
    """The MetaService's unit on this node. ``ready``: it answers."""

    running: bool = False
    ready: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class EndpointSeen:
    """What the local endpoint says.

    Attributes:
        epoch: The highest it has been told or has seen.
        target: The node whose MetaService it relays to; "" for none.
        mode: "serve", "quiesce", "recover".
        admission: "all" or "survivors".
        life: The MetaService process it reaches; "" for none.
    """

    epoch: int = 0
    target: str = ""
    mode: str = "serve"
    admission: str = "all"
    life: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class ClientsSeen:
    """Where clients without an endpoint were led last on this node: to ``master``, under this epoch; "" for nowhere."""

    epoch: int = 0
    master: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """Everything that counts, at one moment.

    Attributes:
        now_seconds: CLOCK_BOOTTIME.
        node: This node.
        standing: What its coordinator says.
        view: The newest view that another master has published; ``None`` for none.
        meta: The MetaService here.
        endpoint: The endpoint here; ``None`` when there is none or it does not answer.
        clients: Where clients here were led; ``None`` where they have an endpoint.
        tier_state: What this node's own tier keeper says.
        tier_serving: It has opened the tier to everybody.
        armed_until_seconds: The guard's present deadline.
        handing_over: This node is about to give mastership up: its MetaService has been stopped and stays so.
        permit_until_seconds: Until then a MetaService may run here for a switchover to this node, though it is not the
            master yet. Nobody uses it: every endpoint relays to the master's.
    """

    now_seconds: float
    node: str
    standing: Standing
    view: ClusterView | None = None
    meta: MetaSeen = MetaSeen()
    endpoint: EndpointSeen | None = None
    clients: ClientsSeen | None = None
    tier_state: str = "down"
    tier_serving: bool = False
    armed_until_seconds: float = 0.0
    handing_over: bool = False
    permit_until_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class ArmGuard:
    """The MetaService may run until then."""

    until_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class KillMeta:
    """SIGKILL, now."""

    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class WantMeta:
    """The MetaService is wanted here."""


@dataclasses.dataclass(frozen=True, slots=True)
class RestMeta:
    """It is not, and why."""

    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class PointEndpoint:
    """The local endpoint relays to this node's MetaService (this node: its own)."""

    epoch: int
    node: str


@dataclasses.dataclass(frozen=True, slots=True)
class PointClients:
    """Clients without an endpoint are led to this node's MetaService: by their files, by the host name."""

    epoch: int
    node: str


@dataclasses.dataclass(frozen=True, slots=True)
class OpenEndpoint:
    """Survivors are back and the pool is clean: everything passes, everybody may join."""


@dataclasses.dataclass(frozen=True, slots=True)
class Publish:
    """Tell the others."""

    epoch: int
    tier_state: str
    served_life: str


Duty = ArmGuard | KillMeta | WantMeta | RestMeta | PointEndpoint | PointClients | OpenEndpoint | Publish


def duties(seen: Seen) -> tuple[Duty, ...]:
    """What has to be done, in order."""
    if _is_master(seen):
        return tuple(_of_the_master(seen))
    return tuple(_of_the_others(seen))


def _is_master(seen: Seen) -> bool:
    return seen.standing.role == "master" and seen.now_seconds < seen.standing.until_seconds


def _of_the_master(seen: Seen) -> list[Duty]:
    standing, endpoint = seen.standing, seen.endpoint
    found: list[Duty] = []
    if standing.until_seconds != seen.armed_until_seconds:
        found.append(ArmGuard(standing.until_seconds))
    early = standing.serve_after_seconds - seen.now_seconds
    ends = standing.until_seconds - seen.now_seconds < START_MARGIN_SECONDS
    if seen.handing_over:
        found.append(RestMeta("mastership is being handed over"))
    elif seen.meta.running or (early <= 0 and not ends):
        found.append(WantMeta())
    elif early > 0:
        found.append(RestMeta(f"the master before must have ended first: {early:.1f}s more"))
    if endpoint is not None and early <= 0 and not seen.handing_over:
        # Not before the MetaService of the master before has ended: it would tell those that stay with it that the
        # others have left. Under the same epoch: the endpoint has been started anew.
        later = standing.epoch > endpoint.epoch
        if later or (standing.epoch == endpoint.epoch and endpoint.target != seen.node):
            found.append(PointEndpoint(standing.epoch, seen.node))
    if not seen.handing_over:
        found += _lead(seen, standing.epoch, seen.node)
    found.append(Publish(standing.epoch, _tier_state(seen), _served_life(seen)))
    return found


def _lead(seen: Seen, epoch: int, master: str) -> list[Duty]:
    """Forward only. At once: a client leaves its MetaService when that ends and not before, whatever it is told."""
    clients = seen.clients
    if clients is None or epoch < clients.epoch or (epoch, master) == (clients.epoch, clients.master):
        return []
    return [PointClients(epoch, master)]


def _tier_state(seen: Seen) -> str:
    """For the others a MetaService that answers is up: they may come back to it while it still has to prove itself."""
    endpoint = seen.endpoint
    if seen.clients is not None:
        up = seen.meta.ready and seen.tier_state == "down" and not seen.handing_over
        return "meta_up" if up else seen.tier_state
    pointed = endpoint is not None and (endpoint.epoch, endpoint.target) == (seen.standing.epoch, seen.node)
    answers = pointed and endpoint is not None and (endpoint.life or seen.meta.ready)
    return "meta_up" if answers and seen.tier_state == "down" and not seen.handing_over else seen.tier_state


def _served_life(seen: Seen) -> str:
    """The MetaService process that the keeper has opened; the keeper looks through the endpoint's eyes too."""
    endpoint = seen.endpoint
    if seen.clients is not None:
        return f"epoch {seen.standing.epoch}" if seen.tier_serving and seen.meta.running else ""
    opened = (
        seen.tier_serving
        and endpoint is not None
        and endpoint.epoch == seen.standing.epoch
        and endpoint.mode == "serve"
        and endpoint.admission == "all"
    )
    return endpoint.life if opened and endpoint is not None else ""


def _of_the_others(seen: Seen) -> list[Duty]:
    standing, view, endpoint = seen.standing, seen.view, seen.endpoint
    found: list[Duty] = []
    known = standing.role != "unknown"
    if known and seen.now_seconds < seen.permit_until_seconds:
        if seen.permit_until_seconds != seen.armed_until_seconds:
            found.append(ArmGuard(seen.permit_until_seconds))
        found.append(WantMeta())
    else:
        if seen.meta.running and known:
            found.append(KillMeta(_why_not_here(seen)))
        if known or not seen.meta.running:
            found.append(RestMeta(_why_not_here(seen)))
    if view is None or view.master == seen.node:
        return found
    found += _lead(seen, view.epoch, view.master)
    if endpoint is None:
        return found
    later = view.epoch > endpoint.epoch
    if later or (view.epoch == endpoint.epoch and endpoint.target != view.master):
        if view.tier_state != "down":  # then the MetaService before it has certainly ended
            found.append(PointEndpoint(view.epoch, view.master))
    elif (
        view.epoch == endpoint.epoch
        and (endpoint.mode == "recover" or endpoint.admission == "survivors")
        and view.served_life == endpoint.life != ""
    ):
        found.append(OpenEndpoint())
    return found


def _why_not_here(seen: Seen) -> str:
    standing, view = seen.standing, seen.view
    if standing.role == "master":
        return "its lease has ended"
    if standing.role == "unknown":
        return f"who is the master is not known: {standing.why}" if standing.why else "no master is known yet"
    master = view.master if view is not None and view.epoch >= standing.epoch else standing.master
    return f"standby: {master} is the master" if master else f"standby: there is no master ({standing.why})"
