"""kvtierctl support-bundle."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated

import typer

from kvtierd.cli.common import JsonOption, SettingsOption, SocketOption, connect, print_json, settings_path
from kvtierd.quantities import format_size


def support_bundle(
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Default: kvtierd-support-DATE.tar.gz, here.")
    ] = None,
    settings: SettingsOption = None,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> None:
    """Gather settings, plan, status, events, journal, logs' ends, metrics and doctor's findings, without secrets.

    Read the listing, and the file, before you send it. JSON: output, size_bytes, files [{name, size_bytes, problem}].
    """
    from kvtierd.doctor.admission import admit
    from kvtierd.doctor.bundle import write_bundle
    from kvtierd.doctor.registry import all_checks
    from kvtierd.plugins import load_plugins

    plugins = load_plugins()
    file, named = settings_path(settings)
    patient = admit(plugins, settings_file=file if named or file.exists() else None)
    where = output or Path(time.strftime("kvtierd-support-%Y%m%d-%H%M%S.tar.gz"))
    with connect(settings, socket) as client:
        bundle = asyncio.run(write_bundle(where, patient, all_checks(plugins), client))
    if as_json:
        print_json(
            {
                "output": str(bundle.path),
                "size_bytes": bundle.size_bytes,
                "files": [part._asdict() for part in bundle.parts],
            }
        )
        return
    for part in bundle.parts:
        print(
            f"{part.size_bytes:>10,}  {part.name}"
            if not part.problem
            else f"         -  {part.name}: {part.problem}"
        )
    print(
        f"{bundle.path}: {format_size(bundle.size_bytes)}, secrets replaced by ***; look into it before you send it"
    )
