"""kvtierctl inventory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtierd.cli.common import JsonOption, SettingsOption, load, settings_path
from kvtierd.quantities import format_size

if TYPE_CHECKING:
    from kvtierd.plan.inventory import Inventory


def inventory(
    settings: SettingsOption = None,
    python: Annotated[
        list[Path] | None, typer.Option("--python", help="Interpreter to ask for MemCache; may be repeated.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what this host has; with --json in the form that plan --inventory reads.

    JSON: the fields of kvtierd.plan.inventory.Inventory; sizes in bytes; null is unknown.
    """
    import asyncio

    found = asyncio.run(_take(settings, [str(p) for p in python or ()]))
    if as_json:
        print(found.model_dump_json(indent=2))
        return
    _print(found)


async def _take(settings: Path | None, pythons: list[str]) -> Inventory:
    import sys

    from kvtierd.host.inventory import take_inventory
    from kvtierd.host.view import HostView
    from kvtierd.plugins import load_plugins
    from kvtierd.provision.assembly import inventory_of_this_host

    file, named = settings_path(settings)
    if pythons or not (named or file.exists()):
        return await take_inventory(HostView(), python=pythons or [sys.executable])
    return await inventory_of_this_host(load(settings), load_plugins())


def _print(found: Inventory) -> None:
    print(f"host       {found.hostname} ({found.machine}, kernel {found.kernel})")
    print(
        f"memory     {format_size(found.memory_total_bytes)},"
        f" {format_size(found.memory_available_bytes)} available, {len(found.numa_nodes)} NUMA node(s)"
    )
    for pool in found.hugepages:
        print(
            f"hugepages  {format_size(pool.page_size_bytes)}: {pool.total_pages} pages, {pool.free_pages} free"
        )
    names = sorted({npu.name for npu in found.npus})
    print(f"NPUs       {len(found.npus)} dies {', '.join(names)}" if found.npus else "NPUs       none found")
    if found.ascend.driver_version or found.ascend.cann_version:
        print(
            f"Ascend     driver {found.ascend.driver_version or '?'}, CANN {found.ascend.cann_version or '?'}"
        )
    for install in found.memcache:
        where = install.python if install.runtime == "wheel" else install.home
        version = install.memcache_version or "not found"
        print(f"MemCache   {version} ({install.runtime}: {where})")
    for nic in found.nics:
        if nic.addresses:
            print(f"NIC        {nic.name}: {', '.join(nic.addresses)}")
    for problem in found.problems:
        print(f"unknown    {problem}")
