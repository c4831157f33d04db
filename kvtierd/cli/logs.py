"""kvtierctl logs."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from kvtierd.cli.common import JsonOption, SettingsOption, SocketOption, UnitArgument, connect


def logs(
    unit: UnitArgument,
    settings: SettingsOption = None,
    socket: SocketOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=10_000, help="How many old lines.")] = 50,
    as_json: JsonOption = False,
) -> None:
    """Show the captured output of a unit.

    JSON, one object a line: text.
    """
    with connect(settings, socket) as client:
        for line in client.logs(unit, lines=lines, follow=follow):
            print(json.dumps({"text": line}) if as_json else line, flush=True)
