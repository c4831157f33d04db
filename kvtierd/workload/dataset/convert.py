"""Makes a test set out of raw records: choose by length, repeat, and write as QA pairs or conversations.

For clean input the bytes are those of the conversion script that people have used for this, with the same options and
defaults. Nothing but one record and eight bytes for each chosen one is in memory: what was chosen waits in a file.
"""

from __future__ import annotations

import array
import dataclasses
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, TypeVar, cast

from kvtierd.errors import WorkloadError
from kvtierd.files import replacing
from kvtierd.workload.dataset.records import Skips, read_values
from kvtierd.workload.needs import need
from kvtierd.workload.tokens import Encode

CountMode = Literal["valid-only", "all-lines"]
OutputFormat = Literal["qa", "multi-turn", "openai"]

T = TypeVar("T")
FileProgress = Callable[[Path, int], None]
"""Is told the input file and how many bytes of it have been taken in."""

_SUFFIXES: Final = {"qa": ".jsonl", "multi-turn": ".json", "openai": ".jsonl"}
_WRITE_BYTES: Final = 4 * 1024 * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class ConvertOptions:
    """What to choose and how to write it.

    ``top_n`` is how many records are chosen; with ``count_mode`` "all-lines" how many lines are looked at. Lengths are
    the records' own ``length``, or tokens when a tokenizer is given. Every second repetition runs backwards with
    ``alternate_order``. ``rounds`` questions make one conversation, in "multi-turn" (ShareGPT's form) and "openai".
    """

    inputs: tuple[Path, ...] = (Path("multi_news.jsonl"),)
    output: Path = Path("test_py_multi_news.jsonl")
    top_n: int = 64
    min_length: int = 1024
    max_length: int = 4096
    repeat: int = 2
    source_fields: tuple[str, ...] = ("context",)
    count_mode: CountMode = "valid-only"
    alternate_order: bool = True
    output_format: OutputFormat = "multi-turn"
    rounds: int = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Converted:
    """What came of it. ``written`` counts questions; ``left_over`` those that did not fill a conversation."""

    selected: int
    written: int
    conversations: int | None
    left_over: int
    shortest: float
    longest: float
    skips: Skips
    notes: tuple[str, ...]


class _Chosen:
    """The chosen questions as JSON strings, in a file without a name; read back forwards and backwards."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._ends = stream, array.array("Q", [0])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def add(self, text: bytes) -> None:
        self._stream.write(text)
        self._ends.append(self._ends[-1] + len(text))

    def passes(self, repeat: int, *, alternate: bool) -> Iterator[bytes]:
        self._stream.flush()
        descriptor, ends = self._stream.fileno(), self._ends
        for number in range(repeat):
            order = range(len(self))
            for i in reversed(order) if alternate and number % 2 else order:
                yield os.pread(descriptor, ends[i + 1] - ends[i], ends[i])


class _Lengths:
    """Which lengths were met, for the message when none of them fits."""

    def __init__(self) -> None:
        self.shortest, self.longest = math.inf, -math.inf

    def add(self, length: float) -> None:
        self.shortest, self.longest = min(self.shortest, length), max(self.longest, length)


def convert(
    options: ConvertOptions, *, encode: Encode | None = None, progress: FileProgress | None = None
) -> Converted:
    """Reads the inputs and writes the output, whole or not at all.

    Raises:
        WorkloadError: a file cannot be read (``dataset.*``); ``dataset.nothing-selected``,
            ``dataset.too-few-for-a-conversation``, ``dataset.would-overwrite-input``.
        StateError: the output cannot be written.
    """
    for path in options.inputs:
        if path.exists() and options.output.exists() and path.samefile(options.output):
            raise WorkloadError(
                f"the output {options.output} is one of the inputs",
                hint="name another --output",
                code="dataset.would-overwrite-input",
            )
    skips, met, taken = Skips(), _Lengths(), _Lengths()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=options.output.parent, buffering=_WRITE_BYTES) as spool:
        chosen = _Chosen(cast("BinaryIO", spool))
        for text, length in _selected(options, skips, met, encode, progress):
            chosen.add(text)
            taken.add(length)
            if options.count_mode == "valid-only" and len(chosen) >= options.top_n:
                break
        total = len(chosen) * options.repeat
        rounds = 1 if options.output_format == "qa" else options.rounds
        _check(options, skips, met, len(chosen), total // rounds)
        texts = chosen.passes(options.repeat, alternate=options.alternate_order)
        with replacing(options.output) as stream:
            _WRITERS[options.output_format](stream, texts, rounds)
    return Converted(
        selected=len(chosen),
        written=total - total % rounds,
        conversations=None if options.output_format == "qa" else total // rounds,
        left_over=total % rounds,
        shortest=taken.shortest,
        longest=taken.longest,
        skips=skips,
        notes=tuple(_notes(options, len(chosen))),
    )


def _selected(
    options: ConvertOptions, skips: Skips, met: _Lengths, encode: Encode | None, progress: FileProgress | None
) -> Iterator[tuple[bytes, float]]:
    """The questions that fit, each as a JSON string, with their lengths; for "all-lines" of the first ``top_n``."""
    dumps = need("orjson", "write datasets").dumps
    lines = 0
    for path in options.inputs:
        told = None if progress is None else lambda size, path=path: progress(path, size)
        for where, record in read_values(path, skips, progress=told):
            if options.count_mode == "all-lines":
                lines += 1
                if lines > options.top_n:
                    return
            if record is None:
                continue
            length: float | None = None
            if encode is None:
                length = _own_length(record, skips, where)
                if length is None or not _fits(length, options, skips, met, where):
                    continue
            question = _question(record, options.source_fields, skips, where)
            if question is None:
                continue
            if length is None:
                assert encode is not None
                length = len(encode(question))
                if not _fits(length, options, skips, met, where):
                    continue
            try:
                yield dumps(question), length
            except TypeError:  # half of a surrogate pair: no UTF-8 can hold it
                skips.add("half a surrogate pair was replaced by U+FFFD", where)
                yield dumps(question.encode("utf-16", "surrogatepass").decode("utf-16", "replace")), length


def _fits(length: float, options: ConvertOptions, skips: Skips, met: _Lengths, where: str) -> bool:
    met.add(length)
    if options.min_length <= length <= options.max_length:
        return True
    skips.add("too short" if length < options.min_length else "too long", where)
    return False


def _own_length(record: dict[str, Any], skips: Skips, where: str) -> float | None:
    if "length" not in record:
        skips.add("has no length, taken as 0", where)
        return 0
    length = record["length"]
    if isinstance(length, bool) or not isinstance(length, int | float) or not math.isfinite(length):
        skips.add("length is not a number", where)
        return None
    return length


def _question(record: dict[str, Any], fields: tuple[str, ...], skips: Skips, where: str) -> str | None:
    parts = []
    for field in fields:
        value = record.get(field)
        if value is None:
            skips.add(f"has no {field}", where)
        else:
            parts.append(value if isinstance(value, str) else str(value))
    return "".join(parts) if parts else None


def _write_qa(stream: BinaryIO, texts: Iterator[bytes], _: int) -> None:
    stream.writelines(
        b"".join(b'{"question": %b, "answer": ""}\n' % text for text in batch) for batch in _groups(texts, 64)
    )


def _write_multi_turn(stream: BinaryIO, texts: Iterator[bytes], rounds: int) -> None:
    turn = (
        b'      {\n        "from": "human",\n        "value": %b\n      },\n'
        b'      {\n        "from": "gpt",\n        "value": " "\n      }'
    )
    before = b"[\n"
    for number, group in enumerate(_groups(texts, rounds), 1):
        if len(group) == rounds:
            stream.write(before)
            stream.write(b'  {\n    "id": "id%d",\n    "conversations": [\n' % number)
            stream.write(b",\n".join(turn % text for text in group))
            stream.write(b"\n    ]\n  }")
            before = b",\n"
    stream.write(b"\n]")


def _write_openai(stream: BinaryIO, texts: Iterator[bytes], rounds: int) -> None:
    question, answer = b'{"role": "user", "content": %b}', b', {"role": "assistant", "content": " "}, '
    for number, group in enumerate(_groups(texts, rounds), 1):
        if len(group) == rounds:
            messages = answer.join(question % text for text in group)
            stream.write(b'{"id": "id%d", "messages": [%b]}\n' % (number, messages))


_WRITERS: Final[dict[str, Callable[[BinaryIO, Iterator[bytes], int], None]]] = {
    "qa": _write_qa,
    "multi-turn": _write_multi_turn,
    "openai": _write_openai,
}


def _groups(items: Iterator[T], size: int) -> Iterator[list[T]]:
    """Lists of ``size`` items; the last one may be shorter."""
    group: list[T] = []
    for item in items:
        group.append(item)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def _check(options: ConvertOptions, skips: Skips, met: _Lengths, selected: int, conversations: int) -> None:
    reasons = "; ".join(skips.lines()) or "the input is empty"
    if not selected:
        lengths = f" Lengths in the input: {met.shortest:g} to {met.longest:g}." if met.longest >= 0 else ""
        raise WorkloadError(
            f"no record has a text in {' or '.join(options.source_fields)} and a length of"
            f" {options.min_length} to {options.max_length}; nothing was written",
            why=reasons + lengths,
            hint="change --min-length and --max-length, or --source-fields",
            code="dataset.nothing-selected",
        )
    if not conversations:
        raise WorkloadError(
            f"{selected} records, {options.repeat} times, do not fill one conversation of {options.rounds} rounds;"
            " nothing was written",
            why=reasons,
            hint="lower --rounds, or raise --top-n or --repeat",
            code="dataset.too-few-for-a-conversation",
        )


def _notes(options: ConvertOptions, selected: int) -> Iterator[str]:
    suffix = _SUFFIXES[options.output_format]
    if options.output.suffix != suffix:
        yield f"{options.output.name}: tools that go by the name, AISBench for one, expect {suffix} for this format"
    if options.count_mode == "valid-only" and selected < options.top_n:
        yield f"{options.top_n} records were asked for, {selected} are there"
