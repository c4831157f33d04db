"""Conversations and request traces out of the forms that datasets come in.

QA pairs (``question``, or ``prompt``), ShareGPT (``conversations`` of ``from``/``value``), OpenAI messages
(``messages`` of ``role``/``content``, also inside a batch file's ``body``), and Mooncake's trace (``timestamp`` in
milliseconds, ``input_length``, ``output_length``, ``hash_ids``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

from kvtierd.errors import WorkloadError
from kvtierd.workload.dataset.records import Progress, Skips, read_records

Role = Literal["system", "user", "assistant"]
Form = Literal["qa", "sharegpt", "openai", "mooncake"]

_ROLES: Final[dict[str, Role]] = {
    "human": "user", "user": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant",
    "system": "system", "developer": "system",
}  # fmt: skip
_QUESTION_FIELDS: Final = ("question", "prompt")


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One message. An assistant's text is empty where the dataset only marks that an answer comes here."""

    role: Role
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in order: perhaps system first, then user and assistant in turn, beginning with user.

    ``timestamp_seconds`` is when it was asked, since the trace's beginning; ``output_tokens`` how long the answer is
    to be. Both only where the record says so.
    """

    id: str
    turns: tuple[Turn, ...]
    timestamp_seconds: float | None = None
    output_tokens: int | None = None

    @property
    def questions(self) -> tuple[str, ...]:
        """The user's messages."""
        return tuple(turn.text for turn in self.turns if turn.role == "user")


@dataclasses.dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace without its text: equal ``hash_ids`` are equal blocks of the prompt, in order."""

    timestamp_seconds: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]


def form_of(record: dict[str, Any]) -> Form | None:
    """Which form a record has, by its keys."""
    if "hash_ids" in record:
        return "mooncake"
    if "messages" in record or (isinstance(record.get("body"), dict) and "messages" in record["body"]):
        return "openai"
    if "conversations" in record or "conversation" in record:
        return "sharegpt"
    return "qa" if any(field in record for field in _QUESTION_FIELDS) else None


def dataset_form(path: Path) -> Form | None:
    """The form of the file's first record that has one. ``None``: none of those here.

    Raises:
        WorkloadError: as ``read_records``.
    """
    return next((form for _, record in read_records(path, Skips()) if (form := form_of(record))), None)


def read_conversations(
    path: Path, *, skips: Skips, form: Form | None = None, progress: Progress | None = None
) -> Iterator[Conversation]:
    """The conversations of a dataset; a QA pair is one with a single question.

    Raises:
        WorkloadError: as ``read_records``; ``dataset.empty`` after the last record, when none could be used.
    """
    seen: dict[str, int] = {}
    given = 0
    for where, record in read_records(path, skips, progress=progress):
        kind = form or form_of(record)
        if kind is None or kind == "mooncake":
            skips.add("no question, conversations or messages", where)
            continue
        turns = _turns(record, kind, skips, where)
        if not any(turn.role == "user" for turn in turns):
            skips.add("no text of a user", where)
            continue
        name = str(record.get("id") or record.get("custom_id") or record.get("_id") or f"{given + 1}")
        seen[name] = seen.get(name, 0) + 1
        given += 1
        body = record["body"] if isinstance(record.get("body"), dict) else record
        yield Conversation(
            id=name if seen[name] == 1 else f"{name}#{seen[name]}",
            turns=turns,
            timestamp_seconds=_milliseconds(record.get("timestamp")),
            output_tokens=_count(
                body.get("max_completion_tokens") or body.get("max_tokens") or record.get("output_length")
            ),
        )
    if not given:
        raise _empty(path, skips)


def read_mooncake(path: Path, *, skips: Skips, progress: Progress | None = None) -> Iterator[TraceRequest]:
    """The requests of a trace in Mooncake's form, in the file's order.

    Raises:
        WorkloadError: as ``read_records``; ``dataset.empty`` after the last record, when none could be used.
    """
    given = 0
    for where, record in read_records(path, skips, progress=progress):
        ids, at = record.get("hash_ids"), _milliseconds(record.get("timestamp"))
        tokens, output = _count(record.get("input_length")), _count(record.get("output_length"))
        if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
            skips.add("hash_ids is not a list of integers", where)
        elif at is None or tokens is None:
            skips.add("timestamp or input_length is missing or not a number", where)
        else:
            given += 1
            yield TraceRequest(at, tokens, output or 0, tuple(ids))
    if not given:
        raise _empty(path, skips)


def _turns(record: dict[str, Any], form: Form, skips: Skips, where: str) -> tuple[Turn, ...]:
    if form == "qa":
        question = next((record[field] for field in _QUESTION_FIELDS if record.get(field) is not None), None)
        answer = record.get("answer")
        if not isinstance(question, str) or not question.strip():
            return ()
        return (
            Turn("user", question),
            *([Turn("assistant", answer)] if isinstance(answer, str) and answer.strip() else []),
        )
    if form == "openai":
        messages = record["body"].get("messages") if "messages" not in record else record["messages"]
    else:
        messages = record.get("conversations", record.get("conversation"))
    if not isinstance(messages, list):
        return ()
    turns: list[Turn] = []
    for message in messages:
        turn = _turn(message, skips, where)
        if turn is None:
            continue
        if turn.role == "assistant" and not any(t.role == "user" for t in turns):
            skips.add("an answer before the first question was left out", where)
        elif turns and turns[-1].role == turn.role:
            # An answer between them is missing: for the engine they are one message.
            if turn.text:
                skips.add("two messages of one side were joined", where)
                joined = "\n\n".join(text for text in (turns[-1].text, turn.text) if text)
                turns[-1] = Turn(turn.role, joined)
        else:
            turns.append(turn)
    return tuple(turns)


def _turn(message: Any, skips: Skips, where: str) -> Turn | None:
    if not isinstance(message, dict):
        skips.add("a message that is not an object was left out", where)
        return None
    name = message.get("from", message.get("role"))
    role = _ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        skips.add(f"a message from {name!r} was left out", where)
        return None
    text = _text(message.get("value", message.get("content")), skips, where)
    if role == "assistant":
        return Turn(role, text if text.strip() else "")
    if not text.strip():
        skips.add("an empty message was left out", where)
        return None
    return Turn(role, text)


def _text(value: Any, skips: Skips, where: str) -> str:
    """A message's text; of OpenAI's list of parts the texts."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        texts = [
            part["text"] for part in value if isinstance(part, dict) and isinstance(part.get("text"), str)
        ]
        if len(texts) < len(value):
            skips.add("a part of a message that is not text was left out", where)
        return "".join(texts)
    return ""


def _milliseconds(value: Any) -> float | None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value / 1000 if ok else None


def _count(value: Any) -> int | None:
    ok = (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    )
    return int(value) if ok else None


def _empty(path: Path, skips: Skips) -> WorkloadError:
    return WorkloadError(
        f"{path} has no record that can be used",
        why="; ".join(skips.lines()) or "it is empty",
        hint="records are objects with question, prompt, conversations or messages (or hash_ids for a trace)",
        code="dataset.empty",
    )
