"""A specification as the properties of a transient systemd service, and such properties as a run. Pure.

Property names and types are those of ``org.freedesktop.systemd1.Unit`` and ``.Service`` (systemd 249 and later).
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from dbus_fast.signature import Variant

from kvtierd.errors import UnitError
from kvtierd.plan.model import UnitSpec
from kvtierd.quantities import parse_cpu_list
from kvtierd.units.backend import ProcessExit, UnitProcess
from kvtierd.units.guard import OF_THE_GUARD, guarded_argv

SLICE = "kvtierd.slice"
SUFFIX = ".service"
WATCHDOG_USEC = 10_000_000
UNLIMITED = 2**64 - 1  # systemd's "infinity"
LOG_BURST_LINES = 100_000  # in 30 s; journald's own 10,000 would tear holes into what a driver reads
_UNIT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,127}")
_MARKER = re.compile(r"kvtierd unit of (?P<owner>.+) \(spec (?P<digest>\S*), start (?P<token>[0-9a-f]+)\)")
# What systemd adds to the environment of a service by itself, up to version 257.
_ADDED_VARIABLES = frozenset({
    "CACHE_DIRECTORY", "CONFIGURATION_DIRECTORY", "CREDENTIALS_DIRECTORY", "FDSTORE", "HOME",
    "INVOCATION_ID", "JOURNAL_STREAM", "LANG", "LISTEN_FDNAMES", "LISTEN_FDS", "LISTEN_PID",
    "LISTEN_PIDFDID", "LOGNAME", "LOGS_DIRECTORY", "MAINPID", "MANAGERPID", "MEMORY_PRESSURE_WATCH",
    "MEMORY_PRESSURE_WRITE", "NOTIFY_SOCKET", "PATH", "RUNTIME_DIRECTORY", "SHELL", "STATE_DIRECTORY",
    "SYSTEMD_EXEC_PID", "SYSTEMD_PROC_CMDLINE", "TERM", "USER", "WATCHDOG_PID", "WATCHDOG_USEC",
    "XDG_RUNTIME_DIR",
})  # fmt: skip
_CLD_EXITED = 1  # of waitid(2); 2 and 3: killed by a signal, without and with a core
# EXIT STATUS of a service whose main process could not be set up (systemd.exec(5)); those that no retry can mend.
_SETUP_STATUS = {
    200: "the working directory cannot be entered",
    203: "the program cannot be executed",
    216: "the group is not known or cannot be taken",
    217: "the user is not known",
}
_SETUP_STATUSES = range(200, 246)


@dataclasses.dataclass(frozen=True, slots=True)
class Marker:
    """How a unit of ours is told from anybody's: its description.

    ``owner`` is the daemon's runtime directory: two daemons on one host do not touch each other's units.
    ``token`` is new for each start.
    """

    owner: str
    digest: str
    token: str

    def text(self) -> str:
        """For the unit's description, which ``systemctl`` shows and which outlives reloads of systemd."""
        return f"kvtierd unit of {self.owner} (spec {self.digest}, start {self.token})"


def read_marker(description: str) -> Marker | None:
    """The marker of a description; ``None``: this unit is not kvtierd's."""
    found = _MARKER.fullmatch(description)
    return Marker(**found.groupdict()) if found else None


def service_name(unit_id: str) -> str:
    """``kvtier-engine-a`` -> ``kvtier-engine-a.service``. Raises ``UnitError`` (``unit.unknown``) for what is no id."""
    if not _UNIT_ID.fullmatch(unit_id):
        raise UnitError(f"{unit_id!r} is not a unit's id", code="unit.unknown")
    return unit_id + SUFFIX


def object_path(service: str) -> str:
    """The unit's D-Bus path: everything but letters and digits is written as ``_xx``, a leading digit too."""
    escaped = "".join(
        chr(byte)
        if chr(byte).isascii() and chr(byte).isalnum() and not (index == 0 and chr(byte).isdigit())
        else f"_{byte:02x}"
        for index, byte in enumerate(service.encode())
    )
    return f"/org/freedesktop/systemd1/unit/{escaped}"


def transient_properties(
    spec: UnitSpec,
    marker: Marker,
    program: str,
    *,
    stop_signal: int,
    manager_variables: Collection[str] = (),
) -> list[tuple[str, Variant]]:
    """What ``StartTransientUnit`` is given.

    The environment can be read by every user of the host over D-Bus; a specification holds no secrets.

    Args:
        spec: The unit. ``after`` is not passed on: systemd never unloads a unit that another one names there.
        marker: Becomes the description.
        program: The path of ``argv[0]``, absolute.
        stop_signal: The number of ``spec.stop.signal``.
        manager_variables: Names in systemd's own environment block, which units would inherit.
    """
    unset = sorted((_ADDED_VARIABLES | set(manager_variables)) - spec.env.keys() - _kept_for_the_guard(spec))
    # "$" doubled: "${X}" in an argument is the engine's business, not systemd's. ExecStartEx has a flag for that, but
    # systemd 252 cannot read its own file of such a unit again, and after a daemon-reload the unit has no command.
    argv = spec.argv if spec.guard_file is None else guarded_argv(spec.guard_file, (program, *spec.argv[1:]))
    first = program if spec.guard_file is None else argv[0]
    command = [first, [argument.replace("$", "$$") for argument in argv], False]
    properties = [
        ("Description", Variant("s", marker.text())),
        # Kept until its end has been read and written down; then the backend unloads it.
        ("RemainAfterExit", Variant("b", True)),
        ("CollectMode", Variant("s", "inactive")),
        ("Slice", Variant("s", SLICE)),
        ("Type", Variant("s", "exec")),
        ("Restart", Variant("s", "no")),  # the supervisor decides
        ("ExecStart", Variant("a(sasb)", [command])),
        ("WorkingDirectory", Variant("s", spec.cwd)),
        ("Environment", Variant("as", [f"{name}={value}" for name, value in spec.env.items()])),
        ("UnsetEnvironment", Variant("as", unset)),
        # mixed: the signal to the main process, which may drain, SIGKILL to whatever is left of the group.
        ("KillMode", Variant("s", "mixed")),
        ("KillSignal", Variant("i", stop_signal)),
        ("SendSIGKILL", Variant("b", True)),
        ("TimeoutStopUSec", Variant("t", int(spec.stop.timeout_seconds * 1_000_000))),
        ("TimeoutStartUSec", Variant("t", 20_000_000)),
        ("StandardInput", Variant("s", "null")),
        ("StandardOutput", Variant("s", "journal")),
        ("StandardError", Variant("s", "inherit")),
        ("SyslogIdentifier", Variant("s", spec.id)),
        ("SyslogLevelPrefix", Variant("b", False)),
        ("LogRateLimitIntervalUSec", Variant("t", 30_000_000)),
        ("LogRateLimitBurst", Variant("u", LOG_BURST_LINES)),
        ("UMask", Variant("u", 0o022)),
        ("IgnoreSIGPIPE", Variant("b", False)),
        ("LimitMEMLOCK", Variant("t", UNLIMITED)),
        ("LimitMEMLOCKSoft", Variant("t", UNLIMITED)),
        ("TasksMax", Variant("t", UNLIMITED)),
        ("OOMScoreAdjust", Variant("i", 0)),
    ]
    if spec.guard_file is None:
        properties.append(("NotifyAccess", Variant("s", "none")))
    else:
        properties += [
            ("NotifyAccess", Variant("s", "all")),  # the guard is not the main process
            ("WatchdogUSec", Variant("t", WATCHDOG_USEC)),  # until the guard says its own
            ("WatchdogSignal", Variant("i", 9)),
        ]
    resources = spec.resources
    if resources.cpus:
        properties.append(("CPUAffinity", Variant("ay", cpu_mask(resources.cpus))))
    if resources.nice:
        properties.append(("Nice", Variant("i", resources.nice)))
    if resources.memory_max_bytes is not None:
        properties.append(("MemoryMax", Variant("t", resources.memory_max_bytes)))
    if spec.user is not None:
        properties.append(("User", Variant("s", spec.user)))
    return properties


def _kept_for_the_guard(spec: UnitSpec) -> frozenset[str]:
    return frozenset(OF_THE_GUARD) if spec.guard_file is not None else frozenset()


def cpu_mask(cpus: str) -> bytes:
    """systemd's form of a CPU list: bit n of byte n // 8 is CPU n."""
    numbers = parse_cpu_list(cpus)
    mask = bytearray(numbers[-1] // 8 + 1)
    for number in numbers:
        mask[number // 8] |= 1 << number % 8
    return bytes(mask)


def marker_of(properties: Mapping[str, Any], owner: str) -> Marker | None:
    """The marker when this unit exists and is this daemon's; whether systemd still likes its settings is no matter."""
    if not is_loaded(properties) or properties.get("Slice", SLICE) != SLICE:
        return None
    marker = read_marker(str(properties.get("Description", "")))
    return marker if marker is not None and marker.owner == owner else None


def is_loaded(properties: Mapping[str, Any]) -> bool:
    """Whether systemd has anything under this name: a unit, or a file that would define one."""
    return str(properties.get("LoadState", "not-found")) != "not-found"


def has_ended(properties: Mapping[str, Any]) -> bool:
    """Whether the main process is gone and systemd waits for nothing of the unit any more.

    "exited" can still have processes that the main process left behind.
    """
    if properties.get("ActiveState") in {"inactive", "failed"}:
        return True
    return str(properties.get("SubState")) == "exited"


def process_of(
    unit_id: str,
    properties: Mapping[str, Any],
    marker: Marker,
    exit_: ProcessExit | None = None,
    note: str = "",
) -> UnitProcess:
    """A unit of ours as the rest of the daemon sees it; ``exit_`` when it has ended."""
    if exit_ is None and not note and _unlimited_in_spite_of_a_limit(properties):
        note = "memory_max is not enforced: systemd has no memory controller on this host"
    return UnitProcess(
        unit_id=unit_id,
        instance=instance_of(properties),
        pid=int(properties.get("MainPID") or properties.get("ExecMainPID") or 0),
        started_unix_seconds=properties.get("ExecMainStartTimestamp", 0) / 1_000_000,
        spec_digest=marker.digest,
        exit=exit_,
        note=note,
    )


def _unlimited_in_spite_of_a_limit(properties: Mapping[str, Any]) -> bool:
    """systemd takes MemoryMax also where there is no controller; then it cannot say what the unit uses either."""
    limit, used = properties.get("MemoryMax", UNLIMITED), properties.get("MemoryCurrent")
    return limit != UNLIMITED and used == UNLIMITED


def instance_of(properties: Mapping[str, Any]) -> str:
    """The run's InvocationID, 32 hexadecimal digits; empty when there was no run."""
    return bytes(properties.get("InvocationID", b"")).hex()


def exit_of(properties: Mapping[str, Any], *, now: float, requested: bool) -> ProcessExit:
    """How the main process ended; unknown when systemd does not know it either."""
    code = int(properties.get("ExecMainCode", 0))
    status = int(properties.get("ExecMainStatus", 0))
    at = properties.get("ExecMainExitTimestamp", 0) / 1_000_000 or now
    if code == 0:
        return ProcessExit(None, None, at, requested)
    exited = code == _CLD_EXITED
    return ProcessExit(status if exited else None, None if exited else status, at, requested)


def setup_problem(properties: Mapping[str, Any]) -> tuple[str, bool] | None:
    """Why the main process was never there, and whether that is for good; ``None``: it was, or nobody knows."""
    status = int(properties.get("ExecMainStatus", 0))
    if int(properties.get("ExecMainCode", 0)) != _CLD_EXITED or status not in _SETUP_STATUSES:
        return None
    return _SETUP_STATUS.get(
        status, f"systemd could not set it up (status {status})"
    ), status in _SETUP_STATUS


def program_of(spec: UnitSpec) -> str:
    """The absolute path of ``argv[0]``, found as a shell would: in the unit's own PATH.

    Raises:
        UnitError: ``unit.exec``
    """
    if not spec.argv:
        raise UnitError(f"{spec.id} has no command", code="unit.exec")
    if any("\0" in text for text in (*spec.argv, *spec.env, *spec.env.values(), spec.cwd)):
        raise UnitError(f"an argument or a variable of {spec.id} holds a zero byte", code="unit.exec")
    first = spec.argv[0]
    if "/" in first:
        return os.path.normpath(Path(spec.cwd) / first)
    found = shutil.which(first, path=spec.env.get("PATH", os.defpath))
    if found is None:
        raise UnitError(f"there is no program {first!r} for {spec.id}", code="unit.exec")
    return str(Path(found).absolute())
