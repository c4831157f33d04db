"""kvtierctl plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from kvtierd.cli.common import JsonOption, print_json

if TYPE_CHECKING:
    from kvtierd.plan.engine import EngineDriver
    from kvtierd.plugins import PluginInfo, PluginSet


def plugins(as_json: JsonOption = False) -> None:
    """List the installed engine plugins: their drivers, which engines these know, and what is wrong with each.

    Exit 1 if one is broken. JSON, a list of plugins: name, distribution, version, drivers, problem ("" when it is
    fine), warnings (what works now and will not for ever), details: a list of drivers with name, package (the
    engine's distribution, null for none), versions (of it, as PEP 440; "" is any), default_port, api_version, problems.
    """
    from kvtierd.plugins import load_plugins

    found = load_plugins()
    rows = [_row(plugin, found) for plugin in found.plugins]
    if as_json:
        print_json(rows)
    elif not rows:
        print("no engine plugin is installed; to write one: kvtierctl plugin new NAME")
    else:
        _show(rows)
    if any(row["problem"] for row in rows):
        raise typer.Exit(1)


def _row(plugin: PluginInfo, found: PluginSet) -> dict[str, Any]:
    details = [_details(found.drivers[name]) for name in plugin.drivers]
    problems = [f"{d['name']}: {text}" for d in details for text in d["problems"]]
    return {
        "name": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "drivers": list(plugin.drivers),
        "problem": plugin.problem or "; ".join(problems),
        "warnings": list(plugin.warnings),
        "details": details,
    }


def _details(driver: EngineDriver) -> dict[str, Any]:
    return {
        "name": driver.name,
        "package": driver.package,
        "versions": driver.versions,
        "default_port": driver.default_port,
        "api_version": driver.api_version,
        "problems": _shape(driver),
    }


def _shape(driver: EngineDriver) -> list[str]:
    """What is wrong with the driver's own attributes."""
    from kvtierd.testing.checks import Subject, shape_problems

    return [problem.message for problem in shape_problems(Subject(driver))]


def _show(rows: list[dict[str, Any]]) -> None:
    table = [("DRIVER", "ENGINE", "VERSIONS", "PORT", "PLUGIN", "STATE")]
    for row in rows:
        plugin = f"{row['distribution'] or row['name']} {row['version']}".strip()
        for driver in row["details"]:
            state = "; ".join(driver["problems"]) or "ok"
            table.append(
                (
                    driver["name"],
                    driver["package"] or "-",
                    driver["versions"] or "any",
                    str(driver["default_port"]),
                    plugin,
                    state,
                )
            )
        if not row["details"]:
            table.append(("-", "-", "-", "-", plugin, row["problem"]))
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]) - 1)]
    for line in table:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        print("  ".join([*cells, line[-1]]).rstrip())
    for row in rows:
        for text in row["warnings"]:
            print(f"warning: {row['distribution'] or row['name']}: {text}")
