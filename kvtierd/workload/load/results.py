"""The files of a run: requests.jsonl as requests end, result.json at the beginning (incomplete) and at the end.

A run that is killed, or whose disk fills up, leaves what was measured and a result that says that it is not complete.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import IO, Any, Final

from kvtierd.errors import KvtierError, StateError, WorkloadError
from kvtierd.files import write_atomic
from kvtierd.workload.load.measure import RequestRecord

RESULT: Final = "result.json"
REQUESTS: Final = "requests.jsonl"
MOST_RESULT_BYTES: Final = 64 * 1024**2


class RunFiles:
    """Writes one run's files. A disk that is full does not end the run: ``problem`` says what could not be written."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.problem: KvtierError | None = None
        self._requests: IO[str] | None = None

    def begin(self, result: dict[str, Any]) -> None:
        """Makes the directory and marks the run as not complete.

        Raises:
            WorkloadError: ``load.output-taken``: an earlier run's files are there.
            StateError: it cannot be written.
        """
        taken = [name for name in (RESULT, REQUESTS) if (self.directory / name).exists()]
        if taken:
            raise WorkloadError(
                f"{self.directory} already holds a run ({', '.join(taken)})",
                hint="give each run a directory of its own; they can be compared with kvtierctl bench report DIR DIR",
                code="load.output-taken",
            )
        self._write_result(result)
        try:
            self._requests = (self.directory / REQUESTS).open("w", encoding="utf-8")
        except OSError as error:
            raise StateError(
                f"{self.directory / REQUESTS} cannot be written", why=str(error), code="state.io"
            ) from error

    def add(self, record: RequestRecord) -> None:
        """One request that has ended. Written when the buffer is full, at the latest at the end."""
        if self._requests is None:
            return
        try:
            self._requests.write(json.dumps(record.as_dict(), ensure_ascii=False) + "\n")
        except OSError as error:
            self._failed(REQUESTS, error)

    def flush(self) -> None:
        """Hands what was added to the system, so that a killed run has lost little."""
        if self._requests is None:
            return
        try:
            self._requests.flush()
        except OSError as error:
            self._failed(REQUESTS, error)

    def discard(self) -> None:
        """Takes the files away again: the run never began. The directory is kept when something else is in it."""
        self._close()
        for name in (REQUESTS, RESULT):
            with contextlib.suppress(OSError):
                (self.directory / name).unlink()
        with contextlib.suppress(OSError):
            self.directory.rmdir()

    def end(self, result: dict[str, Any]) -> None:
        """Writes the result. Never raises: see ``problem``."""
        self.flush()
        self._close()
        if self.problem is not None:
            result["complete"] = False
            result["ended"] = "disk"
            result["notes"] = [*result["notes"], self.problem.message]
        try:
            self._write_result(result)
        except StateError as error:
            self.problem = self.problem or error

    def _write_result(self, result: dict[str, Any]) -> None:
        text = json.dumps(result, indent=2, ensure_ascii=False) + "\n"
        write_atomic(self.directory / RESULT, text.encode("utf-8", errors="replace"))

    def _failed(self, name: str, error: OSError) -> None:
        self.problem = WorkloadError(
            f"{self.directory / name} is cut off: {error.strerror or error}",
            hint="free space on that file system; what was measured is in the result that was printed",
            code="load.results-not-written",
        )
        self._close()

    def _close(self) -> None:
        stream, self._requests = self._requests, None
        if stream is None:
            return
        try:
            stream.close()
        except OSError as error:
            if self.problem is None:
                self._failed(REQUESTS, error)
            with contextlib.suppress(OSError):  # what is in the buffer is lost; the descriptor must not be
                os.close(stream.fileno())


def read_result(directory: Path) -> dict[str, Any]:
    """A run's result.

    Raises:
        WorkloadError: ``report.no-run``: there is none, or it is damaged.
    """
    path = directory / RESULT
    try:
        with path.open("rb") as stream:
            value = json.loads(stream.read(MOST_RESULT_BYTES))
        if not isinstance(value, dict) or value.get("kind") != "kvtierd-bench-run":
            raise ValueError("it is not the result of a run")
    except (OSError, ValueError) as error:
        raise WorkloadError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}",
            hint="name the directory that was given to kvtierctl bench run --output",
            code="report.no-run",
        ) from error
    return value


def read_requests(directory: Path) -> list[RequestRecord]:
    """The requests of a run; a last line that was cut off is left out, a missing file is no request."""
    records: list[RequestRecord] = []
    try:
        with (directory / REQUESTS).open(encoding="utf-8", errors="replace") as stream:
            for line in stream:
                with contextlib.suppress(ValueError, TypeError, AttributeError):
                    records.append(RequestRecord.from_dict(json.loads(line)))
    except FileNotFoundError:
        pass
    return records
