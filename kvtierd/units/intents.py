"""What the operator stopped by hand, kept across restarts of the daemon (not of the host, if the directory is in /run)."""

from __future__ import annotations

import json
from pathlib import Path

from kvtierd.errors import StateError
from kvtierd.files import write_atomic

FILE_NAME = "stopped-by-operator.json"


class StopIntents:
    """A small set of unit ids in a file.

    Args:
        directory: Where the file lives; ``None`` keeps the set in memory only.
    """

    def __init__(self, directory: Path | None) -> None:
        self._path = None if directory is None else directory / FILE_NAME
        self._stopped: set[str] = set()
        self.problem = ""  # why the file could not be read or written, else empty
        self._load()

    def __contains__(self, unit_id: str) -> bool:
        return unit_id in self._stopped

    def add(self, unit_id: str) -> None:
        """The operator stopped this unit."""
        if unit_id not in self._stopped:
            self._stopped.add(unit_id)
            self._save()

    def discard(self, unit_id: str) -> None:
        """The operator wants this unit to run again."""
        if unit_id in self._stopped:
            self._stopped.discard(unit_id)
            self._save()

    def _load(self) -> None:
        if self._path is None:
            return
        try:
            stopped = json.loads(self._path.read_bytes())["stopped"]
            self._stopped = {unit_id for unit_id in stopped if isinstance(unit_id, str)}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.problem = f"{self._path} cannot be read, so nothing counts as stopped by hand: {error}"

    def _save(self) -> None:
        if self._path is None:
            return
        try:
            write_atomic(self._path, json.dumps({"stopped": sorted(self._stopped)}).encode())
            self.problem = ""
        except StateError as error:
            why = error.why or error.message
            self.problem = f"{self._path} cannot be written; a restarted daemon will not know of it: {why}"
