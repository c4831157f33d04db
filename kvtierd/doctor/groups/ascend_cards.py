"""The cards: what npu-smi says of them, who holds their memory, and whether their device files can be opened."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Final

from kvtierd.checks import (
    CannotTellError,
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
from kvtierd.doctor.groups.ascend import GROUP, no_npus
from kvtierd.doctor.looking import container_mark
from kvtierd.plan.inventory import Inventory, Npu
from kvtierd.plan.model import UnitSpec
from kvtierd.quantities import format_size

__all__ = ["GROUP"]

MANAGERS: Final = ("davinci_manager", "devmm_svm", "hisi_hdc")
HUAWEI: Final = "0x19e5"
ACCELERATOR: Final = "0x1200"  # PCI class, without the programming interface
# A card without any process shows 3 to 5 % of its HBM in use: the driver's own.
IDLE_SHARE: Final = 0.10
_OF_NPUS: Final = re.compile(r"npu-smi|NPU")


@GROUP.check(
    "npu-smi",
    title="npu-smi answers, and its table can be read",
    why="It is the only source for which dies there are, how much memory they have and who holds them. A hung one means a hung"
    " driver: engines hang in the same call.",
    fix="npu-smi info by hand; dmesg | grep -i -e davinci -e devmm; a driver that hangs needs a reboot",
    unless=no_npus,
)
async def npu_smi(patient: Patient) -> Outcome:
    """Whether it answered in time, and with dies. What it says is checked elsewhere."""
    inventory = await patient.inventory()
    problems = [p for p in inventory.problems if _OF_NPUS.search(p)]
    if inventory.npus:
        cards = len({npu.card for npu in inventory.npus})
        told = f"{len(inventory.npus)} dies on {cards} cards ({_names(inventory.npus)})"
        return warn(f"{told}; {'; '.join(problems)}") if problems else ok(told)
    text = "; ".join(problems) or "npu-smi lists no NPU"
    if "no answer within" in text:
        return unknown(text)
    hint = "in a container: mount /usr/local/bin/npu-smi, /usr/local/Ascend/driver and /dev/davinci*"
    return warn(text, hint)


@GROUP.check(
    "health",
    title="All dies are healthy",
    why="A die with an alarm has lost memory pages, its link or its cooling: engines on it fail late, and those of other"
    " cards wait for it.",
    fix="npu-smi info -t health -i CARD names the error; reset the card or have it replaced",
    unless=no_npus,
)
async def health(patient: Patient) -> Outcome:
    """The health column."""
    inventory = await _with_npus(patient)
    found = []
    for npu in inventory.npus:
        if npu.health is None or npu.health.upper() == "OK":
            continue
        told = f"device {npu.device} (card {npu.card}): {npu.health}"
        found.append(fail(told) if npu.health.lower() == "critical" else warn(told))
    silent = sum(npu.health is None for npu in inventory.npus)
    if silent == len(inventory.npus):
        return unknown("npu-smi says nothing of their health")
    return worst(found, f"{len(inventory.npus) - silent} dies OK")


@GROUP.check(
    "hbm",
    title="The cards' memory is held by processes that exist",
    why='An engine takes its share of the whole card, and ends with "Available memory: 0" after minutes of loading when'
    " somebody else has it. Memory without an owner is held by a worker whose engine was killed, or by a container's process.",
    fix="kvtierctl doctor --only engine names left-over workers; fuser -v /dev/davinci* names the others; npu-smi set -t reset"
    " -i CARD when nobody is left",
    unless=no_npus,
)
async def hbm(patient: Patient) -> Outcome:
    """Used memory per die against npu-smi's processes, and these against /proc."""
    inventory = await _with_npus(patient)
    planned = {device for unit in await _engines(patient) for device in unit.devices}
    boxed = container_mark(patient.view) is not None
    found, busy = [], 0
    for npu in inventory.npus:
        held = [p for p in inventory.npu_processes if (p.card, p.chip) == (npu.card, npu.chip)]
        gone = [p for p in held if not patient.view.exists(f"/proc/{p.pid}")]
        for process in gone:
            told = (
                f"device {npu.device} is held by pid {process.pid} ({process.name or '?'}), which is not here"
            )
            found.append(note(f"{told}: perhaps outside this container") if boxed else warn(told))
        busy += bool(held)
        if npu.hbm_used_bytes is None or not npu.hbm_total_bytes or held:
            continue
        if npu.hbm_used_bytes > npu.hbm_total_bytes * IDLE_SHARE:
            busy += 1
            told = (
                f"device {npu.device}: {format_size(npu.hbm_used_bytes)} of {format_size(npu.hbm_total_bytes)} are in use"
                " and no process is listed"
            )
            found.append(fail(told) if npu.device in planned else warn(told))
    if all(npu.hbm_used_bytes is None for npu in inventory.npus) and not found:
        return absent("these cards list no HBM")
    return worst(found, f"{busy} of {len(inventory.npus)} dies are in use, all by processes that exist")


@GROUP.check(
    "held",
    title="No planned card is held by somebody else",
    why="kvtierd does not start an engine on a card that another process holds: it would fail minutes later for want of memory.",
    fix="end the process named, then kvtierctl reload",
    unless=no_npus,
)
async def held(patient: Patient) -> Outcome:
    """What the planner found: processes of kvtierd's own units do not count."""
    engines = [unit for unit in await _engines(patient) if unit.devices]
    if not engines:
        return absent("no engine is planned")
    return worst(
        (fail(f"{unit.name}: {unit.blocked}") for unit in engines if unit.blocked),
        f"{sum(len(unit.devices) for unit in engines)} devices of {len(engines)} engines",
    )


@GROUP.check(
    "cards",
    title="Every card that is in the host is listed",
    why="A card that dropped off the bus, or that the driver did not take, is missing from npu-smi, and the others change their"
    " numbers: an engine then runs on another card than is meant.",
    fix="lspci -d 19e5: against npu-smi info -m; dmesg | grep -i davinci; reboot",
    unless=no_npus,
)
async def cards(patient: Patient) -> Outcome:
    """The PCI bus and /dev/davinci* against npu-smi."""
    inventory = await _with_npus(patient)
    listed = {npu.bus_id.lower() for npu in inventory.npus if npu.bus_id}
    on_bus = _accelerators(patient)
    found = []
    if lost := sorted(on_bus - listed) if listed else []:
        found.append(warn(f"on the PCI bus and not in npu-smi: {', '.join(lost)}"))
    files = {int(n[7:]) for n in patient.view.names("/dev") if re.fullmatch(r"davinci\d+", n)}
    if files and len(files) < len(inventory.npus):
        found.append(note(f"{len(inventory.npus)} dies and {len(files)} files /dev/davinci*"))
    wanted = {device for unit in await _engines(patient) for device in unit.devices}
    if missing := sorted(wanted - {npu.device for npu in inventory.npus}):
        found.append(fail(f"planned devices that are not there: {', '.join(map(str, missing))}"))
    return worst(found, f"{len(inventory.npus)} dies")


@GROUP.check(
    "devices",
    title="The driver's device files are there",
    why="A process opens /dev/davinciN for its die, and davinci_manager, devmm_svm and hisi_hdc for all. In a container, and"
    " under systemd's PrivateDevices, each of them has to be given.",
    fix="docker run --device /dev/davinci0 ... --device /dev/davinci_manager --device /dev/devmm_svm --device /dev/hisi_hdc;"
    " on a host: modprobe drv_davinci, or install the driver again",
    unless=no_npus,
)
async def devices(patient: Patient) -> Outcome:
    """Presence, by name."""
    names = set(patient.view.names("/dev"))
    dies = sorted(int(n[7:]) for n in names if re.fullmatch(r"davinci\d+", n))
    missing = [f"/dev/{name}" for name in MANAGERS if name not in names]
    if not dies:
        missing.insert(0, "/dev/davinci0 and its like")
    if missing:
        return fail(f"missing: {', '.join(missing)}")
    wanted = {d for unit in await _engines(patient) for d in unit.devices}
    absent_ones = sorted(wanted - set(dies))
    if absent_ones:
        return warn(f"missing: {', '.join(f'/dev/davinci{d}' for d in absent_ones)}")
    return ok(f"{len(dies)} dies, {', '.join(MANAGERS)}")


@GROUP.check(
    "device-access",
    title="Whoever runs the engines may open the device files",
    why="The files belong to HwHiAiUser's group. A user outside it gets error 507033 or 507899 from the driver, which says"
    " nothing of permissions.",
    fix="usermod -aG HwHiAiUser USER, or install the driver with --install-for-all",
    unless=no_npus,
)
async def device_access(patient: Patient) -> Outcome:
    """Owner, group and mode by ``ls -ln /dev``, against the users of planned engines."""
    engines = await _engines(patient)
    if not engines:
        return absent("no engine is planned")
    listing = await patient.run("ls", "-ln", "/dev")
    files = {row[-1]: row for row in (line.split() for line in listing.stdout.splitlines()) if len(row) > 4}
    wanted = [*MANAGERS, *(f"davinci{d}" for unit in engines for d in unit.devices)]
    seen = [files[name] for name in wanted if name in files]
    if not seen:
        raise CannotTellError(listing.describe() or "ls lists none of the device files")
    found = []
    for user in sorted({unit.user or "root" for unit in engines}):
        if user == "root":
            continue
        identity = await patient.look("/etc/passwd", functools.partial(_identity, patient, user))
        if identity is None:
            found.append(warn(f"{user} is not in /etc/passwd"))
            continue
        closed = sorted({f"/dev/{row[-1]}" for row in seen if not _may_open(row, *identity)})
        if closed:
            found.append(fail(f"{user} may not open {', '.join(closed)}"))
    plain = sorted(f"/dev/{row[-1]}" for row in seen if not row[0].startswith("c"))
    if plain:
        found.append(fail(f"not a device: {', '.join(plain)} (a bind mount that found nothing makes a file)"))
    return worst(found, f"{len(seen)} files for {', '.join(sorted({u.user or 'root' for u in engines}))}")


async def _with_npus(patient: Patient) -> Inventory:
    inventory = await patient.inventory()
    if not inventory.npus:
        raise CannotTellError("no NPU is listed")
    return inventory


async def _engines(patient: Patient) -> tuple[UnitSpec, ...]:
    try:
        plan = await patient.plan()
    except CannotTellError:  # settings.plan says so
        return ()
    return () if plan is None else tuple(unit for unit in plan.units if unit.kind == "engine")


def _names(npus: Iterable[Npu]) -> str:
    return ", ".join(sorted({npu.name or "unnamed" for npu in npus}))


def _accelerators(patient: Patient) -> set[str]:
    """Huawei's accelerators on the PCI bus, by address."""
    view, base = patient.view, "/sys/bus/pci/devices"
    return {
        name.lower()
        for name in view.names(base)
        if view.text(f"{base}/{name}/vendor") == HUAWEI
        and (view.text(f"{base}/{name}/class") or "").startswith(ACCELERATOR)
    }


def _identity(patient: Patient, user: str) -> tuple[int, frozenset[int]] | None:
    """A user's number and groups, from /etc/passwd and /etc/group."""
    entries = [line.split(":") for line in (patient.view.text("/etc/passwd") or "").splitlines()]
    mine = next((e for e in entries if e[0] == user and len(e) > 3), None)
    if mine is None or not mine[2].isdecimal() or not mine[3].isdecimal():
        return None
    groups = {int(mine[3])}
    for line in (patient.view.text("/etc/group") or "").splitlines():
        fields = line.split(":")
        if len(fields) > 3 and user in fields[3].split(",") and fields[2].isdecimal():
            groups.add(int(fields[2]))
    return int(mine[2]), frozenset(groups)


def _may_open(row: list[str], uid: int, groups: frozenset[int]) -> bool:
    """By a line of ``ls -ln``: ``crw-rw---- 1 0 1000 235, 0 ...``. The first class that fits decides, as in the kernel."""
    mode = row[0]
    if row[2] == str(uid):
        return mode[1:3] == "rw"
    if row[3].isdecimal() and int(row[3]) in groups:
        return mode[4:6] == "rw"
    return mode[7:9] == "rw"
