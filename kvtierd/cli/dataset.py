"""kvtierctl dataset: make a test set of long documents or conversations."""

from __future__ import annotations

import contextlib
import enum
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from kvtierd.cli.common import JsonOption, print_json
from kvtierd.errors import UsageError

if TYPE_CHECKING:
    from kvtierd.workload.dataset.convert import Converted, FileProgress

dataset_app = typer.Typer(
    help="Make test sets of long documents and conversations.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


class _ManyValues(TyperCommand):
    """Lets an option take several values after one name, ``--input a b``, as the options' users know it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        spread: list[str] = []
        many = ""
        for number, word in enumerate(args):
            if word.startswith("-") and word != "-":
                many = word if word in {"--input", "--source-fields"} else ""
            elif many and args[number - 1] != many:
                spread.append(many)
            spread.append(word)
        return super().parse_args(ctx, spread)


class _CountMode(enum.StrEnum):
    VALID_ONLY = "valid-only"
    ALL_LINES = "all-lines"


class _Format(enum.StrEnum):
    QA = "qa"
    MULTI_TURN = "multi-turn"
    OPENAI = "openai"


class _YesNo(enum.StrEnum):
    TRUE = "True"
    FALSE = "False"


@dataset_app.command("convert", cls=_ManyValues)
def convert(
    input_: Annotated[
        list[Path] | None,
        typer.Option(
            "--input", metavar="FILE...", help="JSON lines; gzip and zstd too.  [default: multi_news.jsonl]"
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="The file to write.")] = Path("test_py_multi_news.jsonl"),
    top_n: Annotated[int, typer.Option(min=1, help="How many records to choose.")] = 64,
    min_length: Annotated[int, typer.Option(min=0, help="Leave out records shorter than this.")] = 1024,
    max_length: Annotated[int, typer.Option(min=0, help="Leave out records longer than this.")] = 4096,
    repeat: Annotated[int, typer.Option(min=1, help="How often the chosen records come.")] = 2,
    source_fields: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD...", help="Fields that make the question, joined.  [default: context]"),
    ] = None,
    count_mode: Annotated[
        _CountMode, typer.Option(help="What --top-n counts: chosen records, or lines looked at.")
    ] = _CountMode.VALID_ONLY,
    alternate_order: Annotated[
        _YesNo, typer.Option(help="Every second repetition runs backwards.")
    ] = _YesNo.TRUE,
    output_format: Annotated[
        _Format,
        typer.Option(
            help="qa: a question a line; multi-turn: ShareGPT; openai: messages, a conversation a line."
        ),
    ] = _Format.MULTI_TURN,
    rounds: Annotated[int, typer.Option(min=1, help="Questions in a conversation (not for qa).")] = 4,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Model directory or tokenizer.json: lengths in tokens, not the records' own."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Choose records by length, repeat them, and write QA pairs or conversations.

    The output is whole or not there. JSON: output, format, selected, questions, conversations, left_over,
    length {min, max, unit}, skipped {reason: {count, first}}, notes.
    """
    from kvtierd.workload.dataset.convert import ConvertOptions
    from kvtierd.workload.dataset.convert import convert as run
    from kvtierd.workload.tokens import load_tokenizer

    if min_length > max_length:
        raise UsageError(f"--min-length {min_length} is above --max-length {max_length}")
    defaults = ConvertOptions()
    options = ConvertOptions(
        inputs=tuple(input_ or defaults.inputs),
        output=output,
        top_n=top_n,
        min_length=min_length,
        max_length=max_length,
        repeat=repeat,
        source_fields=tuple(source_fields or defaults.source_fields),
        count_mode=count_mode.value,
        alternate_order=alternate_order is _YesNo.TRUE,
        output_format=output_format.value,
        rounds=rounds,
    )
    encode = load_tokenizer(tokenizer) if tokenizer else None
    with _progress(options.inputs, quiet=as_json) as progress:
        result = run(options, encode=encode, progress=progress)
    unit = "tokens" if tokenizer else "as the records say"
    if as_json:
        print_json(
            {
                "output": str(output),
                "format": options.output_format,
                "selected": result.selected,
                "questions": result.written,
                "conversations": result.conversations,
                "left_over": result.left_over,
                "length": {"min": result.shortest, "max": result.longest, "unit": unit},
                "skipped": result.skips.as_dict(),
                "notes": list(result.notes),
            }
        )
    else:
        _show(result, options.output, options.repeat, unit)


@dataset_app.command("sample")
def sample(
    output: Annotated[Path, typer.Option(help="The file to write.")] = Path("sample.jsonl"),
    records: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many.")] = 64,
    min_length: Annotated[int, typer.Option(min=16, help="Words of the shortest.")] = 1024,
    max_length: Annotated[int, typer.Option(min=16, help="Words of the longest.")] = 4096,
    seed: Annotated[int, typer.Option(help="The same seed gives the same file.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Make a small file like LongBench's, without the internet.

    JSON: output, records.
    """
    from kvtierd.workload.dataset.sample import write_sample

    if min_length > max_length:
        raise UsageError(f"--min-length {min_length} is above --max-length {max_length}")
    write_sample(output, records=records, shortest=min_length, longest=max_length, seed=seed)
    if as_json:
        print_json({"output": str(output), "records": records})
    else:
        print(f"{output}: {records:,} records of {min_length:,} to {max_length:,} words")


def _show(result: Converted, output: Path, repeat: int, unit: str) -> None:
    print(f"{result.selected:,} records chosen, lengths {result.shortest:g} to {result.longest:g} ({unit})")
    times = f"each {repeat} times" if repeat > 1 else "each once"
    if result.conversations is None:
        print(f"{output}: {result.written:,} questions, {times}")
    else:
        print(f"{output}: {result.conversations:,} conversations of {result.written:,} questions, {times}")
    if result.left_over:
        print(f"left over: {result.left_over} questions that do not fill a conversation")
    for line in result.skips.lines():
        print(f"skipped or changed: {line}")
    for note in result.notes:
        print(f"note: {note}")


@contextlib.contextmanager
def _progress(inputs: tuple[Path, ...], *, quiet: bool) -> Iterator[FileProgress | None]:
    """A bar over the bytes of all inputs, when somebody can see it."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    sizes = {path: path.stat().st_size if path.is_file() else 0 for path in inputs}
    bar = Progress(
        BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True
    )
    with bar:
        task = bar.add_task("", total=sum(sizes.values()))
        done = dict.fromkeys(inputs, 0)

        def tell(path: Path, size: int) -> None:
            done[path] = size
            bar.update(task, completed=sum(done.values()))

        yield tell
