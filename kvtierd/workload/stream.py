"""One streamed completion against an OpenAI-compatible server, timed.

TTFT is the time to the first chunk that carries text; chunks with only a role or only usage do not count.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import time
from typing import Any

from kvtierd.errors import KvtierError
from kvtierd.workload.load.events import DONE, EventParser, read_chunk

MOST_BODY_BYTES = 1024 * 1024
READ_BYTES = 64 * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
    """What one request gave. ``usage`` is the server's own account, engine-specific fields included."""

    text: str
    ttft_seconds: float
    total_seconds: float
    usage: dict[str, Any]


def complete(
    host: str, port: int, *, model: str, prompt: str, max_tokens: int, timeout_seconds: float = 60.0
) -> Completion:
    """Streams one completion at temperature 0.

    Raises:
        KvtierError: the server cannot be reached, answers with an error, or ends the stream in the middle.
    """
    body = json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    connection = http.client.HTTPConnection(host, port, timeout=timeout_seconds)
    started = time.perf_counter()
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            text = response.read(2000).decode(errors="replace")
            raise KvtierError(f"the engine answered {response.status}: {text}", code="workload.http")
        return _read(response, started)
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise KvtierError(
            f"the request to {host}:{port} failed: {type(error).__name__}: {error}",
            code="workload.connection",
        ) from error
    finally:
        connection.close()


def served_model(host: str, port: int, *, timeout_seconds: float = 10.0) -> str:
    """The name of the first model that the server lists at /v1/models.

    Raises:
        KvtierError: it cannot be reached or lists none.
    """
    connection = http.client.HTTPConnection(host, port, timeout=timeout_seconds)
    try:
        connection.request("GET", "/v1/models")
        listed = json.loads(connection.getresponse().read(MOST_BODY_BYTES))
        return str(listed["data"][0]["id"])
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
        raise KvtierError(
            f"{host}:{port} lists no model: {type(error).__name__}: {error}", code="workload.models"
        ) from error
    finally:
        connection.close()


def _read(response: http.client.HTTPResponse, started: float) -> Completion:
    parts: list[str] = []
    first: float | None = None
    usage: dict[str, Any] = {}
    parser = EventParser()
    done = False
    while not done and (data := response.read1(READ_BYTES)):
        now = time.perf_counter()
        for event in parser.feed(data):
            if event == DONE:
                done = True
                break
            chunk = read_chunk(event)
            if chunk.error:
                raise KvtierError(f"the engine reported an error: {chunk.error}", code="workload.engine")
            usage = chunk.usage or usage
            if chunk.content and first is None:
                first = now - started
            parts.append(chunk.content)
    if not done or first is None:
        raise KvtierError("the stream ended in the middle", code="workload.truncated")
    return Completion("".join(parts), first, time.perf_counter() - started, usage)
