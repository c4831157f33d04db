"""kvtierctl peers, switchover, promote, pause, resume."""

from __future__ import annotations

import os
import time
from typing import Annotated, Any

import typer

from kvtierd.cli.common import (
    JsonOption,
    SettingsOption,
    SocketOption,
    connect,
    print_json,
)
from kvtierd.control.messages import message_dict
from kvtierd.control.v1 import control_pb2 as pb
from kvtierd.errors import UsageError
from kvtierd.quantities import format_duration


def peers(settings: SettingsOption = None, socket: SocketOption = None, as_json: JsonOption = False) -> None:
    """Show the nodes of the cluster: who is the master since when and why, and what each node says of itself.

    Exit 1 when a node cannot be reached, or differs in what must agree.

    JSON: cluster, mode, role (of this node), epoch, master, since (unix seconds), why, view_age_seconds,
    lease_left_seconds, paused, problems; peers: name, address, voter, witness, this_node, role, epoch,
    last_contact_seconds, version, memcache_version, clock_offset_seconds, settings_digest, differences, problem,
    uptime_seconds. null is unknown.
    """
    with connect(settings, socket) as client:
        reply = client.peers()
    _show(reply, as_json)
    if reply.problems:
        raise typer.Exit(1)


def switchover(
    node: Annotated[str, typer.Argument(help="The node that is to become the master.")],
    settings: SettingsOption = None,
    socket: SocketOption = None,
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", min=1, max=600, help="The longest to wait.")
    ] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """On the master: give mastership to another node, in order. Engines go on and cached blocks are kept.

    JSON: epoch, seconds, note.
    """
    with connect(settings, socket) as client:
        reply = client.switchover(node, wait)
    if as_json:
        print_json(message_dict(reply))
    else:
        print(
            f"{node} is the master, epoch {reply.epoch}, after {reply.seconds:.1f} s. {reply.note}".rstrip()
        )


def promote(
    settings: SettingsOption = None,
    socket: SocketOption = None,
    force: Annotated[
        bool, typer.Option("--force", help="The old master is off or fenced: I have made sure of it.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Make this node the master by your word (mode static), when the old one is lost.

    JSON: as peers.
    """
    if not force:
        raise UsageError(
            "promote makes this node the master without asking the old one",
            hint="with the old master switched off or cut from the network: kvtierctl promote --force;"
            " with it alive, on it: kvtierctl switchover NODE",
        )
    with connect(settings, socket) as client:
        reply = client.promote(force=force)
    _show(reply, as_json)


def pause(
    reason: Annotated[str, typer.Option("--reason", help="Shown in status until it is resumed.")] = "",
    settings: SettingsOption = None,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep this node from becoming the master and from acting by itself. A master that is paused stays the master.

    JSON: as peers.
    """
    with connect(settings, socket) as client:
        reply = client.pause(on=True, reason=reason)
    _show(reply, as_json)


def resume(settings: SettingsOption = None, socket: SocketOption = None, as_json: JsonOption = False) -> None:
    """End a pause.

    JSON: as peers.
    """
    with connect(settings, socket) as client:
        reply = client.pause(on=False)
    _show(reply, as_json)


def _show(reply: pb.PeersReply, as_json: bool) -> None:
    if as_json:
        print_json(message_dict(reply))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if os.isatty(1) or os.environ.get("COLUMNS") else 140, highlight=False)
    print(_headline(reply))
    table = Table(box=None, pad_edge=False)
    for column in (
        "NODE",
        "ADDRESS",
        "ROLE",
        "EPOCH",
        "LAST CONTACT",
        "CLOCK",
        "KVTIERD",
        "MEMCACHE",
        "SETTINGS",
    ):
        table.add_column(column)
    for peer in reply.peers:
        table.add_row(*_row(peer))
    console.print(table)
    for problem in reply.problems:
        console.print(f"! {problem}", style="bold red", markup=False)


def _headline(reply: pb.PeersReply) -> str:
    if reply.mode == "standalone":
        return "one host: there is no cluster"
    parts = [f"cluster {reply.cluster} (mode {reply.mode})"]
    if not reply.master:
        parts.append("no master is known")
    else:
        since = (
            f" for {format_duration(max(0.0, time.time() - reply.since))}" if reply.HasField("since") else ""
        )
        parts.append(f"master {reply.master}{since}, epoch {reply.epoch}")
    if reply.why:
        parts.append(reply.why)
    if reply.HasField("view_age_seconds") and reply.role != "master" and reply.view_age_seconds > 10:
        parts.append(f"last heard of {format_duration(reply.view_age_seconds)} ago")
    if reply.HasField("lease_left_seconds"):
        parts.append(f"lease ends in {reply.lease_left_seconds:.1f}s unless renewed")
    if reply.paused:
        parts.append("PAUSED")
    return "; ".join(parts)


def _row(peer: pb.Peer) -> tuple[str, ...]:
    kind = " (witness)" if peer.witness else "" if peer.voter else " (observer)"
    here = " *" if peer.this_node else ""
    contact = (
        "here" if peer.this_node
        else f"{format_duration(peer.last_contact_seconds)} ago" if peer.HasField("last_contact_seconds")
        else "never"
    )  # fmt: skip
    clock = f"{peer.clock_offset_seconds:+.2f}s" if peer.HasField("clock_offset_seconds") else "-"
    known: Any = (peer.version or "-", peer.memcache_version or "-", peer.settings_digest[:8] or "-")
    return (
        peer.name + here,
        peer.address,
        (peer.role or "-") + kind,
        str(peer.epoch or "-"),
        contact,
        clock,
        *known,
    )
