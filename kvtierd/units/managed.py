"""One unit as the supervisor keeps it: its specification, its status, its tasks under way."""

from __future__ import annotations

import asyncio
import dataclasses

from kvtierd.plan.model import UnitSpec
from kvtierd.units.backend import UnitProcess
from kvtierd.units.probes import ProbeResult
from kvtierd.units.unit_state import ActionFailure, UnitStatus


@dataclasses.dataclass(slots=True, eq=False)
class Managed:
    """All that the supervisor keeps of one unit.

    ``probed_spec``: the specification that the living process was started with, as far as it is known: a changed one
    may ask at another port. ``stopped_for_now``: a stop that the next daemon need not know.
    ``fatal_sign``: of which run (instance), and what its output said.
    ``looked``: ``process`` was seen after the last action ended. ``lines_of``: the run (instance, ended) of ``last_lines``.
    """

    spec: UnitSpec
    planned: bool
    status: UnitStatus = dataclasses.field(default_factory=UnitStatus)
    since_unix_seconds: float = 0.0
    process: UnitProcess | None = None
    looked: bool = False
    look: asyncio.Task[None] | None = None
    action: asyncio.Task[None] | None = None
    probing: asyncio.Task[None] | None = None
    probe: ProbeResult | None = None
    probed_instance: str | None = None
    next_probe_at: float = 0.0
    failure: ActionFailure | None = None
    restart_requested: str | None = None
    start_requested: bool = False
    stopped_for_now: bool = False
    resting: str = ""  # why the node's part in the cluster does not need it now
    probed_spec: UnitSpec | None = None
    fatal_sign: tuple[str, str] | None = None
    last_lines: tuple[str, ...] = ()
    lines_at: float = float("-inf")
    lines_of: tuple[str, bool] | None = None  # instance, ended

    @property
    def running(self) -> bool:
        """Whether it was alive when last looked at."""
        return self.process is not None and self.process.running

    def spec_to_probe(self) -> UnitSpec:
        """What the living process should answer to."""
        process = self.process
        if process is None or self.probed_spec is None or process.spec_digest == self.spec.digest:
            self.probed_spec = self.spec
        return self.probed_spec

    @property
    def busy(self) -> bool:
        """Whether nothing may be decided now: an action or a look is under way."""
        return self.action is not None or self.look is not None or not self.looked

    def collect(self) -> None:
        """Clears away finished tasks; they have left their results here."""
        if self.action is not None and self.action.done():
            self.action = None
        if self.look is not None and self.look.done():
            self.look = None
        if self.probing is not None and self.probing.done():
            self.probing = None
