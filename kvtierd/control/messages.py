"""Messages of the control service as JSON values. Imports no gRPC: kvtierctl starts with it."""

from __future__ import annotations

from typing import Any


def message_dict(message: Any) -> dict[str, Any]:
    """A protobuf message as JSON values: proto field names, unknown optional fields as null, numbers as numbers."""
    fields: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.is_repeated:
            fields[field.name] = [message_dict(v) if field.message_type else v for v in value]
        elif field.message_type:
            fields[field.name] = message_dict(value)
        elif field.has_presence and not message.HasField(field.name):
            fields[field.name] = None
        else:
            fields[field.name] = value
    return fields
