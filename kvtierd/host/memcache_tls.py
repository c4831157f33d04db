"""Copies of certificate, key and OpenSSL that MemCache's own TLS accepts: real files, mode 0400 and 0500, one owner.

MemCache refuses links, a key that others can read, and libraries with a mode above 0500. They are copies in the runtime
directory, so that the originals keep the modes and links that whoever renews them likes.
"""

from __future__ import annotations

import os
import stat
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from kvtierd.errors import HostError
from kvtierd.files import write_atomic
from kvtierd.plan.model import MemcacheTls
from kvtierd.plan.tls import CA, CERT, KEY, LIBRARIES, OPENSSL

MOST_BYTES: Final = 64 * 1024 * 1024
VERSIONS: Final = (".3", "", ".1.1")
SYSTEM_DIRECTORIES: Final = ("/usr/lib64", "/usr/lib", "/lib64", "/usr/local/lib64", "/usr/local/lib")


def prepare_tls(
    tls: MemcacheTls, owner: tuple[int, int] | None, *, directories: Iterable[str] | None = None
) -> list[str]:
    """Makes the copies that differ from their originals; the paths written.

    Args:
        tls: What goes where.
        owner: Numbers of the user and group that MemCache runs as; ``None``: ours.
        directories: Where to look for OpenSSL; default: the settings' directory, else the system's.

    Raises:
        HostError: ``tls.unreadable``, ``tls.no-openssl``.
        StateError: a copy cannot be written.
    """
    directory = Path(tls.directory)
    libraries = directory / OPENSSL
    found = find_openssl((tls.openssl,) if tls.openssl else (directories or _system_directories()))
    for made in (directory, libraries):
        made.mkdir(mode=0o700, parents=True, exist_ok=True)
        made.chmod(0o500 if owner is not None else 0o700)
        if owner is not None:
            os.chown(made, *owner)
    # In this order: the key comes last, so that a certificate without its key is seen for the shortest time.
    copies = [(Path(tls.ca), directory / CA, 0o400), (Path(tls.cert), directory / CERT, 0o400)]
    copies += [(source, libraries / name, 0o500) for name, source in zip(LIBRARIES, found, strict=True)]
    copies.append((Path(tls.key), directory / KEY, 0o400))
    return [str(target) for source, target, mode in copies if _copy(source, target, mode, owner)]


def find_openssl(directories: Iterable[str]) -> tuple[Path, Path]:
    """The files of libssl and libcrypto, of one version and one directory.

    Raises:
        HostError: ``tls.no-openssl``.
    """
    looked = list(directories)
    for directory in looked:
        for version in VERSIONS:
            ssl, crypto = (Path(directory) / f"{name}{version}" for name in LIBRARIES)
            if ssl.is_file() and crypto.is_file():
                return ssl, crypto
    raise HostError(
        f"libssl.so.3 and libcrypto.so.3 are not in {', '.join(looked)}",
        why="MemCache's TLS loads OpenSSL from a directory of its own",
        hint="install OpenSSL 3's libraries, or name where they are: [meta] openssl",
        code="tls.no-openssl",
    )


def _system_directories() -> tuple[str, ...]:
    multiarch = sysconfig.get_config_var("MULTIARCH")
    return (*((f"/usr/lib/{multiarch}",) if multiarch else ()), *SYSTEM_DIRECTORIES)


def _copy(source: Path, target: Path, mode: int, owner: tuple[int, int] | None) -> bool:
    try:
        with source.open("rb") as stream:
            data = stream.read(MOST_BYTES + 1)
    except OSError as error:
        raise HostError(
            f"{source} cannot be read: {error.strerror}",
            hint="certificates are made by: kvtierctl certs; their places are in [cluster] tls",
            code="tls.unreadable",
        ) from error
    if len(data) > MOST_BYTES:
        raise HostError(f"{source} is too long for what it should be", code="tls.unreadable")
    if _is_same(target, data, mode, owner):
        return False
    write_atomic(target, data, mode=mode, owner=owner)
    return True


def _is_same(target: Path, data: bytes, mode: int, owner: tuple[int, int] | None) -> bool:
    try:
        status = target.lstat()
        return (
            stat.S_ISREG(status.st_mode)
            and stat.S_IMODE(status.st_mode) == mode
            and (owner is None or (status.st_uid, status.st_gid) == owner)
            and status.st_size == len(data)
            and target.read_bytes() == data
        )
    except OSError:
        return False
