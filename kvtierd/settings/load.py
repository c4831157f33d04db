"""Reading settings: the file, its drop-ins, the environment; every problem with file, line, key and remedy.

Order, later wins: the file itself; ``conf.d/*.toml`` in its directory, by name; ``KVTIERD_<SECTION>__<KEY>``.
A drop-in's ``[[engine]]`` with a known name changes that engine, with a new name adds one.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from kvtierd.errors import SettingsError
from kvtierd.settings.locate import Path as KeyPath
from kvtierd.settings.locate import key_lines, line_of
from kvtierd.settings.model import Settings

DROP_IN_DIRECTORY = "conf.d"
MAX_FILE_BYTES = 1024 * 1024
RESERVED_ENVIRONMENT = frozenset({"KVTIERD_SETTINGS", "KVTIERD_SOCKET"})
_SECTIONS = frozenset(Settings.model_fields)


@dataclasses.dataclass(frozen=True, slots=True)
class SettingsProblem:
    """One thing that is wrong: where, what, and what would be right. ``line`` counts from 1."""

    file: str
    line: int | None
    key: str | None
    code: str
    message: str
    hint: str

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        key = f" {self.key}:" if self.key else ""
        hint = f"\n    {self.hint}" if self.hint else ""
        return f"{place}:{key} {self.message}{hint}"


class InvalidSettingsError(SettingsError):
    """The settings are wrong; ``problems`` lists every reason."""

    code = "settings.invalid"

    def __init__(self, problems: tuple[SettingsProblem, ...]) -> None:
        what = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(f"the settings have {what}:\n" + "\n".join(str(p) for p in problems))
        self.problems = problems


def load_settings(file: Path, environment: Mapping[str, str] | None = None) -> Settings:
    """The validated settings.

    Raises:
        InvalidSettingsError: with every problem found.
    """
    settings, problems = check_settings(file, environment)
    if settings is None or problems:
        raise InvalidSettingsError(problems)
    return settings


def check_settings(
    file: Path, environment: Mapping[str, str] | None = None
) -> tuple[Settings | None, tuple[SettingsProblem, ...]]:
    """The settings if they are valid, and everything that is wrong with them. Never raises."""
    merged = _Merged()
    problems = merged.add_file(file)
    if not problems:
        for drop_in in _drop_ins(file):
            problems += merged.add_file(drop_in)
    environment = os.environ if environment is None else environment
    problems += _unknown_environment(environment)
    if problems:
        return None, tuple(problems)
    try:
        return _validate(merged.values, environment), ()
    except ValidationError as error:
        return None, tuple(_explain(detail, merged, environment) for detail in _deduplicate(error.errors()))


def _validate(values: dict[str, Any], environment: Mapping[str, str]) -> Settings:
    """The files' values with the environment laid over them."""
    if any(name.upper().startswith("KVTIERD_") and name not in RESERVED_ENVIRONMENT for name in environment):
        from kvtierd.settings.environment import environment_values

        values = _laid_over(values, environment_values(environment))
    return Settings.model_validate(values)


def _laid_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        mine = merged.get(key)
        merged[key] = _laid_over(mine, value) if isinstance(mine, dict) and isinstance(value, dict) else value
    return merged


def _drop_ins(file: Path) -> list[Path]:
    directory = file.parent / DROP_IN_DIRECTORY
    try:
        return sorted(p for p in directory.iterdir() if p.suffix == ".toml" and not p.name.startswith("."))
    except OSError:
        return []


class _Merged:
    """Values of all files so far, and where each came from."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._origin: dict[KeyPath, tuple[str, int | None]] = {}
        self._files: list[str] = []

    def add_file(self, file: Path) -> list[SettingsProblem]:
        name = str(file)
        self._files.append(name)
        text, problem = _read(file)
        if problem:
            return [problem]
        try:
            values = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            return [_syntax_problem(name, text, error)]
        lines = key_lines(text)
        self._merge((), self.values, values, name, lines, ())
        return []

    def origin(self, path: KeyPath) -> tuple[str, int | None]:
        """File and line of a key, or of the nearest parent that was written."""
        for end in range(len(path), 0, -1):
            if path[:end] in self._origin:
                return self._origin[path[:end]]
        return (self._files[0] if self._files else "", None)

    def _merge(
        self,
        into_path: KeyPath,
        into: dict[str, Any],
        new: dict[str, Any],
        file: str,
        lines: dict[KeyPath, int],
        file_path: KeyPath,
    ) -> None:
        for key, value in new.items():
            target, source = (*into_path, key), (*file_path, key)
            self._origin[target] = (file, line_of(lines, source))
            if isinstance(value, dict) and isinstance(into.get(key), dict):
                self._merge(target, into[key], value, file, lines, source)
            elif target == ("engine",) and isinstance(value, list):
                self._merge_engines(into.setdefault("engine", []), value, file, lines)
            else:
                into[key] = {} if isinstance(value, dict) else value
                if isinstance(value, dict):
                    self._merge(target, into[key], value, file, lines, source)

    def _merge_engines(self, into: Any, new: list[Any], file: str, lines: dict[KeyPath, int]) -> None:
        if not isinstance(into, list):
            return
        for index, engine in enumerate(new):
            name = engine.get("name") if isinstance(engine, dict) else None
            # Two engines of one name inside one file are a mistake and stay two, for validation to refuse.
            earlier = [i for i, e in enumerate(into) if isinstance(e, dict) and e.get("name") == name]
            position = (
                earlier[0] if earlier and self._origin.get(("engine", earlier[0]), ("",))[0] != file else None
            )
            if position is None:
                position = len(into)
                into.append({} if isinstance(engine, dict) else engine)
            self._origin[("engine", position)] = (file, line_of(lines, ("engine", index)))
            if isinstance(engine, dict):
                self._merge(("engine", position), into[position], engine, file, lines, ("engine", index))


def _read(file: Path) -> tuple[str, SettingsProblem | None]:
    def problem(code: str, message: str, hint: str) -> SettingsProblem:
        return SettingsProblem(str(file), None, None, code, message, hint)

    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return "", problem(
            "missing-file", "the file does not exist", "examples are in examples/ and in kvtierd.toml(5)"
        )
    except OSError as error:
        return "", problem(
            "unreadable-file", f"cannot be read: {error.strerror}", "check the path and its permissions"
        )
    if len(data) > MAX_FILE_BYTES:
        return "", problem(
            "too-large", f"is larger than {MAX_FILE_BYTES} bytes", "this is not a settings file"
        )
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n"), None
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        return "", SettingsProblem(
            str(file),
            line,
            None,
            "not-utf8",
            "contains bytes that are not UTF-8",
            "save the file as UTF-8 text",
        )


def _syntax_problem(file: str, text: str, error: tomllib.TOMLDecodeError) -> SettingsProblem:
    match = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
    line = int(match[1]) if match else text.count("\n") + 1
    message = re.sub(r"\s*\(at .*\)$", "", str(error))
    hint = "the file must be TOML: text values stand in quotes, tables in [brackets]"
    lines = text.splitlines()
    if 0 < line <= len(lines) and "=" in lines[line - 1] and "Invalid value" in message:
        key, value = (part.strip() for part in lines[line - 1].split("=", 1))
        hint = f'write text in quotes: {key} = "{value}"'
    return SettingsProblem(file, line, None, "syntax", message, hint)


def _unknown_environment(environment: Mapping[str, str]) -> list[SettingsProblem]:
    problems = []
    for name in sorted(environment):
        if not name.upper().startswith("KVTIERD_") or name in RESERVED_ENVIRONMENT:
            continue
        section = name[len("KVTIERD_") :].split("__")[0].lower()
        if section not in _SECTIONS:
            problems.append(
                SettingsProblem(
                    "environment", None, name, "unknown-key", f"no settings section is named {section!r}",
                    _nearest(section, _SECTIONS) or "the form is KVTIERD_<SECTION>__<KEY>, e.g. KVTIERD_POOL__DRAM",
                )
            )  # fmt: skip
    return problems


def _deduplicate(errors: list[ErrorDetails]) -> list[ErrorDetails]:
    """A union reports one error per member; keep the first per key, with all expectations joined."""
    seen: dict[tuple[str | int, ...], ErrorDetails] = {}
    for detail in errors:
        path = _key_path(detail["loc"])
        if path not in seen:
            seen[path] = detail
    return list(seen.values())


def _key_path(loc: tuple[str | int, ...]) -> KeyPath:
    """pydantic's location without the names of union members and validators that it appends."""
    path: list[str | int] = []
    model: type[BaseModel] | None = Settings
    for part in loc:
        if model is None and not isinstance(part, int) and path:
            break
        path.append(part)
        if isinstance(part, str) and model is not None:
            field = model.model_fields.get(part)
            model = _model_of(field) if field else None
        # an index keeps the element's model
    return tuple(path)


def _model_of(field: FieldInfo) -> type[BaseModel] | None:
    annotation = field.annotation
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    for candidate in candidates:
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _field_at(path: KeyPath) -> tuple[FieldInfo | None, type[BaseModel] | None]:
    """The field at a path, and the model that should have the path's last key."""
    model: type[BaseModel] | None = Settings
    parent: type[BaseModel] | None = Settings
    field: FieldInfo | None = None
    for part in path:
        if isinstance(part, int):
            continue
        parent = model
        field = model.model_fields.get(part) if model else None
        model = _model_of(field) if field else None
    return field, parent


def _explain(detail: ErrorDetails, merged: _Merged, environment: Mapping[str, str]) -> SettingsProblem:
    path = _key_path(detail["loc"])
    field, parent = _field_at(path)
    file, line = merged.origin(path)
    variable = "KVTIERD_" + "__".join(str(p) for p in path).upper()
    if variable in environment:
        file, line = f"environment variable {variable}", None
    key = ".".join(str(p) for p in path) or None
    kind = detail["type"]
    code, message, hint = "invalid-value", detail["msg"], _hint_for(field, path)
    if kind == "extra_forbidden":
        code, message = "unknown-key", f"unknown key {path[-1]!r}"
        hint = _unknown_hint(str(path[-1]), parent)
    elif kind == "missing":
        code, message = "missing-key", f"the key {path[-1]!r} is missing"
    elif kind == "value_error":
        message = detail["msg"].removeprefix("Value error, ")
    elif kind in {"literal_error", "enum"}:
        message = f"{_shown(detail)} is not allowed; allowed: {detail.get('ctx', {}).get('expected', '')}"
    elif kind.endswith(("_type", "_parsing")):
        message = f"{_shown(detail)} is not right here: {_plain(detail)}"
    else:
        message = f"{_shown(detail)}: {_plain(detail)}"
    return SettingsProblem(file, line, key, code, message, hint)


def _shown(detail: ErrorDetails) -> str:
    shown = repr(detail["input"])
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _hint_for(field: FieldInfo | None, path: KeyPath) -> str:
    if field is None:
        return ""
    parts = [field.description] if field.description else []
    if field.examples:
        examples = " or ".join(f"{path[-1]} = {_toml(e)}" for e in field.examples[:2])
        parts.append(f"for example: {examples}")
    return "; ".join(parts)


def _unknown_hint(key: str, parent: type[BaseModel] | None) -> str:
    known = set(parent.model_fields) if parent else set()
    near = _nearest(key, known)
    if near:
        return near
    homes = [
        f"[{section}]"
        for section, field in Settings.model_fields.items()
        if (model := _model_of(field)) is not None and key in model.model_fields
    ]
    if homes:
        return f"{key!r} belongs into {' or '.join(homes)}"
    return f"known keys here: {', '.join(sorted(known))}"


def _nearest(key: str, known: frozenset[str] | set[str]) -> str:
    near = difflib.get_close_matches(key.replace("-", "_").lower(), sorted(known), n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else ""


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, dict):
        return "{ " + ", ".join(f'"{k}" = {_toml(v)}' for k, v in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return str(value)


def _plain(detail: ErrorDetails) -> str:
    """pydantic's sentence without its opening "Input should be"."""
    text = detail["msg"]
    return (
        "must be" + text.removeprefix("Input should be")
        if text.startswith("Input should be")
        else text.lower()
    )
