"""The endpoint's configuration file: strict JSON into plain dataclasses.

No pydantic here: the endpoint is a small process of its own, and without it starts in half the time and memory.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from kvtierd.errors import EndpointError

_MAX_FILE_BYTES = 1024 * 1024
_MAX_UNIX_PATH_BYTES = 107


def config_error(message: str, *, hint: str = "") -> EndpointError:
    """An error about the configuration, code ``endpoint.config``."""
    return EndpointError(message, hint=hint, code="endpoint.config")


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Address:
    """A TCP address: a host name or literal, and a port from 1 to 65535."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: object, where: str = "address") -> Address:
        """From ``"host:port"`` or ``"[v6]:port"``. Raises ``EndpointError``."""
        if isinstance(text, str):
            host, colon, port = text.rpartition(":")
            host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
            if (
                colon
                and host
                and len(host) < 256
                and port.isascii()
                and port.isdigit()
                and 0 < int(port[:6]) < 65536
            ):
                return cls(host, int(port))
        raise config_error(f'{where}: {text!r} is not an address; write for example "127.0.0.1:5000"')

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Where the MetaService is: its own port and its config-store port. Any reachable host."""

    meta: Address
    config_store: Address

    @classmethod
    def parse(cls, value: object, where: str = "target") -> Target:
        """From ``{"meta": "host:port", "config_store": "host:port"}``. Raises ``EndpointError``."""
        if not isinstance(value, dict) or set(value) != {"meta", "config_store"}:
            raise config_error(
                f'{where}: expected {{"meta": "host:port", "config_store": "host:port"}}, got {value!r}'
            )
        return cls(
            Address.parse(value["meta"], f"{where}.meta"),
            Address.parse(value["config_store"], f"{where}.config_store"),
        )

    def as_dict(self) -> dict[str, str]:
        """The form that ``parse`` reads."""
        return {"meta": str(self.meta), "config_store": str(self.config_store)}


@dataclasses.dataclass(frozen=True, slots=True)
class EndpointConfig:
    """The file's content; durations are in seconds.

    ``listen`` and ``target`` have the keys ``meta`` and ``config_store``. ``control_socket`` and ``state_file`` are
    absolute paths; their directories must exist. ``waiting_seconds`` is how long a new client is kept waiting
    before it is refused, ``waiting_room`` how many of its connections wait at most.
    """

    listen: Target
    target: Target
    control_socket: Path
    state_file: Path
    purge_on_unclean: bool = True
    silence_seconds: float = 0.9  # with the tick that notices it, no call blocks longer than 1 s
    hold_seconds: float = 0.8
    handshake_seconds: float = 5.0
    waiting_seconds: float = 600.0
    waiting_room: int = 256
    max_connections: int = 1024
    quiesce_limit_seconds: float = 60.0

    def as_dict(self) -> dict[str, Any]:
        """The JSON form, complete."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return values | {
            "listen": self.listen.as_dict(),
            "target": self.target.as_dict(),
            "control_socket": str(self.control_socket),
            "state_file": str(self.state_file),
        }


_SECONDS = {
    "silence_seconds": (0.05, 60.0),
    "hold_seconds": (0.0, 60.0),
    "handshake_seconds": (0.1, 60.0),
    "waiting_seconds": (0.1, 86400.0),
    "quiesce_limit_seconds": (1.0, 3600.0),
}
_COUNTS = {"waiting_room": (0, 65536), "max_connections": (1, 65536)}


def parse_config(value: object) -> EndpointConfig:
    """The configuration from decoded JSON. Raises ``EndpointError`` that names the key and what would be right."""
    if not isinstance(value, dict):
        raise config_error("the configuration is not a JSON object")
    known = {field.name: field for field in dataclasses.fields(EndpointConfig)}
    for key in value:
        if key not in known:
            raise config_error(f"unknown key {key!r}", hint=f"known keys: {', '.join(known)}")
    for name, field in known.items():
        if name not in value and field.default is dataclasses.MISSING:
            raise config_error(f"key {name!r} is missing")
    checked: dict[str, Any] = {}
    for key, item in value.items():
        checked[key] = _check(key, item)
    config = EndpointConfig(**checked)
    addresses = [
        config.listen.meta,
        config.listen.config_store,
        config.target.meta,
        config.target.config_store,
    ]
    if len(set(addresses)) != len(addresses):
        raise config_error(
            "listen and target must be four different addresses", hint="the endpoint would call itself"
        )
    return config


def _check(key: str, item: object) -> object:
    if key in ("listen", "target"):
        return Target.parse(item, key)
    if key in ("control_socket", "state_file"):
        if not isinstance(item, str) or not item.startswith("/"):
            raise config_error(f"{key}: expected an absolute path, got {item!r}")
        if key == "control_socket" and len(item.encode()) > _MAX_UNIX_PATH_BYTES:
            raise config_error(
                f"{key}: {item!r} is longer than the {_MAX_UNIX_PATH_BYTES} bytes a unix socket can have"
            )
        return Path(item)
    if key == "purge_on_unclean":
        if not isinstance(item, bool):
            raise config_error(f"{key}: expected true or false, got {item!r}")
        return item
    low, high = _SECONDS.get(key) or _COUNTS[key]
    wanted = (int, float) if key in _SECONDS else (int,)
    if isinstance(item, bool) or not isinstance(item, wanted) or not low <= item <= high:
        raise config_error(f"{key}: expected a number from {low} to {high}, got {item!r}")
    return item


def load_config(path: Path) -> EndpointConfig:
    """Reads and checks the file. Raises ``EndpointError``."""
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_FILE_BYTES + 1)
        if len(text) > _MAX_FILE_BYTES:
            raise config_error(f"{path} has more than {_MAX_FILE_BYTES} bytes")
        return parse_config(json.loads(text))
    except OSError as error:
        raise config_error(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise config_error(f"{path} is not JSON: {error}") from error
    except RecursionError as error:
        raise config_error(f"{path} is nested too deeply") from error
