"""Which checks there are: the built-in groups, then those of plugins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtierd.checks import Check
from kvtierd.doctor.groups import (
    ascend_cards,
    cluster,
    disk,
    engine_sglang,
    hugepages,
    known,
    memcache,
    network_cards,
    platform,
    security,
    settings,
    systemd,
)
from kvtierd.errors import UsageError
from kvtierd.plugins import PluginSet

# A group of several modules is a chain: each imports the one before it, the last one is named here.
BUILT_IN = (
    settings.GROUP,
    platform.GROUP,
    hugepages.GROUP,
    ascend_cards.GROUP,
    network_cards.GROUP,
    memcache.GROUP,
    engine_sglang.GROUP,
    cluster.GROUP,
    systemd.GROUP,
    security.GROUP,
    disk.GROUP,
    known.GROUP,
)


def built_in() -> tuple[Check, ...]:
    """Every check that kvtierd brings, in the order in which it is shown."""
    return tuple(check for group in BUILT_IN for check in group.checks)


def all_checks(plugins: PluginSet) -> tuple[Check, ...]:
    """The built-in ones, then those that plugins bring. One that takes a built-in's id is left out: ours is tested."""
    ours = built_in()
    ids = {check.id for check in ours}
    return (*ours, *(check for check in plugins.checks if check.id not in ids))


def chosen(checks: Sequence[Check], only: Iterable[str]) -> tuple[Check, ...]:
    """Those that ``only`` names, by group or id; all when it names none.

    Raises:
        UsageError: A name that is neither.
    """
    names = tuple(only)
    known = {check.group for check in checks} | {check.id for check in checks}
    for name in names:
        if name not in known:
            groups = ", ".join(dict.fromkeys(check.group for check in checks))
            raise UsageError(f"there is no check or group {name!r}", hint=f"groups: {groups}")
    return tuple(check for check in checks if not names or check.id in names or check.group in names)
