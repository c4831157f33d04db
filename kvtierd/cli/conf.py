"""kvtierctl conf check."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtierd.cli.common import JsonOption, print_json
from kvtierd.errors import UsageError

conf_app = typer.Typer(help="Check configuration files.", no_args_is_help=True)

DEFAULT_MEMCACHE_VERSION = "1.3.0"


class Kind(enum.StrEnum):
    """What kind of file it is."""

    SETTINGS = "settings"
    META = "meta"
    LOCAL = "local"
    SGLANG_META = "sglang-meta"


@conf_app.callback()
def _conf() -> None:
    """Check configuration files."""


@conf_app.command()
def check(
    file: Annotated[Path, typer.Argument(help="The file to check.")],
    kind: Annotated[Kind | None, typer.Option("--kind", help="What it is; default: by its name.")] = None,
    memcache_version: Annotated[
        str, typer.Option(help="MemCache version the file is for.")
    ] = DEFAULT_MEMCACHE_VERSION,
    as_json: JsonOption = False,
) -> None:
    """Check a settings file, or a hand-written MemCache file. Exit 1 when it has errors.

    JSON: ok, problems [{file, line, key, code, message, hint, severity}].
    """
    which = kind or _guess(file)
    problems = _settings(file) if which is Kind.SETTINGS else _memcache(file, which, memcache_version)
    ok = not any(p["severity"] == "error" for p in problems)
    if as_json:
        print_json({"ok": ok, "problems": problems})
    else:
        for problem in problems:
            place = problem["file"] if problem["line"] is None else f"{problem['file']}:{problem['line']}"
            key = f" {problem['key']}:" if problem["key"] else ""
            word = "" if problem["severity"] == "error" else f" ({problem['severity']})"
            print(f"{place}:{word}{key} {problem['message']}")
            if problem["hint"]:
                print(f"    {problem['hint']}")
        print(f"{file}: {'ok' if ok else 'NOT OK'} ({which.value})")
    if not ok:
        raise typer.Exit(1)


def _guess(file: Path) -> Kind:
    from kvtierd.memcache.conf_files import kind_of

    kind = kind_of(file.name)
    if kind is None and file.name.lower().endswith(".conf"):
        raise UsageError(
            f"{file}: the name does not tell what it is", hint="write --kind meta or --kind local"
        )
    return Kind(kind) if kind else Kind.SETTINGS


def _settings(file: Path) -> list[dict[str, Any]]:
    import dataclasses

    from kvtierd.settings import check_settings

    # The file alone: the environment of this shell is not what the daemon will have.
    _, problems = check_settings(file, environment={})
    return [{**dataclasses.asdict(p), "severity": "error"} for p in problems]


def _memcache(file: Path, kind: Kind, version: str) -> list[dict[str, Any]]:
    from kvtierd.memcache.conf_files import check_conf_file

    return [
        {
            "file": str(file),
            "line": p.line,
            "key": p.key,
            "code": p.code,
            "message": p.message,
            "hint": p.hint,
            "severity": p.severity,
        }
        for p in check_conf_file(file, kind.value, version)
    ]
