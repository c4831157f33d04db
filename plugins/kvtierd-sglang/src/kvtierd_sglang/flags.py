"""``[[engine]] args`` as SGLang's command line: which flags are kvtierd's, and how a TOML value becomes arguments.

A name is SGLang's flag without its dashes (``tp-size``, ``mem-fraction-static``). ``true`` is the bare flag, ``false``
leaves it out, a list becomes several values, a table JSON. SGLang's parser accepts abbreviations of its flags, so a
name that abbreviates one of kvtierd's flags is refused like the flag itself.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, Final

from kvtierd.plan.model import Refusal
from kvtierd.quantities import parse_duration

_NAME: Final = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")

_BY_SETTING: Final = "kvtierd sets it from the engine's own settings: {}"
_ALWAYS: Final = "leave it out: kvtierd always sets it, since it reads what it gives"
_ADMIN: Final = (
    "a key in a command line is readable by every user of the host; l3_switch = true in [[engine]] gives SGLang an"
    " admin key by a file of mode 0600"
)
_READABLE: Final = (
    "a key in a command line is readable by every user of the host; write it into a YAML file of mode 0600 and"
    ' name that: config = "/etc/kvtierd/sglang.yaml"'
)
OURS: Final[Mapping[str, str]] = {
    "model-path": _BY_SETTING.format("model"),
    "model": _BY_SETTING.format("model"),
    "host": _BY_SETTING.format("host"),
    "port": _BY_SETTING.format("port"),
    "enable-metrics": _ALWAYS,
    "enable-cache-report": _ALWAYS,
    "enable-hierarchical-cache": 'write l2 = "on" or l2 = "off"',
    "enable-hicache": 'write l2 = "on" or l2 = "off"',
    "hicache-size": 'it is per rank; write the host\'s budget instead: l2 = "64GiB" in [[engine]]',
    "hicache-io-backend": "the driver sets the one that works on this hardware",
    "hicache-storage-backend": 'write l3 = "on" or l3 = "off"',
    "disaggregation-mode": 'write role = "prefill" or role = "decode" in [[engine]]',
    "node-rank": "kvtierd counts the engine's nodes",
    "dist-init-addr": "kvtierd takes the address of the engine's first node",
    "nccl-init-addr": "kvtierd takes the address of the engine's first node",
    "api-key": _READABLE,
    "admin-api-key": _ADMIN,
}
"""Flags that ``args`` may not hold, and what to write instead."""

L1_OFF: Final = "disable-radix-cache"
EXTRA_CONFIG: Final = "hicache-storage-backend-extra-config"
RANK_FLAGS: Final = (
    *("tp-size", "tensor-parallel-size", "tp"),
    *("pp-size", "pipeline-parallel-size", "pp"),
    *("dp-size", "data-parallel-size", "dp"),
)
OWN_OPTIONS: Final = ("l2", "l3", "ready-deadline", "drain")
"""Options of this driver that are no flags of SGLang."""


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The checked ``args``.

    ``flags`` keeps the settings' order, by normal name. ``l2`` and ``l3`` are ``None`` where the operator left the
    choice to kvtierd. ``storage`` holds the operator's own keys for the storage backend's JSON.
    """

    flags: Mapping[str, Any]
    storage: Mapping[str, Any]
    l2: bool | None
    l3: bool | None
    ready_deadline_seconds: float
    drain_seconds: float
    refusals: tuple[Refusal, ...]

    def number(self, *names: str, default: int = 1) -> int:
        """The first of these flags that is a positive whole number."""
        for name in names:
            value = self.flags.get(name)
            if isinstance(value, str) and value.isascii() and value.isdigit():
                value = int(value)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        return default

    def says_ranks(self) -> bool:
        """Whether the operator wrote any of the flags that decide how many ranks there are."""
        return any(name in self.flags for name in RANK_FLAGS)

    def on(self, name: str) -> bool:
        """Whether a switch is given."""
        return self.flags.get(name) is True

    def arguments(self) -> list[str]:
        """The operator's flags as they go onto the command line."""
        return [text for name, value in self.flags.items() for text in arguments_of(name, value)]


def arguments_of(name: str, value: Any) -> list[str]:
    """One flag: none, one or several arguments."""
    if value is False:
        return []
    if value is True:
        return [f"--{name}"]
    if isinstance(value, Mapping):
        return [f"--{name}", json.dumps(value)]
    if isinstance(value, (list, tuple)):
        return [f"--{name}", *(_text(item) for item in value)]
    return [f"--{name}", _text(value)]


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (Mapping, bool)) else str(value)


class _Reader:
    def __init__(self, ready_deadline_seconds: float, drain_seconds: float) -> None:
        self.refusals: list[Refusal] = []
        self.flags: dict[str, Any] = {}
        self.storage: dict[str, Any] = {}
        self.switches: dict[str, bool] = {}
        self.durations = {"ready-deadline": ready_deadline_seconds, "drain": drain_seconds}

    def refuse(self, code: str, message: str, hint: str) -> None:
        self.refusals.append(Refusal(code=code, message=message, hint=hint))

    def read(self, args: Mapping[str, Any]) -> None:
        seen: dict[str, str] = {}
        for written, value in args.items():
            name = written.strip().replace("_", "-")
            if name in seen:
                self.refuse(
                    "engine.arg-twice", f"args: {seen[name]} and {written} are the same flag", "keep one"
                )
                continue
            seen[name] = written
            if not _NAME.fullmatch(name):
                self.refuse(
                    "engine.arg-unknown",
                    f"args: {written!r} is not the name of a flag",
                    f"write SGLang's flag without dashes in front: {name.lstrip('-').lower() or 'tp-size'}",
                )
            elif name in OWN_OPTIONS:
                self._own(name, value)
            elif name == EXTRA_CONFIG:
                self._storage(value)
            elif not self._is_ours(name):
                self._flag(name, value)

    def _is_ours(self, name: str) -> bool:
        if name == L1_OFF or _abbreviates(name, L1_OFF):
            self.refuse(
                "engine.l1-off",
                f"args: {name} turns off the radix cache, which is L1: L2 and L3 hang on it",
                'leave it out; for an engine without L3 write l3 = "off"',
            )
            return True
        full = name if name in OURS else next((o for o in OURS if _abbreviates(name, o)), None)
        if full is None and _abbreviates(name, EXTRA_CONFIG):
            self.refuse("engine.arg-ours", f"args: {name} is short for {EXTRA_CONFIG}", "write it in full")
            return True
        if full is None:
            return False
        short = "" if full == name else f" (short for {full})"
        self.refuse("engine.arg-ours", f"args: {name}{short} is set by kvtierd", OURS[full])
        return True

    def _own(self, name: str, value: Any) -> None:
        if name in self.durations:
            try:
                seconds = parse_duration(value)
                if seconds <= 0:
                    raise ValueError("a deadline must be longer than nothing")
            except ValueError as error:
                self.refuse("engine.arg-value", f"args: {name}: {error}", f'write for example {name} = "10m"')
            else:
                self.durations[name] = seconds
        elif isinstance(value, bool) or value in {"on", "off"}:
            self.switches[name] = value is True or value == "on"
        else:
            self.refuse(
                "engine.arg-value", f"args: {name} is {value!r}", f'write {name} = "on" or {name} = "off"'
            )

    def _storage(self, value: Any) -> None:
        if isinstance(value, Mapping):
            self.storage = dict(value)
            return
        self.refuse(
            "engine.arg-value",
            f"args: {EXTRA_CONFIG} is not a table",
            f"write only what you add to kvtierd's keys: {EXTRA_CONFIG} = {{ prefetch_threshold = 256 }}",
        )

    def _flag(self, name: str, value: Any) -> None:
        if value is None or (isinstance(value, float) and value != value):  # noqa: PLR0124 - NaN
            self.refuse("engine.arg-value", f"args: {name} has no value", "give it one, or leave it out")
        elif any("\0" in text for text in arguments_of(name, value)):
            self.refuse("engine.arg-value", f"args: {name} holds a NUL character", "remove it")
        else:
            self.flags[name] = value


def _abbreviates(name: str, flag: str) -> bool:
    return len(name) >= 3 and name != flag and flag.startswith(name) and name not in _WHOLE_FLAGS


# Whole flags of SGLang that are the beginning of one of ours.
_WHOLE_FLAGS: Final = frozenset({"model", "hicache-storage-backend"})


def read_options(args: Mapping[str, Any], *, ready_deadline_seconds: float, drain_seconds: float) -> Options:
    """Checks ``args``; what is wrong is in ``refusals``, and the rest is usable for showing a plan."""
    reader = _Reader(ready_deadline_seconds, drain_seconds)
    reader.read(args)
    return Options(
        flags=reader.flags,
        storage=reader.storage,
        l2=reader.switches.get("l2"),
        l3=reader.switches.get("l3"),
        ready_deadline_seconds=reader.durations["ready-deadline"],
        drain_seconds=reader.durations["drain"],
        refusals=tuple(reader.refusals),
    )
