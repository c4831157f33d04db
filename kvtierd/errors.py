"""The one exception root of kvtierd.

Every error an operator can meet says what happened, why, and what to do, and carries a stable code
that scripts may match. This module imports nothing of ours.
"""

from __future__ import annotations

from typing import Any, ClassVar


class KvtierError(Exception):
    """Root of all errors that kvtierd raises on purpose.

    Args:
        message: What happened, one sentence, with the values that matter.
        why: The reason, when it is known and not part of the message.
        hint: What the operator can do about it.
        code: Overrides the class's stable code, for finer distinctions ("hugepages.read-only").
    """

    code: ClassVar[str] = "internal"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, why: str = "", hint: str = "", code: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.why = why
        self.hint = hint
        self.stable_code = code or type(self).code

    def __str__(self) -> str:
        parts = [self.message]
        if self.why:
            parts.append(f"why: {self.why}")
        if self.hint:
            parts.append(f"do: {self.hint}")
        return "\n".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """The error as documented JSON: code, message, why, hint."""
        return {"code": self.stable_code, "message": self.message, "why": self.why, "hint": self.hint}


class UsageError(KvtierError):
    """The command line is wrong (exit 2)."""

    code = "usage"
    exit_code = 2


class SettingsError(KvtierError):
    """The settings file cannot be read or is invalid."""

    code = "settings"


class PlanError(KvtierError):
    """No plan can be made, or the plan was refused."""

    code = "plan"


class HostError(KvtierError):
    """The host does not give what was asked of it (memory, ports, permissions)."""

    code = "host"


class HugepageError(HostError):
    """Hugepages could not be reserved or released."""

    code = "hugepages"


class ConfError(KvtierError):
    """A MemCache configuration file is wrong or cannot be rendered."""

    code = "conf"


class MemcacheError(KvtierError):
    """The MetaService or the pool does not answer as it should."""

    code = "memcache"


class EndpointError(KvtierError):
    """The local endpoint cannot be reached or refused a command."""

    code = "endpoint"


class UnitError(KvtierError):
    """A unit cannot be started, stopped or found."""

    code = "unit"


class PluginError(KvtierError):
    """An engine plugin is missing, broken or does not fit."""

    code = "plugin"


class EmulatorError(KvtierError):
    """The emulated driver cannot be built or entered."""

    code = "emulator"


class ClusterError(KvtierError):
    """The cluster's settings are not safe, or what was asked of it is not possible now."""

    code = "cluster"


class ActionError(KvtierError):
    """An action of the policy could not be carried out, or did not have its effect."""

    code = "act"


class WorkloadError(KvtierError):
    """A dataset cannot be read, a load cannot be run, or its result says nothing."""

    code = "workload"


class StateError(KvtierError):
    """The state directory cannot be used (locked, full, damaged)."""

    code = "state"


class DaemonUnreachableError(KvtierError):
    """kvtierctl cannot reach the daemon (exit 3)."""

    code = "daemon-unreachable"
    exit_code = 3
