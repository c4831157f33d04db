"""Where a MetaService can be: addresses, the MetaService of this host, another node's endpoint. Pure."""

from __future__ import annotations

import dataclasses

from kvtierd.errors import EndpointError


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
    """A MetaService that is reached without a hop: its own port and its config-store port."""

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

    def __str__(self) -> str:
        return str(self.meta)


@dataclasses.dataclass(frozen=True, slots=True)
class PeerTarget:
    """The MetaService behind another node's endpoint, by the node's name; its address is in ``peers``."""

    peer: str

    def as_dict(self) -> dict[str, str]:
        """The form that ``parse_target`` reads."""
        return {"peer": self.peer}

    def __str__(self) -> str:
        return f"the endpoint of {self.peer}"


AnyTarget = Target | PeerTarget


def parse_target(value: object, where: str = "target") -> AnyTarget | None:
    """From ``Target``'s form, ``{"peer": "name"}``, or ``None``: no master at present. Raises ``EndpointError``."""
    if value is None:
        return None
    if isinstance(value, dict) and set(value) == {"peer"} and isinstance(value["peer"], str):
        return PeerTarget(value["peer"])
    return Target.parse(value, where)


def target_dict(target: AnyTarget | None) -> dict[str, str] | None:
    """The form that ``parse_target`` reads."""
    return None if target is None else target.as_dict()


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """Another node: its name, which its certificate must carry, and where its endpoint listens for peers."""

    name: str
    address: Address

    def as_dict(self) -> dict[str, str]:
        """The form in the configuration."""
        return {"name": self.name, "address": str(self.address)}


@dataclasses.dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files, by absolute path: the authority, this node's certificate (and chain), its key."""

    ca: str
    cert: str
    key: str

    def as_dict(self) -> dict[str, str]:
        """The form in the configuration."""
        return dataclasses.asdict(self)
