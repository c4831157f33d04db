"""PURE: pictures as JSON and back, one a line: to record what a node saw, and to try a policy on it.

What is ``None`` or as by default is left out. Unknown keys are passed over, so that a recording of a later version can be
read; a value of another kind than the picture has is an error.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import json
import types
import typing
from typing import Any

from kvtierd.errors import StateError
from kvtierd.observe.picture import Picture


def picture_to_json(picture: Picture) -> dict[str, Any]:
    """The picture as JSON values."""
    kept = _plain(picture)
    assert isinstance(kept, dict)
    return kept


def picture_line(picture: Picture) -> str:
    """The picture as one line of JSON, without its end."""
    return json.dumps(picture_to_json(picture), separators=(",", ":"))


def picture_from_json(kept: Any) -> Picture:
    """The picture again.

    Raises:
        StateError: ``state.picture-unreadable``: which value is wrong.
    """
    try:
        picture = _object(Picture, kept, "")
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(
            f"a recorded picture cannot be read: {error}", code="state.picture-unreadable"
        ) from error
    assert isinstance(picture, Picture)
    return picture


def read_line(line: str, number: int) -> Picture:
    """One line of a recording.

    Raises:
        StateError: ``state.picture-unreadable``, with the line's number.
    """
    try:
        return picture_from_json(json.loads(line))
    except (StateError, ValueError, RecursionError) as error:
        told = error.message if isinstance(error, StateError) else str(error)
        raise StateError(
            f"line {number} is not a recorded picture",
            why=told,
            hint="a recording has one picture as JSON on every line",
            code="state.picture-unreadable",
        ) from error


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {}
        for field in dataclasses.fields(value):
            each = getattr(value, field.name)
            if each is not None and each != _default(field):
                found[field.name] = _plain(each)
        return found
    if isinstance(value, collections.abc.Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return dataclasses.MISSING


@functools.cache
def _fields(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _object(kind: type, kept: Any, where: str) -> Any:
    if not isinstance(kept, dict):
        raise TypeError(f"{where or 'the picture'} is not an object")
    values = {
        name: _value(hint, kept[name], f"{where}.{name}".lstrip("."))
        for name, hint in _fields(kind).items()
        if name in kept
    }
    return kind(**values)


def _value(hint: Any, kept: Any, where: str) -> Any:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in {typing.Union, types.UnionType}:
        return None if kept is None else _value(next(i for i in inner if i is not type(None)), kept, where)
    if dataclasses.is_dataclass(hint):
        return _object(typing.cast("type", hint), kept, where)
    if origin is tuple:
        if not isinstance(kept, list):
            raise TypeError(f"{where} is not a list")
        return tuple(_value(inner[0], each, f"{where}[{i}]") for i, each in enumerate(kept))
    if origin is collections.abc.Mapping:
        if not isinstance(kept, dict):
            raise TypeError(f"{where} is not an object")
        return {
            (int(key) if inner[0] is int else key): _value(inner[1], each, f"{where}.{key}")
            for key, each in kept.items()
        }
    if hint is float and isinstance(kept, int) and not isinstance(kept, bool):
        return float(kept)
    if not isinstance(kept, hint) or (isinstance(kept, bool) and hint is not bool):
        raise TypeError(f"{where} is {kept!r}, not {hint.__name__}")
    return kept
