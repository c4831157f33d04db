"""kvtierctl status."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtierd.cli.common import JsonOption, SettingsOption, SocketOption, connect, print_json
from kvtierd.control.messages import message_dict
from kvtierd.quantities import format_duration, format_size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvtierd.control.v1 import control_pb2 as pb

OLD_VIEW_SECONDS = 15.0
WATCH_SECONDS = 1.0
_STYLES = {
    "ready": "green",
    "degraded": "yellow",
    "starting": "cyan",
    "stopping": "cyan",
    "backoff": "yellow",
    "failed": "bold red",
    "down": "bold red",
}


def status(
    settings: SettingsOption = None,
    socket: SocketOption = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Renew it every second until Ctrl-C.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show tiers, units and problems of this node. Exit 1 when something is not as it should be.

    JSON: node, series, emulated, epoch, master, backend, version, memcache_version, tier_state, tier_reasons;
    tiers [{name, where, state, capacity_bytes, used_bytes, query_tokens, hit_tokens, hit_rate, age_seconds, ...}];
    units [{id, kind, name, state, reason, remark, pid, since, restarts, last_lines, ...}]; clients of the endpoint;
    hugepages; problems; endpoint_mode; role ("master", "follower", "unknown", "" without a cluster), master_why,
    view_age_seconds (since the master itself said so), paused; started and at (unix seconds); last_decision {rule, what,
    why, age_seconds, outcome}, next_decision {rule, what, why, outcome, in_seconds}, dry_run. null is unknown.
    """
    with connect(settings, socket) as client:
        if watch and not as_json:
            _watch(client)
            return
        reply = client.status()
        if as_json:
            print_json(message_dict(reply))
        else:
            _console().print(render(reply))
    if reply.problems:
        raise typer.Exit(1)


def _console() -> Any:
    from rich.console import Console

    # Not on a terminal: wide enough that nothing is cut for the programs that read it.
    return Console(width=None if os.isatty(1) or os.environ.get("COLUMNS") else 140, highlight=False)


def _watch(client: Any) -> None:
    from rich.live import Live

    if not os.isatty(1):
        # For a file or a pipe: one status after the other, each whole.
        while True:
            _console().print(render(client.status()), "")
            time.sleep(WATCH_SECONDS)
    with Live(render(client.status()), console=_console(), refresh_per_second=4, screen=False) as live:
        while True:
            time.sleep(WATCH_SECONDS)
            live.update(render(client.status()))


def render(reply: pb.StatusReply) -> RenderableType:
    """The status for people."""
    from rich.console import Group
    from rich.text import Text

    emulated = "  EMULATED" if reply.emulated else ""
    head = Text()
    head.append(f"{reply.node}", style="bold")
    head.append(f"  {reply.series}" if reply.series else "")
    head.append(emulated, style="bold magenta")
    head.append(
        f"  kvtierd {reply.version} ({reply.backend})  MemCache {reply.memcache_version or '?'}"
        f"  up {format_duration(max(0.0, reply.at - reply.started))}"
    )
    parts: list[RenderableType] = [head]
    if reply.role:
        parts.append(Text(_part_in_cluster(reply), style="" if reply.master else "yellow"))
    parts += [_tiers(reply), _units(reply)]
    if reply.clients:
        parts.append(_clients(reply))
    if reply.HasField("hugepages"):
        pages = reply.hugepages
        got = str(pages.got_pages) if pages.HasField("got_pages") else "unknown"
        parts.append(
            Text(f"hugepages {format_size(pages.page_size_bytes)}: asked {pages.asked_pages}, got {got}")
        )
    if reply.endpoint_mode not in {"", "serve"}:
        parts.append(Text(f"the endpoint is in mode {reply.endpoint_mode}", style="yellow"))
    parts += [Text(line, style="cyan") for line in _decisions(reply)]
    parts += [Text(f"! {problem}", style="bold red") for problem in reply.problems]
    return Group(*parts)


def _decisions(reply: pb.StatusReply) -> list[str]:
    """What the policy did last, and what it could do next."""
    lines = ["policy: dry run, nothing is done"] if reply.dry_run else []
    if reply.HasField("last_decision"):
        last = reply.last_decision
        ago = f" {format_duration(last.age_seconds)} ago" if last.HasField("age_seconds") else ""
        lines.append(f"last decision{ago}: {last.what} ({last.rule}): {last.outcome}")
    if reply.HasField("next_decision"):
        coming = reply.next_decision
        when = (
            "now"
            if not coming.in_seconds
            else f"in {format_duration(coming.in_seconds)} at the earliest, if it stays so"
        )
        lines.append(f"next possible: {coming.what} ({coming.rule}), {when}: {coming.why}")
    return lines


def _part_in_cluster(reply: pb.StatusReply) -> str:
    if not reply.master:
        return f"no master is known: {reply.master_why}"
    if reply.role == "master":
        return f"this node is the master, epoch {reply.epoch}"
    age = ""
    if reply.HasField("view_age_seconds") and reply.view_age_seconds > OLD_VIEW_SECONDS:
        age = f"; last heard of {format_duration(reply.view_age_seconds)} ago"
    return f"{reply.master} is the master, epoch {reply.epoch}{age}"


def _table(*columns: str, right: tuple[str, ...] = ()) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _state(word: str) -> Any:
    from rich.text import Text

    return Text(word, style=_STYLES.get(word, ""))


def _tiers(reply: pb.StatusReply) -> Any:
    table = _table(
        "TIER", "WHERE", "STATE", "CAPACITY", "USED", "HIT RATE", "HIT / ASKED TOKENS", "AGE",
        right=("CAPACITY", "USED", "HIT RATE", "HIT / ASKED TOKENS", "AGE"),
    )  # fmt: skip
    for tier in reply.tiers:
        capacity = "-"
        if tier.HasField("capacity_bytes"):
            capacity = format_size(tier.capacity_bytes)
        elif tier.HasField("capacity_tokens"):
            capacity = f"{tier.capacity_tokens} tokens"
        tokens = "-"
        if tier.HasField("hit_tokens") and tier.HasField("query_tokens"):
            tokens = f"{tier.hit_tokens} / {tier.query_tokens}"
        table.add_row(
            tier.name,
            tier.where,
            _state(tier.state),
            capacity,
            format_size(tier.used_bytes) if tier.HasField("used_bytes") else "-",
            f"{tier.hit_rate:.1%}" if tier.HasField("hit_rate") else "-",
            tokens,
            format_duration(max(0.0, tier.age_seconds)) if tier.HasField("age_seconds") else "-",
        )
    return table


def _units(reply: pb.StatusReply) -> Any:
    table = _table("UNIT", "STATE", "PID", "SINCE", "RESTARTS", "WHY", right=("PID", "SINCE", "RESTARTS"))
    for unit in reply.units:
        why = unit.reason
        if unit.HasField("next_try_in_seconds"):
            why += f" (next try in {format_duration(max(0.0, unit.next_try_in_seconds))})"
        if unit.remark:
            why = f"{why}; " if why else ""
            why += unit.remark
        if unit.stale:
            why = f"{why}; " if why else ""
            why += "its specification changed: kvtierctl apply restarts it"
        table.add_row(
            unit.id.removeprefix("kvtier-"),
            _state(unit.state),
            str(unit.pid) if unit.HasField("pid") else "-",
            format_duration(max(0.0, reply.at - unit.since)) if unit.HasField("since") else "-",
            str(unit.restarts),
            why,
        )
    return table


def _clients(reply: pb.StatusReply) -> Any:
    table = _table(
        "CLIENT", "PID", "KIND", "LOOKUPS", "HITS", "WRITES", "CONNECTED",
        right=("PID", "LOOKUPS", "HITS", "WRITES"),
    )  # fmt: skip
    for client in reply.clients:
        table.add_row(
            client.process.removeprefix("kvtier-") or "?",
            str(client.pid) if client.HasField("pid") else "-",
            client.kind or "?",
            str(client.lookups),
            str(client.lookup_hits),
            str(client.writes),
            "yes" if client.connected else "no",
        )
    return table
