"""A private mount namespace, and the few ways to change what a process sees in it.

Nothing here touches the host: the namespace's mounts do not propagate out and vanish with its last process.
Works as root, and as an ordinary user where the kernel allows user namespaces. Linux only, standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from kvtierd.errors import EmulatorError

STAGING = Path("/dev/shm")  # noqa: S108 - a mount point, not a place for files
"""Where ``mirror`` assembles a directory before it moves it into place: a directory that every host has and
that the caller covers itself in the end."""

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_MS_NOSUID, _MS_NODEV = 0x2, 0x4
_MS_BIND, _MS_MOVE, _MS_REC, _MS_PRIVATE = 0x1000, 0x2000, 0x4000, 0x40000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)


def enter_private_namespace() -> None:
    """Gives the calling process a mount namespace of its own, from which nothing propagates.

    Root unshares the mount namespace; an ordinary user (or a root without the capability) unshares a user
    namespace with it, in which its own user and group ids stay what they are. The process must be
    single-threaded.

    Raises:
        EmulatorError: The kernel does not allow it (``emulator.namespace``); ``why`` names its reason.
    """
    uid, gid = os.geteuid(), os.getegid()
    if uid != 0 or not _unshare(_CLONE_NEWNS):
        if not _unshare(_CLONE_NEWUSER | _CLONE_NEWNS):
            raise _denied("unshare", ctypes.get_errno())
        _map_own_ids(uid, gid)
    _mount("none", Path("/"), "", _MS_REC | _MS_PRIVATE)


def bind(source: Path, target: Path) -> None:
    """Shows ``source`` (a file or a directory, with what is mounted below it) at the existing ``target``."""
    _mount(str(source), target, "", _MS_BIND | _MS_REC)


def mirror(directory: Path, *, add: Mapping[str, Path], hide: Collection[str] = ()) -> None:
    """Replaces ``directory`` by a copy whose entries are the old ones, plus private additions.

    The copy is a fresh tmpfs. Every top-level entry of the old directory is bound into it (symbolic links are
    made anew), so what exists now stays visible and live; entries made later at the top level are private.

    Args:
        directory: An absolute path without symbolic links.
        add: Name -> file or directory to show under that name, in place of an old entry if there is one.
        hide: Names of old entries to leave out.
    """
    mode = stat.S_IMODE(directory.stat().st_mode)
    _mount("tmpfs", STAGING, "tmpfs", _MS_NOSUID | _MS_NODEV, f"mode={mode:o}")
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name not in hide and entry.name not in add:
                _mirror_entry(entry, STAGING / entry.name)
    for name, source in add.items():
        _make_mount_point(STAGING / name, is_directory=source.is_dir())
        bind(source, STAGING / name)
    _mount(str(STAGING), directory, "", _MS_MOVE)


def _mirror_entry(entry: os.DirEntry[str], target: Path) -> None:
    try:
        if entry.is_symlink():
            target.symlink_to(Path(entry.path).readlink())
            return
        _make_mount_point(target, is_directory=entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return  # gone since the directory was listed
    try:
        _mount(entry.path, target, "", _MS_BIND | _MS_REC)
    except EmulatorError:
        if Path(entry.path).exists():
            raise
        # Gone as well: other processes' temporary files come and go.
        target.rmdir() if target.is_dir() else target.unlink()


def _make_mount_point(target: Path, *, is_directory: bool) -> None:
    if is_directory:
        target.mkdir()
    else:
        target.touch()


def _map_own_ids(uid: int, gid: int) -> None:
    try:
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1", encoding="ascii")
    except OSError as error:
        raise _denied(f"writing {error.filename}", error.errno or 0) from error


def _unshare(flags: int) -> bool:
    return int(_libc.unshare(ctypes.c_int(flags))) == 0


def _mount(source: str, target: Path, kind: str, flags: int, data: str = "") -> None:
    result = _libc.mount(
        os.fsencode(source), os.fsencode(target), kind.encode(), flags, data.encode() or None
    )
    if result != 0:
        raise _denied(f"mounting {source} on {target}", ctypes.get_errno())


def _denied(what: str, number: int) -> EmulatorError:
    why, hint = explain(number, _read_sysctl, root=os.geteuid() == 0)
    return EmulatorError(
        f"the emulation cannot have a private mount namespace: {what}: {os.strerror(number)}",
        why=why,
        hint=hint,
        code="emulator.namespace",
    )


def explain(number: int, read_sysctl: Callable[[str], str | None], *, root: bool) -> tuple[str, str]:
    """Why the kernel refused a namespace or a mount, and what to do: (why, hint), either may be empty.

    Args:
        number: The errno.
        read_sysctl: Path below /proc/sys -> its value, ``None`` if the kernel does not have it.
        root: Whether the process is root.
    """
    if number == errno.ENOSPC or read_sysctl("user/max_user_namespaces") == "0":
        return (
            "user.max_user_namespaces or user.max_mnt_namespaces is used up or 0",
            "raise it with sysctl, or run as root",
        )
    if number not in (errno.EPERM, errno.EACCES):
        return "", ""
    if not root and read_sysctl("kernel/unprivileged_userns_clone") == "0":
        return (
            "this kernel forbids user namespaces to ordinary users (kernel.unprivileged_userns_clone = 0)",
            "run as root, or set that sysctl to 1",
        )
    if not root and read_sysctl("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return (
            "AppArmor restricts user namespaces of ordinary users (kernel.apparmor_restrict_unprivileged_userns = 1)",
            "run as root, or set that sysctl to 0",
        )
    return (
        "the kernel, or the container this runs in, does not allow it",
        "run as root outside a container, or give the container CAP_SYS_ADMIN and a seccomp profile with unshare and mount",
    )


def _read_sysctl(name: str) -> str | None:
    try:
        return (Path("/proc/sys") / name).read_text(encoding="ascii").strip()
    except OSError:
        return None
