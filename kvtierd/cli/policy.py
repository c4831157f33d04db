"""kvtierctl why, kvtierctl policy."""

from __future__ import annotations

import json
import os
import shutil
import textwrap
import time
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtierd.cli.common import (
    JsonOption,
    SettingsOption,
    SocketOption,
    connect,
    load,
    print_json,
)
from kvtierd.control.messages import message_dict
from kvtierd.errors import StateError, UsageError
from kvtierd.quantities import format_duration, format_size

if TYPE_CHECKING:
    from kvtierd.control.v1 import control_pb2 as pb
    from kvtierd.decide.simulate import Replay

MOST_FILE_BYTES = 256 * 1024 * 1024
policy_app = typer.Typer(
    help="What kvtierd may change by itself, what it has changed, and what another policy would do.",
    no_args_is_help=True,
)


def why(
    unit: Annotated[
        str, typer.Argument(help="An engine, a pool holder, the MetaService; without one: everything.")
    ] = "",
    settings: SettingsOption = None,
    socket: SocketOption = None,
    last: Annotated[int, typer.Option("--last", "-n", min=1, max=500, help="Actions to show.")] = 10,
    all_rules: Annotated[bool, typer.Option("--all", "-a", help="Also rules that see nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Why a unit is as it is, and why kvtierd does or does not act: what each rule sees, and what was done lately.

    JSON: unit, state, reason; rules [{rule, about, state, sees, verdict, next_in_seconds, would}]; actions [{id, at, ended,
    rule, target, what, why, precondition, state, outcome, undo, node, step}]; events.
    """
    with connect(settings, socket) as client:
        reply = client.why(unit, last=last)
    if as_json:
        print_json(message_dict(reply))
        return
    print("\n".join(fitted(why_lines(reply, all_rules=all_rules))))


def why_lines(reply: pb.WhyReply, *, all_rules: bool) -> list[str]:
    """The text of ``kvtierctl why``."""
    lines = []
    if reply.unit:
        lines.append(f"{reply.unit} is {reply.state}{f': {reply.reason}' if reply.reason else ''}")
        lines += [f"  {_when(e.at)}  {e.message}" for e in reply.events] or [
            "  nothing happened to it lately"
        ]
        lines.append("")
    shown = [r for r in reply.rules if all_rules or r.state in {"holds", "between"}]
    lines.append("what the rules see now:")
    for rule in shown:
        about = f" ({rule.about})" if rule.about and rule.about != rule.rule else ""
        lines.append(f"  {rule.rule}{about}: {rule.sees}")
        then = f"would {rule.would}; " if rule.would else ""
        later = f", in {format_duration(rule.next_in_seconds)}" if rule.HasField("next_in_seconds") else ""
        lines.append(f"    {then}{rule.verdict}{later}")
    if not shown:
        quiet = len(reply.rules)
        lines.append(f"  nothing to act on ({quiet} looked at; --all shows them)" if quiet else "  nothing")
    lines += ["", "what was done:"]
    for action in reply.actions:
        lines.append(f"  {_when(action.at)}  {action.what}: {action.state}")
        lines.append(f"    because {action.rule}: {action.why}")
        if action.outcome:
            lines.append(f"    {action.outcome}")
    if not reply.actions:
        lines.append("  nothing")
    return lines


@policy_app.command()
def show(
    settings: SettingsOption = None,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> None:
    """The policy in force, and what it has changed beside the settings.

    JSON: policy {every key of [policy]}, adjustments {evict_high, evict_low, holders [{index, dram_bytes}]}, problems.
    """
    with connect(settings, socket) as client:
        reply = client.policy()
    policy, adjusted = json.loads(reply.policy_json), json.loads(reply.adjustments_json)
    if as_json:
        print_json({"policy": policy, "adjustments": adjusted, "problems": list(reply.problems)})
        return
    print("\n".join(fitted(policy_lines(policy, adjusted, list(reply.problems)))))


def policy_lines(policy: dict[str, Any], adjusted: dict[str, Any], problems: list[str]) -> list[str]:
    """The text of ``kvtierctl policy show``."""
    from kvtierd.settings.policy import PolicySettings

    defaults = PolicySettings().model_dump(mode="json")
    lines = ["[policy] in force (* not the default):"]
    width = max(map(len, policy))
    lines += [
        f"{'*' if policy[key] != defaults.get(key) else ' '} {key:<{width}}  {_shown(key, policy[key])}"
        for key in policy
    ]
    lines += ["", "changed beside the settings:"]
    changed = []
    if adjusted.get("evict_high") is not None:
        changed.append(f"  thresholds {adjusted['evict_high']}/{adjusted['evict_low']} %")
    changed += [
        f"  pool holder added-{h['index']} of {format_size(h['dram_bytes'])}"
        for h in adjusted.get("holders", [])
    ]
    lines += [*changed, "  kvtierctl policy reset takes it back"] if changed else ["  nothing"]
    return [*lines, *(f"! {text}" for text in problems)]


def _shown(key: str, value: Any) -> str:
    """As one would write it in the settings."""
    from kvtierd.settings.policy import PolicySettings

    field = PolicySettings.model_fields.get(key)
    kind = str(field.metadata) if field is not None else ""
    if "parse_duration" in kind:
        return format_duration(value)
    if "parse_size" in kind:
        return format_size(value)
    return json.dumps(value)


@policy_app.command()
def reset(settings: SettingsOption = None, socket: SocketOption = None, as_json: JsonOption = False) -> None:
    """Take back everything that the policy has changed beside the settings; added holders lose their keys.

    JSON: undone, problems.
    """
    with connect(settings, socket) as client:
        reply = client.reset_policy()
    if as_json:
        print_json({"undone": list(reply.undone), "problems": list(reply.problems)})
        return
    print("\n".join(reply.undone) or "nothing was changed")


@policy_app.command()
def record(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Is written anew.")],
    settings: SettingsOption = None,
    socket: SocketOption = None,
) -> None:
    """Write what this node saw in the last hour, one picture a line: for kvtierctl policy simulate."""
    count = 0
    try:
        with connect(settings, socket) as client:
            lines = client.pictures()
            first = next(lines, None)  # before the file: without a daemon an earlier recording stays
            with file.open("w", encoding="utf-8") as out:
                for line in chain(() if first is None else (first,), lines):
                    out.write(line + "\n")
                    count += 1
    except OSError as error:
        raise StateError(f"{file} cannot be written: {error.strerror}") from None
    print(f"{count} pictures in {file}")


@policy_app.command()
def simulate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="From kvtierctl policy record.")],
    settings: SettingsOption = None,
    as_json: JsonOption = False,
) -> None:
    """What the policy of a settings file would have decided on what was recorded. Touches nothing.

    The recording does not react: what would have come of an action is not in it.

    JSON: pictures, first_seconds, last_seconds; decided [{at_seconds, rule, target, severity, disruptive, action, text,
    reason, numbers}]; kept_back {rule: {why: pictures}}.
    """
    from kvtierd.decide.policy import policy_from
    from kvtierd.decide.simulate import pictures_of, replay

    try:
        if file.stat().st_size > MOST_FILE_BYTES:
            raise UsageError(f"{file} is larger than {format_size(MOST_FILE_BYTES)}")
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None
    policy = policy_from(load(settings).policy)
    played = replay(pictures_of(lines), policy)
    if as_json:
        print_json(
            {
                "pictures": played.pictures,
                "first_seconds": played.first_seconds,
                "last_seconds": played.last_seconds,
                "decided": [d.as_dict() for d in played.decided],
                "kept_back": played.kept_back,
            }
        )
        return
    print("\n".join(fitted(replay_lines(played))))


def replay_lines(played: Replay) -> list[str]:
    """The text of ``kvtierctl policy simulate``."""
    first = played.first_seconds or 0.0
    lines = [f"{played.pictures} pictures over {format_duration((played.last_seconds or 0.0) - first)}"]
    for decided in played.decided:
        lines.append(f"after {format_duration(decided.at_seconds - first)}: {decided.proposal.action.text}")
        lines.append(f"    because {decided.proposal.rule}: {decided.proposal.reason}")
    if not played.decided:
        lines.append("nothing would have been done")
    for rule, reasons in sorted(played.kept_back.items()):
        told = "; ".join(f"{why} ({count} pictures)" for why, count in Counter(reasons).most_common(3))
        lines.append(f"kept back: {rule}: {told}")
    return lines


def fitted(lines: list[str]) -> list[str]:
    """The lines as wide as the terminal, what follows further in; for a file or a pipe as they are."""
    if not os.isatty(1) and not os.environ.get("COLUMNS"):
        return lines
    width = max(40, shutil.get_terminal_size().columns)
    found: list[str] = []
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        found += textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False) or [""]
    return found


def _when(unix_seconds: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(unix_seconds))
