"""kvtierctl events."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from kvtierd.cli.common import JsonOption, SettingsOption, SocketOption, connect
from kvtierd.control.messages import message_dict

NODE_WIDTH = 12  # lines are written as they come, so the longest name is not known


def events(
    settings: SettingsOption = None,
    socket: SocketOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new ones.")] = False,
    last: Annotated[int, typer.Option("--last", "-n", min=0, help="How many old ones; 0: all kept.")] = 50,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Of all nodes, by time; times are by each node's own clock.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what happened on this node, or on all: starts, ends, decisions, problems.

    JSON, one object a line: id, at (unix seconds), severity (info, warning, error), kind, unit, message, node.
    """
    with connect(settings, socket) as client:
        for event in client.events(last=last, follow=follow, cluster=cluster):
            if as_json:
                print(json.dumps(message_dict(event)), flush=True)
                continue
            stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.at))
            node = f" {event.node:<{NODE_WIDTH}}" if event.node else ""
            unit = f" {event.unit}:" if event.unit else ""
            print(f"{stamp}{node} {event.severity:<7}{unit} {event.message}", flush=True)
