"""Files that hold one generated secret: drawing it, keeping it, reading it. The secret is the file's last word.

Imports little on purpose: the shim of a unit reads them too.
"""

from __future__ import annotations

import os
import stat

MASK = "***"
MOST_BYTES = 4096
SHORTEST_SECRET_CHARS = 16
# What may stand in "Authorization: Bearer".
_LETTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~+/=")


def new_secret() -> str:
    """256 random bits as letters, digits, ``-`` and ``_``.

    It begins with a letter: it must be mistaken neither for an option nor, in YAML, for a number.
    """
    import secrets  # not for the shims

    return "k" + secrets.token_urlsafe(32)


def read_secret(path: str) -> str:
    """The secret in this file.

    Raises:
        OSError: it cannot be read, or is a link.
        ValueError: it is not a private file with a secret in it; the text says what it is, never what it holds.
    """
    words = _read(path).split()
    if not words or not _is_secret(words[-1]):
        raise ValueError("its last word is not a secret")
    return words[-1]


def kept_secret(path: str, before: str, after: str) -> str | None:
    """The secret between these texts in a file that holds nothing else; ``None`` when that is not what is there."""
    try:
        text = _read(path)
    except (OSError, ValueError):
        return None
    secret = text[len(before) : len(text) - len(after)]
    return secret if text == before + secret + after and _is_secret(secret) else None


def _is_secret(word: str) -> bool:
    return len(word) >= SHORTEST_SECRET_CHARS and set(word) <= _LETTERS


def _read(path: str) -> str:
    """The text of a real file that only its owner can use.

    It belongs to the user of a unit, who might put a link to somebody else's file in its place.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a file")
        if status.st_mode & 0o077:
            raise ValueError(f"its mode {stat.S_IMODE(status.st_mode):04o} lets others use it")
        data = os.read(descriptor, MOST_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > MOST_BYTES:
        raise ValueError(f"it is longer than {MOST_BYTES} bytes")
    return data.decode("ascii", errors="replace")
