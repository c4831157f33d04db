"""An OpenAI-compatible server as the load generator sees it: what it serves, which fields it takes, one timed request."""

from __future__ import annotations

import array
import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from kvtierd.errors import WorkloadError
from kvtierd.workload.load.events import DONE, EventParser, error_text, read_chunk
from kvtierd.workload.load.http_stream import MOST_ERROR_BYTES, Head, HttpFaultError, HttpStreams, Origin

Api = Literal["chat", "completions"]
Message = Mapping[str, str]
PATHS: Final[Mapping[str, str]] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
EVENT_STREAM: Final = "text/event-stream"
MODELS_SECONDS: Final = 10.0
_SHOWN_CHARS: Final = 300


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed. ``kind`` is stable and groups failures; ``text`` is an example of one."""

    kind: str
    text: str
    status: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Dialect:
    """What a server takes beyond the necessary: known from a first request that is not counted."""

    api: Api = "chat"
    ignore_eos: bool = True
    min_tokens: bool = True
    usage: bool = True


@dataclasses.dataclass(slots=True)
class Answer:
    """One answer as it came. Times in seconds on ``time.perf_counter``'s clock, or since ``started`` where so named.

    ``gaps`` are the times between one event with text and the next. ``chunks`` counts events with text. ``last_seconds`` is
    the last event with text or with the reason of the end.
    """

    started: float
    first_seconds: float | None = None
    last_seconds: float | None = None
    gaps: array.array[float] = dataclasses.field(default_factory=lambda: array.array("f"))
    chunks: int = 0
    content: list[str] = dataclasses.field(default_factory=list)
    reasoning: list[str] = dataclasses.field(default_factory=list)
    usage: dict[str, Any] = dataclasses.field(default_factory=dict)
    finish_reason: str = ""
    failure: Failure | None = None

    @property
    def text(self) -> str:
        """What belongs into the history: the content, or what was thought when there was nothing else."""
        return "".join(self.content) or "".join(self.reasoning)

    def usage_count(self, name: str) -> int | None:
        """A whole number out of the server's own account."""
        value = self.usage.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that the server says it did not compute."""
        details = self.usage.get("prompt_tokens_details")
        value = details.get("cached_tokens") if isinstance(details, dict) else None
        return value if isinstance(value, int) and not isinstance(value, bool) else None


class OpenAiClient:
    """Talks to one server.

    Args:
        origin: where it is.
        api_key: for ``Authorization``; never shown.
        extra: further fields of every request.
    """

    def __init__(
        self, origin: Origin, *, api_key: str | None = None, extra: Mapping[str, Any] | None = None
    ) -> None:
        self.origin = origin
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._streams = HttpStreams(origin, headers=headers)
        self._extra = dict(extra or {})

    def close(self) -> None:
        """Hangs up."""
        self._streams.close()

    async def models(self) -> list[str] | None:
        """The names served at /v1/models; ``None`` when the server has no such list.

        Raises:
            WorkloadError: ``load.unreachable``, ``load.not-openai``, ``load.key``: nothing can be measured there.
        """
        taken = _Whole()
        where = self.origin.url
        try:
            async with asyncio.timeout(MODELS_SECONDS):
                await self._streams.ask("GET", "/v1/models", b"", taken)
        except TimeoutError:
            raise WorkloadError(
                f"{where} did not answer within {MODELS_SECONDS:g} s", code="load.unreachable"
            ) from None
        except HttpFaultError as fault:
            raise WorkloadError(
                f"nothing can be measured at {where}: {fault.message}",
                hint="is the server running, and is this its address? kvtierctl status shows engines and their state",
                code="load.unreachable",
            ) from fault
        if taken.head.status in {404, 405, 501}:
            return None
        if taken.head.status in {401, 403}:
            raise WorkloadError(
                f"{where} wants another key: status {taken.head.status}",
                hint="put it into a file (--api-key-file) or into the variable OPENAI_API_KEY",
                code="load.key",
            )
        try:
            if taken.head.status != 200:
                raise ValueError(f"status {taken.head.status}")
            return [str(model["id"]) for model in json.loads(taken.body)["data"]]
        except (ValueError, LookupError, TypeError) as error:
            shown = taken.body[:_SHOWN_CHARS].decode(errors="replace")
            kind = "an HTML page" if "html" in taken.head.media_type else f"{error}"
            raise WorkloadError(
                f"{where} is no OpenAI-compatible server: /v1/models gave {kind}",
                why=shown,
                hint="is this the engine's own port, and not that of a proxy or of metrics?",
                code="load.not-openai",
            ) from None

    async def negotiate(
        self, model: str, prompt: str, *, api: Api, ignore_eos: bool, timeout_seconds: float
    ) -> tuple[Dialect, list[str]]:
        """Finds out with a request that is not counted what the server takes, and what to tell about it.

        Raises:
            WorkloadError: no form of request gets an answer; the last answer is the reason.
        """
        dialect = Dialect(api=api, ignore_eos=ignore_eos, min_tokens=ignore_eos)
        notes: list[str] = []
        while True:
            answer = await self.ask(
                dialect,
                model,
                [{"role": "user", "content": prompt}],
                max_tokens=2,
                timeout_seconds=timeout_seconds,
            )
            if answer.failure is None:
                return dialect, notes
            following = _next_dialect(dialect, answer.failure)
            if following is None:
                raise WorkloadError(
                    f"{self.origin.url} does not answer a first request: {answer.failure.text}",
                    hint=_hint_for(answer.failure),
                    code=f"load.{answer.failure.kind}",
                )
            dialect, note = following
            notes.append(note)

    async def ask(
        self,
        dialect: Dialect,
        model: str,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        timeout_seconds: float,
    ) -> Answer:
        """One streamed request. Never raises for what the server or the network does: that is the answer's ``failure``."""
        body = json.dumps(
            request_body(dialect, model, messages, max_tokens=max_tokens) | self._extra, ensure_ascii=False
        ).encode("utf-8", errors="replace")
        answer = Answer(time.perf_counter())
        taken = _Streamed(answer)
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._streams.ask("POST", PATHS[dialect.api], body, taken)
            taken.end()
        except TimeoutError:
            answer.failure = Failure("timeout", f"no whole answer within {timeout_seconds:g} s")
        except HttpFaultError as fault:
            if not taken.complete:  # what comes behind [DONE] is of no interest
                answer.failure = Failure(fault.kind, fault.message)
        except _RefusedError as refused:
            answer.failure = refused.failure
        return answer


def request_body(
    dialect: Dialect, model: str, messages: Sequence[Message], *, max_tokens: int
) -> dict[str, Any]:
    """The body of one request. A chat becomes one text for servers that only complete."""
    body: dict[str, Any] = {"model": model, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    if dialect.api == "chat":
        body["messages"] = [dict(m) for m in messages]
    else:
        body["prompt"] = as_text(messages)
    if dialect.ignore_eos:
        body["ignore_eos"] = True
    if dialect.min_tokens:
        body["min_tokens"] = max_tokens
    if dialect.usage:
        body["stream_options"] = {"include_usage": True}
    return body


def as_text(messages: Sequence[Message]) -> str:
    """A chat as one text, in which each turn only appends: the next turn's prompt begins with this one and its answer."""
    if len(messages) == 1:
        return messages[0]["content"]
    turns = "".join(f"{m['role'].capitalize()}: {m['content']}\n" for m in messages)
    return f"{turns}Assistant: "


def _next_dialect(dialect: Dialect, failure: Failure) -> tuple[Dialect, str] | None:
    """What to try next, and what to say of it."""
    told = failure.text.lower()
    no_chat = (failure.status in {404, 405, 501} and "model" not in told) or (
        failure.status == 400 and ("chat template" in told or "chat_template" in told)
    )
    if dialect.api == "chat" and no_chat:
        note = "the server has no chat: measured over /v1/completions, chats as one text"
        return dataclasses.replace(dialect, api="completions"), note
    if failure.status not in {400, 422}:
        return None
    if dialect.ignore_eos and "ignore_eos" in told:
        return dataclasses.replace(dialect, ignore_eos=False), _note("ignore_eos")
    if dialect.min_tokens and "min_tokens" in told:
        return dataclasses.replace(dialect, min_tokens=False), _note("min_tokens")
    if dialect.usage and "stream_options" in told:
        return dataclasses.replace(dialect, usage=False), _note("stream_options")
    if dialect.ignore_eos or dialect.min_tokens:
        # It does not say what it dislikes: these are the unusual ones.
        note = _note("ignore_eos and min_tokens")
        return dataclasses.replace(dialect, ignore_eos=False, min_tokens=False), note
    return None


def _note(name: str) -> str:
    lost = {
        "stream_options": "output tokens are counted by events, prompt tokens are unknown",
        "ignore_eos": "answers may be shorter than asked for",
    }
    return f"the server does not take {name}: {lost.get(name, 'the output length may vary')}"


def _hint_for(failure: Failure) -> str:
    if failure.status == 404:
        return "is the model's name one that the server lists at /v1/models?"
    if failure.status == 429:
        return "the server limits requests: try later, or with a lower rate"
    return ""


class _RefusedError(Exception):
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class _Whole:
    """Keeps a short answer."""

    def __init__(self) -> None:
        self.head = Head(0, {})
        self.body = b""

    def on_head(self, head: Head) -> None:
        self.head = head

    def on_data(self, data: bytes) -> None:
        if len(self.body) < 16 * MOST_ERROR_BYTES:
            self.body += data


class _Streamed:
    """Takes one streamed answer into an :class:`Answer`."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._parser = EventParser()
        self._status = 0
        self._refused: bytearray | None = None
        self._media_type = ""
        self._previous = 0.0
        self.complete = False

    def on_head(self, head: Head) -> None:
        self._status, self._media_type = head.status, head.media_type
        # Some servers stream under another name; what is no event then shows in the events themselves.
        if head.status != 200 or head.media_type in {"text/html", "application/json"}:
            self._refused = bytearray()

    def on_data(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._refused is not None:
            if len(self._refused) < MOST_ERROR_BYTES:
                self._refused += data
            return
        if self.complete:
            return
        try:
            for event in self._parser.feed(data):
                self._take(event, now)
        except ValueError as error:
            raise _RefusedError(
                Failure("bad-event", f"the stream is not in OpenAI's form: {error}")
            ) from None

    def end(self) -> None:
        """Looks whether the answer was whole."""
        if self._refused is not None:
            raise _RefusedError(self._refusal(bytes(self._refused)))
        if not self.complete:
            now = time.perf_counter()
            try:
                for event in self._parser.end():
                    self._take(event, now)
            except ValueError:
                pass  # half an event: the stream was cut there
        answer = self._answer
        if not self.complete and not answer.finish_reason:
            text = f"the stream ended after {answer.chunks} events with text, without an end"
            raise _RefusedError(Failure("cut", text))
        if answer.first_seconds is None:
            raise _RefusedError(Failure("empty", "the answer had no token"))

    def _take(self, event: bytes, now: float) -> None:
        if event == DONE:
            self.complete = True
            return
        chunk = read_chunk(event)
        if chunk.error:
            raise _RefusedError(Failure("server-error", chunk.error[:_SHOWN_CHARS]))
        answer = self._answer
        if chunk.content or chunk.reasoning:
            since = now - answer.started
            if answer.first_seconds is None:
                answer.first_seconds = since
            else:
                answer.gaps.append(now - self._previous)
            self._previous = now
            answer.last_seconds = since
            answer.chunks += 1
            if chunk.content:
                answer.content.append(chunk.content)
            if chunk.reasoning:
                answer.reasoning.append(chunk.reasoning)
        if chunk.finish_reason:
            answer.finish_reason = chunk.finish_reason
            answer.last_seconds = now - answer.started
        if chunk.usage is not None:
            answer.usage = chunk.usage

    def _refusal(self, body: bytes) -> Failure:
        shown = body[:_SHOWN_CHARS].decode(errors="replace").strip()
        with contextlib.suppress(ValueError):
            shown = error_text(json.loads(body))[:_SHOWN_CHARS]
        if self._status == 200:
            what = "an HTML page" if self._media_type == "text/html" else "a whole answer instead of a stream"
            return Failure("not-a-stream", f"the server sent {what}: {shown}", 200)
        kind = "rate-limited" if self._status == 429 else f"http-{self._status}"
        return Failure(kind, f"status {self._status}: {shown}", self._status)
