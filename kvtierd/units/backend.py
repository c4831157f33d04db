"""The one interface behind which processes run: transient units of systemd, or a shim each.

A backend runs processes and remembers how they ended. It knows nothing of readiness, restarts or
states: that is the supervisor's. Units outlive the process that started them.
"""

from __future__ import annotations

import builtins
import dataclasses
import signal as signals
from collections.abc import AsyncIterator
from typing import Protocol

from kvtierd.errors import UnitError
from kvtierd.plan.model import UnitSpec


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessExit:
    """How a process ended: one of ``code`` and ``signal`` is set, or neither when nobody saw the end.

    Nobody sees it when the host restarts or the unit's shim was killed. ``requested``: we stopped it.
    """

    code: int | None
    signal: int | None
    at_unix_seconds: float
    requested: bool

    def describe(self) -> str:
        """For people: ``exit 1`` or ``killed by SIGKILL``."""
        if self.signal is not None:
            known = self.signal in signals.valid_signals()
            return f"killed by {signals.Signals(self.signal).name if known else f'signal {self.signal}'}"
        if self.code is not None:
            return f"exit {self.code}"
        return "ended, exit status unknown"


@dataclasses.dataclass(frozen=True, slots=True)
class UnitProcess:
    """One run of one unit, alive or ended.

    Identity is ``instance``: a new random id for each start, so that a reused process id can never be mistaken.
    ``note`` is what the operator should know about this run (processes left behind, a lost supervisor), or empty.
    """

    unit_id: str
    instance: str
    pid: int
    started_unix_seconds: float
    spec_digest: str
    exit: ProcessExit | None = None
    note: str = ""

    @property
    def running(self) -> bool:
        """Whether the main process is alive as far as the backend knows."""
        return self.exit is None


class UnitBackend(Protocol):
    """Starts, stops and finds processes. Every call has a deadline inside and raises ``UnitError`` on failure."""

    name: str

    async def start(self, spec: UnitSpec) -> UnitProcess:
        """Starts the unit. Raises ``UnitError`` (code ``unit.exists``) if it is already running, whoever started it."""
        ...

    async def stop(
        self, unit_id: str, *, signal: str = "SIGTERM", timeout_seconds: float = 20.0
    ) -> UnitProcess:
        """Signal to the main process, wait, then SIGKILL to the whole tree. Returns the ended process."""
        ...

    async def kill(self, unit_id: str, signal: str = "SIGKILL") -> None:
        """Signal to every process of the unit, at once."""
        ...

    async def find(self, unit_id: str) -> UnitProcess | None:
        """The unit's current or last run, also one that an earlier daemon started."""
        ...

    async def list(self) -> list[UnitProcess]:
        """All units known to the backend, running or ended, for adoption."""
        ...

    async def forget(self, unit_id: str) -> None:
        """Drops the record of an ended unit. An error while it runs."""
        ...

    async def tail(self, unit_id: str, lines: int = 20) -> builtins.list[str]:
        """The last output lines of the current or last run (stdout and stderr in order), undecodable bytes replaced."""
        ...

    async def logged(self, unit_id: str, text: str) -> bool:
        """Whether a line of the current run contained ``text``, which a ``LogProbe`` of its specification names."""
        ...

    def follow(self, unit_id: str, lines: int = 20, *, instance: str | None = None) -> AsyncIterator[str]:
        """The last lines, then new ones as they come; survives rotation and restarts of the unit.

        With ``instance`` no line from before that run comes: what an engine said as it died is not said of the next.
        Raises ``UnitError`` (code ``unit.other-run``) when there is no such run.
        """
        ...

    async def wait_change(self, timeout_seconds: float) -> bool:
        """Waits until some unit of ours ended or started; False on time-out. Spares the loop from polling fast."""
        ...

    async def close(self) -> None:
        """Releases the backend's own resources. Units go on."""
        ...


def signal_number(name: str) -> int:
    """The number of a signal's name. Raises ``UnitError`` (``unit.signal``) for a name that there is not."""
    try:
        return int(signals.Signals[name])
    except KeyError:
        raise UnitError(
            f"there is no signal {name!r}", hint="Write for example SIGTERM.", code="unit.signal"
        ) from None
