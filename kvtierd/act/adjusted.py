"""What actions have changed beside the settings, on disk: read when a plan is made, written before one is taken over."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from pydantic import ValidationError

from kvtierd.errors import StateError
from kvtierd.files import aside_name, write_atomic
from kvtierd.plan.adjustments import NOTHING, Adjustments

FILE = "adjustments.json"
MOST_BYTES = 64 * 1024


def read_adjustments(state: Path) -> tuple[Adjustments, str]:
    """What is in force, and what is wrong with the file; "" for nothing.

    A file that cannot be read counts as nothing changed: then the settings hold. It stays where it is for the one who asks
    why; the next write sets it aside.
    """
    path = state / FILE
    try:
        if path.stat().st_size > MOST_BYTES:
            return NOTHING, f"{path} is too large to be kvtierd's"
        return Adjustments.model_validate_json(path.read_bytes()), ""
    except FileNotFoundError:
        return NOTHING, ""
    except OSError as error:
        return NOTHING, f"{path} cannot be read: {error.strerror}"
    except ValidationError:
        return NOTHING, f"{path} is damaged; thresholds and pool holders are as the settings say"


def write_adjustments(state: Path, adjustments: Adjustments) -> None:
    """Keeps them, synced. A damaged file before is set aside under another name, not lost.

    Raises:
        StateError: they cannot be written.
    """
    path = state / FILE
    if read_adjustments(state)[1]:
        with contextlib.suppress(OSError):
            path.rename(aside_name(path, "damaged", time.time()))
    if adjustments == NOTHING:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StateError(f"{path} cannot be removed: {error.strerror}") from None
        return
    write_atomic(path, adjustments.model_dump_json(indent=1).encode() + b"\n", mode=0o600)
