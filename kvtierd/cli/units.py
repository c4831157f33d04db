"""kvtierctl start, stop and restart."""

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
from kvtierd.errors import UsageError

WaitOption = Annotated[
    float,
    typer.Option(
        "--wait", metavar="SECONDS", min=0, max=600, help="Wait until it has settled; 0: do not wait."
    ),
]


def start(
    unit: UnitArgument = "",
    settings: SettingsOption = None,
    socket: SocketOption = None,
    all_units: Annotated[bool, typer.Option("--all", help="Start every unit of this node.")] = False,
    wait: WaitOption = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Start a unit that was stopped or has failed, or all of them.

    JSON: id, kind, name, state, reason, pid, since, restarts, next_try_in_seconds, last_lines, stale, last_exit, remark;
    with --all a list of them.
    """
    if all_units == bool(unit):
        raise UsageError("name one unit, or write --all")
    if not all_units:
        _control("start", unit, settings, socket, wait, as_json)
        return
    with connect(settings, socket) as client:
        ids = [u.id for u in client.status().units]
        for unit_id in ids:  # at once, since they wait for one another
            client.control_unit(unit_id, "start", 0.0)
        units = [client.control_unit(unit_id, "start", wait) for unit_id in ids]
    _show_all(units, as_json, wanted={"ready"} if wait > 0 else set())


def restart(
    unit: UnitArgument,
    settings: SettingsOption = None,
    socket: SocketOption = None,
    wait: WaitOption = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Stop a unit and start it again.

    JSON: as start.
    """
    _control("restart", unit, settings, socket, wait, as_json)


def stop(
    unit: UnitArgument = "",
    settings: SettingsOption = None,
    socket: SocketOption = None,
    all_units: Annotated[
        bool, typer.Option("--all", help="Stop every unit of this node, engines first.")
    ] = False,
    wait: WaitOption = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Stop a unit, or all of them. It stays stopped until it is started again.

    JSON: as start; with --all a list of them.
    """
    if all_units == bool(unit):
        raise UsageError("name one unit, or write --all")
    if not all_units:
        _control("stop", unit, settings, socket, wait, as_json)
        return
    with connect(settings, socket) as client:
        units = client.stop_all(wait)
    _show_all(units, as_json, wanted={"stopped", "failed"})


def drain(
    unit: UnitArgument,
    settings: SettingsOption = None,
    socket: SocketOption = None,
    deadline: Annotated[
        float,
        typer.Option(
            "--deadline", metavar="SECONDS", min=0, max=600, help="The longest to wait for its requests."
        ),
    ] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Wait until an engine has no requests, then stop it; say what was cut off. Take it out of your balancer first.

    JSON: as start, and note.
    """
    with connect(settings, socket) as client:
        reply = client.drain(unit, deadline)
    if as_json:
        print_json({**message_dict(reply.unit), "note": reply.note})
    else:
        print(reply.note)
        _print(reply.unit)
    if reply.unit.state != "stopped":
        raise typer.Exit(1)


def _show_all(units: list[Any], as_json: bool, *, wanted: set[str]) -> None:
    if as_json:
        print_json([message_dict(u) for u in units])
    else:
        for each in units:
            _print(each)
    if wanted and any(u.state not in wanted for u in units):
        raise typer.Exit(1)


def _control(action: str, unit: str, settings: Any, socket: Any, wait: float, as_json: bool) -> None:
    with connect(settings, socket) as client:
        answer = client.control_unit(unit, action, wait)
    if as_json:
        print_json(message_dict(answer))
    else:
        _print(answer)
    wanted = {"stopped"} if action == "stop" else {"ready"}
    if wait > 0 and answer.state not in wanted:
        raise typer.Exit(1)


def _print(unit: Any) -> None:
    reason = f": {unit.reason}" if unit.reason else ""
    print(f"{unit.id} is {unit.state}{reason}")
    if unit.state == "failed":
        for line in unit.last_lines[-5:]:
            print(f"  | {line}")
