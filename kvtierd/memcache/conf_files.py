"""Checking MemCache files on disk: reads them, looks at the paths they name, and asks the pure checker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvtierd.errors import ConfError
from kvtierd.mmc_conf.check import check_local, check_meta
from kvtierd.mmc_conf.problems import ConfProblem, PathInfo, check_conf_path
from kvtierd.mmc_conf.sglang_check import check_sglang_meta

MAX_FILE_BYTES = 1024 * 1024

_CHECKS: dict[str, Callable[[bytes, str], tuple[ConfProblem, ...]]] = {
    "meta": lambda data, version: check_meta(data, version, path_info=path_info),
    "local": lambda data, version: check_local(data, version, path_info=path_info),
    "sglang-meta": lambda data, version: check_sglang_meta(data, version, path_info=path_info),
}


def path_info(path: str) -> PathInfo:
    """What is at a path on this host, the path itself not followed: MemCache refuses symbolic links."""
    try:
        looked_at = Path(path)
        target = str(looked_at.resolve()) if looked_at.is_symlink() else None
        return PathInfo(exists=looked_at.exists(), symlink_target=target)
    except (OSError, ValueError, RuntimeError):  # RuntimeError: a loop of links
        return PathInfo(exists=False)


def check_conf_file(file: Path, kind: str, version: str) -> tuple[ConfProblem, ...]:
    """Everything that is wrong with a file, the file itself included.

    Args:
        file: the file.
        kind: "meta", "local" or "sglang-meta".
        version: the MemCache that will read it.

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
    return (*check_conf_path(str(file), path_info), *_CHECKS[kind](data, version))
