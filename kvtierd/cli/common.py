"""What the verbs share: options, the way to the daemon, printing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvtierd.control.client import ControlClient
    from kvtierd.settings import Settings

DEFAULT_SETTINGS = Path("/etc/kvtierd/kvtierd.toml")
DEFAULT_SOCKET = Path("/run/kvtierd/kvtierd.sock")

SettingsOption = Annotated[
    Path | None,
    typer.Option(
        "--settings", "-s", metavar="FILE", help="Settings file; default /etc/kvtierd/kvtierd.toml."
    ),
]
SocketOption = Annotated[
    Path | None,
    typer.Option("--socket", metavar="PATH", help="Control socket; default: as the settings say."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON with documented fields.")]
UnitArgument = Annotated[
    str, typer.Argument(help="Unit: an engine's name, meta, endpoint, pool-0, or a full id.")
]

# Options given before the verb; the verb's own win.
chosen: dict[str, Path | None] = {"settings": None, "socket": None}


def settings_path(option: Path | None) -> tuple[Path, bool]:
    """The settings file to use, and whether somebody named it."""
    named = option or chosen["settings"]
    if named is None and os.environ.get("KVTIERD_SETTINGS"):
        named = Path(os.environ["KVTIERD_SETTINGS"])
    return (named, True) if named else (DEFAULT_SETTINGS, False)


def load(option: Path | None) -> Settings:
    """The validated settings. Raises ``InvalidSettingsError``."""
    from kvtierd.settings import load_settings

    return load_settings(settings_path(option)[0].absolute())


def socket_path(settings: Path | None, socket: Path | None) -> Path:
    """Where the daemon listens: by option, by the settings, else the default place."""
    explicit = socket or chosen["socket"]
    if explicit is None and os.environ.get("KVTIERD_SOCKET"):
        explicit = Path(os.environ["KVTIERD_SOCKET"])
    if explicit is not None:
        return explicit
    file, named = settings_path(settings)
    if not named and not file.exists():
        return DEFAULT_SOCKET
    return Path(load(settings).paths.runtime) / "kvtierd.sock"


def connect(settings: Path | None, socket: Path | None) -> ControlClient:
    """A client for the daemon; it connects with the first call."""
    from kvtierd.control.client import ControlClient

    return ControlClient(socket_path(settings, socket))


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2))
