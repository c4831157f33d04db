"""PURE: what is sent. Conversations and traces as sessions, the salt in front, and texts that mean nothing."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from kvtierd.workload.dataset.conversations import Conversation, TraceRequest

# Short frequent words: with most tokenizers each is one token together with the blank before it.
_TEXT: Final = (
    "the and that have for not with you this but his from they say her she will one all would there their what out"
    " about who get which when make can like time just him know take people into year your good some could them see"
    " other than then now look only come over think also back after use two how our work first well way even new want"
    " because any these give day most us great between need large often hand high place hold turn here why help talk"
    " where much before move right boy old too same tell does set three air play small end put home read port land"
)
WORDS: Final = tuple(_TEXT.split())
MOONCAKE_BLOCK_TOKENS: Final = 512


@dataclasses.dataclass(frozen=True, slots=True)
class Session:
    """Requests that follow each other: each question waits for the answer to the one before.

    ``questions`` is called when the session starts, so that the texts of a long trace need not all be in memory.
    """

    id: str
    system: str
    questions: Callable[[], tuple[str, ...]]
    timestamp_seconds: float | None = None
    output_tokens: int | None = None


def from_conversation(conversation: Conversation, salt: str) -> Session:
    """The user's turns of a conversation; the answers in the dataset are not sent, those of the server are."""
    system = "\n".join(t.text for t in conversation.turns if t.role == "system")
    questions = conversation.questions
    if system:
        system = salt + system
    elif questions:
        questions = (salt + questions[0], *questions[1:])
    return Session(
        conversation.id, system, lambda: questions, conversation.timestamp_seconds, conversation.output_tokens
    )


def from_trace(
    requests: Iterable[TraceRequest], salt: str, *, block_tokens: int, chars_per_token: float | None
) -> Iterator[Session]:
    """One session a request. Equal hash ids give equal text, so what could be shared in the trace can be shared here."""
    for number, request in enumerate(requests, 1):
        yield Session(
            f"trace-{number}",
            "",
            functools.partial(_trace_questions, request, salt, block_tokens, chars_per_token),
            request.timestamp_seconds,
            request.output_tokens or None,
        )


def _trace_questions(
    request: TraceRequest, salt: str, block_tokens: int, chars_per_token: float | None
) -> tuple[str, ...]:
    left = request.input_tokens
    parts = [salt] if salt else []
    for identity in request.hash_ids:
        if left <= 0:
            break
        parts.append(block_text(identity, min(left, block_tokens), block_tokens, chars_per_token))
        left -= block_tokens
    if left > 0:  # ids for less than the prompt is long: the rest belongs to nobody else
        parts.append(filler(f"rest-{request.hash_ids}-{request.timestamp_seconds}", left, chars_per_token))
    return ("".join(parts),)


def block_text(identity: int, tokens: int, block_tokens: int, chars_per_token: float | None) -> str:
    """The first ``tokens`` of a trace's block."""
    whole = _block(identity, block_tokens, chars_per_token)
    if tokens >= block_tokens:
        return whole
    if chars_per_token is not None:
        return whole[: round(tokens * chars_per_token)]
    return " ".join(whole.split(" ")[:tokens]) + " "


@functools.lru_cache(maxsize=4096)
def _block(identity: int, tokens: int, chars_per_token: float | None) -> str:
    return filler(f"block-{identity}", tokens, chars_per_token)


def filler(seed: str, tokens: int, chars_per_token: float | None = None) -> str:
    """About ``tokens`` tokens of words that depend on ``seed`` only: a word for each, or a text of that many characters."""
    chance = random.Random(seed)
    if chars_per_token is None:
        return " ".join(chance.choices(WORDS, k=tokens)) + " "
    length = round(tokens * chars_per_token)
    return " ".join(chance.choices(WORDS, k=length // 2 + 1))[:length]


def warm_up_text(seed: str, chars: int) -> str:
    """A text of that many characters that no dataset has."""
    return filler(f"warm-up-{seed}", max(chars, 1), 1.0)


def salt_text(salt: str) -> str:
    """What stands in front of every prompt of a run, so that nothing from an earlier run can be hit."""
    return f"[run {salt}] " if salt else ""
