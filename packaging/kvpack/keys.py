"""The settings' sections and keys, read from their model: for the manual and the default file."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from kvtierd.quantities import format_size, parse_duration, parse_size
from kvtierd.settings import Settings


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """One key: its TOML type in words, its default as TOML (``None``: there is none), examples as TOML."""

    name: str
    kind: str
    default: str | None
    required: bool
    description: str
    examples: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """One table of the file: its header as written in TOML, what it is for, its keys."""

    header: str
    description: str
    keys: tuple[Key, ...]
    means_something: bool = False  # the header alone, without keys, is not the same as no header

    @property
    def repeated(self) -> bool:
        """Whether the table may stand in the file several times."""
        return self.header.startswith("[[")


def tables() -> tuple[Table, ...]:
    """All tables in the order of the model, tables within tables after the one they belong to."""
    found: list[Table] = []
    for name, field in Settings.model_fields.items():
        assert _model_of(field.annotation).model is not None, f"[{name}] is not a table"
        found += _tables(name, field)
    return tuple(found)


def _tables(path: str, field: FieldInfo) -> list[Table]:
    model, repeated, optional = _model_of(field.annotation)
    if model is None:
        return []
    header = f"[[{path}]]" if repeated else f"[{path}]"
    text = " ".join((model.__doc__ or "").split()).split(": ", 1)[-1]
    keys = tuple(
        _key(name, inner)
        for name, inner in model.model_fields.items()
        if _model_of(inner.annotation).model is None
    )
    found = [Table(header, text, keys, means_something=repeated or optional)]
    for name, inner in model.model_fields.items():
        found += _tables(f"{path}.{name}", inner)
    return found


def _key(name: str, field: FieldInfo) -> Key:
    assert field.description, f"{name} has no description"
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    size = _has(field, parse_size)
    duration = _has(field, parse_duration)
    return Key(
        name=name,
        kind=_kind(field, size=size, duration=duration),
        default=None if default is None else toml_value(default, size=size, duration=duration),
        required=field.is_required(),
        description=field.description,
        examples=tuple(toml_value(e) for e in field.examples or ()),
    )


def toml_value(value: Any, *, size: bool = False, duration: bool = False) -> str:
    """A value as TOML, on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if size and isinstance(value, int):
        return f'"{format_size(value).replace(" ", "")}"'
    if duration and isinstance(value, float):
        return f'"{value:g}s"'
    if isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, dict):
        inner = ", ".join(f"{_toml_key(k)} = {toml_value(v)}" for k, v in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(toml_value(v) for v in value)}]"
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def _toml_key(key: str) -> str:
    return key if key.replace("-", "").replace("_", "").isalnum() else f'"{key}"'


def _has(field: FieldInfo, function: object) -> bool:
    """Whether a value of this key is read by this function (sizes, durations)."""
    if any(getattr(part, "func", None) is function for part in field.metadata):
        return True
    return any(
        getattr(part, "func", None) is function
        for each in _alternatives(field.annotation)
        for part in getattr(each, "__metadata__", ())
    )


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in {typing.Union, types.UnionType}:
        return typing.get_args(annotation)
    return (annotation,)


class _Model(NamedTuple):
    """The model of a table, whether there can be several, and whether there can be none."""

    model: type[BaseModel] | None = None
    repeated: bool = False
    optional: bool = False


def _model_of(annotation: Any) -> _Model:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _Model(annotation)
    if typing.get_origin(annotation) is tuple:
        inner = typing.get_args(annotation)[0]
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            return _Model(inner, repeated=True)
    for each in _alternatives(annotation):
        if each is not annotation and isinstance(each, type) and issubclass(each, BaseModel):
            return _Model(each, optional=True)
    return _Model()


def _kind(field: FieldInfo, *, size: bool, duration: bool) -> str:
    if size:
        return "size"
    if duration:
        return "duration"
    parts = [_kind_of(each) for each in _alternatives(field.annotation) if each is not type(None)]
    limits = {
        name: getattr(part, name) for part in field.metadata for name in ("ge", "le") if hasattr(part, name)
    }
    text = " or ".join(parts)
    return f"{text} from {limits['ge']} to {limits['le']}" if {"ge", "le"} <= limits.keys() else text


def _kind_of(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        base, *metadata = typing.get_args(annotation)
        for part in metadata:
            if isinstance(part, FieldInfo):
                metadata += part.metadata
        limits = {n: getattr(p, n) for p in metadata for n in ("ge", "le") if hasattr(p, n)}
        text = _kind_of(base)
        return f"{text} from {limits['ge']} to {limits['le']}" if {"ge", "le"} <= limits.keys() else text
    if origin is Literal:
        return " | ".join(f'"{value}"' for value in typing.get_args(annotation))
    if origin is tuple:
        return f"list of {_plural(_kind_of(typing.get_args(annotation)[0]))}"
    if origin is dict:
        return "table"
    return {bool: "true or false", int: "number", float: "number", str: "text"}[annotation]


def _plural(kind: str) -> str:
    return kind.replace("text", "texts").replace("number", "numbers", 1)
