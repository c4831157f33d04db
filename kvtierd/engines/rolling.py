"""PURE: in which order engines are restarted, so that a group never goes without a ready member.

Engines without a group stand alone: nobody can replace them, so they may be restarted at any time, one after another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """An engine as the planner and the supervisor see it."""

    unit_id: str
    group: str | None
    ready: bool


def ask_for(due: list[str], unit_id: str) -> None:
    """Puts an engine at the end of those that wait for their turn; once."""
    if unit_id not in due:
        due.append(unit_id)


def next_to_restart(due: Sequence[str], members: Mapping[str, Member]) -> str | None:
    """Which of the engines that are due may be restarted now, ``None``: wait.

    Args:
        due: engines to restart, in the order they were asked for.
        members: all engines of the node.

    At most one engine is down at a time. One of a group goes only when another member of it is ready, or when it is
    not ready itself (then nothing is lost), or when it is the only one.
    """
    down = [m for m in members.values() if not m.ready and m.unit_id not in due]
    for unit_id in due:
        member = members.get(unit_id)
        if member is None:
            continue
        if not member.ready:
            return unit_id
        if down:
            continue
        others = [
            m for m in members.values() if m.group is not None and m.group == member.group and m is not member
        ]
        if not others or any(m.ready for m in others):
            return unit_id
    return None
