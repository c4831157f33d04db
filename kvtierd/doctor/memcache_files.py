"""MemCache's configuration files as doctor meets them: named by the operator, or by a running engine's environment."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from kvtierd.checks import CannotTellError, Outcome, Patient, fail, note, unknown, warn
from kvtierd.doctor.looking import Process, here, present, shown
from kvtierd.errors import KvtierError
from kvtierd.host.view import HostView
from kvtierd.memcache.conf_files import MAX_FILE_BYTES, check_conf_file, kind_of
from kvtierd.mmc_conf.parse import parse_conf
from kvtierd.mmc_conf.problems import ConfProblem, PathInfo, PathLookup, check_conf_path
from kvtierd.mmc_conf.rules import METRICS_URL
from kvtierd.mmc_conf.values import LOG_PATH
from kvtierd.plan.series import detect_series

VARIABLES = {"MMC_META_CONFIG_PATH": "meta", "MMC_LOCAL_CONFIG_PATH": "local"}
ASSUMED_VERSION = "1.3.0"
_SHOWN = 50
_SHOWN_OF_FILE = 12
_JSON_NAMES = {"metrics_url": METRICS_URL, "log_path": LOG_PATH}


class ConfFile(NamedTuple):
    """A file to check. ``place`` is how it is called to the operator, ``path`` where it is on this machine.

    ``kind`` is ``None`` when the name does not tell what it is. ``link`` is the path on the host where it may be a
    symbolic link that ``path`` has followed already.
    """

    place: str
    path: Path
    kind: str | None
    link: str | None = None


def named_confs(patient: Patient) -> list[ConfFile]:
    """Those of ``--conf``."""
    return [
        ConfFile(shown(patient.view, str(path)), path.absolute(), kind_of(path.name))
        for path in patient.confs
    ]


def confs_of(view: HostView, found: Iterable[Process]) -> list[tuple[Process, str, ConfFile]]:
    """Process, variable and file for each MemCache file that a running process's environment names."""
    confs = []
    for process in found:
        for variable, kind in VARIABLES.items():
            path = (process.environ or {}).get(variable, "")
            if path.startswith("/"):
                # In a container the path is one of its own root.
                own = f"/proc/{process.pid}/root{path}"
                place = own if view.exists(own) else path
                link = None if view.live else place
                confs.append((process, variable, ConfFile(path, here(view, place), kind, link)))
    return confs


def here_unresolved(view: HostView, path: str) -> Path:
    """Where it is on this machine, the last name not followed: whether it is a link matters."""
    parent, _, name = path.rpartition("/")
    return here(view, parent or "/") / name


def lookup(view: HostView) -> PathLookup:
    """Looks up paths of the host, the path itself not followed."""

    def look(path: str) -> PathInfo:
        try:
            at = here_unresolved(view, path)
            target = shown(view, str(view.path(path))) if at.is_symlink() else None
            return PathInfo(exists=view.exists(path), symlink_target=target)
        except (CannotTellError, OSError, ValueError, RuntimeError):
            return PathInfo(exists=False)

    return look


async def reader_of(patient: Patient) -> tuple[str, bool]:
    """The MemCache that will read the files, and whether all sizes align to 1 GB (A3).

    The version is as the settings say, as installed, else the newest known one. Files can be checked without an inventory.
    """
    settings = patient.settings
    try:
        inventory = await patient.inventory()
    except CannotTellError:
        inventory = None
    version = settings.meta.version if settings is not None else None
    series = settings.node.series if settings is not None else "auto"
    if inventory is not None:
        version = version or next(
            (i.memcache_version for i in inventory.memcache if i.memcache_version), None
        )
        series = (detect_series(inventory.npus).series or "auto") if series == "auto" else series
    return version or ASSUMED_VERSION, series == "A3"


def is_memcache_file(conf: ConfFile) -> bool:
    """Whether it has a line of MemCache's. Of any other file nothing is quoted: whoever runs a process can name one."""
    return any(key.lower().startswith(("ock.", "ubsio.")) for key in values(conf))


def judge(view: HostView, conf: ConfFile, version: str, *, a3: bool) -> list[Outcome]:
    """What is wrong with one file, as ``kvtierctl conf check`` says it. Reads the disk."""
    if conf.kind is None:
        return [
            unknown(f"{conf.place}: its name does not tell what it is; *meta*.conf, *local*.conf or *.json")
        ]
    if not conf.path.exists() and not conf.path.is_symlink():
        return [fail(f"{conf.place} does not exist")]
    look = lookup(view)
    try:
        problems = check_conf_file(conf.path, conf.kind, version, look=look, a3=a3)
        problems = (*(check_conf_path(conf.link, look) if conf.link else ()), *problems)
    except KvtierError as error:
        return [unknown(f"{conf.place}: {shown(view, error.message)}", error.hint)]
    told = [_outcome(view, conf, problem) for problem in problems]
    told.sort(key=lambda outcome: outcome.severity != "fail")
    rest = len(told) - _SHOWN_OF_FILE
    return told if rest <= 0 else [*told[:_SHOWN_OF_FILE], fail(f"{conf.place}: {rest} more")]


def _outcome(view: HostView, conf: ConfFile, problem: ConfProblem) -> Outcome:
    at = f"{conf.place}:{problem.line}" if problem.line else conf.place
    key = f"{problem.key}: " if problem.key and problem.key not in problem.message else ""
    text = f"{at}: {key}{shown(view, problem.message)}"
    return fail(text, problem.hint) if problem.severity == "error" else warn(text, problem.hint)


def summed(outcomes: list[Outcome], good: str) -> Outcome:
    """The worst severity, its texts (not without end), and how much else there is."""
    for severity, make in (("fail", fail), ("warn", warn), ("unknown", unknown), ("note", note)):
        chosen = [o.found for o in outcomes if o.severity == severity]
        if not chosen:
            continue
        rest = len(outcomes) - min(len(chosen), _SHOWN)
        text = "; ".join(chosen[:_SHOWN]) + (f"; and {rest} more" if rest else "")
        first = next(o for o in outcomes if o.severity == severity)
        return make(text, first.fix if len(chosen) == 1 else "")
    return Outcome("ok", good)


def values(conf: ConfFile) -> dict[str, str]:
    """Key -> value of a readable file, the names of SGLang's JSON as in a conf file; empty when it is not readable."""
    try:
        with conf.path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES)
    except OSError:
        return {}
    if conf.kind == "sglang-meta":
        try:
            read = json.loads(data)
        except ValueError:
            return {}
        items: dict[str, object] = read if isinstance(read, dict) else {}
        return {_JSON_NAMES.get(name, name): str(value) for name, value in items.items()}
    return {entry.key: entry.value.partition("#")[0].strip() for entry in parse_conf(data).entries}


def is_link(view: HostView, path: str) -> bool:
    """Whether the path itself is a symbolic link: links above it MemCache follows (tried with 1.3.0)."""
    return present(view, path) and here_unresolved(view, path.rstrip("/")).is_symlink()
