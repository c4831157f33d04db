"""PURE: server-sent events out of bytes, and what one event of an OpenAI-compatible stream says."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

MOST_EVENT_BYTES = 8 * 1024**2
DONE = b"[DONE]"


class EventParser:
    """Takes a stream's bytes as they come and gives the data of each complete event.

    Works on bytes, so that a character cut in two by the network is whole again. Comments (``: ping``), other fields and
    empty events are passed over; several ``data:`` lines of one event are joined by newlines; lines end with LF, CRLF or CR.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._skip_lf = False

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that are complete now.

        Raises:
            ValueError: one event is longer than 8 MiB.
        """
        # The usual case: exactly one whole event, nothing kept from before.
        if (
            not self._rest
            and not self._data
            and data.startswith(b"data: ")
            and data.endswith(b"\n\n")
            and data.find(b"\n") == len(data) - 2
            and b"\r" not in data
        ):
            return [data[6:-2]]
        return self._feed_lines(data)

    def end(self) -> list[bytes]:
        """What the stream's end completes: some servers leave out the blank line behind the last event."""
        return self._feed_lines(b"\n\n") if self._rest or self._data else []

    def _feed_lines(self, data: bytes) -> list[bytes]:
        if self._skip_lf and data:
            data = data.removeprefix(b"\n")
            self._skip_lf = False
        if b"\r" in data:
            # A CR at the end may be the first half of a CRLF.
            self._skip_lf = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) + sum(map(len, self._data)) > MOST_EVENT_BYTES:
            raise ValueError(f"one event is longer than {MOST_EVENT_BYTES} bytes")
        found = []
        for line in lines:
            if not line:
                if self._data:
                    found.append(b"\n".join(self._data))
                    self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
        return found


class Chunk(NamedTuple):
    """What one event says. ``error`` is the server's own words when the event is an error."""

    content: str = ""
    reasoning: str = ""
    finish_reason: str = ""
    usage: dict[str, Any] | None = None
    error: str = ""


def read_chunk(data: bytes) -> Chunk:
    """One event's data, of a chat or of a completion stream. An event with only a role, or only usage, has no text.

    Raises:
        ValueError: it is not a JSON object in that form.
    """
    value = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError("an event is not a JSON object")
    error = value.get("error")
    if error:
        return Chunk(error=error_text(value))
    if value.get("object") == "error":  # vLLM's older form
        return Chunk(error=str(value.get("message") or value))
    choices = value.get("choices")
    usage = value.get("usage")
    if not isinstance(usage, dict):
        usage = None
    if not choices:
        if choices is None and usage is None:
            raise ValueError("an event has neither choices nor usage")
        return Chunk(usage=usage)
    try:
        choice = choices[0]
        finish = choice.get("finish_reason") or ""
        delta = choice.get("delta")
        if delta is None:
            return Chunk(choice.get("text") or "", "", finish, usage)
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        return Chunk(delta.get("content") or "", reasoning, finish, usage)
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"an event's choice is not in OpenAI's form: {error}") from None


def error_text(value: Any) -> str:
    """The words of an error body: OpenAI's ``{"error": {"message"}}``, FastAPI's ``{"detail"}``, or what is there."""
    if isinstance(value, dict):
        found = value.get("error") or value.get("detail") or value.get("message") or value
        if isinstance(found, dict):
            found = found.get("message") or found
        return str(found)
    return str(value)
