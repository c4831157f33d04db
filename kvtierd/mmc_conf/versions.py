"""Which releases of MemCache the key table knows, and how a written version is read."""

from __future__ import annotations

import re
from typing import NamedTuple

from kvtierd.errors import ConfError


class MmcVersion(NamedTuple):
    """A release of MemCache: ``str(MmcVersion(1, 3, 0)) == "1.3.0"``. Ordered by age."""

    major: int
    minor: int
    patch: int = 0

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


KNOWN_VERSIONS: tuple[MmcVersion, ...] = (
    *(MmcVersion(1, 0, patch) for patch in range(5)),
    *(MmcVersion(1, 1, patch) for patch in range(7)),
    *(MmcVersion(1, 2, patch) for patch in range(2)),
    MmcVersion(1, 3, 0),
)
"""Every release on PyPI that the key table was made from, oldest first."""

_VERSION = re.compile(r"\s*v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?(?:[-.+]?[A-Za-z][\w.+-]*)?\s*")


def resolve_version(text: str | MmcVersion, *, assume: str | None = None) -> MmcVersion:
    """The known release that stands for ``text``.

    "1.3" means the newest known patch of 1.3, and so does a patch newer than the newest known one. A minor
    version that is not known is refused, since MemCache ends on a key it does not know; the caller may name
    the known release to use in its place.

    Args:
        text: A version as ``importlib.metadata`` gives it: "1.3.0", "1.3", "1.2.1.post1".
        assume: The known version to use when ``text`` is unknown.

    Raises:
        ConfError: ``conf.version``: not a version, or unknown and ``assume`` does not help.
    """
    if isinstance(text, MmcVersion):
        text = str(text)
    match = _VERSION.fullmatch(text)
    if match:
        patches = [v for v in KNOWN_VERSIONS if v[:2] == (int(match[1]), int(match[2]))]
        if patches:
            newest = patches[-1]
            return min(newest, newest._replace(patch=int(match[3]))) if match[3] else newest
    if assume is not None:
        return resolve_version(assume)
    nearest = _nearest(match)
    raise ConfError(
        f"MemCache {text!r} is not a version that kvtierd knows; known are {KNOWN_VERSIONS[0]} to {KNOWN_VERSIONS[-1]}",
        why="an older or newer MemCache may refuse to start because of a key it does not know",
        hint=f"to use the keys of the nearest known version, say so: {nearest}",
        code="conf.version",
    )


def _nearest(match: re.Match[str] | None) -> MmcVersion:
    if match is None:
        return KNOWN_VERSIONS[-1]
    wanted = (int(match[1]), int(match[2]), 0)
    return KNOWN_VERSIONS[0] if wanted < KNOWN_VERSIONS[0] else KNOWN_VERSIONS[-1]
