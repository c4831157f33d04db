"""kvtierctl l3."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvtierd.cli.common import (
    JsonOption,
    SettingsOption,
    SocketOption,
    UnitArgument,
    connect,
    print_json,
)
from kvtierd.control.messages import message_dict

l3_app = typer.Typer(
    help="Take an engine's L3 off and on while it runs; needs l3_switch = true in its settings.",
    no_args_is_help=True,
)
DeadlineOption = Annotated[
    float,
    typer.Option(
        "--deadline",
        metavar="SECONDS",
        min=0,
        max=600,
        help="The longest to wait for a moment without requests, where the engine needs one.",
    ),
]


@l3_app.command()
def detach(
    unit: UnitArgument,
    settings: SettingsOption = None,
    socket: SocketOption = None,
    deadline: DeadlineOption = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Take L3 off an engine: it computes what L1 and L2 do not have. It starts with L3 again after a restart.

    JSON: unit, on, seconds, note.
    """
    _switch(unit, settings, socket, deadline, as_json, on=False)


@l3_app.command()
def attach(
    unit: UnitArgument,
    settings: SettingsOption = None,
    socket: SocketOption = None,
    deadline: DeadlineOption = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Give an engine its L3 back.

    JSON: as detach.
    """
    _switch(unit, settings, socket, deadline, as_json, on=True)


def _switch(unit: str, settings: Any, socket: Any, deadline: float, as_json: bool, *, on: bool) -> None:
    with connect(settings, socket) as client:
        reply = client.switch_l3(unit, on=on, wait_seconds=deadline)
    if as_json:
        print_json(message_dict(reply))
    else:
        print(f"{reply.unit}: {reply.note}")
