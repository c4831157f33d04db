"""kvtierctl doctor: what will hurt, found before it does."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtierd.cli.common import (
    JsonOption,
    SettingsOption,
    print_json,
    settings_path,
    socket_path,
)
from kvtierd.control.messages import message_dict

if TYPE_CHECKING:
    from kvtierd.checks import Daemon
    from kvtierd.doctor.run import Examined

DAEMON_SECONDS = 1.5
_WORDS = {"ok": "ok", "note": "note", "unknown": "?", "warn": "WARN", "fail": "FAIL"}
_COUNTED = {"ok": "ok", "note": "notes", "unknown": "unknown", "warn": "warnings", "fail": "failed"}
_STYLES = {"ok": "green", "note": "", "unknown": "", "warn": "yellow", "fail": "bold red"}


def doctor(
    engine: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ENGINE COMMAND]", help="An engine's command line to check as well."),
    ] = None,
    root: Annotated[
        Path,
        typer.Option(help="Look at the host whose / is this directory; its commands are in DIR/.commands."),
    ] = Path("/"),
    settings: SettingsOption = None,
    conf: Annotated[
        list[Path] | None,
        typer.Option("--conf", metavar="FILE", help="A hand-written MemCache file; repeatable."),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="GROUP|ID", help="Only these checks; repeatable.")
    ] = None,
    fix_hints: Annotated[
        bool, typer.Option("--fix-hints", help="Say why each finding matters and how to mend it.")
    ] = False,
    show_all: Annotated[bool, typer.Option("--all", help="Show what is well too.")] = False,
    known_issues: Annotated[
        bool, typer.Option("--known-issues", help="Show the table of known issues, and check nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check this host, its settings and files, without changing anything and without the daemon.

    Exit 1 when a check fails. JSON: ok, checks [{id, group, severity, title, found, why, fix, doc}]; with
    --known-issues: issues [{id, component, versions, when, severity, handled, title, advice, source}].
    """
    if known_issues:
        _show_known_issues(as_json)
        return
    from kvtierd.doctor.admission import admit
    from kvtierd.doctor.registry import all_checks, chosen
    from kvtierd.doctor.run import examine
    from kvtierd.plugins import load_plugins

    plugins = load_plugins()
    checks = chosen(all_checks(plugins), only or ())
    file, named = settings_path(settings)
    patient = admit(
        plugins,
        root=root.absolute(),
        settings_file=file if named or (root == Path("/") and file.exists()) else None,
        confs=tuple(conf or ()),
        engine_argv=tuple(engine or ()),
        daemon=_ask_daemon(settings) if root == Path("/") else None,
    )
    examined = asyncio.run(examine(patient, checks))
    bad = any(e.severity == "fail" for e in examined)
    if as_json:
        print_json({"ok": not bad, "checks": [e.as_dict() for e in examined]})
    else:
        _show(examined, everything=show_all, hints=fix_hints)
    sys.stdout.flush()
    if bad:
        raise typer.Exit(1)


def _ask_daemon(settings: Path | None) -> Daemon | None:
    """What a kvtierd on this host says; ``None`` when there is none, or it does not answer soon."""
    from kvtierd.control.client import ControlClient
    from kvtierd.doctor.admission import Answers
    from kvtierd.errors import KvtierError

    try:
        path = socket_path(settings, None)
        if not path.exists():
            return None
        with ControlClient(path, call_seconds=DAEMON_SECONDS) as client:
            return Answers(message_dict(client.status()), message_dict(client.peers()))
    except (KvtierError, OSError):
        return None


def _show_known_issues(as_json: bool) -> None:
    from kvtierd.doctor.known_issues import WORDS, known_issues

    issues = known_issues()
    if as_json:
        print_json({"issues": [issue.model_dump() for issue in issues]})
        return
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=False)
    table = Table(box=None, pad_edge=False, show_header=True)
    table.add_column("COMPONENT", no_wrap=True)
    table.add_column("VERSIONS", max_width=17)
    table.add_column("ISSUE", ratio=1)
    for issue in issues:
        told = Text(issue.title, style=_STYLES[issue.severity])
        if issue.when:
            told.append(f"\nif {', '.join(WORDS[word] for word in issue.when)}", style="dim")
        told.append(f"\n{issue.advice}\n", style="")
        told.append(f"{issue.id}, {issue.source}", style="dim")
        told.append("; kvtierd works around it\n" if issue.handled else "\n", style="dim")
        table.add_row(issue.component, issue.versions.replace(",", ", ") or "all", told)
    console.print(Padding(table, (0, 0)))
    console.print(f"{len(issues)} known issues")


def _show(examined: tuple[Examined, ...], *, everything: bool, hints: bool) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    from kvtierd.checks import SEVERITIES

    console = Console(highlight=False, soft_wrap=False)
    for one in examined:
        if one.severity == "ok" and not everything:
            continue
        head = Text(f"{_WORDS[one.severity]:<5}", style=_STYLES[one.severity])
        head.append(f"{one.check.id}", style="bold")
        head.append(f"  {one.check.title}", style="dim" if one.severity == "ok" else "")
        console.print(head)
        console.print(Padding(Text(one.outcome.found), (0, 0, 0, 5)))
        if hints and one.severity != "ok":
            about = one.as_dict()
            console.print(Padding(Text(f"why: {about['why']}"), (0, 0, 0, 5)))
            console.print(Padding(Text(f"do:  {about['fix']}"), (0, 0, 0, 5)))
            console.print(Padding(Text(f"see: {about['doc']}"), (0, 0, 0, 5)))
    counts = Counter(one.severity for one in examined)
    told = ", ".join(f"{counts[s]} {_COUNTED[s]}" for s in reversed(SEVERITIES) if counts[s])
    console.print(f"{len(examined)} checks: {told}")
    if not hints and counts.total() > counts["ok"] + counts["note"]:
        console.print("kvtierctl doctor --fix-hints says why each matters and how to mend it")
