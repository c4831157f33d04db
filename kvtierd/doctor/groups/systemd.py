"""systemd: is kvtierd's unit still what kvtierd promises and needs, and did the services before it work?"""

from __future__ import annotations

import re
from typing import Final

from kvtierd.checks import Group, Outcome, Patient, absent, fail, note, ok, unknown, warn, worst
from kvtierd.doctor.looking import processes
from kvtierd.doctor.memcache_files import VARIABLES
from kvtierd.doctor.unit_files import Assignment, Unit, is_on, read_unit
from kvtierd.host.view import HostView
from kvtierd.units.choice import OLDEST_SYSTEMD

GROUP = Group("systemd")
SERVICE: Final = "kvtierd.service"
HUGEPAGES_SERVICE: Final = "kvtierd-hugepages.service"
# What transient units of kvtierd are called: systemd looks for drop-ins under every prefix that ends with a dash.
ENGINE_UNITS: Final = "kvtier-engine-x.service"
ENGINE_DROP_INS: Final = ("service.d", "kvtier-.service.d", "kvtier-engine-.service.d")
HUGEPAGE_PATHS: Final = ("/sys/kernel/mm/hugepages", "/proc/sys/vm")

# Switches that hide from the daemon what it has to look at or to change: what then goes wrong.
SWITCHES: Final = {
    "ProtectKernelTunables": "makes /proc/sys and /sys read-only: hugepages cannot be reserved (EROFS)",
    "PrivateDevices": "hides /dev/davinci* and /dev/hisi_hdc: npu-smi finds no card",
    "PrivateNetwork": "cuts it off from engines, the MetaService and other nodes",
    "PrivateUsers": "hides whom processes and files belong to",
    "MemoryDenyWriteExecute": "ends programs that make code at run time, such as interpreters of engines",
    "DynamicUser": "takes away root, without which no unit is started",
}
VALUES: Final = {
    "ProtectProc": ({"invisible", "noaccess"}, "hides who holds a card or a port"),
    "ProcSubset": ({"pid"}, "hides /proc/meminfo and /proc/sys"),
    "ProtectHome": ({"yes", "true", "tmpfs", "1", "on"}, "hides interpreters and models in /root and /home"),
    "DevicePolicy": ({"strict"}, "closes the driver's devices, unless each is allowed"),
}
UNIT_SWITCHES: Final = ("PrivateDevices", "PrivateNetwork", "MemoryDenyWriteExecute", "PrivateUsers")


@GROUP.check(
    "running",
    title=f"systemd is process 1, version {OLDEST_SYSTEMD} or later",
    why="Units are then services with a control group of their own, which outlive the daemon and end as a whole. Elsewhere a small"
    " process keeps each unit.",
    fix="nothing, in a container; else upgrade systemd, or write [daemon] backend = shim to have it said",
)
async def running(patient: Patient) -> Outcome:
    """/run/systemd/system, and ``systemctl --version``."""
    if not patient.view.exists("/run/systemd/system"):
        wanted = patient.settings is not None and patient.settings.daemon.backend == "systemd"
        return (fail if wanted else note)(
            "process 1 is not systemd: each unit gets a small process of its own"
        )
    result = await patient.run("systemctl", "--version")
    match = re.match(r"systemd (\d+)", result.stdout)
    if not match:
        return unknown(result.describe() or "systemctl does not say its version")
    version = int(match[1])
    return (
        ok(f"systemd {version}")
        if version >= OLDEST_SYSTEMD
        else warn(f"systemd {version} is too old for units as services")
    )


@GROUP.check(
    "unit-file",
    title="kvtierd.service is the packaged one",
    why="A whole copy in /etc hides the packaged unit: what an upgrade changes there never takes effect.",
    fix="systemctl edit kvtierd (a drop-in with the few lines that differ) in place of the copy; then systemctl daemon-reload",
)
def unit_file(patient: Patient) -> Outcome:
    """A unit of the same name before the packaged one, and drop-ins."""
    unit = read_unit(patient.view, SERVICE)
    if unit.file is None:
        return absent("kvtierd.service is not installed")
    if unit.file.startswith(("/etc/", "/run/")):
        return warn(f"{unit.file} hides the packaged unit")
    return note(f"drop-ins: {', '.join(unit.drop_ins)}") if unit.drop_ins else ok(unit.file)


@GROUP.check(
    "sandbox",
    title="The daemon's sandbox leaves it what it needs",
    why="kvtierd writes hugepages, asks npu-smi, looks at other users' processes and talks to engines. A switch that is good for most"
    " services takes one of these away, and what fails then names another cause.",
    fix="remove the line from the drop-in it is in (systemctl cat kvtierd), then systemctl daemon-reload and restart kvtierd",
)
def sandbox(patient: Patient) -> Outcome:
    """Switches in kvtierd.service, kvtierd-hugepages.service and their drop-ins."""
    found, looked = [], 0
    for name in (SERVICE, HUGEPAGES_SERVICE):
        unit = read_unit(patient.view, name)
        if unit.file is not None or unit.drop_ins:
            looked += 1
            found += _sandbox_problems(unit)
    return worst(found, "nothing in its way") if looked else absent("kvtierd.service is not installed")


def _sandbox_problems(unit: Unit) -> list[Outcome]:
    found = []
    for key, harm in SWITCHES.items():
        if is_on(assignment := unit.last(key)):
            found.append(fail(_told(assignment, harm)))
    for key, (bad, harm) in VALUES.items():
        assignment = unit.last(key)
        if assignment is not None and assignment.value.lower() in bad:
            found.append(fail(_told(assignment, harm)))
    user = unit.last("User")
    if user is not None and user.value not in {"root", "0"}:
        found.append(fail(_told(user, "only root writes hugepages and starts units")))
    found += [
        fail(_told(root, "hides what the settings name"))
        for key in ("RootDirectory", "RootImage")
        if (root := unit.last(key)) is not None
    ]
    for assignment in (*unit.all("ReadOnlyPaths"), *unit.all("InaccessiblePaths")):
        paths = {path.lstrip("-+") for path in assignment.value.split()}
        named = sorted(paths & {*HUGEPAGE_PATHS, "/sys/kernel", "/sys/kernel/mm", "/proc"})
        if named:  # the shipped unit has /sys and /proc/sys, with the writable ones below them
            found.append(fail(_told(assignment, f"{', '.join(named)}: hugepages cannot be reserved (EROFS)")))
    writable = {p.lstrip("-+") for a in unit.all("ReadWritePaths") for p in a.value.split()}
    closed = {p.lstrip("-+") for a in unit.all("ReadOnlyPaths") for p in a.value.split()}
    for parent, path in (("/sys", HUGEPAGE_PATHS[0]), ("/proc/sys", HUGEPAGE_PATHS[1])):
        if parent in closed and path not in writable:
            last = unit.all("ReadOnlyPaths")[-1]
            found.append(
                fail(
                    f"{last.file}: {parent} is read-only and {path} is not in ReadWritePaths: no hugepages (EROFS)"
                )
            )
    denied, allowed = unit.all("IPAddressDeny"), unit.all("IPAddressAllow")
    if denied and not allowed and "hugepages" not in (unit.file or ""):
        found.append(warn(_told(denied[-1], "cuts it off from engines and other nodes")))
    return found


@GROUP.check(
    "kill-mode",
    title="A stop of the daemon ends the daemon alone, a stop of an engine the whole engine",
    why="Units that run as the daemon's own processes end with it in any KillMode but process. An engine's unit with KillMode=process"
    " is the reverse: its workers live on and hold the card, and the next start finds no memory.",
    fix="remove KillMode= from the drop-in; kvtierd sets what each unit needs",
)
def kill_mode(patient: Patient) -> Outcome:
    """KillMode and SendSIGKILL of the daemon's unit, and in drop-ins for engines' units."""
    own = read_unit(patient.view, SERVICE)
    engines = read_unit(patient.view, ENGINE_UNITS, ENGINE_DROP_INS)
    if own.file is None and not engines.assignments:
        return absent("kvtierd.service is not installed")
    found = []
    mode = own.last("KillMode")
    if own.file is not None and (mode is None or mode.value != "process"):
        said = (
            _told(mode, "ends units that run as its processes")
            if mode
            else f"{own.file} sets no KillMode=process"
        )
        found.append(warn(said))
    mode = engines.last("KillMode")
    if mode is not None and mode.value in {"process", "none"}:
        found.append(fail(_told(mode, "leaves an engine's workers alive, and they hold the card")))
    kill = engines.last("SendSIGKILL")
    if kill is not None and not is_on(kill):
        found.append(fail(_told(kill, "leaves what ignores SIGTERM alive")))
    return worst(found, "process for the daemon, nothing changed for engines")


@GROUP.check(
    "life",
    title="systemd hears of the daemon's state, and engines do not depend on it",
    why="Without Type=notify systemd counts it as ready at once, and a hung daemon stays hung without WatchdogSec. With PartOf= or"
    " BindsTo= every restart of the daemon, an upgrade too, stops all engines.",
    fix="remove the line from the drop-in (systemctl cat kvtierd)",
)
def life(patient: Patient) -> Outcome:
    """Type, WatchdogSec, Restart, Delegate and bindings to other units."""
    own = read_unit(patient.view, SERVICE)
    engines = read_unit(patient.view, ENGINE_UNITS, ENGINE_DROP_INS)
    if own.file is None and not engines.assignments:
        return absent("kvtierd.service is not installed")
    found = []
    if own.file is not None:
        kind, watchdog, restart = own.last("Type"), own.last("WatchdogSec"), own.last("Restart")
        if kind is None or kind.value != "notify":
            found.append(
                warn(
                    _told(kind, "only notify says when it is ready")
                    if kind
                    else f"{own.file} has no Type=notify"
                )
            )
        if watchdog is None or re.fullmatch(r"0\w*|infinity", watchdog.value):
            found.append(
                warn(
                    _told(watchdog, "a hung daemon stays hung")
                    if watchdog
                    else f"{own.file} has no WatchdogSec"
                )
            )
        if restart is None or restart.value == "no":
            found.append(
                warn(
                    _told(restart, "a daemon that died stays dead")
                    if restart
                    else f"{own.file} has no Restart="
                )
            )
    for unit, other in ((engines, "kvtierd"), (own, "kvtier-")):
        for key in ("PartOf", "BindsTo", "Requires", "Requisite"):
            found += [fail(_told(a, "its restart stops engines")) for a in unit.all(key) if other in a.value]
    return worst(found, "ready by notify, watched, and bound to nothing")


@GROUP.check(
    "engine-sandbox",
    title="Engines' units have no sandbox of somebody else's",
    why="Drop-ins for all services (service.d) and for kvtier-*.service change kvtierd's transient units too: an engine without its"
    " devices, or with a private /tmp, finds no card or not its peers.",
    fix="remove the line, or narrow the drop-in to the services that it is meant for",
)
def engine_sandbox(patient: Patient) -> Outcome:
    """Drop-ins that systemd adds to a transient engine unit."""
    if not patient.view.exists("/run/systemd/system"):
        return absent("process 1 is not systemd")
    unit = read_unit(patient.view, ENGINE_UNITS, ENGINE_DROP_INS)
    found = [fail(_told(a, SWITCHES[key])) for key in UNIT_SWITCHES if is_on(a := unit.last(key)) and a]
    if is_on(private := unit.last("PrivateTmp")) and private:
        found.append(warn(_told(private, "MetaService and engines share sockets and a lock in /tmp")))
    return worst(found, f"{len(unit.drop_ins)} drop-in(s)" if unit.drop_ins else "no drop-ins")


@GROUP.check(
    "memlock",
    title="Engines may lock their memory",
    why="The pool's memory and device buffers are locked. With a limit (64 KiB or 8 MiB are usual) registering them fails, and the log"
    " speaks of a failed mapping.",
    fix="LimitMEMLOCK=infinity; in a container: --ulimit memlock=-1; for users of shims: memlock unlimited in /etc/security/limits.d",
)
def memlock(patient: Patient) -> Outcome:
    """LimitMEMLOCK in unit files, and the limit of each running engine."""
    view, found = patient.view, []
    own = read_unit(view, SERVICE)
    engines = read_unit(view, ENGINE_UNITS, ENGINE_DROP_INS)
    for unit in (own, engines):
        limit = unit.last("LimitMEMLOCK")
        if limit is not None and limit.value != "infinity":
            found.append(warn(_told(limit, "too little for the pool")))
    if own.file is not None and own.last("LimitMEMLOCK") is None:
        found.append(note(f"{own.file} sets no LimitMEMLOCK=infinity"))
    seen, limited = 0, dict[str, list[str]]()
    for process in processes(view):
        if VARIABLES.keys() & (process.environ or {}).keys():
            seen += 1
            limit_bytes = _memlock_of(view, process.pid)
            if limit_bytes is not None and limit_bytes != "unlimited":
                limited.setdefault(limit_bytes, []).append(f"{process.name} {process.pid}")
    # The emulated driver locks nothing.
    emulated = patient.settings is not None and patient.settings.node.series == "emulated"
    make = note if emulated else warn
    found += [make(f"{', '.join(who)} may lock {size} bytes") for size, who in limited.items()]
    if own.file is None and not seen and not found:
        return absent("kvtierd.service is not installed and no engine runs")
    return worst(found, "infinity" + (f", {seen} running engine(s)" if seen else ""))


def _memlock_of(view: HostView, pid: int) -> str | None:
    match = re.search(
        r"^Max locked memory\s+(\S+)", view.text(f"/proc/{pid}/limits") or "", flags=re.MULTILINE
    )
    return match[1] if match else None


@GROUP.check(
    "hugepages-service",
    title="kvtierd-hugepages.service has reserved what the plan needs",
    why="It runs before memory is in pieces. Later the kernel grants fewer pages than asked, and the pool is held back.",
    fix="systemctl enable --now kvtierd-hugepages; journalctl -u kvtierd-hugepages says how many pages are missing",
)
async def hugepages_service(patient: Patient) -> Outcome:
    """Its state by ``systemctl show``."""
    if not patient.view.exists("/run/systemd/system"):
        return absent("process 1 is not systemd")
    result = await patient.run(
        "systemctl", "show", HUGEPAGES_SERVICE, "--property=LoadState,UnitFileState,ActiveState,Result"
    )
    state = dict(line.split("=", 1) for line in result.stdout.splitlines() if "=" in line)
    if not result.ok or "LoadState" not in state:
        return unknown(result.describe() or f"systemctl says nothing of {HUGEPAGES_SERVICE}")
    if state["LoadState"] == "not-found":
        return absent("it is not installed")
    if state["LoadState"] == "masked":
        return warn("it is masked")
    if state.get("ActiveState") == "failed":
        return warn(f"it failed ({state.get('Result', '?')}): fewer pages than planned")
    # Without [Install]: kvtierd.service wants it, so "static" is its usual state.
    return ok(f"{state.get('ActiveState')}, {state.get('UnitFileState') or 'static'}")


def _told(assignment: Assignment | None, harm: str) -> str:
    assert assignment is not None
    return f"{assignment.file}: {assignment.key}={assignment.value} {harm}"
