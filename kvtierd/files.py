"""Writing files so that nothing is ever half there: temporary file, fsync, rename, fsync of the directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from kvtierd.errors import StateError


def write_atomic(
    path: Path,
    data: bytes,
    *,
    mode: int = 0o644,
    owner: tuple[int, int] | None = None,
    attributes: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Replaces ``path`` by a real file with this content, as ``replacing`` does.

    ``owner`` is the numbers of the user and the group that get the file. ``attributes`` are extended ones, as far as the
    file system and our rights allow them.

    Raises:
        StateError: no space, no permission; the old content is then untouched. Its cause is the ``OSError``.
    """
    with replacing(path, mode=mode, owner=owner) as stream:
        stream.write(data)
        for name, value in attributes.items():
            with contextlib.suppress(OSError):
                os.setxattr(stream.fileno(), name, value)


@contextlib.contextmanager
def replacing(path: Path, *, mode: int = 0o644, owner: tuple[int, int] | None = None) -> Iterator[BinaryIO]:
    """A stream whose content becomes ``path`` at the end of the block; a reader sees the old or the new file, never a part.

    A symbolic link at ``path`` is replaced by the file, not followed: MemCache refuses links. Nobody else can read it
    before it has its mode. After an exception in the block the old file is untouched and nothing is left behind.

    Raises:
        StateError: for an ``OSError`` here or in the block, which is its cause.
    """
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(descriptor, "wb") as stream:
            yield stream
            stream.flush()
            if owner is not None:
                os.fchown(stream.fileno(), *owner)
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
        Path(temporary).replace(path)
        temporary = ""
        _sync_directory(path.parent)
    except OSError as error:
        raise _explained(path, error) from error
    finally:
        if temporary:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()


def aside_name(path: Path, mark: str, unix_seconds: float) -> Path:
    """A free name beside ``path`` for a file that cannot be used and must not be lost: ``NAME.MARK-DATE[-N]``."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(unix_seconds))
    first = target = path.with_name(f"{path.name}.{mark}-{stamp}")
    number = 1
    while target.exists():
        number += 1
        target = first.with_name(f"{first.name}-{number}")
    return target


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _explained(path: Path, error: OSError) -> StateError:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return StateError(
            f"no space to write {path}",
            why=error.strerror or "",
            hint="free space on that file system; the file is unchanged",
            code="state.full",
        )
    if error.errno in {errno.EROFS, errno.EACCES, errno.EPERM}:
        return StateError(
            f"{path} cannot be written",
            why=error.strerror or "",
            hint="check owner and mode of the directory, or choose others under [paths]",
            code="state.not-writable",
        )
    return StateError(f"{path} cannot be written", why=str(error), code="state.io")


class DirectoryLock:
    """An exclusive lock on a directory: two daemons must not work on one state.

    The lock is the kernel's (flock), so it ends with the process, however it ends.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / "kvtierd.lock"
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Takes the lock or says who has it.

        Raises:
            StateError: ``state.locked`` with the owner's process id, or why the directory cannot be used.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _explained(self._path, error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.read(descriptor, 64).decode(errors="replace").strip()
            os.close(descriptor)
            raise StateError(
                f"another kvtierd already works on {self._path.parent}"
                + (f" (pid {owner})" if owner else ""),
                hint="stop it first, or give this one directories of its own under [paths]",
                code="state.locked",
            ) from None
        self._descriptor = descriptor
        # The owner's number is only for the message; a full disk must not keep the lock from being taken.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())

    def release(self) -> None:
        """Gives the lock back."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
