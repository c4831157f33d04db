"""Byte-level tokens: one byte of UTF-8 is one token, so token counts can be read off the text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

END_OF_TEXT: Final = 256
VOCABULARY_SIZE: Final = 257

# The model's weights are random: left alone it would answer with bytes that are not text. It may choose among
# printable ASCII, the newline and the end, so that every token is one whole character.
SPEAKABLE: Final[tuple[int, ...]] = (0x0A, *range(0x20, 0x7F), END_OF_TEXT)


def encode(text: str) -> list[int]:
    """The tokens of a text. Lone surrogates (possible in JSON) become ``?`` instead of an error."""
    return list(text.encode("utf-8", errors="replace"))


def decode(tokens: Iterable[int]) -> str:
    """The text of tokens; the end token has none, bytes that are not UTF-8 are replaced."""
    return bytes(t for t in tokens if t < END_OF_TEXT).decode("utf-8", errors="replace")


def chat_prompt(messages: Sequence[tuple[str, str]]) -> str:
    """The prompt for (role, content) pairs. Each turn only appends, so a longer chat shares its prefix."""
    turns = "".join(f"<|{role}|>\n{content}\n" for role, content in messages)
    return f"{turns}<|assistant|>\n"
