"""Commands of a host that is only a directory: files under ``.commands/``, named after their words.

A slash in a word is ``%`` in the name, and a word of more than 60 characters or with a line break is ``@``: the file
``.commands/npu-smi info -m`` is what that command printed. Where there is no file for all words, one that ends with the
first ``@`` counts, whatever words come behind it. A file of the same name with ``.json`` behind it may add
``{"code": 1, "stderr": "...", "timed_out": true}``. What has no file is not installed there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from kvtierd.host.view import OUTPUT_LIMIT_BYTES, CommandResult

DIRECTORY: Final = ".commands"
_LONG_WORD: Final = 60


def recording_name(argv: Sequence[str]) -> str:
    """The name of the file with what a command printed."""
    words = ("@" if len(word) > _LONG_WORD or "\n" in word else word.replace("/", "%") for word in argv)
    return " ".join(words)


class DirectoryRunner:
    """Answers from ``ROOT/.commands``. Implements :class:`kvtierd.host.view.CommandRunner`."""

    def __init__(self, root: Path) -> None:
        self._directory = root / DIRECTORY

    async def run(
        self, argv: Sequence[str], *, timeout_seconds: float, env: Mapping[str, str] | None = None
    ) -> CommandResult:
        """What was recorded for these words."""
        words, file = tuple(argv), self._directory / recording_name(argv)
        if not file.exists() and "@" in (named := file.name.split(" ")):
            file = self._directory / " ".join(named[: named.index("@") + 1])
        about: dict[str, object] = {}
        try:
            with file.open("rb") as stream:
                stdout = stream.read(OUTPUT_LIMIT_BYTES).decode("utf-8", "replace")
        except OSError:
            stdout = None
        try:
            read = json.loads((self._directory / f"{file.name}.json").read_text("utf-8"))
            about = read if isinstance(read, dict) else {}
        except OSError:
            if stdout is None:
                return CommandResult(words, error="is not installed, or not on PATH")
        except ValueError as error:
            return CommandResult(words, error=f"its recording is not JSON: {error}")
        timed_out = bool(about.get("timed_out"))
        code = about.get("code", 0)
        return CommandResult(
            words,
            code=None if timed_out or not isinstance(code, int) else code,
            stdout=stdout or "",
            stderr=str(about.get("stderr", "")),
            timed_out=timed_out,
            seconds=timeout_seconds if timed_out else 0.0,
        )
