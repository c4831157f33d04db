"""The cards' own network ports: device_rdma moves KV over them, and no ``ip addr`` of the host shows them."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from typing import Final

from kvtierd.checks import CannotTellError, Outcome, Patient, absent, fail, note, ok, unknown, warn, worst
from kvtierd.doctor.groups.ascend import no_npus
from kvtierd.doctor.groups.network import GROUP
from kvtierd.doctor.looking import container_mark
from kvtierd.host import hccn
from kvtierd.host.view import CommandResult
from kvtierd.plan.series import detect_series

__all__ = ["GROUP"]

_TOOL_HOME: Final = "/usr/local/Ascend/driver/tools/hccn_tool"
_NOT_TRIED: Final = {"init", "uninit", "thread wait"}


async def _unused(patient: Patient) -> str:
    """Why the cards' RoCE ports do not matter here; empty when they do, or may."""
    if reason := no_npus(patient):
        return reason
    try:
        plan = await patient.plan()
    except CannotTellError:
        plan = None
    if plan is not None and plan.pool.protocol:
        return "" if plan.pool.protocol == "device_rdma" else f"{plan.pool.protocol} does not use RoCE"
    npus = (await patient.inventory()).npus
    series = detect_series(npus).series if npus else None
    if npus and series not in {"300I-A2", "800I-A2"}:
        return f"{series or npus[0].name or 'this hardware'} does not move KV by RoCE"
    return ""


async def _devices(patient: Patient) -> tuple[int, ...]:
    devices = tuple(npu.device for npu in (await patient.inventory()).npus)
    if not devices:
        raise CannotTellError("no NPU is listed")
    return devices


async def _conf(patient: Patient) -> dict[int, hccn.CardAddress]:
    """Raises ``OSError``: the file cannot be read."""

    async def asking() -> dict[int, hccn.CardAddress]:
        return hccn.parse_conf(await patient.look(hccn.CONF, lambda: patient.view.read(hccn.CONF)))

    found: dict[int, hccn.CardAddress] = await patient.once(hccn.CONF, asking)
    return found


async def _conf_or_none(patient: Patient) -> dict[int, hccn.CardAddress]:
    try:
        return await _conf(patient)
    except OSError:
        return {}


async def _ask(patient: Patient, *words: str) -> dict[int, CommandResult]:
    """The same question to every card at once. Raises ``CannotTellError`` when the tool is not there."""
    program = "hccn_tool"
    if patient.view.live and shutil.which(program) is None:
        program = _TOOL_HOME
    devices = await _devices(patient)
    answers = await asyncio.gather(*(patient.run(program, "-i", str(d), *words) for d in devices))
    if all(answer.error for answer in answers):
        raise CannotTellError(answers[0].describe())
    return dict(zip(devices, answers, strict=True))


@GROUP.check(
    "hccn-conf",
    title="Every card has a network address of its own",
    why="MemCache's device_rdma and HCCL read the cards' addresses from /etc/hccn.conf. Without it, as in a container where it is"
    " not mounted, an engine starts without an error, its first token is wrong and the rest is repetition.",
    fix="hccn_tool -i N -ip -s address A netmask M for each card; in a container mount /etc/hccn.conf and hccn_tool",
)
async def hccn_conf(patient: Patient) -> Outcome:
    """The file alone: there, complete, no address twice."""
    if reason := await _unused(patient):
        return absent(reason)
    try:
        cards = await _conf(patient)
    except OSError as error:
        told = f"{hccn.CONF} cannot be read: {error.strerror or error}"
        boxed = container_mark(patient.view) is not None
        mount = "docker run -v /etc/hccn.conf:/etc/hccn.conf:ro -v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro"
        return fail(told, mount if boxed else "")
    found = []
    if missing := [str(d) for d in await _devices(patient) if d not in cards]:
        found.append(fail(f"no address for device {', '.join(missing)}"))
    twice = [a for a, n in Counter(card.address for card in cards.values()).items() if n > 1]
    for address in twice:
        users = [str(card.device) for card in cards.values() if card.address == address]
        found.append(fail(f"{address} is the address of devices {', '.join(users)}"))
    return worst(found, f"{len(cards)} addresses")


@GROUP.check(
    "hccn-subnet",
    title="The cards' addresses are in one subnet",
    why="Cards of different subnets reach each other through a gateway only, if one is set; else transfers between them time out.",
    fix="hccn_tool -i N -ip -s address A netmask M, or set each card's gateway: hccn_tool -i N -gateway -s gateway G",
)
async def hccn_subnet(patient: Patient) -> Outcome:
    """Networks by address and netmask in hccn.conf."""
    if reason := await _unused(patient):
        return absent(reason)
    cards = await _conf_or_none(patient)
    if not cards:
        raise CannotTellError(f"{hccn.CONF} has no addresses")
    if bad := [str(c.device) for c in cards.values() if c.network is None]:
        return warn(f"device {', '.join(bad)}: no valid netmask")
    networks = Counter(str(card.network) for card in cards.values())
    if len(networks) > 1:
        return note(", ".join(f"{n} ({count} cards)" for n, count in sorted(networks.items())))
    return ok(next(iter(networks)))


@GROUP.check(
    "hccn-device",
    title="hccn.conf says what the cards say",
    why="Software takes the addresses from the file, packets go where the card is. One stale line of 32 made transfers take 93 ms"
    " instead of 5, with no error anywhere.",
    fix="the card is right: write its address into /etc/hccn.conf, or set the card: hccn_tool -i N -ip -s address A netmask M",
)
async def hccn_device(patient: Patient) -> Outcome:
    """``hccn_tool -i N -ip -g`` against the file."""
    if reason := await _unused(patient):
        return absent(reason)
    cards = await _conf_or_none(patient)
    answers = await _ask(patient, "-ip", "-g")
    found, alike = [], 0
    for device, answer in answers.items():
        real, written = hccn.parse_address(answer.stdout, device), cards.get(device)
        if real is None:
            found.append(
                unknown(f"device {device}: {answer.describe() or 'hccn_tool names no address'}")
                if not answer.ok
                else fail(f"device {device} has no address")
            )
        elif written is None:
            found.append(note(f"device {device} has {real.address}, {hccn.CONF} has none for it"))
        elif (real.address, real.network) != (written.address, written.network):
            found.append(
                fail(
                    f"device {device} has {real.address}/{real.netmask},"
                    f" {hccn.CONF} says {written.address}/{written.netmask}"
                )
            )
        else:
            alike += 1
    return worst(found, f"{alike} cards as in {hccn.CONF}")


@GROUP.check(
    "hccn-link",
    title="The cards' links are up",
    why="A transfer to a card without a link waits for its time limit. With one card down the whole pool is slow: blocks are"
    " spread over all ranks.",
    fix="check cable, module and switch port; hccn_tool -i N -optical -g; for 950: hccn_tool -g -dev_info -i N",
    unless=no_npus,
)
async def hccn_link(patient: Patient) -> Outcome:
    """``-link -g`` per card; on 950, whose tool has other verbs, the ports of ``-g -dev_info``."""
    npus = (await patient.inventory()).npus
    if npus and detect_series(npus).series == "A5":
        return await _ports_of_950(patient)
    if reason := await _unused(patient):
        return absent(reason)
    answers = await _ask(patient, "-link", "-g")
    found = []
    for device, answer in answers.items():
        state = hccn.parse_link(answer.stdout)
        if state is None:
            found.append(unknown(f"device {device}: {answer.describe() or 'no link status'}"))
        elif state != "UP":
            found.append(fail(f"device {device}: {state}"))
    return worst(found, f"{len(answers)} links UP")


async def _ports_of_950(patient: Patient) -> Outcome:
    devices = await _devices(patient)
    answers = await asyncio.gather(
        *(patient.run("hccn_tool", "-g", "-dev_info", "-i", str(d)) for d in devices)
    )
    if all(answer.error for answer in answers):
        raise CannotTellError(answers[0].describe())
    found, up = [], 0
    for device, answer in zip(devices, answers, strict=True):
        ports = hccn.parse_ports(answer.stdout)
        up += sum(port.link == "UP" for port in ports)
        if not ports:
            found.append(unknown(f"device {device}: {answer.describe() or 'no table of ports'}"))
        elif down := [f"{p.udie}/{p.port}" for p in ports if p.link != "UP"]:
            # Ports that nobody cabled are DOWN too.
            told = f"device {device}: ports {', '.join(down)} of {len(ports)} are not up"
            found.append(warn(told) if len(down) == len(ports) else note(told))
    return worst(found, f"{up} ports UP")


@GROUP.check(
    "hccn-health",
    title="The cards reach their network's other end",
    why="A link can be up and lead nowhere: a wrong VLAN, or a gateway that does not answer.",
    fix="hccn_tool -i N -netdetect -g names what is pinged; set it to an address that answers: hccn_tool -i N -netdetect -s address A",
)
async def hccn_health(patient: Patient) -> Outcome:
    """``-net_health -g`` per card. It pings the netdetect address, which may be an unlucky choice: never more than a warning."""
    if reason := await _unused(patient):
        return absent(reason)
    answers = await _ask(patient, "-net_health", "-g")
    found = []
    for device, answer in answers.items():
        state = hccn.parse_health(answer.stdout)
        if state is None:
            found.append(unknown(f"device {device}: {answer.describe() or 'no health status'}"))
        elif state.lower() in _NOT_TRIED:
            found.append(note(f"device {device}: {state} (no netdetect address is set)"))
        elif state.lower() != "success":
            found.append(warn(f"device {device}: {state}"))
    return worst(found, f"{len(answers)} cards: Success")


@GROUP.check(
    "mtu",
    title="All cards, and the host's interface, have one MTU",
    why="Large packets towards the smaller side are dropped: small requests work, and the first large transfer hangs.",
    fix="hccn_tool -i N -mtu -s size 4096 on every card of every host, and switch ports of at least that",
)
async def mtu(patient: Patient) -> Outcome:
    """``-mtu -g`` per card, and the MTU of [node] nic (else of the fastest interface that is up)."""
    if reason := await _unused(patient):
        return absent(reason)
    sizes: dict[int, list[int]] = {}
    for device, answer in (await _ask(patient, "-mtu", "-g")).items():
        size = hccn.parse_mtu(answer.stdout)
        if size is not None:
            sizes.setdefault(size, []).append(device)
    if not sizes:
        raise CannotTellError("hccn_tool names no MTU")
    if len(sizes) > 1:
        told = "; ".join(f"{size}: device {', '.join(map(str, d))}" for size, d in sorted(sizes.items()))
        return warn(f"the cards' MTUs differ: {told}")
    size = next(iter(sizes))
    wanted = patient.settings.node.nic if patient.settings else None
    nics = [n for n in (await patient.inventory()).nics if n.up and n.name != "lo"]
    nic = next(
        (n for n in nics if n.name == wanted), max(nics, key=lambda n: n.speed_mbit or 0, default=None)
    )
    host = patient.view.integer(f"/sys/class/net/{nic.name}/mtu") if nic else None
    if nic is None or host is None:
        return ok(f"{size} on every card")
    if host < size:
        return note(f"{size} on every card, {host} on {nic.name}")
    return ok(f"{size} on every card, {host} on {nic.name}")
