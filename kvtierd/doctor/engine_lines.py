"""Engines' command lines, as far as doctor has to understand them: planned ones, running ones, and the one it was given.

vLLM takes ``--a-b c``, ``--a_b=c``, ``--a.key value`` and a few short names; SGLang the first two. What is said twice
counts as said last, as argparse has it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvtierd.checks import CannotTellError, Patient
from kvtierd.doctor.processes import Process, read_processes
from kvtierd.host.interpreters import probe_interpreter
from kvtierd.plan.inventory import MemcacheInstall
from kvtierd.plan.model import UnitSpec

PACKAGES: Final = ("sglang", "vllm", "vllm-ascend")
TRANSFER: Final = "kv-transfer-config"
STORES: Final = frozenset({"AscendStoreConnector", "MooncakeConnectorStoreV1", "MooncakeStoreConnectorV1"})
"""vllm-ascend's connector to a pool, under its names of several releases."""

_SHORT: Final = {"tp": "tensor-parallel-size", "pp": "pipeline-parallel-size", "dp": "data-parallel-size"}
_SGLANG_NAMES: Final = {"tp-size": "tensor-parallel-size", "pp-size": "pipeline-parallel-size",
                        "dp-size": "data-parallel-size", "enable-hicache": "enable-hierarchical-cache"}  # fmt: skip
_PATH: Final = ("/usr/local/bin", "/usr/bin", "/bin", "/usr/local/sbin")
# Models whose layers do not all keep the same kind of KV, by name: those that vllm-ascend's and SGLang's documents name.
_HYBRID: Final = re.compile(
    r"deepseek[-_. ]?v4|qwen[-_]?3[._]5|qwen[-_]?3[-_.]?next|kimi[-_.]?(linear|k3)|gpt[-_.]?oss|minimax|nemotron[-_.]?h"
    r"|jamba",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True, slots=True)
class EngineLine:
    """One engine as its command line says it.

    Attributes:
        who: For messages: "engine qwen3", "the command line", "vllm (pid 12)".
        kind: "vllm" or "sglang".
        model: What it serves, "" when it is not said.
        flags: Options under their long names with dashes; a bare one is ``""``.
        env: Variables given with it.
        python: The interpreter that runs it, where the line shows it.
        versions: Distribution -> version, as far as known.
        memcache: MemCache's version in that interpreter.
        source: "plan", "given" or "running".
        box: The container it runs in, "" for the host: sockets in files are not shared between them.
    """

    who: str
    kind: str
    model: str
    flags: Mapping[str, str]
    env: Mapping[str, str]
    python: str | None
    source: str
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    memcache: str | None = None
    box: str = ""

    def number(self, name: str, default: int) -> int:
        """An option that is a whole number; the default where it is something else (the engine refuses that itself)."""
        text = self.flags.get(name, "")
        return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else default

    @property
    def port(self) -> int:
        """Of its API."""
        return self.number("port", 8000 if self.kind == "vllm" else 30000)

    @property
    def hybrid(self) -> bool:
        """Whether the model's name is that of one with several kinds of KV."""
        return _HYBRID.search(self.model) is not None

    @property
    def transfer(self) -> Mapping[str, Any] | None:
        """vLLM's KV transfer, ``None`` without one. Raises ``ValueError``: it is not a JSON object."""
        text = self.flags.get(TRANSFER)
        parts = {k.partition(".")[2]: v for k, v in self.flags.items() if k.startswith(f"{TRANSFER}.")}
        if text is None and not parts:
            return None
        value = json.loads(text) if text is not None else {}
        if not isinstance(value, dict):
            raise ValueError("it is not a JSON object")
        return {**value, **parts}

    @property
    def connectors(self) -> tuple[Mapping[str, Any], ...]:
        """The outermost connector first, then those of a MultiConnector; empty without, or where they cannot be read."""
        try:
            outer = self.transfer
        except ValueError:
            return ()
        if outer is None:
            return ()
        inner = _extra(outer).get("connectors")
        return (outer, *(c for c in inner if isinstance(c, dict))) if isinstance(inner, list) else (outer,)

    @property
    def store(self) -> Mapping[str, Any] | None:
        """The options of the connector to MemCache's pool; ``None``: it does not use one."""
        for connector in self.connectors:
            if connector.get("kv_connector") in STORES and _extra(connector).get("backend") == "memcache":
                return _extra(connector)
        return None

    @property
    def uses_memcache(self) -> bool:
        """Whether its L3 is MemCache."""
        if self.kind == "sglang":
            return self.flags.get("hicache-storage-backend", "") in {"npu_memcache", "ascend_memcache"}
        return self.store is not None or any("Kvtierd" in str(c.get("kv_connector")) for c in self.connectors)


def read_line(argv: Sequence[str], who: str, source: str, env: Mapping[str, str] = {}) -> EngineLine | None:
    """The engine in a command line, ``None`` when there is none. Whatever stands in front (env, docker run) is skipped."""
    words = list(argv)
    for index, word in enumerate(words):
        program, following = word.rsplit("/", 1)[-1], words[index + 1 : index + 2]
        if program in {"vllm", "sglang"} and following == ["serve"]:
            directory, slash, _ = word.rpartition("/")
            python = f"{directory}/python3" if slash else None
            if index and re.fullmatch(r"python[\d.]*", words[index - 1].rsplit("/", 1)[-1]):
                python = words[index - 1]
            return _line(program, words[index + 2 :], who, source, _env(words[:index], env), python)
        if (
            word == "-m"
            and following
            and following[0].startswith(("vllm.entrypoints", "sglang.launch_server"))
        ):
            kind = following[0].partition(".")[0]
            before = words[index - 1] if index else None
            return _line(kind, words[index + 2 :], who, source, _env(words[:index], env), before)
    return None


async def engine_lines(patient: Patient) -> tuple[EngineLine, ...]:
    """The line that doctor was given and the planned engines, with what is known of their versions."""
    lines: tuple[EngineLine, ...] = await patient.once("engine-lines", lambda: _engine_lines(patient))
    return lines


async def running_lines(patient: Patient) -> tuple[EngineLine, ...]:
    """Engines that run on the host, without their versions. Raises ``CannotTellError``: there is no /proc."""
    found = [
        (read_line(p.argv, p.shown, "running", p.env or {}), p.box)
        for p in (await processes(patient)).values()
        if p.is_server
    ]
    return tuple(dataclasses.replace(line, box=box) for line, box in found if line is not None)


async def processes(patient: Patient) -> dict[int, Process]:
    """All processes of the host. Raises ``CannotTellError``."""

    async def asking() -> dict[int, Process]:
        return await patient.look("/proc", lambda: read_processes(patient.view))

    found: dict[int, Process] = await patient.once("processes", asking)
    return found


async def planned_engines(patient: Patient) -> tuple[UnitSpec, ...]:
    """Engine units of the plan; none where there is no plan (another check says why)."""
    try:
        plan = await patient.plan()
    except CannotTellError:
        return ()
    return () if plan is None else tuple(unit for unit in plan.units if unit.kind == "engine")


async def _engine_lines(patient: Patient) -> tuple[EngineLine, ...]:
    found = [read_line(patient.engine_argv, "the command line", "given")]
    found += [
        read_line(unit.argv, f"engine {unit.name}", "plan", unit.env)
        for unit in await planned_engines(patient)
    ]
    lines = [line for line in found if line is not None]
    return tuple([await _with_versions(patient, line) for line in lines])


async def _with_versions(patient: Patient, line: EngineLine) -> EngineLine:
    python = line.python
    if python is None or "/" not in python:
        program = python or line.kind
        python = await patient.look(f"programs named {program}", lambda: _interpreter_of(patient, program))
    install = await _install(patient, python) if python else None
    versions = dict(install.packages) if install else {}
    named = next(
        (e for e in (patient.settings.engine if patient.settings else ()) if line.who == f"engine {e.name}"),
        None,
    )
    if named is not None and named.version is not None:
        package = {"vllm-ascend": "vllm-ascend", "sglang": "sglang"}.get(named.plugin, "vllm")
        versions[package] = named.version
    memcache = install.memcache_version if install else None
    return dataclasses.replace(line, python=python, versions=versions, memcache=memcache)


async def _install(patient: Patient, python: str) -> MemcacheInstall | None:
    known = None
    with contextlib.suppress(CannotTellError):
        known = (await patient.inventory()).install_in(python)
    if known is not None and known.packages:
        return known

    async def asking() -> MemcacheInstall:
        return await probe_interpreter(patient.view, python, packages=PACKAGES, timeout_seconds=4.0)

    found: MemcacheInstall = await patient.once(("interpreter", python), asking)
    return found if found.packages or found.memcache_version else known


def _interpreter_of(patient: Patient, program: str) -> str | None:
    """The interpreter of a program found on a service's PATH: itself, or the first line of the script."""
    for directory in _PATH:
        path = f"{directory}/{program}"
        if not patient.view.exists(path):
            continue
        if program.startswith("python"):
            return path
        text = patient.view.text(path) or ""
        match = re.match(r"#!\s*(/\S*python[\d.]*)\s", text)
        return match[1] if match else None
    return None


def _line(
    kind: str, words: Sequence[str], who: str, source: str, env: Mapping[str, str], python: str | None
) -> EngineLine:
    flags, plain = _flags(words, kind)
    model = flags.get("model") or flags.get("model-path") or (plain[0] if plain else "")
    return EngineLine(who=who, kind=kind, model=model, flags=flags, env=env, python=python, source=source)


def _flags(words: Sequence[str], kind: str) -> tuple[dict[str, str], list[str]]:
    flags: dict[str, str] = {}
    plain: list[str] = []
    name = None
    for word in words:
        short = re.fullmatch(r"-(tp|pp|dp)(?:=?(\d+))?", word)
        if word.startswith("--") or short:
            text = f"--{_SHORT[short[1]]}{f'={short[2]}' if short[2] else ''}" if short else word
            written, equals, value = text[2:].partition("=")
            name = _canonical(written, kind)
            flags[name] = value if equals else ""
            name = None if equals else name
        elif name is not None:
            flags[name] = f"{flags[name]} {word}" if flags[name] else word
            # Several values are rare and none of ours: the next plain word belongs to nobody.
            name = None
        else:
            plain.append(word)
    return flags, plain


def _canonical(written: str, kind: str) -> str:
    name, dot, rest = written.partition(".")
    name = name.replace("_", "-").lower()
    if kind == "sglang":
        name = _SGLANG_NAMES.get(name, _SHORT.get(name, name))
    return name + dot + rest


def _env(words: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """NAME=VALUE words in front of the program, docker's ``-e`` and ``--env`` included."""
    env = dict(given)
    for word in words:
        match = re.fullmatch(r"(?:--env=|-e)?([A-Z_][A-Z0-9_]*)=(.*)", word, flags=re.DOTALL)
        if match:
            env[match[1]] = match[2]
    return env


def _extra(connector: Mapping[str, Any]) -> Mapping[str, Any]:
    extra = connector.get("kv_connector_extra_config")
    return extra if isinstance(extra, dict) else {}
