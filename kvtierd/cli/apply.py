"""kvtierctl apply and reload."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtierd.cli.common import JsonOption, SettingsOption, SocketOption, connect, print_json
from kvtierd.control.messages import message_dict

if TYPE_CHECKING:
    from kvtierd.control.v1 import control_pb2 as pb


def apply(settings: SettingsOption = None, socket: SocketOption = None, as_json: JsonOption = False) -> None:
    """Make the daemon read its settings and bring the host in line, restarting units that changed.

    JSON: changed_files, new_units, removed_units, stale_units (restarted now), notes.
    """
    with connect(settings, socket) as client:
        _show(client.reload(restart_changed=True), applied=True, as_json=as_json)


def reload(settings: SettingsOption = None, socket: SocketOption = None, as_json: JsonOption = False) -> None:
    """Make the daemon read its settings; units that changed are marked stale but not restarted.

    JSON: changed_files, new_units, removed_units, stale_units (waiting for a restart), notes.
    """
    with connect(settings, socket) as client:
        _show(client.reload(restart_changed=False), applied=False, as_json=as_json)


def _show(reply: pb.ReloadReply, *, applied: bool, as_json: bool) -> None:
    if as_json:
        print_json(message_dict(reply))
        return
    changes = [f"file written     {path}" for path in reply.changed_files]
    changes += [f"unit added       {unit}" for unit in reply.new_units]
    changes += [f"unit removed     {unit}" for unit in reply.removed_units]
    verb = "unit restarting " if applied else "restart needed  "
    changes += [f"{verb} {unit}" for unit in reply.stale_units]
    print("\n".join(changes) or "nothing changed: the host is as planned")
    for note in reply.notes:
        print(f"note: {note}")
    if reply.stale_units and not applied:
        print("to restart what changed: kvtierctl apply")
