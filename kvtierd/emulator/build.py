"""Builds the emulated driver with the system's C compiler, once per source, machine and cache directory.

The result is a directory that MemCache takes for an Ascend installation::

    <cache_dir>/ascend-driver-<hash>-<machine>/
        lib64/libascendcl.so, libascend_hal.so, libra.so, libtsdclient.so, libhccl.so   (one file, five names)
        driver/version.info

Building is atomic: the directory appears complete under its final name or not at all, and processes that
build at the same time all get a good one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path

from kvtierd.errors import EmulatorError

LIBRARY_NAMES = ("libascendcl.so", "libascend_hal.so", "libra.so", "libtsdclient.so", "libhccl.so")
"""What MemFabric 1.x opens, found by its error messages when one is missing. They are hard links of one file,
so that the loader maps a single instance and all names share its state."""

VERSION_INFO = "Innerversion=V100R001C23SPC005B219\n"
"""The content of driver/version.info: MemFabric parses it and picks the symbols it looks up by it."""

_SOURCE_NAME = "ascend_driver.c"
_FLAGS = ("-std=gnu11", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-pthread")
_BUILD_TIMEOUT_SECONDS = 60.0
_MOST_OUTPUT_CHARS = 4000


@dataclasses.dataclass(frozen=True, slots=True)
class EmulatedDriver:
    """A built driver. ``home`` is both ASCEND_HOME_PATH and the driver's installation path."""

    home: Path

    @property
    def library_dir(self) -> Path:
        """Where the libraries are; belongs into LD_LIBRARY_PATH."""
        return self.home / "lib64"

    def env(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """The variables that a unit needs: ASCEND_HOME_PATH and LD_LIBRARY_PATH.

        Args:
            base: The environment that they are added to. Only its LD_LIBRARY_PATH matters: it is kept, behind ours.
        """
        earlier = (base or {}).get("LD_LIBRARY_PATH", "")
        search = f"{self.library_dir}:{earlier}" if earlier else str(self.library_dir)
        return {"ASCEND_HOME_PATH": str(self.home), "LD_LIBRARY_PATH": search}


def locate_driver(cache_dir: Path) -> EmulatedDriver:
    """Where the driver for this machine is, or will be: its directory is known before it is built."""
    return EmulatedDriver(cache_dir.absolute() / driver_directory_name(_source()))


def _source() -> bytes:
    return resources.files(__package__).joinpath(_SOURCE_NAME).read_bytes()


def ensure_driver(cache_dir: Path) -> EmulatedDriver:
    """The emulated driver for this machine, built now if ``cache_dir`` does not hold it yet.

    Raises:
        EmulatorError: No compiler (``emulator.no-compiler``), it failed (``emulator.compile``), or the
            cache directory cannot be written (``emulator.cache``).
    """
    driver = locate_driver(cache_dir)
    home = driver.home
    if home.is_dir():
        return driver
    compiler = _find_compiler()
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=".building-", dir=cache_dir))
    except OSError as error:
        raise _cache_error(cache_dir, error) from error
    try:
        _build_into(building, _source(), compiler)
        _publish(building, home)
    except OSError as error:
        raise _cache_error(cache_dir, error) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return EmulatedDriver(home)


def driver_directory_name(source: bytes) -> str:
    """The name under which the driver of this source is cached: everything that shapes the result is in it."""
    recipe = "\0".join((*_FLAGS, *LIBRARY_NAMES, VERSION_INFO)).encode()
    return f"ascend-driver-{hashlib.sha256(source + recipe).hexdigest()[:16]}-{platform.machine()}"


def _find_compiler() -> list[str]:
    """The compiler's argv: $CC (which may hold options, as make allows) or the first of cc and gcc."""
    named = os.environ.get("CC", "").strip()
    candidates = [shlex.split(named)] if named else [["cc"], ["gcc"]]
    for argv in candidates:
        if argv and shutil.which(argv[0]):
            return argv
    tried = " and ".join(repr(argv[0]) for argv in candidates if argv)
    raise EmulatorError(
        f"no C compiler to build the emulated Ascend driver with: tried {tried}",
        why="$CC names it" if named else "neither is in PATH",
        hint="install gcc (Debian: apt install gcc; openEuler: dnf install gcc) or set CC to a C compiler",
        code="emulator.no-compiler",
    )


def _build_into(directory: Path, source: bytes, compiler: list[str]) -> None:
    libraries = directory / "lib64"
    libraries.mkdir()
    source_file = directory / _SOURCE_NAME
    source_file.write_bytes(source)
    first = libraries / LIBRARY_NAMES[0]
    argv = [*compiler, *_FLAGS, "-o", str(first), str(source_file)]
    try:
        result = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_BUILD_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise EmulatorError(
            f"the C compiler did not finish within {_BUILD_TIMEOUT_SECONDS:.0f} s",
            why=shlex.join(argv),
            hint="run that command by hand",
            code="emulator.compile",
        ) from error
    except OSError as error:
        raise EmulatorError(
            f"cannot run the C compiler {compiler[0]!r}: {error.strerror}",
            hint="set CC to a C compiler that runs",
            code="emulator.compile",
        ) from error
    if result.returncode != 0 or not first.is_file():
        output = (result.stderr + result.stdout).decode(errors="replace").strip()[:_MOST_OUTPUT_CHARS]
        raise EmulatorError(
            f"the C compiler failed on the emulated Ascend driver (exit {result.returncode})",
            why=output or "it printed nothing and wrote no library",
            hint=f"check the compiler: {shlex.join(argv[: len(compiler)])} --version",
            code="emulator.compile",
        )
    first.chmod(0o755)
    for name in LIBRARY_NAMES[1:]:
        os.link(first, libraries / name)
    version = directory / "driver" / "version.info"
    version.parent.mkdir()
    version.write_text(VERSION_INFO, encoding="ascii")
    # mkdtemp makes the directory private; units of other users read it.
    for path in (directory, libraries, version.parent):
        path.chmod(0o755)
    version.chmod(0o644)
    _sync((first, version, libraries, version.parent, directory))


def _publish(building: Path, home: Path) -> None:
    """Renames the finished directory to its name. When another process was faster, its result is as good."""
    try:
        building.rename(home)
    except OSError:
        if not home.is_dir():
            raise
    else:
        _sync((home.parent,))


def _sync(paths: Iterable[Path]) -> None:
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            # Some file systems refuse to sync a directory; there is nothing better to do then.
            with contextlib.suppress(OSError):
                os.fsync(handle)
        finally:
            os.close(handle)


def _cache_error(cache_dir: Path, error: OSError) -> EmulatorError:
    return EmulatorError(
        f"cannot write the emulated Ascend driver to {cache_dir}: {error.strerror or error}",
        hint="choose a cache directory that this user may write",
        code="emulator.cache",
    )
