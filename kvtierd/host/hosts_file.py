"""One marked line in a hosts file that leads a name to an address. Everything else in the file stays byte for byte.

The C library reads the file anew for every look-up, so a client that dials again finds the new address. A container has
a file of its own, mounted from the host: that is written in place, since a file renamed over it would not be seen inside.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import stat
from pathlib import Path
from typing import Final

from kvtierd.errors import HostError, StateError
from kvtierd.files import write_atomic

HOSTS_FILE: Final = Path("/etc/hosts")
MARK: Final = b"# kvtierd writes this line: the master's MetaService"
MOST_BYTES: Final = 4 * 1024 * 1024
_NAME = re.compile(r"[a-z0-9-]{1,63}(\.[a-z0-9-]{1,63})*", re.ASCII)
# Not to be had in the file's directory, or not over this file: it is mounted, or its directory is read-only for us.
_NO_RENAME = frozenset({errno.EBUSY, errno.EROFS, errno.EACCES, errno.EPERM, errno.EXDEV})


def with_alias(data: bytes, name: str, address: str | None) -> bytes:
    """The content with our line for ``name`` saying ``address`` (``None``: without our line). PURE.

    Our first line keeps its place; further ones of ours for the same name go.

    Raises:
        HostError: ``hosts.foreign-line``: somebody else's line has the name; ``hosts.name``: it cannot stand there.
    """
    if not _NAME.fullmatch(name) or (address is not None and not _is_address(address)):
        raise HostError(f"{name!r} at {address!r} cannot be a line of a hosts file", code="hosts.name")
    kept: list[bytes] = []
    place: int | None = None
    for line in _lines(data):
        if not _names(line, name):
            kept.append(line)
        elif MARK not in line:
            raise HostError(
                f"a line of the hosts file that is not kvtierd's has the name {name}",
                why=f"it says: {line.decode(errors='replace').strip()[:200]}",
                hint="take the name out of that line, or write [meta] host_alias = false",
                code="hosts.foreign-line",
            )
        elif place is None:
            place = len(kept)
    if address is None:
        return b"".join(kept)
    ours = f"{address}\t{name}\t".encode() + MARK + b"\n"
    if place is None:
        place = len(kept)
    if place == len(kept) and kept and not kept[-1].endswith(b"\n"):
        kept[-1] += b"\n"
    return b"".join((*kept[:place], ours, *kept[place:]))


def address_of(data: bytes, name: str) -> str | None:
    """What our line says of the name; ``None``: there is none."""
    for line in _lines(data):
        if MARK in line and _names(line, name):
            return line.split()[0].decode(errors="replace")
    return None


def _lines(data: bytes) -> list[bytes]:
    """Cut at line feeds alone: nothing else ends a line for the C library."""
    pieces = data.split(b"\n")
    return [p + b"\n" for p in pieces[:-1]] + ([pieces[-1]] if pieces[-1] else [])


def _names(line: bytes, name: str) -> bool:
    words = line.partition(b"#")[0].lower().split()
    return name.encode() in words[1:]


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def point_alias(name: str, address: str | None, *, path: Path = HOSTS_FILE, in_place: bool = False) -> bool:
    """Makes the file lead ``name`` to ``address`` (``None``: takes our line out). Whether anything was written.

    Args:
        name: The host name, in small letters.
        address: A number.
        path: The file; a link is followed.
        in_place: It is mounted somewhere else: no other file may take its place.

    Raises:
        HostError: as in :func:`with_alias`; ``hosts.unreadable``; ``hosts.read-only``: it cannot be written, and is as
            it was.
    """
    path = Path(os.path.realpath(path))
    before = _read(path)
    after = with_alias(before, name, address)
    if after == before:
        return False
    try:
        if in_place:
            _write_in_place(path, before, after)
        else:
            _replace(path, before, after)
    except OSError as error:
        raise _read_only(path, error) from error
    return True


def check_writable(path: Path = HOSTS_FILE) -> None:
    """Raises ``HostError`` (``hosts.read-only``, ``hosts.unreadable``) when our line could not be written there."""
    path = Path(os.path.realpath(path))
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError as error:
        raise _unreadable(path, error) from error
    except OSError as error:
        raise _read_only(path, error) from error


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise OSError(errno.EINVAL, "it is not a file")
            data = stream.read(MOST_BYTES + 1)
    except OSError as error:
        raise _unreadable(path, error) from error
    if len(data) > MOST_BYTES:
        raise _unreadable(path, OSError(errno.EFBIG, f"it has more than {MOST_BYTES} bytes"))
    return data


def _replace(path: Path, before: bytes, after: bytes) -> None:
    """By another file with the same mode, owner and attributes; in place where that cannot be."""
    status = path.stat()
    try:
        write_atomic(
            path,
            after,
            mode=stat.S_IMODE(status.st_mode),
            owner=(status.st_uid, status.st_gid),
            attributes=_attributes(path),
        )
    except StateError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        if error.__cause__.errno not in _NO_RENAME:
            raise error.__cause__ from None
        _write_in_place(path, before, after)


def _attributes(path: Path) -> dict[str, bytes]:
    """SELinux keeps its label in one."""
    found = {}
    for name in os.listxattr(path):
        with contextlib.suppress(OSError):
            found[name] = os.getxattr(path, name)
    return found


def _write_in_place(path: Path, before: bytes, after: bytes) -> None:
    """From the first byte that differs on. What was there is put back when it does not work (a full disk)."""
    shorter = min(len(before), len(after))
    start = next((i for i in range(shorter) if before[i] != after[i]), shorter)
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        try:
            _write_from(descriptor, after, start)
        except OSError:
            with contextlib.suppress(OSError):
                _write_from(descriptor, before, start)
            raise
    finally:
        os.close(descriptor)


def _write_from(descriptor: int, data: bytes, start: int) -> None:
    position = start
    while position < len(data):
        position += os.pwrite(descriptor, data[position:], position)
    os.ftruncate(descriptor, len(data))
    os.fsync(descriptor)


def _unreadable(path: Path, error: OSError) -> HostError:
    return HostError(f"{path} cannot be read: {error.strerror or error}", code="hosts.unreadable")


def _read_only(path: Path, error: OSError) -> HostError:
    return HostError(
        f"{path} cannot be written: {error.strerror or error}",
        why="the alias of the master stands there; kvtierd.service sees /etc read-only unless told otherwise",
        hint=f"systemctl edit kvtierd: [Service] ReadWritePaths={path}; or write [meta] host_alias = false",
        code="hosts.read-only",
    )
