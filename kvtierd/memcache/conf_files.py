"""Checking MemCache files on disk: reads them, looks at the paths they name, and asks the pure checker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvtierd.errors import ConfError
from kvtierd.mmc_conf.check import check_local, check_meta
from kvtierd.mmc_conf.problems import ConfProblem, PathInfo, PathLookup, check_conf_path
from kvtierd.mmc_conf.sglang_check import check_sglang_meta

MAX_FILE_BYTES = 1024 * 1024

_CHECKS: dict[str, Callable[[bytes, str, PathLookup, bool], tuple[ConfProblem, ...]]] = {
    "meta": lambda data, version, look, a3: check_meta(data, version, path_info=look),
    "local": lambda data, version, look, a3: check_local(data, version, path_info=look, a3=a3),
    "sglang-meta": lambda data, version, look, a3: check_sglang_meta(data, version, path_info=look),
}


def kind_of(name: str) -> str | None:
    """What a MemCache file with this name is: "meta", "local", "sglang-meta", or ``None`` when the name does not tell."""
    name = name.lower()
    if name.endswith(".json"):
        return "sglang-meta"
    if not name.endswith(".conf"):
        return None
    return "meta" if "meta" in name else "local" if "local" in name else None


def path_info(path: str) -> PathInfo:
    """What is at a path on this host, the path itself not followed: MemCache refuses symbolic links."""
    try:
        looked_at = Path(path)
        target = str(looked_at.resolve()) if looked_at.is_symlink() else None
        return PathInfo(exists=looked_at.exists(), symlink_target=target)
    except (OSError, ValueError, RuntimeError):  # RuntimeError: a loop of links
        return PathInfo(exists=False)


def check_conf_file(
    file: Path, kind: str, version: str, *, look: PathLookup = path_info, a3: bool = False
) -> tuple[ConfProblem, ...]:
    """Everything that is wrong with a file, the file itself included.

    Args:
        file: the file.
        kind: "meta", "local" or "sglang-meta".
        version: the MemCache that will read it.
        look: looks up the paths that it names; default: on this host.
        a3: the host is an A3, where all sizes align to 1 GB.

    Raises:
        ConfError: the file cannot be read, or the version is unknown.
    """
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfError(f"{file} cannot be read: {error.strerror}", code="conf.unreadable") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfError(
            f"{file} is larger than {MAX_FILE_BYTES} bytes: not a MemCache file", code="conf.too-large"
        )
    return (*check_conf_path(str(file), path_info), *_CHECKS[kind](data, version, look, a3))
