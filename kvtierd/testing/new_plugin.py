"""Writing the skeleton of an engine plugin: a distribution that works and whose tests pass as written."""

from __future__ import annotations

import importlib.resources
import keyword
import os
import shutil
import string
import tempfile
from collections.abc import Iterator
from importlib.resources.abc import Traversable
from pathlib import Path

from kvtierd.errors import StateError, UsageError
from kvtierd.files import write_atomic
from kvtierd.plugins import load_plugins
from kvtierd.testing.launch_checks import NAME

_SUFFIX = ".tmpl"
_MOST_NAME_CHARS = 40


def check_name(name: str) -> None:
    """The name is fit for a driver and not taken.

    Raises:
        UsageError: it is not; says what would be.
    """
    if not NAME.fullmatch(name) or len(name) > _MOST_NAME_CHARS:
        raise UsageError(
            f"{name!r} cannot be a driver's name",
            hint=f"lower-case letters and digits, words joined by '-', at most {_MOST_NAME_CHARS}: like my-engine",
            code="plugin.name",
        )
    taken = load_plugins()
    if name in taken.drivers:
        raise UsageError(
            f"the driver {name!r} is already installed", hint="choose another name", code="plugin.name-taken"
        )


def write_skeleton(name: str, directory: Path) -> tuple[Path, ...]:
    """Writes the distribution ``kvtierd-NAME`` into a new directory: all of it, or nothing.

    Args:
        name: The driver's name.
        directory: What to make; its parent must exist.

    Returns:
        The files, relative to the directory.

    Raises:
        UsageError: the name is unfit or taken, the directory is there already, or its parent is not.
        StateError: it cannot be written.
    """
    check_name(name)
    directory = directory.absolute()
    if directory.exists() or directory.is_symlink():
        raise UsageError(
            f"{directory} is there already",
            hint="name a directory that does not exist: --dest",
            code="plugin.dest-exists",
        )
    if not directory.parent.is_dir():
        raise UsageError(
            f"{directory.parent} is no directory",
            hint="make it first, or choose another --dest",
            code="plugin.dest",
        )
    package = "kvtierd_" + name.replace("-", "_")
    words = {
        "name": name,
        "distribution": f"kvtierd-{name}",
        "package": package,
        "metric": name.replace("-", "_"),
        "class_name": "".join(word.capitalize() for word in name.split("-")),
    }
    assert not keyword.iskeyword(package)
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    except OSError as error:
        raise StateError(
            f"{directory} cannot be written: {error.strerror}", code="state.not-writable"
        ) from error
    try:
        written = []
        for place, text in _templates(importlib.resources.files("kvtierd.testing") / "skeleton"):
            path = Path(place.replace("package/", f"src/{package}/", 1))
            write_atomic(temporary / path, string.Template(text).substitute(words).encode())
            written.append(path)
        temporary.chmod(0o777 & ~_umask())
        os.rename(temporary, directory)  # noqa: PTH104 - Path.rename would say the same
    except OSError as error:
        raise StateError(f"{directory} cannot be written: {error.strerror}", code="state.io") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return tuple(sorted(written))


def _templates(root: Traversable, above: str = "") -> Iterator[tuple[str, str]]:
    for item in root.iterdir():
        if item.is_dir():
            yield from _templates(item, f"{above}{item.name}/")
        elif item.name.endswith(_SUFFIX):
            yield above + item.name.removesuffix(_SUFFIX), item.read_text(encoding="utf-8")


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
