"""[observe]: how often kvtierd looks, and where it shows what it sees."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from kvtierd.settings.cluster import TlsSettings
from kvtierd.settings.section import AbsolutePath, Duration, Section


class ObserveTlsSettings(TlsSettings):
    """[observe] tls: certificates for the exporter; whoever asks it must show one that ``ca`` has signed."""

    ca: AbsolutePath = Field(
        "/etc/kvtierd/tls/ca.pem", description="signs the certificates of those who may ask"
    )


def _listen_address(value: object) -> object:
    if value == "off" or not isinstance(value, str):
        return value
    host, _, port = value.rpartition(":")
    try:
        ipaddress.ip_address("127.0.0.1" if host == "localhost" else host.strip("[]"))
        usable = port.isascii() and port.isdigit() and 1024 < int(port) <= 65535
    except ValueError:
        usable = False
    if not usable or (":" in host) != host.startswith("["):
        raise ValueError(f'{value!r} is not an address to listen on, such as 127.0.0.1:9476, and not "off"')
    return value


class ObserveSettings(Section):
    """[observe]: how often kvtierd looks, and where it shows what it sees."""

    interval: Duration = Field(1.0, description="time between two looks at metrics", examples=["1s"])
    exporter: Annotated[str, BeforeValidator(_listen_address)] = Field(
        "127.0.0.1:9476",
        description="where /metrics and the status page are; beyond loopback only with tls; off: nowhere",
        examples=["127.0.0.1:9476", "off"],
    )
    tls: ObserveTlsSettings | None = Field(
        None,
        description="mutual TLS for the exporter",
        examples=[
            {
                "ca": "/etc/kvtierd/tls/ca.pem",
                "cert": "/etc/kvtierd/tls/node.pem",
                "key": "/etc/kvtierd/tls/node.key",
            }
        ],
    )

    @model_validator(mode="after")
    def _plain_only_on_loopback(self) -> Self:
        host = self.exporter.rpartition(":")[0].strip("[]")
        loopback = self.exporter == "off" or host == "localhost" or ipaddress.ip_address(host).is_loopback
        if not loopback and self.tls is None:
            raise ValueError(
                f"exporter {self.exporter} would show this node to anybody in the network; "
                "write tls = { ca, cert, key } as well, or an address on loopback"
            )
        return self
