"""Runs a command where MemCache finds the emulated driver and shares nothing with the host.

``python -m kvtierd.emulator.launch --root DIR [--] ARGV...`` enters a private mount namespace and becomes
ARGV: same process id, no process in between. The environment is passed on; it must hold what
``EmulatedDriver.env`` gives. What ARGV sees differs from the host in this, all of it private to DIR and shared
by everything launched with the same DIR:

====================================  ==========================================================================
/etc/ascend_install.info              names the emulated driver
/tmp/mmc_meta_service.lock            DIR/mmc_meta_service.lock: one MetaService per DIR instead of one per host
/dev/shm                              ``shm_dir_for(DIR)`` on the host, where the pool's memory is
/dev/hugepages                        an empty directory: the emulation never takes the host's hugepages
/var/log/memfabric_hybrid,            DIR/log/...
/var/log/memcache_hybrid
====================================  ==========================================================================

/etc, /tmp and /var/log otherwise show the host's entries as of the launch. Entries that ARGV makes at their top
level are private to it. The host is not touched, apart from DIR and ``shm_dir_for(DIR)``; ``cleanup`` removes
the latter when no unit of DIR runs any more.

Several emulated hosts of one pool: each has a DIR of its own, and in it a link ``memory-of`` to the DIR whose
/dev/shm they share. The MetaService's lock stays each host's own, as it is between real ones.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from kvtierd.emulator import namespace
from kvtierd.errors import EmulatorError, KvtierError, UsageError

EXIT_CANNOT_ENTER = 77
"""The namespace or the command could not be entered (sysexits EX_NOPERM)."""

META_LOCK_NAME = "mmc_meta_service.lock"
MEMORY_OF = "memory-of"
LOG_DIR_NAMES = ("memfabric_hybrid", "memcache_hybrid")
_SHM = Path("/dev/shm")  # noqa: S108 - where MemCache looks
_TMP = Path("/tmp")  # noqa: S108 - where MemCache looks
_HUGEPAGES = Path("/dev/hugepages")


def shm_dir_for(root: Path) -> Path:
    """The directory on the host that units launched with this root see as /dev/shm."""
    link = root / MEMORY_OF
    memory = link if link.is_symlink() else root
    digest = hashlib.sha256(os.fsencode(memory.resolve())).hexdigest()[:16]
    return _SHM / f"kvtierd-emulation-{digest}"


def cleanup(root: Path) -> None:
    """Removes ``shm_dir_for(root)`` with the pool's memory in it. Nothing else; missing is fine.

    Call it when no unit of this root runs any more: a running pool keeps its memory but new units would not
    find it.
    """
    import shutil  # here, since it would slow every launch down

    if (root / MEMORY_OF).is_symlink():
        return  # it is another root's
    directory = shm_dir_for(root)
    if directory.is_symlink() or not directory.is_dir():
        return
    shutil.rmtree(directory, ignore_errors=True)


def enter(root: Path, ascend_home: Path) -> None:
    """Puts the calling process into the emulation of ``root``; see the module's text. Cannot be undone.

    Raises:
        EmulatorError: The kernel does not allow it, or ``root`` or its shared memory cannot be used.
    """
    shm, lock, hugepages, install_info = _prepare(root, ascend_home)
    logs = root.resolve() / "log"
    try:
        working_directory = Path.cwd()
    except FileNotFoundError:
        working_directory = Path("/")  # it was deleted
    namespace.enter_private_namespace()
    namespace.mirror(Path("/etc").resolve(), add={"ascend_install.info": install_info})
    namespace.mirror(_TMP.resolve(), add={META_LOCK_NAME: lock})
    if Path("/var/log").is_dir():
        namespace.mirror(Path("/var/log").resolve(), add={name: logs / name for name in LOG_DIR_NAMES})
    if _HUGEPAGES.is_dir():
        namespace.bind(hugepages, _HUGEPAGES)
    namespace.bind(shm, _SHM)
    # The old working directory may lie below a mount that is now covered: look it up again.
    os.chdir(working_directory)


def _prepare(root: Path, ascend_home: Path) -> tuple[Path, Path, Path, Path]:
    """Makes what the namespace shows: (shared memory, lock file, empty directory, install info)."""
    root = root.resolve()
    if not (ascend_home / "driver" / "version.info").is_file():
        raise EmulatorError(
            f"{ascend_home} holds no emulated driver: driver/version.info is missing",
            why="ASCEND_HOME_PATH names it",
            hint="pass the environment of kvtierd.emulator.build.EmulatedDriver.env",
            code="emulator.driver",
        )
    if root.is_relative_to(_SHM):
        raise EmulatorError(
            f"the emulation root {root} lies in {_SHM}, which the emulation replaces",
            hint="choose another directory",
            code="emulator.root",
        )
    shm, lock, hugepages = shm_dir_for(root), root / META_LOCK_NAME, root / "hugepages"
    install_info = root / "ascend_install.info"
    try:
        for directory in (root, root / "log", hugepages):
            directory.mkdir(parents=True, exist_ok=True)
        # Units of one root may run as different users, as they share /tmp, /dev/shm and /var/log on a real host.
        for directory in (shm, *(root / "log" / name for name in LOG_DIR_NAMES)):
            _make_shared(directory, 0o1777)
        lock.touch(exist_ok=True)
        _chmod_if_owned(lock, 0o666)
        _write_install_info(install_info, ascend_home)
    except OSError as error:
        raise EmulatorError(
            f"cannot prepare the emulation root {root}: {error.strerror}: {error.filename}",
            hint="choose a directory that this user may write",
            code="emulator.root",
        ) from error
    return shm, lock, hugepages, install_info


def _make_shared(directory: Path, mode: int) -> None:
    """Makes a directory that other users may write. One that a stranger made at a guessable place is refused."""
    directory.mkdir(exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (0, os.geteuid()):
        raise EmulatorError(
            f"{directory} is not a directory of this user or root (owner uid {status.st_uid})",
            hint="remove it, or choose another emulation root",
            code="emulator.root",
        )
    _chmod_if_owned(directory, mode)


def _chmod_if_owned(path: Path, mode: int) -> None:
    if path.lstat().st_uid == os.geteuid():
        path.chmod(mode)


def _write_install_info(path: Path, ascend_home: Path) -> None:
    """Units start at the same time and write the same content: each renames a whole file into place."""
    content = f"Driver_Install_Path_Param={ascend_home}\n"
    if path.is_file() and path.read_text(encoding="utf-8") == content:
        return
    written = path.with_name(f".{path.name}.{os.getpid()}")
    written.write_text(content, encoding="utf-8")
    written.replace(path)


def _parse(argv: Sequence[str]) -> tuple[Path, list[str]]:
    """``--root DIR [--] ARGV...``, by hand: argparse would double the time that every launch takes."""
    rest = list(argv)
    if len(rest) >= 2 and rest[0] == "--root":
        root, rest = Path(rest[1]), rest[2:]
        if rest and rest[0] == "--":
            rest = rest[1:]
        if rest:
            return root, rest
    raise UsageError(
        "the emulation needs its directory and a command",
        hint="python -m kvtierd.emulator.launch --root DIR [--] COMMAND [ARGUMENT ...]",
    )


def launch(root: Path, argv: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Enters the emulation and becomes ``argv``. Returns only by raising ``EmulatorError``."""
    home = env.get("ASCEND_HOME_PATH", "")
    if not home:
        raise EmulatorError(
            "ASCEND_HOME_PATH is not set: where is the emulated driver?",
            hint="pass the environment of kvtierd.emulator.build.EmulatedDriver.env",
            code="emulator.driver",
        )
    enter(root, Path(home))
    try:
        os.execvpe(argv[0], list(argv), env)  # noqa: S606 - becoming the command is the point
    except OSError as error:
        raise EmulatorError(f"cannot run {argv[0]!r}: {error.strerror}", code="emulator.exec") from error


def main() -> NoReturn:
    """The command line: exits 77 when the emulation cannot be entered, 2 on a usage error."""
    try:
        root, command = _parse(sys.argv[1:])
        launch(root, command, os.environ)
    except KvtierError as error:
        # One line: the last one is what the status shows of a unit that ended at once.
        print(f"kvtierd emulator: {'; '.join(str(error).splitlines())}", file=sys.stderr)
        sys.exit(error.exit_code if isinstance(error, UsageError) else EXIT_CANNOT_ENTER)


if __name__ == "__main__":
    main()
