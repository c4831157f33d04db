"""The OpenAI forms: requests as checked models, answers and errors as dictionaries. Pure."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, ValidationError

from kvtierd_refengine.core import Usage
from kvtierd_refengine.tokenizer import VOCABULARY_SIZE, chat_prompt, encode

_DEFAULT_COMPLETION_TOKENS: Final = 16  # OpenAI's default for completions
_DEFAULT_CHAT_TOKENS: Final = 256
_MOST_MESSAGES: Final = 1000


class ApiError(Exception):
    """An error that the client gets in OpenAI's form."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """``{"error": {"message", "type", "param", "code"}}``."""
        return error_body(self.status, self.message, param=self.param, code=self.code)


def error_body(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """An error in OpenAI's form for any HTTP status."""
    kinds = {404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class StreamOptions(BaseModel):
    """OpenAI's ``stream_options``."""

    model_config = ConfigDict(extra="ignore")
    include_usage: StrictBool = False


class _Request(BaseModel):
    """What both endpoints share. Fields that would change the answer and are not supported are refused."""

    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    ignore_eos: StrictBool = False
    temperature: float | None = None
    seed: int | None = None  # taken and without effect: the answer is always the most likely token
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    stop: str | list[str] | None = None
    logprobs: bool | int | None = None
    tools: list[Any] | None = None
    response_format: dict[str, Any] | None = None

    def refuse_unsupported(self) -> None:
        """Raises ``ApiError`` for what this engine does not do, rather than answering something else."""
        if self.temperature not in {None, 0}:
            raise ApiError(
                400, "The reference engine only decodes greedily: use temperature 0.", param="temperature"
            )
        for name, neutral in (("n", 1), ("best_of", 1)):
            if getattr(self, name) not in {None, neutral}:
                raise ApiError(400, f"The reference engine only supports {name}={neutral}.", param=name)
        for name in ("echo", "suffix", "stop", "logprobs", "tools"):
            if getattr(self, name):
                raise ApiError(400, f"The reference engine does not support {name!r}.", param=name)
        if self.response_format not in (None, {"type": "text"}):
            raise ApiError(400, "The reference engine only answers text.", param="response_format")


class CompletionRequest(_Request):
    """``POST /v1/completions``. A prompt is a text or a list of tokens (bytes)."""

    prompt: str | list[Annotated[StrictInt, Field(ge=0, lt=VOCABULARY_SIZE)]]

    def prompt_tokens(self) -> list[int]:
        """The prompt as tokens."""
        return encode(self.prompt) if isinstance(self.prompt, str) else self.prompt

    def wanted_tokens(self, room: int) -> int:
        """How many tokens to generate at most."""
        del room
        return self.max_tokens or _DEFAULT_COMPLETION_TOKENS


class TextPart(BaseModel):
    """A text part of a message's content."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(extra="ignore")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """The content as one text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(_Request):
    """``POST /v1/chat/completions``. Texts only."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=_MOST_MESSAGES)]
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None

    def prompt_tokens(self) -> list[int]:
        """The chat as tokens."""
        return encode(chat_prompt([(message.role, message.text) for message in self.messages]))

    def wanted_tokens(self, room: int) -> int:
        """How many tokens to generate at most; without a wish, what there is room for, up to a default."""
        return self.max_completion_tokens or self.max_tokens or max(1, min(room, _DEFAULT_CHAT_TOKENS))


def parse_request(
    kind: type[CompletionRequest] | type[ChatRequest], body: bytes
) -> CompletionRequest | ChatRequest:
    """A checked request. Raises ``ApiError`` 400 that names the first wrong field."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        text = f"{where}: {first['msg']}" if where else first["msg"]
        raise ApiError(400, text, param=where or None) from None
    request.refuse_unsupported()
    return request


def usage_body(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage, with the tiers the prompt's tokens came from in a field of our own."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.l1_tokens + usage.l3_tokens},
        "kvtier": {
            "l1_tokens": usage.l1_tokens,
            "l3_tokens": usage.l3_tokens,
            "computed_tokens": usage.computed_tokens,
            "logits_digest": usage.logits_digest,
        },
    }


class Answer:
    """Builds the bodies of one answer, whole or in chunks, for either endpoint."""

    def __init__(self, model: str, *, chat: bool) -> None:
        self._chat = chat
        self._head: Mapping[str, Any] = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, text: str, finish_reason: str, usage: Usage) -> dict[str, Any]:
        """The answer without streaming."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason, "logprobs": None}
        choice |= {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": [choice], "usage": usage_body(usage)}

    def chunk(self, text: str, *, finish_reason: str | None = None, first: bool = False) -> dict[str, Any]:
        """One chunk of a stream."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason, "logprobs": None}
        if self._chat:
            delta: dict[str, Any] = {"role": "assistant"} if first else {}
            choice["delta"] = delta | ({"content": text} if text or first else {})
        else:
            choice["text"] = text
        return {**self._head, "object": self._stream_kind, "choices": [choice]}

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last chunk of a stream with ``include_usage``: no choices."""
        return {**self._head, "object": self._stream_kind, "choices": [], "usage": usage_body(usage)}

    @property
    def _stream_kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"
