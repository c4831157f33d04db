"""The plan of this very host: what is found on it, less what is kvtierd's own from an earlier start."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvtierd.act.adjusted import read_adjustments
from kvtierd.plan.adjustments import Adjustments
from kvtierd.plan.inventory import Inventory
from kvtierd.plan.model import NodePlan
from kvtierd.plugins import PluginSet
from kvtierd.provision.assembly import inventory_of_this_host, plan_for
from kvtierd.provision.carry_out import owned_pages
from kvtierd.settings import Settings
from kvtierd.units.owned import owned_pids


async def plan_this_host(
    settings: Settings,
    plugins: PluginSet,
    *,
    node: str | None = None,
    master: str | None = None,
    adjustments: Adjustments | None = None,
) -> NodePlan:
    """Looks at this host and plans for it. Changes nothing.

    Args:
        settings: The settings.
        plugins: With the engines' drivers.
        node, master: As in ``make_plan``.
        adjustments: What actions have changed; default: what is kept in the state directory.
    """
    adjusted = adjustments or read_adjustments(Path(settings.paths.state))[0]
    inventory = await inventory_of_this_host(settings, plugins)
    pids, pages = await owned_here(settings, inventory)
    return await asyncio.to_thread(
        lambda: plan_for(
            settings,
            inventory,
            plugins,
            node=node,
            master=master,
            owned_pids=pids,
            owned_pages=pages,
            adjustments=adjusted,
        )
    )


async def owned_here(settings: Settings, inventory: Inventory) -> tuple[frozenset[int], int]:
    """What of this host is kvtierd's own already: the processes of its units, and the hugepages it has reserved."""
    pages = await owned_pages(settings, inventory.default_hugepage_size_bytes)
    return frozenset(owned_pids(Path(settings.paths.runtime))), pages
