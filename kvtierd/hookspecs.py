"""The hooks a plugin can implement (pluggy). The value types are in ``kvtierd.plan.engine``.

A plugin is an ordinary distribution with an entry point in the group ``kvtierd.plugins``::

    [project.entry-points."kvtierd.plugins"]
    refengine = "kvtierd_refengine.plugin"
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

from kvtierd.plan.engine import EngineDriver

if TYPE_CHECKING:
    from kvtierd.checks import Check

PROJECT = "kvtierd"
ENTRY_POINT_GROUP = "kvtierd.plugins"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def kvtierd_engine_drivers() -> Sequence[EngineDriver]:
    """The engine drivers this plugin brings.

    Called once when plugins are loaded. A driver's ``name`` is what ``[[engine]] plugin = "..."`` selects.
    """
    raise NotImplementedError


@hookspec
def kvtierd_doctor_checks() -> Sequence[Check]:
    """Checks that ``kvtierctl doctor`` runs beside its own; ``kvtierd.checks`` says what a check is.

    Optional. Called once when plugins are loaded. Ids are ``group.name``; a group of the plugin's own name is usual.
    """
    raise NotImplementedError
