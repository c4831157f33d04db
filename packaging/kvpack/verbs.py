"""kvtierctl's verbs, options and help, read from the command line itself."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from pathlib import Path
from typing import Any, get_args

import typer

from kvtierd.cli.app import app

PROGRAM = "kvtierctl"


@dataclasses.dataclass(frozen=True, slots=True)
class Param:
    """One option (``opts`` begin with a dash) or argument of a verb."""

    opts: tuple[str, ...]
    help: str
    metavar: str
    takes_value: bool
    choices: tuple[str, ...] = ()
    required: bool = False
    multiple: bool = False
    is_file: bool = False

    @property
    def is_option(self) -> bool:
        """Whether it is written with dashes."""
        return self.opts[0].startswith("-")


@dataclasses.dataclass(frozen=True, slots=True)
class Verb:
    """One verb: its words ("status", or "conf check"), its help text, and what it takes."""

    words: tuple[str, ...]
    help: str
    params: tuple[Param, ...]

    @property
    def options(self) -> tuple[Param, ...]:
        """What is written with dashes, --help included."""
        return (*(p for p in self.params if p.is_option), HELP)

    @property
    def arguments(self) -> tuple[Param, ...]:
        """What is written by its place."""
        return tuple(p for p in self.params if not p.is_option)

    @property
    def summary(self) -> str:
        """The first sentence of the help text."""
        first = " ".join(self.help.split("\n\n")[0].split())
        return first.split(". ")[0].rstrip(".")


HELP = Param(("--help", "-h"), "Show help.", "", takes_value=False)


def program_help() -> str:
    """What kvtierctl says about itself."""
    return str(typer.main.get_command(app).help or "")


def global_params() -> tuple[Param, ...]:
    """Options before the verb, without those that only install completion: the packages bring it."""
    params: list[Any] = typer.main.get_command(app).params
    return tuple(_param(p) for p in params if "completion" not in str(p.name))


def verbs() -> tuple[Verb, ...]:
    """All verbs in the order kvtierctl lists them."""
    return tuple(_walk(typer.main.get_command(app), ()))


def _walk(command: Any, words: tuple[str, ...]) -> list[Verb]:
    children = getattr(command, "commands", None)
    if children is None:
        return [Verb(words, inspect.cleandoc(command.help or ""), tuple(_param(p) for p in command.params))]
    return [verb for name, child in children.items() for verb in _walk(child, (*words, name))]


def _param(param: Any) -> Param:
    kind = param.type_descriptor.annotation
    kinds = get_args(kind) or (kind,)
    choices = tuple(
        str(member.value)
        for each in kinds
        if isinstance(each, type) and issubclass(each, enum.Enum)
        for member in each
    )
    flag = bool(getattr(param, "is_flag", False))
    opts = tuple(sorted((*param.opts, *param.secondary_opts), key=len, reverse=True))
    metavar = param.metavar or ("|".join(choices) if choices else str(param.name).upper())
    return Param(
        opts=opts,
        help=" ".join(str(param.help or "").split()),
        metavar="" if flag else metavar,
        takes_value=not flag,
        choices=choices,
        required=bool(param.required),
        multiple=param.nargs == -1 or bool(param.multiple),
        is_file=Path in kinds,
    )
