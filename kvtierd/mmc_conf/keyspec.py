"""What the key table says of a key: its files, type, range, defaults and the releases that know it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from kvtierd.mmc_conf.versions import MmcVersion

FileKind = Literal["meta", "local"]
KIND_NAMES: Mapping[FileKind, str] = {"meta": "mmc-meta.conf", "local": "mmc-local.conf"}
OTHER_KIND: Mapping[FileKind, FileKind] = {"meta": "local", "local": "meta"}

PREFIX = "ock.mmc."
UBSIO_PREFIX = "ubsio."

V1_0 = MmcVersion(1, 0, 0)
V1_0_1 = MmcVersion(1, 0, 1)
V1_0_2 = MmcVersion(1, 0, 2)
V1_1 = MmcVersion(1, 1, 0)
V1_1_3 = MmcVersion(1, 1, 3)
V1_2 = MmcVersion(1, 2, 0)
V1_2_1 = MmcVersion(1, 2, 1)
V1_3 = MmcVersion(1, 3, 0)
LAST_1_1 = MmcVersion(1, 1, 6)

INT32_MAX = 2**31 - 1
_T = TypeVar("_T")


class ValueType(enum.Enum):
    """How MemCache reads a value."""

    URL = "address"
    METRICS_URL = "HTTP address"
    ENDPOINT = "ZeroMQ endpoint"
    SIZE = "size"
    INT = "integer"
    BOOL = "boolean"
    ENUM = "choice"
    PATH = "path"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class KeySpec:
    """One key.

    Attributes:
        name: The key as it is written.
        kinds: The files that may hold it.
        type: How its value is read.
        since: The first release that knows it.
        until: The last one, or None.
        defaults: What holds when it is not set, from a release on, oldest first. None: no default.
        low, high: The range of an integer, both included.
        choices: What a choice may be, from a release on, oldest first.
        required: The releases in which MemCache refuses a file without it: from, to (None: still).
        hot_since: From which release on a running process takes a change of it, by file.
        secret: The value itself must not be shown.
        max_bytes: The longest value.
        min_port: For addresses.
        note: What an operator should know.
    """

    name: str
    kinds: tuple[FileKind, ...]
    type: ValueType
    since: MmcVersion = V1_0
    until: MmcVersion | None = None
    defaults: tuple[tuple[MmcVersion, str | None], ...] = ()
    low: int | None = None
    high: int | None = None
    choices: tuple[tuple[MmcVersion, tuple[str, ...]], ...] = ()
    required: tuple[MmcVersion, MmcVersion | None] | None = None
    hot_since: Mapping[FileKind, MmcVersion] | None = None
    secret: bool = False
    max_bytes: int | None = None
    min_port: int = 1025
    note: str = ""

    def known_in(self, version: MmcVersion) -> bool:
        """Whether this release knows the key."""
        return self.since <= version and (self.until is None or version <= self.until)

    def default_in(self, version: MmcVersion) -> str | None:
        """What holds in this release when the key is not set."""
        return _at(self.defaults, version, None)

    def choices_in(self, version: MmcVersion) -> tuple[str, ...]:
        """What a choice may be in this release."""
        return _at(self.choices, version, ())

    def required_in(self, version: MmcVersion) -> bool:
        """Whether this release refuses a file without the key."""
        if self.required is None:
            return False
        first, last = self.required
        return first <= version and (last is None or version <= last)

    def hot_in(self, kind: FileKind, version: MmcVersion) -> bool:
        """Whether a running process of this release takes a change of the key in this file."""
        first = (self.hot_since or {}).get(kind)
        return first is not None and first <= version


def _at(steps: tuple[tuple[MmcVersion, _T], ...], version: MmcVersion, otherwise: _T) -> _T:
    found = otherwise
    for since, value in steps:
        if since <= version:
            found = value
    return found
