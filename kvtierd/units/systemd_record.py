"""What the systemd backend has to remember by itself, in small files: systemd forgets a unit that has been unloaded.

``RUNTIME/systemd/<unit id>.json`` exists from the moment a stop is asked for or an end is seen until the next start:
``{version, instance, requested}`` and, once it has ended, ``{..., process: {...}}``.
``RUNTIME/systemd/<unit id>.lock`` is held (flock) by whoever starts, unloads or writes off the unit.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from kvtierd.errors import UnitError
from kvtierd.files import write_atomic
from kvtierd.units.backend import ProcessExit, UnitProcess

VERSION = 1
LOCK_POLL_SECONDS = 0.02


class UnitRecords:
    """The records of one daemon's units.

    Args:
        directory: Where they are; created when needed. Best on a tmpfs such as /run: no record outlives a boot.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def ids(self) -> list[str]:
        """All units that have a record."""
        try:
            return sorted(path.stem for path in self._directory.iterdir() if path.suffix == ".json")
        except OSError:
            return []

    def read(self, unit_id: str) -> dict[str, Any] | None:
        """The record; ``None`` when there is none or it cannot be understood."""
        try:
            record = json.loads((self._directory / f"{unit_id}.json").read_bytes()[: 1 << 20])
        except (OSError, ValueError):
            return None
        return record if isinstance(record, dict) and isinstance(record.get("instance"), str) else None

    def is_requested(self, unit_id: str, instance: str) -> bool:
        """Whether we asked this run to end."""
        record = self.read(unit_id)
        return record is not None and record["instance"] == instance and bool(record.get("requested"))

    def ended(self, unit_id: str, instance: str | None = None) -> UnitProcess | None:
        """The recorded end: of this run, or of whichever was last."""
        record = self.read(unit_id)
        if record is None or (instance is not None and record["instance"] != instance):
            return None
        with contextlib.suppress(KeyError, TypeError):
            fields = dict(record["process"])
            return UnitProcess(**fields | {"exit": ProcessExit(**fields["exit"])})
        return None

    def write_request(self, unit_id: str, instance: str) -> None:
        """A stop of this run has been asked for. Raises ``StateError``."""
        if self.ended(unit_id, instance) is None:
            self._write(unit_id, {"instance": instance, "requested": True})

    def write_end(self, process: UnitProcess) -> None:
        """This run has ended. Raises ``StateError``."""
        assert process.exit is not None
        record = {"instance": process.instance, "requested": process.exit.requested}
        self._write(process.unit_id, record | {"process": dataclasses.asdict(process)})

    def remove(self, unit_id: str) -> None:
        """Forgets the unit."""
        with contextlib.suppress(OSError):
            (self._directory / f"{unit_id}.json").unlink(missing_ok=True)

    @contextlib.asynccontextmanager
    async def exclusive(self, unit_id: str, limit_seconds: float) -> AsyncIterator[None]:
        """Keeps other daemons from changing this unit meanwhile.

        Raises:
            UnitError: ``unit.busy`` when somebody else does so all the time, ``unit.runtime-dir``.
        """
        path = self._directory / f"{unit_id}.lock"
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise UnitError(
                f"the directory {self._directory} cannot be used: {error.strerror}", code="unit.runtime-dir"
            ) from error
        try:
            deadline = time.monotonic() + limit_seconds
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise UnitError(
                            f"{unit_id} is being started or stopped by somebody else", code="unit.busy"
                        ) from None
                await asyncio.sleep(LOCK_POLL_SECONDS)
            yield
        finally:
            os.close(fd)

    def _write(self, unit_id: str, record: dict[str, Any]) -> None:
        data = json.dumps({"version": VERSION, **record}).encode()
        write_atomic(self._directory / f"{unit_id}.json", data, mode=0o600)
