"""Everything for one run out of its options: sessions from the dataset, the client, signals, the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import secrets
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import uvloop

from kvtierd.errors import KvtierError, WorkloadError
from kvtierd.workload.dataset.conversations import dataset_form, read_conversations, read_mooncake
from kvtierd.workload.dataset.records import Skips
from kvtierd.workload.load.client import OpenAiClient
from kvtierd.workload.load.http_stream import read_origin
from kvtierd.workload.load.prompts import (
    MOONCAKE_BLOCK_TOKENS,
    Session,
    from_conversation,
    from_trace,
    salt_text,
)
from kvtierd.workload.load.results import RunFiles
from kvtierd.workload.load.runner import LoadSettings, Run, Say
from kvtierd.workload.load.target import Target

KEY_VARIABLE: Final = "OPENAI_API_KEY"


@dataclasses.dataclass(frozen=True, slots=True)
class RunRequest:
    """One run as it was asked for.

    ``salt`` ``None`` draws one, "" sends the dataset as it is. ``limit`` is the most sessions taken from the dataset.
    ``tell_seconds`` is how often progress is told of.
    """

    dataset: Path
    output: Path
    load: LoadSettings
    salt: str | None = None
    limit: int | None = None
    label: str = ""
    trace_block_tokens: int = MOONCAKE_BLOCK_TOKENS
    chars_per_token: float | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tell_seconds: float = 10.0


def read_api_key(file: Path | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """The key for the server, out of a file or of ``OPENAI_API_KEY``; never out of the command line.

    Raises:
        WorkloadError: the file cannot be read or holds no key; its content is not shown.
    """
    if file is None:
        return environment.get(KEY_VARIABLE) or None
    try:
        key = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(
            f"the key file {file} cannot be read: {type(error).__name__}", code="load.key"
        ) from None
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise WorkloadError(f"the key file {file} does not hold one key", code="load.key")
    return key


def read_sessions(request: RunRequest, salt: str) -> tuple[list[Session], dict[str, Any]]:
    """The sessions of a dataset, and facts about it for the result.

    Raises:
        WorkloadError: the dataset cannot be read or is empty, or does not fit the way requests arrive.
    """
    skips = Skips()
    form = dataset_form(request.dataset)
    prefix = salt_text(salt)
    found: Iterator[Session]
    if form == "mooncake":
        found = from_trace(
            read_mooncake(request.dataset, skips=skips),
            prefix,
            block_tokens=request.trace_block_tokens,
            chars_per_token=request.chars_per_token,
        )
    else:
        found = (from_conversation(c, prefix) for c in read_conversations(request.dataset, skips=skips))
    sessions = list(itertools.islice(found, request.limit))
    if request.load.arrival == "trace" and all(s.timestamp_seconds is None for s in sessions):
        raise WorkloadError(
            f"{request.dataset} has no times to replay",
            hint="--arrival trace needs records with a timestamp, such as Mooncake's; or give a --rate",
            code="load.no-times",
        )
    about = {
        "path": str(request.dataset),
        "form": form,
        "sessions": len(sessions),
        "left_out": skips.as_dict(),
    }
    return sessions, about


def run_load(
    request: RunRequest, target: Target, *, api_key: str | None = None, say: Say = lambda _: None
) -> tuple[dict[str, Any], KvtierError | None]:
    """Runs it, on an event loop of its own. SIGINT and SIGTERM end it early, with what was measured.

    Returns:
        The result, as in result.json, and what kept it from being written whole.

    Raises:
        KvtierError: nothing could be measured.
    """
    salt = secrets.token_hex(4) if request.salt is None else request.salt
    sessions, dataset = read_sessions(request, salt)
    about = {"label": request.label, "engine": target.engine, "salt": salt, "dataset": dataset}
    files = RunFiles(request.output)

    async def execute() -> dict[str, Any]:
        client = OpenAiClient(read_origin(target.url), api_key=api_key, extra=request.extra)
        run = Run(client, request.load, sessions, files, counters=target.counters, about=about, say=say)
        stop = asyncio.Event()
        teller = asyncio.create_task(_tell(run, say, request.tell_seconds))
        with _early_end(stop):
            try:
                return await run.execute(stop)
            finally:
                teller.cancel()
                client.close()
                say("")

    result = uvloop.run(execute())
    return result, files.problem


async def _tell(run: Run, say: Say, seconds: float) -> None:
    tokens, at = 0, asyncio.get_running_loop().time()
    while True:
        await asyncio.sleep(seconds)
        live, now = run.live, asyncio.get_running_loop().time()
        if not live.running and not live.done:
            continue
        rate = (live.tokens - tokens) / (now - at)
        tokens, at = live.tokens, now
        failed = f", {live.failed} requests failed" if live.failed else ""
        say(f"{live.done} of {live.total} done, {live.running} under way{failed}, {rate:.0f} tokens/s")


@contextlib.contextmanager
def _early_end(stop: asyncio.Event) -> Iterator[None]:
    """The first Ctrl-C ends the run with what there is; a second one is as usual."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def end() -> None:
        stop.set()
        for number in numbers:
            loop.remove_signal_handler(number)

    try:
        for number in numbers:
            loop.add_signal_handler(number, end)
    except (ValueError, RuntimeError):  # not in the main thread: whoever runs it there ends it otherwise
        yield
        return
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
