"""Ascend software: the driver, its firmware and CANN, each where MemCache and the engines look for it."""

from __future__ import annotations

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
from kvtierd.host.ascend import DEFAULT_HOME, INSTALL_INFO, find_ascend, parse_info
from kvtierd.plan.hardware import facts_of
from kvtierd.plan.series import detect_series

GROUP = Group("ascend")
TOOLKIT_INFO: Final = "ascend_toolkit_install.info"


def no_npus(patient: Patient) -> str:
    """Why nothing of Ascend is to be expected here; empty when it is."""
    settings, view = patient.settings, patient.view
    if settings is not None and settings.node.series == "emulated":
        return "the series is emulated"
    marks = (INSTALL_INFO, f"{DEFAULT_HOME}/driver", "/dev/davinci_manager", "/dev/davinci0")
    if (settings is None or settings.node.series == "auto") and not any(view.exists(m) for m in marks):
        return "there is no sign of an NPU"
    return ""


@GROUP.check(
    "driver",
    title="The Ascend driver is where MemCache looks for it",
    why="MemCache reads /etc/ascend_install.info, then driver/version.info in the directory named there, then Innerversion in"
    ' that. Without any of them a rank ends with "the current version of ascend driver does not support mf!".',
    fix="install the driver again; in a container mount /etc/ascend_install.info and /usr/local/Ascend/driver",
    blocks=("pool", "engine"),
    unless=no_npus,
)
def driver(patient: Patient) -> Outcome:
    """As MemCache looks for it."""
    view, found = patient.view, find_ascend(patient.view)
    about = [p for p in found.problems if "CANN" not in p]
    if about:
        mounts = "mount /etc/ascend_install.info into the container (docker run -v /etc/ascend_install.info:/etc/ascend_install.info:ro)"
        return fail("; ".join(about), "" if view.exists(INSTALL_INFO) else mounts)
    install = found.install
    return ok(
        f"{install.driver_version or 'version unknown'} ({install.driver_inner_version}) in {install.driver_home}/driver"
    )


@GROUP.check(
    "install",
    title="The driver's installation is complete",
    why="The installer writes down how far it came. An unfinished one, and one of another kind than the host (a virtual NPU's),"
    " has a driver that loads and parts that are missing.",
    fix="install the driver again: Ascend-hdk-*-npu-driver_*.run --full --install-for-all, then reboot",
    unless=no_npus,
)
def install(patient: Patient) -> Outcome:
    """Driver_Install_Status, Driver_Install_Mode and the path in /etc/ascend_install.info."""
    values = _install_info(patient)
    home, mode = values.get("Driver_Install_Path_Param", ""), values.get("Driver_Install_Mode", "")
    found = []
    status = values.get("Driver_Install_Status")
    if status not in {None, "complete"}:
        found.append(warn(f"Driver_Install_Status is {status}"))
    if not home:
        found.append(warn(f"{INSTALL_INFO} has no Driver_Install_Path_Param"))
    elif not patient.view.exists(home):
        found.append(fail(f"Driver_Install_Path_Param is {home}, which does not exist"))
    if mode == "vnpu_guest":
        found.append(
            note(
                "Driver_Install_Mode is vnpu_guest: a virtual NPU, with a share of a card and without a network port of its own",
                "device_rdma needs whole cards: pass them through to this machine, or run on the host",
            )
        )
    if home and home.rstrip("/") != DEFAULT_HOME:
        found.append(
            note(
                f"the driver is in {home}: software that has {DEFAULT_HOME} built in does not find it",
                f"ln -s {home}/driver {DEFAULT_HOME}/driver, where nothing is there yet",
            )
        )
    return worst(found, f"{mode or 'normal'}, {status or 'complete'}, in {home}")


@GROUP.check(
    "firmware",
    title="The firmware is one that the driver works with",
    why="Driver and firmware are upgraded one after the other. With a firmware outside the driver's range cards come up with"
    " health Alarm, or are reset under load.",
    fix="install the firmware of the driver's own release (Ascend-hdk-*-npu-firmware_*.run --upgrade), then reboot",
    unless=no_npus,
)
def firmware(patient: Patient) -> Outcome:
    """compatible_version_fw in driver/version.info against firmware/version.info."""
    home = find_ascend(patient.view).install.driver_home
    if home is None:
        raise CannotTellError("there is no driver")
    ranges = re.findall(
        r"\[\s*([^,\]\s]+)\s*,\s*([^,\]\s]+)\s*\]",
        _values(patient, f"{home}/driver/version.info").get("compatible_version_fw", ""),
    )
    place = _firmware_home(patient, home)
    version = _values(patient, f"{place}/firmware/version.info").get("Version", "")
    if not ranges or not version:
        return unknown("the driver names no firmware versions" if version else "the firmware has no version")
    numbers = _numbers(version)
    told = " or ".join(f"{low} to {high}" for low, high in ranges)
    if any(_numbers(low) <= numbers <= _numbers(high) for low, high in ranges):
        return ok(f"{version}, within {told}")
    return warn(f"the firmware is {version}; the driver works with {told}")


@GROUP.check(
    "cann",
    title="CANN for this machine is where MemCache looks for it",
    why="MemCache loads libascendcl from ASCEND_HOME_PATH; without it a rank ends with -1. Up to 8.3 CANN is in"
    " ascend-toolkit/latest, from 8.5 on in cann or cann-VERSION, each with a directory per machine type.",
    fix="install Ascend-cann-toolkit for this machine type into /usr/local/Ascend",
    unless=no_npus,
)
def cann(patient: Patient) -> Outcome:
    """As kvtierd looks for it when it plans."""
    found = find_ascend(patient.view)
    about = [p for p in found.problems if "CANN" in p]
    home, version = found.install.cann_home, found.install.cann_version
    if home is not None:
        return note("; ".join(about)) if about else ok(f"{version} in {home}")
    settings = patient.settings
    runners = [settings.meta.runner, *(e.runner for e in settings.engine)] if settings else ["host"]
    if set(runners) == {"docker"}:
        return ok("none on the host: MemCache and engines run in containers")
    told = "; ".join(about) or "no CANN toolkit was found"
    return fail(told) if settings is not None else warn(told)


@GROUP.check(
    "cann-driver",
    title="CANN and the driver are of releases that go together",
    why="CANN lists the driver releases it was tested with. With an older one operators are missing at run time, in the"
    " middle of a request.",
    fix="install the driver that CANN's release notes name, or the CANN of the driver's release",
    unless=no_npus,
)
def cann_driver(patient: Patient) -> Outcome:
    """compatible_version of the toolkit against the driver's Innerversion."""
    found = find_ascend(patient.view).install
    if found.cann_home is None or not found.driver_inner_version:
        raise CannotTellError("CANN or the driver's version is missing")
    text = patient.view.text(f"{found.cann_home}/{patient.view.machine}-linux/{TOOLKIT_INFO}") or ""
    names = re.findall(r"\[([A-Z0-9]+)\]", parse_info(text).get("compatible_version", ""))
    if not names:
        return absent(f"CANN {found.cann_version} names no drivers")
    if any(found.driver_inner_version.startswith(name) for name in names):
        return ok(f"CANN {found.cann_version}, driver {found.driver_inner_version}")
    return warn(
        f"the driver is {found.driver_inner_version}; CANN {found.cann_version} was made for {', '.join(names)}"
    )


@GROUP.check(
    "home-path",
    title="ASCEND_HOME_PATH of every process leads to a CANN",
    why='A unit\'s environment is complete: nothing comes from a login shell. "Environment ASCEND_HOME_PATH is not set" is how a'
    " rank without it ends; with the path of a CANN that was upgraded away it fails to load a library.",
    fix="remove ASCEND_HOME_PATH from [engine.env]: kvtierd sets it to the CANN it finds",
    blocks=("pool",),
    unless=no_npus,
)
async def home_path(patient: Patient) -> Outcome:
    """The environment of planned pool holders and engines that run on the host."""
    plan = await patient.plan()
    if plan is None:
        return absent("no valid settings")
    found, homes = [], set()
    for unit in plan.units:
        if unit.kind not in {"pool", "engine"} or "docker" in unit.argv[0]:
            continue
        home = unit.env.get("ASCEND_HOME_PATH")
        if home is None:
            found.append(fail(f"{unit.id} has no ASCEND_HOME_PATH"))
        elif not patient.view.exists(home):
            found.append(fail(f"{unit.id}: ASCEND_HOME_PATH is {home}, which does not exist"))
        else:
            homes.add(home)
    if not found and not homes:
        return absent("no unit on the host needs it")
    return worst(found, ", ".join(sorted(homes)))


@GROUP.check(
    "series",
    title="The hardware is what the settings say",
    why="The series decides protocol, alignment and hugepages. A plan for another one starts and then fails in the driver, or"
    " moves KV over the slow way.",
    fix='write [node] series as it is, or "auto"',
    unless=no_npus,
)
async def series(patient: Patient) -> Outcome:
    """[node] series against the chips' names. 300I A2 and 800I A2 carry the same chips."""
    inventory = await patient.inventory()
    if not inventory.npus:
        raise CannotTellError("no NPU is listed")
    guess = detect_series(inventory.npus)
    wanted = patient.settings.node.series if patient.settings else "auto"
    if wanted == "auto":
        if guess.series is None:
            return note(str(guess.note), "MemCache's device protocols need A2, A3 or A5 (950)")
        return ok(guess.series)
    if guess.series is None:
        return warn(f"the settings say {wanted}; {guess.note}")
    if guess.series == wanted or {guess.series, wanted} == {"300I-A2", "800I-A2"}:
        return ok(f"{wanted}, {len(inventory.npus)} dies")
    return fail(
        f"the settings say {wanted}, the chips ({inventory.npus[0].name}) are those of {guess.series}"
    )


@GROUP.check(
    "protocol",
    title="The pool's protocol is the one of this hardware",
    why="A2 moves KV by device_rdma, A3 by device_sdma over its own fabric, 950 by device_urma or device_uboe. Others are refused"
    " by the driver, or go through host memory and are slower than computing.",
    fix='write [pool] protocol = "auto"',
    blocks=("pool", "engine"),
    unless=no_npus,
)
async def protocol(patient: Patient) -> Outcome:
    """[pool] protocol against what the chips can."""
    settings = patient.settings
    if settings is None:
        return absent("no valid settings")
    found = detect_series((await patient.inventory()).npus).series
    real = found or (settings.node.series if settings.node.series != "auto" else None)
    if real is None:
        raise CannotTellError("the hardware series is not known")
    facts, wanted = facts_of(real), settings.pool.protocol
    if wanted in {"auto", facts.protocol}:
        return ok(f"{facts.protocol} on {real}")
    if wanted not in facts.protocols:
        return fail(f"{wanted} does not work on {real} (it has {', '.join(facts.protocols)})")
    return note(f"{wanted} on {real}, where {facts.protocol} is what it is made for")


def _install_info(patient: Patient) -> dict[str, str]:
    return _values(patient, INSTALL_INFO)


def _values(patient: Patient, name: str) -> dict[str, str]:
    return parse_info(patient.read(name))


def _firmware_home(patient: Patient, driver_home: str) -> str:
    values = parse_info(patient.view.text(INSTALL_INFO) or "")
    return values.get("Firmware_Install_Path_Param", "").rstrip("/") or driver_home


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:6])
