"""The endpoint's configuration file: strict JSON into plain dataclasses.

No pydantic here: the endpoint is a small process of its own, and without it starts in half the time and memory.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from kvtierd.endpoint.names import certificate_names
from kvtierd.endpoint.targets import (
    Address,
    AnyTarget,
    Peer,
    PeerTarget,
    Target,
    TlsFiles,
    config_error,
    parse_target,
    target_dict,
)
from kvtierd.errors import EndpointError

_MAX_FILE_BYTES = 1024 * 1024
_MAX_UNIX_PATH_BYTES = 107
_MAX_PEERS = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class EndpointConfig:
    """The file's content; durations are in seconds. Keys with a default may be missing: files outlive versions.

    ``listen`` has the keys ``meta`` and ``config_store``. ``target`` has the same (the MetaService of this host), or is
    ``{"peer": "name"}`` (another node's endpoint), or null (no master at present). ``control_socket`` and
    ``state_file`` are absolute paths; their directories must exist. ``waiting_seconds`` is how long a new client is
    kept waiting before it is refused, ``waiting_room`` how many of its connections wait at most.

    Between nodes: ``cluster`` and ``node`` are the names that go into hellos and certificates; ``peer_listen`` is where
    this endpoint takes links from other nodes (null: nowhere), ``peers`` who they are, ``tls`` the files ``ca``, ``cert``,
    ``key``. Without ``tls`` nothing is sent or taken unless ``insecure`` is true. ``max_peer_links`` bounds the links of
    one peer; after ``hop_seconds`` without a sign of life a link between nodes is given up.
    """

    listen: Target
    target: AnyTarget | None
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
    cluster: str = ""
    node: str = ""
    peer_listen: Address | None = None
    peers: tuple[Peer, ...] = ()
    tls: TlsFiles | None = None
    insecure: bool = False
    max_peer_links: int = 512
    hop_seconds: float = 30.0

    def as_dict(self) -> dict[str, Any]:
        """The JSON form, complete."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return values | {
            "listen": self.listen.as_dict(),
            "target": target_dict(self.target),
            "control_socket": str(self.control_socket),
            "state_file": str(self.state_file),
            "peer_listen": None if self.peer_listen is None else str(self.peer_listen),
            "peers": [peer.as_dict() for peer in self.peers],
            "tls": None if self.tls is None else self.tls.as_dict(),
        }

    def peer(self, name: str) -> Peer | None:
        """The other node with this name, if it is listed."""
        return next((peer for peer in self.peers if peer.name == name != self.node), None)

    def check_target(self, target: AnyTarget | None) -> None:
        """Raises ``EndpointError`` when the target is not listed, or is this endpoint itself."""
        if isinstance(target, PeerTarget):
            if target.peer == self.node:
                raise config_error(
                    f"target: {target.peer!r} is this node itself", hint="name its MetaService"
                )
            if self.peer(target.peer) is None:
                raise config_error(
                    f"target: {target.peer!r} is not among the peers",
                    hint=f"peers: {', '.join(peer.name for peer in self.peers) or 'none'}",
                )
        elif target is not None and {target.meta, target.config_store} & {
            self.listen.meta,
            self.listen.config_store,
            self.peer_listen,
        }:
            raise config_error("target: that is the endpoint itself")


_SECONDS = {
    "silence_seconds": (0.05, 60.0),
    "hold_seconds": (0.0, 60.0),
    "handshake_seconds": (0.1, 60.0),
    "waiting_seconds": (0.1, 86400.0),
    "quiesce_limit_seconds": (1.0, 3600.0),
    "hop_seconds": (1.0, 600.0),
}
_COUNTS = {"waiting_room": (0, 65536), "max_connections": (1, 65536), "max_peer_links": (1, 65536)}


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
    addresses = [config.listen.meta, config.listen.config_store]
    if isinstance(config.target, Target):
        addresses += [config.target.meta, config.target.config_store]
    if len(set(addresses)) != len(addresses):
        raise config_error(
            "listen and target must be four different addresses", hint="the endpoint would call itself"
        )
    _check_cluster(config)
    config.check_target(config.target)
    return config


def _check_cluster(config: EndpointConfig) -> None:
    if config.tls is not None and config.insecure:
        raise config_error("tls and insecure = true exclude each other", hint="leave out one of them")
    if not config.peers and config.peer_listen is None:
        return
    if not config.cluster or not config.node:
        raise config_error("peers need the keys cluster and node", hint="the names of this cluster and node")
    if config.tls is None and not config.insecure:
        raise config_error(
            "peers need tls",
            hint="give ca, cert and key, or write insecure = true for plain TCP between nodes",
        )
    names = [peer.name for peer in config.peers]
    if len(set(names)) != len(names):
        raise config_error("peers: two have the same name")
    try:
        for name in (config.node, *names):
            certificate_names(name, config.cluster)
    except EndpointError as error:
        raise config_error(f"peers: {error.message}", hint=error.hint) from error


def _check(key: str, item: object) -> object:
    if key == "listen":
        return Target.parse(item, key)
    if key == "target":
        return parse_target(item)
    if key in ("control_socket", "state_file"):
        path = _absolute_path(key, item)
        if key == "control_socket" and len(path.encode()) > _MAX_UNIX_PATH_BYTES:
            raise config_error(
                f"{key}: {path!r} is longer than the {_MAX_UNIX_PATH_BYTES} bytes a unix socket can have"
            )
        return Path(path)
    if key in ("purge_on_unclean", "insecure"):
        if not isinstance(item, bool):
            raise config_error(f"{key}: expected true or false, got {item!r}")
        return item
    if key in ("cluster", "node"):
        if not isinstance(item, str):
            raise config_error(f"{key}: expected a name, got {item!r}")
        return item
    if key == "peer_listen":
        return None if item is None else Address.parse(item, key)
    if key == "peers":
        return _peers(item)
    if key == "tls":
        if item is None:
            return None
        if not isinstance(item, dict) or set(item) != {"ca", "cert", "key"}:
            raise config_error('tls: expected {"ca": path, "cert": path, "key": path}')
        return TlsFiles(**{name: _absolute_path(f"tls.{name}", path) for name, path in item.items()})
    low, high = _SECONDS.get(key) or _COUNTS[key]
    wanted = (int, float) if key in _SECONDS else (int,)
    if isinstance(item, bool) or not isinstance(item, wanted) or not low <= item <= high:
        raise config_error(f"{key}: expected a number from {low} to {high}, got {item!r}")
    return item


def _absolute_path(key: str, item: object) -> str:
    if not isinstance(item, str) or not item.startswith("/"):
        raise config_error(f"{key}: expected an absolute path, got {item!r}")
    return item


def _peers(value: object) -> tuple[Peer, ...]:
    if not isinstance(value, list) or len(value) > _MAX_PEERS:
        raise config_error(f"peers: expected a list of at most {_MAX_PEERS} nodes")
    peers: list[Peer] = []
    for item in value:
        if (
            not isinstance(item, dict)
            or set(item) != {"name", "address"}
            or not isinstance(item["name"], str)
        ):
            raise config_error(f'peers: expected {{"name": "...", "address": "host:port"}}, got {item!r}')
        peers.append(Peer(item["name"], Address.parse(item["address"], f"peers.{item['name']}.address")))
    return tuple(peers)


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
