"""How errors of ours cross gRPC: the stable code, reason and hint travel as trailing metadata."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import grpc

from kvtierd.errors import KvtierError

METADATA_KEY = "kvtierd-error-bin"
SERVICE = "kvtierd.v1.Control"
MAX_MESSAGE_BYTES = 8 * 1024 * 1024
CHANNEL_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
)
MAX_SOCKET_PATH_BYTES = 107  # sockaddr_un


def pack(error: KvtierError) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata for an error."""
    return ((METADATA_KEY, json.dumps(error.as_dict()).encode()),)


def unpack(metadata: Iterable[tuple[str, str | bytes]] | None) -> KvtierError | None:
    """The error that travelled, if one did."""
    for key, value in metadata or ():
        if key == METADATA_KEY:
            text = value.decode() if isinstance(value, bytes) else value
            fields = json.loads(text)
            return KvtierError(fields["message"], why=fields["why"], hint=fields["hint"], code=fields["code"])
    return None


def status_for(error: KvtierError) -> grpc.StatusCode:
    """The gRPC status that fits an error's code."""
    if error.stable_code.endswith((".unknown", ".missing")):
        return grpc.StatusCode.NOT_FOUND
    return grpc.StatusCode.FAILED_PRECONDITION
