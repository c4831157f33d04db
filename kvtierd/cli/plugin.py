"""kvtierctl plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtierd.cli.common import JsonOption, print_json

plugin_app = typer.Typer(help="Write engine plugins.", no_args_is_help=True)


@plugin_app.callback()
def _plugin() -> None:
    """Write engine plugins."""


@plugin_app.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the engine driver, like my-engine.")],
    dest: Annotated[
        Path | None,
        typer.Option("--dest", metavar="DIR", help="Directory to make; default: kvtierd-NAME here."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a working engine plugin to start from. Its tests pass as written: pytest DIR.

    JSON: name, directory, files (relative to it).
    """
    from kvtierd.testing.new_plugin import write_skeleton

    directory = (dest or Path(f"kvtierd-{name}")).absolute()
    files = write_skeleton(name, directory)
    if as_json:
        print_json({"name": name, "directory": str(directory), "files": [str(f) for f in files]})
        return
    for file in files:
        print(directory / file)
    here = Path.cwd()
    shown = directory.relative_to(here) if directory.is_relative_to(here) else directory
    print(
        f"\ntest it:    pytest {shown}\ninstall it: pip install {shown}   (into the interpreter that runs kvtierd)"
    )
