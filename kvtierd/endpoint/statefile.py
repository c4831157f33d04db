"""The endpoint's state file: small JSON, written atomically, valid for one boot of the host but for its epochs."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from kvtierd.errors import EndpointError

_MAX_BYTES = 256 * 1024


def boot_id() -> str:
    """Differs after every boot, so that process ids of an earlier boot are never believed."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def read_state(path: Path) -> dict[str, Any] | None:
    """The saved object, or ``None`` when there is none or it is damaged. Of an earlier boot only the epochs count."""
    try:
        with path.open("rb") as file:
            saved = json.loads(file.read(_MAX_BYTES + 1)[:_MAX_BYTES])
    except (OSError, ValueError, RecursionError):
        return None
    return saved if isinstance(saved, dict) and saved.get("version") == 1 else None


def is_of_this_boot(saved: dict[str, Any]) -> bool:
    """Whether the processes it names can be running."""
    return saved.get("boot_id") == boot_id()


def save_state(path: Path, value: dict[str, Any]) -> None:
    """Writes, syncs and renames. Raises ``EndpointError`` (``endpoint.state-file``)."""
    text = json.dumps(value | {"boot_id": boot_id()}, separators=(",", ":")).encode()
    temporary = ""
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
        _sync_directory(path.parent)
    except OSError as error:
        if temporary:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
        raise EndpointError(
            f"cannot write {path}: {error.strerror}",
            hint="free the disk or mend the directory; until then a restarted endpoint forgets its clients",
            code="endpoint.state-file",
        ) from error


def _sync_directory(path: Path) -> None:
    """Makes a rename last: without it a power cut may bring the old file back."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
