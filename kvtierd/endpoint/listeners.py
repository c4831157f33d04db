"""Listening sockets, and what is said when a port is taken."""

from __future__ import annotations

import errno
import socket

from kvtierd.endpoint.identity import port_owner
from kvtierd.endpoint.targets import Address
from kvtierd.errors import EndpointError

BACKLOG = 512
PORT_TAKEN = "endpoint.port-taken"


def bind(address: Address) -> socket.socket:
    """A listening socket. Raises ``EndpointError``, ``endpoint.port-taken`` when somebody else has the port."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    # With the protocol named, asyncio sets TCP_NODELAY on what it accepts; without, answers wait 40 ms for an ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address.host, address.port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise EndpointError(
                f"cannot listen on {address}: {error.strerror or error}", code="endpoint.listen"
            ) from error
        owner = port_owner(address.port)
        raise EndpointError(
            f"port {address} is taken" + (f" by {owner}" if owner else ""),
            hint="stop that process, or change the port in [meta]",
            code=PORT_TAKEN,
        ) from error
    return listener
