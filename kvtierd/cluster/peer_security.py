"""What the peers' server and links need of certificates (``tls.PeerTls``); tests have others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import grpc


class PeerSecurity(Protocol):
    """How this node proves who it is, and knows who calls. The methods raise ``ClusterError``."""

    @property
    def generation(self) -> int:
        """Grows when the certificate files have changed; a channel keeps what it began with."""
        ...

    @property
    def handshakes(self) -> int:
        """How many have begun at the server's port; 0 without TLS."""
        ...

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        """Lets the server listen at ``host:port``; the port, when that was 0."""
        ...

    def channel(self, peer: str, *, options: Sequence[tuple[str, Any]] = ()) -> grpc.aio.Channel:
        """A channel to a listed peer, which nobody else can answer on."""
        ...

    def identify(self, auth_context: Mapping[str, Iterable[bytes]], claimed: str = "") -> str:
        """Which listed peer a caller is. ``claimed`` is who its message says it is from; raises if it is not."""
        ...
