"""kvtierctl plugins."""

from __future__ import annotations

import typer

from kvtierd.cli.common import JsonOption, print_json


def plugins(as_json: JsonOption = False) -> None:
    """List the installed engine plugins, their drivers, and what is wrong with each. Exit 1 if one is broken.

    JSON, a list: name, distribution, version, drivers, problem ("" when it is fine).
    """
    import dataclasses

    from kvtierd.plugins import load_plugins

    found = load_plugins().plugins
    if as_json:
        print_json([dataclasses.asdict(p) for p in found])
    elif not found:
        print("no engine plugin is installed")
    else:
        for plugin in found:
            state = plugin.problem or "ok"
            drivers = ", ".join(plugin.drivers) or "-"
            print(f"{plugin.name:<16} {plugin.distribution} {plugin.version:<10} drivers: {drivers}  {state}")
    if any(p.problem for p in found):
        raise typer.Exit(1)
