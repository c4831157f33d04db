"""The engine's options: one table for the command line, for ``[[engine]] args`` and for their checks.

Importing this module imports neither numpy nor aiohttp: the daemon does it, and the server does it before it sets the
number of BLAS threads.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from kvtierd.quantities import MIB, parse_duration, parse_size
from kvtierd_refengine import NOTICE, __version__

Parser = Callable[[object], Any]

_NAMESPACE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
FATAL_PREFIX: Final = "refengine: fatal:"
"""Starts the last line of a server that no retry can help."""


def _integer(lowest: int, highest: int) -> Parser:
    def parse(value: object) -> int:
        if isinstance(value, str):
            try:
                value = int(value)
            except ValueError:
                raise ValueError(f"expected a whole number, got {value!r}") from None
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"expected a whole number, got {value!r}")
        if not lowest <= value <= highest:
            raise ValueError(f"expected {lowest} to {highest}, got {value}")
        return value

    return parse


def _size(lowest: int, highest: int) -> Parser:
    def parse(value: object) -> int:
        size_bytes = parse_size(value)
        if not lowest <= size_bytes <= highest:
            raise ValueError(f"expected {lowest} to {highest} bytes, got {size_bytes}")
        return size_bytes

    return parse


def _duration(lowest: float, highest: float) -> Parser:
    def parse(value: object) -> float:
        seconds = parse_duration(value)
        if not lowest <= seconds <= highest:
            raise ValueError(f"expected {lowest:g} s to {highest:g} s, got {seconds:g} s")
        return seconds

    return parse


def _choice(*choices: str) -> Parser:
    def parse(value: object) -> str:
        if value not in choices:
            raise ValueError(f"expected one of {', '.join(choices)}, got {value!r}")
        return str(value)

    return parse


def _switch(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if value in {"on", "off"}:
        return value == "on"
    raise ValueError(f'expected "on" or "off", got {value!r}')


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ValueError(f"expected a non-empty text, got {value!r}")
    return value


def _namespace(value: object) -> str:
    """Part of every key, so it may not hold the keys' separator."""
    if not isinstance(value, str) or not _NAMESPACE.fullmatch(value):
        raise ValueError(f"expected up to 64 letters, digits, dots, dashes, underscores, got {value!r}")
    return value


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One option: ``name`` as on the command line without dashes, ``default`` as an operator would write it."""

    name: str
    parse: Parser
    default: str
    help: str
    ours: bool = False  # set by kvtierd: refused in [[engine]] args

    @property
    def field(self) -> str:
        """The name in :class:`EngineOptions`."""
        return self.name.replace("-", "_")


OPTIONS: Final[tuple[Option, ...]] = (
    Option("host", _text, "127.0.0.1", "address to listen on", ours=True),
    Option("port", _integer(1, 65535), "8100", "port to listen on", ours=True),
    Option("served-model-name", _text, "refengine", "name in /v1/models and in requests", ours=True),
    Option("preset", _choice("base", "tiny"), "base", "size of the model: base, or tiny for tests"),
    Option("seed", _integer(0, 2**32 - 1), "0", "seed of the weights: another seed is another model"),
    Option("block-size", _integer(8, 512), "64", "tokens in a KV block"),
    Option("max-model-len", _integer(16, 65536), "4096", "most tokens of prompt and answer together"),
    Option("max-num-seqs", _integer(1, 64), "4", "requests computed in turns; further ones wait"),
    Option("max-queue", _integer(1, 10_000), "64", "requests that may wait; further ones get 429"),
    Option("max-body", _size(1024, 64 * MIB), "1MiB", "largest request body; larger ones get 413"),
    Option("l1", _size(64 * 1024, 2**40), "64MiB", "size of the L1 block cache"),
    Option("prefix-cache", _switch, "on", "off: no prompt is looked up in L1; for comparisons"),
    Option("threads", _integer(1, 256), "1", "threads for matrix products (OpenBLAS, OpenMP)"),
    Option("l3", _switch, "off", "on: use the MemCache pool of MMC_LOCAL_CONFIG_PATH as L3"),
    Option("l3-switch", _switch, "off", "on: PUT and DELETE /l3 take L3 on and off", ours=True),
    Option("l3-namespace", _namespace, "refengine", "first part of every key in the pool"),
    Option("l3-call-limit", _duration(0.01, 60), "1s", "how long a MemCache call may hold up a request"),
    Option("l3-cooldown", _duration(0.01, 600), "5s", "how long L3 is skipped after a failed call"),
    Option("l3-init-deadline", _duration(0.1, 600), "10s", "serve without L3 when joining takes longer"),
    Option("l3-save-queue", _integer(1, 100_000), "128", "blocks that may wait to be saved to L3"),
    Option("stats-interval", _duration(0.1, 3600), "10s", "how often the hit-rate line is logged"),
    Option("drain", _duration(0, 600), "10s", "how long SIGTERM waits for running requests"),
)
_BY_FIELD: Final = {option.field: option for option in OPTIONS}


@dataclasses.dataclass(frozen=True, slots=True)
class EngineOptions:
    """All options, parsed: sizes in bytes, durations in seconds."""

    host: str
    port: int
    served_model_name: str
    preset: str
    seed: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_queue: int
    max_body: int
    l1: int
    prefix_cache: bool
    threads: int
    l3: bool
    l3_switch: bool
    l3_namespace: str
    l3_call_limit: float
    l3_cooldown: float
    l3_init_deadline: float
    l3_save_queue: int
    stats_interval: float
    drain: float


def options(**changes: Any) -> EngineOptions:
    """The defaults with some fields replaced by parsed values; for tests and embedding."""
    values = {option.field: option.parse(option.default) for option in OPTIONS}
    return EngineOptions(**(values | changes))


@dataclasses.dataclass(frozen=True, slots=True)
class ArgProblem:
    """Why one entry of ``[[engine]] args`` is refused."""

    code: str
    message: str
    hint: str


def arguments_from(args: Mapping[str, Any]) -> tuple[list[str], list[ArgProblem]]:
    """Command-line arguments from ``[[engine]] args``, and what is wrong with them. Dashes and underscores are alike."""
    argv: list[str] = []
    problems: list[ArgProblem] = []
    seen: dict[str, str] = {}
    for written, value in args.items():
        field = written.replace("-", "_")
        option = _BY_FIELD.get(field)
        if option is None:
            problems.append(_unknown(written))
        elif field in seen:
            problems.append(
                ArgProblem(
                    "engine.arg-twice", f"args name {written!r} and {seen[field]!r}", "keep one of them"
                )
            )
        elif option.ours:
            hint = "set host, port, model or l3_switch of the engine instead"
            problems.append(
                ArgProblem("engine.arg-ours", f"args may not set {written!r}: kvtierd does", hint)
            )
        else:
            try:
                option.parse(value)
            except ValueError as error:
                problems.append(
                    ArgProblem("engine.arg-value", f"args.{written}: {error}", f"default: {option.default}")
                )
            else:
                text = ("on" if value else "off") if isinstance(value, bool) else str(value)
                argv += [f"--{option.name}", text]
        seen[field] = written
    return argv, problems


def _unknown(written: str) -> ArgProblem:
    known = [option.name for option in OPTIONS if not option.ours]
    nearest = difflib.get_close_matches(written.replace("_", "-"), known, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(known)}"
    return ArgProblem("engine.arg-unknown", f"refengine has no argument {written!r}", hint)


def parse_command_line(argv: Sequence[str]) -> EngineOptions:
    """The options on a command line. Exits 2 with a message when they are wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m kvtierd_refengine.server",
        description=NOTICE,
        epilog='Sizes are written "64MiB", durations "500ms" or "10s".',
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvtierd-refengine {__version__}")
    for option in OPTIONS:
        parser.add_argument(
            f"--{option.name}",
            dest=option.field,
            type=_for_argparse(option.parse),
            default=option.default,
            metavar=option.name.rpartition("-")[2].upper(),
            help=f"{option.help} (default: {option.default})",
        )
    return EngineOptions(**vars(parser.parse_args(argv)))


def _for_argparse(parse: Parser) -> Parser:
    def convert(value: object) -> Any:
        try:
            return parse(value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert
