"""kvtierctl purge."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtierd.cli.common import JsonOption, SettingsOption, SocketOption, connect, print_json
from kvtierd.errors import UsageError


def purge(
    settings: SettingsOption = None,
    socket: SocketOption = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do it: all cached blocks of all engines are dropped.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Empty the pool: every cached block of every engine. Engines go on and recompute.

    JSON: seconds.
    """
    if not yes:
        raise UsageError(
            "purge drops every cached block of every engine on this pool",
            hint="if that is meant: kvtierctl purge --yes",
        )
    with connect(settings, socket) as client:
        reply = client.purge()
    if as_json:
        print_json({"seconds": reply.seconds})
    else:
        print(f"the pool was emptied in {reply.seconds:.1f} s")
