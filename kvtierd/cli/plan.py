"""kvtierctl plan."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvtierd.cli.common import JsonOption, SettingsOption, load, print_json
from kvtierd.quantities import format_size

if TYPE_CHECKING:
    from kvtierd.plan.model import NodePlan

InventoryOption = Annotated[
    Path | None,
    typer.Option("--inventory", metavar="FILE", help="Plan for this recorded host instead of ours."),
]
NodeOption = Annotated[str | None, typer.Option("--node", help="Plan for this node of the cluster.")]


MEANS = {"conf": "its file is rewritten", "alias": "the host name is led there", "restart": "it is restarted"}


def plan(
    settings: SettingsOption = None,
    inventory: InventoryOption = None,
    node: NodeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what this node would get. Touches nothing. Exit 1 when the plan must not be applied.

    JSON: node, series, emulated, memcache_version; hugepages {page_size_bytes, pages, per_numa_node}; pool;
    meta (URLs); files [{path, mode, content, user}]; units [{id, kind, argv, env, user, devices, files, ...}];
    ports [{port, address, unit, purpose}]; direct {alias, master, addresses, clients [{unit, means, why}]} in a cluster
    without endpoints; tls (paths of MemCache's own TLS, no keys); notes and refusals [{code, message}].
    """
    made = _make(settings, inventory, node)
    if as_json:
        print_json(made.model_dump(mode="json"))
    else:
        print_plan(made)
    if made.refusals:
        raise typer.Exit(1)


def _make(settings: Path | None, inventory: Path | None, node: str | None) -> NodePlan:
    from kvtierd.plugins import load_plugins
    from kvtierd.provision.assembly import plan_for, read_inventory

    loaded = load(settings)
    plugins = load_plugins()
    if inventory is not None:
        return plan_for(loaded, read_inventory(inventory), plugins, node=node)
    import asyncio

    from kvtierd.provision.host_plan import plan_this_host

    return asyncio.run(plan_this_host(loaded, plugins, node=node))


def print_plan(made: NodePlan) -> None:
    """The plan for people."""
    pool = made.pool
    print(f"node       {made.node} ({made.series}{', EMULATED' if made.emulated else ''})")
    print(f"MemCache   {made.memcache_version or 'not found'}")
    print(
        f"pool       {format_size(pool.capacity_bytes)} in {pool.providers} x"
        f" {format_size(pool.dram_bytes_per_provider)} ({pool.placement}, {pool.protocol},"
        f" world_size {pool.world_size})"
    )
    pages = made.hugepages
    if pages.pages:
        print(
            f"hugepages  {pages.pages} x {format_size(pages.page_size_bytes)}"
            f" = {format_size(pages.pages * pages.page_size_bytes)}"
        )
        for numa, count in sorted(pages.per_numa_node.items()):
            print(f"           NUMA node {numa}: {count}")
    else:
        print("hugepages  none needed")
    print(
        "ports      "
        + "\n           ".join(f"{p.port:<6}{p.address:<16}{p.unit}: {p.purpose}" for p in made.ports)
    )
    print("files      " + "\n           ".join(f"{f.mode} {f.path}" for f in made.files))
    print("units      " + "\n           ".join(f"{u.id}: {shlex.join(_short(u.argv))}" for u in made.units))
    for client in made.direct.clients if made.direct is not None else ():
        print(f"on a change of master {client.unit}: {MEANS[client.means]}, since {client.why}")
    for note in made.notes:
        print(f"note       {note.message}")
    for refusal in made.refusals:
        print(f"REFUSED    {refusal.message}")
        if refusal.hint:
            print(f"           do: {refusal.hint}")


def _short(argv: tuple[str, ...]) -> list[str]:
    """The command without the emulation launcher in front: that is said elsewhere."""
    rest = list(argv)
    if "kvtierd.emulator.launch" in rest and "--" in rest:
        rest = rest[rest.index("--") + 1 :]
    return rest
