"""Finding the plugin that the suite is to check: an installed one, or a module on the path."""

from __future__ import annotations

import dataclasses
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING

from kvtierd.errors import PluginError
from kvtierd.hookspecs import ENTRY_POINT_GROUP
from kvtierd.plugins import load_plugins
from kvtierd.testing.subject import Subject

if TYPE_CHECKING:
    import pytest


@dataclasses.dataclass(frozen=True)
class Chosen:
    """What the command line names: a driver, where its plugin is if not installed, recorded texts of its engine."""

    name: str
    module: str = ""
    metrics_files: tuple[Path, ...] = ()
    output_files: tuple[Path, ...] = ()


def chosen_plugin(config: pytest.Config) -> Chosen | None:
    """The options of this pytest run; ``None`` without ``--kvtierd-plugin``.

    Paths count from where pytest was started, else from its root directory (for options in a project's addopts).
    """
    name = config.getoption("kvtierd_plugin")
    if not name:
        return None

    def paths(option: str) -> tuple[Path, ...]:
        given = [Path(p) for p in config.getoption(option)]
        started = config.invocation_params.dir
        return tuple(started / p if (started / p).exists() else config.rootpath / p for p in given)

    return Chosen(
        name,
        config.getoption("kvtierd_plugin_module") or "",
        paths("kvtierd_plugin_metrics"),
        paths("kvtierd_plugin_output"),
    )


def load_chosen(chosen: Chosen) -> tuple[Subject | None, str]:
    """The driver with its texts, or why there is none."""
    entries = [EntryPoint(chosen.name, chosen.module, ENTRY_POINT_GROUP)] if chosen.module else None
    found = load_plugins(entries)
    try:
        driver = found.driver(chosen.name)
        metrics = tuple(p.read_text(encoding="utf-8") for p in chosen.metrics_files)
        lines = tuple(
            line
            for p in chosen.output_files
            for line in p.read_text(encoding="utf-8", errors="replace").splitlines()
        )
    except PluginError as error:
        broken = [f"{p.name}: {p.problem}" for p in found.plugins if p.problem]
        return None, "; ".join([error.message, *broken])
    except (OSError, UnicodeDecodeError) as error:
        return None, str(error)
    return Subject(driver, metrics, lines), ""
