"""An engine's tokenizer, from the model's own files; nothing is fetched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvtierd.errors import WorkloadError
from kvtierd.workload.needs import need

Encode = Callable[[str], list[int]]
"""Text to token ids, without special tokens."""


def load_tokenizer(path: Path) -> Encode:
    """The tokenizer of a model directory, or of a ``tokenizer.json``.

    Raises:
        WorkloadError: ``workload.tokenizer``, ``workload.missing-package``.
    """
    tokenizers = need("tokenizers", "count tokens")
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise WorkloadError(
            f"cannot load the tokenizer {file}",
            why=str(error),
            hint="name the model's directory, or its tokenizer.json; an older model without that file has to be"
            " saved once with transformers' fast tokenizer",
            code="workload.tokenizer",
        ) from None

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    return encode
