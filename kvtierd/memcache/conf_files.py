"""Checking MemCache files on disk: reads them, looks at the paths they name, and asks the pure checker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvtierd.errors import ConfError
from kvtierd.mmc_conf.check import check_local, check_meta
from kvtierd.mmc_conf.problems import ConfProblem, PathInfo
from kvtierd.mmc_conf.sglang_check import check_sglang_meta

MAX_FILE_BYTES = 1024 * 1024

_CHECKS: dict[str, Callable[[bytes, str], tuple[ConfProblem, ...]]] = {
    "meta": lambda data, version: check_meta(data, version, path_info=path_info),
    "local": lambda data, version: check_local(data, version, path_info=path_info),
    "sglang-meta": lambda data, version: check_sglang_meta(data, version, path_info=path_info),
}


def path_info(path: str) -> PathInfo:
    """What is at a path on this host; the first symbolic link on the way to it counts, MemCache refuses any."""
    try:
        looked_at = Path(path)
        for part in (looked_at, *looked_at.parents):
            if part.is_symlink():
                return PathInfo(exists=looked_at.exists(), symlink_target=str(looked_at.resolve()))
        return PathInfo(exists=looked_at.exists())
    except OSError:
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
    problems = _CHECKS[kind](data, version)
    if not file.is_symlink():
        return problems
    link = ConfProblem(
        line=None,
        key=None,
        code="symlink",
        message=f"{file} is a symbolic link to {file.resolve()}; MemCache refuses to read it",
        hint=f"name the real file: {file.resolve()}",
        severity="error",
    )
    return (link, *problems)
