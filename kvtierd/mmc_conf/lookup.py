"""Finding keys in the table, and the known key that a wrong one was meant to be."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable
from functools import cache

from kvtierd.mmc_conf.keys import KEYS
from kvtierd.mmc_conf.keyspec import PREFIX, UBSIO_PREFIX, FileKind, KeySpec
from kvtierd.mmc_conf.ubsio import UBSIO_KEYS
from kvtierd.mmc_conf.versions import MmcVersion

_LONGEST_COMPARED_CHARS = 200
# Letters of other scripts that look like Latin ones and occur in keys.
_LOOKALIKES = str.maketrans("аеорсухкмтвіѕԁɡοαερκνιυ", "aeopcyxkmtbisdgoaepkviu")
_TABLE = {(kind, spec.name): spec for spec in (*KEYS, *UBSIO_KEYS) for kind in spec.kinds}


def find_key(kind: FileKind, name: str) -> KeySpec | None:
    """The key of this name in this kind of file, in any release."""
    return _TABLE.get((kind, name))


@cache
def keys_of(kind: FileKind, version: MmcVersion) -> tuple[KeySpec, ...]:
    """All keys that this file may hold in this release, in the table's order."""
    return tuple(spec for (of, _), spec in _TABLE.items() if of == kind and spec.known_in(version))


def has_known_prefix(name: str) -> bool:
    """Whether MemCache from 1.2 on looks at the key at all; it drops every other one without a word."""
    return name.startswith((PREFIX, UBSIO_PREFIX))


def nearest_key(name: str, kind: FileKind, version: MmcVersion) -> str | None:
    """The known key that was probably meant, or None.

    Case, quotes, invisible and look-alike characters, hyphens for underscores and a missing or misspelt prefix do
    not count as differences.
    """
    return nearest(name, (spec.name for spec in keys_of(kind, version)))


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The name of ``known`` that is most like ``name``, or None when none is much like it."""
    wanted = _plain(name)
    if not wanted:
        return None
    by_plain: dict[str, str] = {}
    for candidate in known:
        by_plain.setdefault(_plain(candidate), candidate)
    if wanted in by_plain:
        return by_plain[wanted]
    close = difflib.get_close_matches(wanted, by_plain, n=1, cutoff=0.72)
    return by_plain[close[0]] if close else None


def _plain(name: str) -> str:
    """What remains of a key when everything that people get wrong is taken away."""
    words = unicodedata.normalize("NFKC", name[:_LONGEST_COMPARED_CHARS]).split()
    text = words[-1].lower().translate(_LOOKALIKES) if words else ""  # the last word: "export KEY"
    text = "".join(c for c in text.replace("-", "_") if c.isalnum() or c in "._")
    for prefix in (PREFIX, "ock.", "mmc."):
        text = text.removeprefix(prefix)
    return text
