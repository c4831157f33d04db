"""pytest's options for authors of engine plugins. Without ``--kvtierd-plugin`` it does nothing.

pytest loads this module in every run of this interpreter, so it imports nothing of kvtierd before it is asked to.
"""

from __future__ import annotations

from pathlib import Path

import pytest

_SUITE = Path(__file__).with_name("conformance.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the conformance suite."""
    group = parser.getgroup("kvtierd", "kvtierd engine plugins")
    group.addoption(
        "--kvtierd-plugin",
        metavar="NAME",
        help="also run kvtierd's conformance suite on the engine driver NAME",
    )
    group.addoption(
        "--kvtierd-plugin-module",
        metavar="MODULE[:ATTRIBUTE]",
        help="where the plugin is, as its entry point would say it, when it is not installed",
    )
    group.addoption(
        "--kvtierd-plugin-metrics",
        metavar="FILE",
        action="append",
        default=[],
        help="a recorded scrape of the engine's metrics without zeros; may be given several times",
    )
    group.addoption(
        "--kvtierd-plugin-output",
        metavar="FILE",
        action="append",
        default=[],
        help="recorded output of the engine, some lines of each kind; may be given several times",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Adds the suite to what is collected, unless it was named."""
    if not config.getoption("kvtierd_plugin"):
        if config.getoption("kvtierd_plugin_module"):
            raise pytest.UsageError("--kvtierd-plugin-module needs --kvtierd-plugin NAME")
        return
    named = {"kvtierd.testing.conformance", str(_SUITE)}
    if not any(str(argument).split("::")[0] in named for argument in config.args):
        config.args.append(str(_SUITE))
