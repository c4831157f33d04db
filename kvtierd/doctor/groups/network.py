"""The network between hosts, and the ports on this one."""

from __future__ import annotations

import ipaddress
import re
from typing import Final

from kvtierd.checks import (
    CannotTellError,
    Group,
    Outcome,
    Patient,
    absent,
    fail,
    note,
    ok,
    unknown,
    warn,
    worst,
)
from kvtierd.settings import PeerSettings

GROUP = Group("network")
RANGE: Final = "/proc/sys/net/ipv4/ip_local_port_range"
RESERVED: Final = "/proc/sys/net/ipv4/ip_local_reserved_ports"
USUAL: Final = {
    5000: "the MetaService; also a Docker registry's",
    6000: "the config store; also X11's, which ssh -X forwards",
    8000: "the MetaService's HTTP; also vLLM's API",
    16666: "HCCL between cards",
}
"""Ports that are taken by habit, and who else has the habit."""


@GROUP.check(
    "ports",
    title="The ports of the plan are free",
    why="A MetaService whose port is taken opens its other ports, gives up a second later and exits with 0. Its defaults are"
    " those of a Docker registry (5000), X11 (6000) and vLLM (8000).",
    fix="ss -ltnp names the owner; end it, or write another port under [meta] or [[engine]]",
)
async def ports(patient: Patient) -> Outcome:
    """What the planner refused or moved; without a plan the usual ports."""
    inventory = await patient.inventory()
    plan = await patient.plan()
    taken = {owner.port for owner in inventory.ports_in_use}
    if plan is None:
        found = [note(f"{port} is taken ({who})") for port, who in USUAL.items() if port in taken]
        return worst(found, f"none of {', '.join(map(str, USUAL))} is taken")
    found = [fail(r.message, r.hint) for r in plan.refusals if r.code.startswith("port.")]
    found += [note(n.message) for n in plan.notes if n.code.startswith("port.")]
    found += [
        warn(f"{use.port} ({use.unit}, {use.purpose}) is the port of {USUAL[16666]}", "choose another port")
        for use in plan.ports
        if use.port == 16666
    ]
    return worst(found, ", ".join(f"{use.port} ({use.purpose})" for use in plan.ports))


@GROUP.check(
    "ephemeral",
    title="Ports we listen on are not handed out to clients",
    why="The kernel gives outgoing connections ports of its ephemeral range. One of ours can be taken by any client at the moment"
    " in which the unit restarts, and the unit then fails now and then.",
    fix="sysctl net.ipv4.ip_local_reserved_ports=PORTS, and the same in /etc/sysctl.d; or listen below the range",
)
async def ephemeral(patient: Patient) -> Outcome:
    """Planned ports, those of the peers' links included, against the range and its exceptions."""
    limits = re.findall(r"\d+", patient.view.text(RANGE) or "")
    if len(limits) != 2:
        return unknown(f"{RANGE} cannot be read")
    plan, settings = await patient.plan(), patient.settings
    wanted = set(USUAL) - {16666} if plan is None else {use.port for use in plan.ports}
    if settings is not None and settings.cluster.mode != "standalone":
        wanted |= {settings.cluster.port, settings.cluster.endpoint_port}
    low, high = int(limits[0]), int(limits[1])
    kept = _port_list(patient.view.text(RESERVED) or "")
    inside = sorted(port for port in wanted if low <= port <= high and port not in kept)
    told = f"the ephemeral range is {low} to {high}"
    if not inside:
        return ok(told)
    text = ", ".join(map(str, inside))
    return warn(
        f"{told}; {text} are in it", f"sysctl net.ipv4.ip_local_reserved_ports={text.replace(' ', '')}"
    )


@GROUP.check(
    "nic",
    title="The interface for traffic between hosts is there and up",
    why="Gloo, TP and HCCL bind to the interface that they are told. With a name that does not exist the engine ends in its"
    " initialisation; with one that is down it waits.",
    fix="ip -br link lists them; write [node] nic as it is called there",
)
async def nic(patient: Patient) -> Outcome:
    """[node] nic, else whether any interface but lo is up."""
    nics = (await patient.inventory()).nics
    if not nics:
        raise CannotTellError("no interface is listed")
    wanted = patient.settings.node.nic if patient.settings else None
    names = ", ".join(n.name for n in nics)
    if wanted is None:
        up = [n.name for n in nics if n.up and n.name != "lo"]
        return ok(f"up: {', '.join(up)}") if up else note(f"none is up but lo (of {names})")
    mine = next((n for n in nics if n.name == wanted), None)
    if mine is None:
        return fail(f"[node] nic is {wanted}; this host has {names}")
    return ok(f"{wanted} is up") if mine.up else fail(f"{wanted} is down")


@GROUP.check(
    "peers",
    title="Every peer has an address that leads to it",
    why="The same settings go to every host. An address of this host, or of loopback, under another's name makes a node talk to"
    " itself: it elects itself, and engines put KV into the wrong pool.",
    fix="write each node's own address under [cluster] peers; ip route get ADDRESS shows the way",
)
async def peers(patient: Patient) -> Outcome:
    """``ip route get`` for each address: the own one is local, the others are not, and there is a way to them."""
    settings = patient.settings
    if settings is None or settings.cluster.mode == "standalone":
        return absent("no peers")
    plan = await patient.plan()
    here = plan.node if plan else settings.node.name
    found = [await _peer(patient, peer, ours=peer.name == here) for peer in settings.cluster.peers]
    addresses = [peer.address for peer in settings.cluster.peers]
    if doubled := sorted({a for a in addresses if addresses.count(a) > 1}):
        found.append(fail(f"the address of two peers: {', '.join(doubled)}"))
    return worst(found, "; ".join(o.found for o in found))


async def _peer(patient: Patient, peer: PeerSettings, *, ours: bool) -> Outcome:
    address = await _numeric(patient, peer.address)
    if address is None:
        return warn(f"{peer.name}: {peer.address} is a name that does not resolve here")
    if ipaddress.ip_address(address).is_loopback:
        return fail(f"{peer.name}: {address} is a loopback address, which is every host's own")
    if ipaddress.ip_address(address).is_unspecified:
        return fail(f"{peer.name}: {address} is no host's address")
    own = {a for n in (await patient.inventory()).nics for a in n.addresses}
    route = await patient.run("ip", "route", "get", address)
    if not route.ok and route.code is None:
        return unknown(f"{peer.name}: {route.describe()}")
    local = address in own or route.stdout.lstrip().startswith("local ")
    if ours:
        told = f"{peer.name}: {address} is this host's"
        return ok(told) if local else fail(f"{peer.name} is this host, and no interface of it has {address}")
    if local:
        return fail(f"{peer.name}: {address} is an address of this host")
    if not route.ok:
        return fail(f"{peer.name}: no route to {address} ({route.describe()})")
    device = re.search(r"\bdev (\S+)", route.stdout)
    return ok(f"{peer.name}: {address} by {device[1] if device else '?'}")


async def _numeric(patient: Patient, host: str) -> str | None:
    """The address itself, or what the host's resolver makes of a name."""
    text = host.strip("[]")
    if not _is_address(text):
        answer = await patient.run("getent", "hosts", host)
        text = answer.stdout.split(None, 1)[0] if answer.ok and answer.stdout.strip() else ""
    return text if _is_address(text) else None


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _port_list(text: str) -> set[int]:
    """The kernel's form: ``5000-5001,8000``."""
    found: set[int] = set()
    for low, high in re.findall(r"(\d{1,5})(?:-(\d{1,5}))?", text):
        found.update(range(int(low), int(high or low) + 1))
    return found
