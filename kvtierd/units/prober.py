"""When the probes of which unit run: quickly while it starts, slowly once it is ready, never two at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import structlog

from kvtierd.errors import KvtierError
from kvtierd.plan.model import UnitKind, UnitSpec
from kvtierd.units.backend import UnitBackend, UnitProcess
from kvtierd.units.managed import Managed
from kvtierd.units.probes import OK, ProbeResult, run_probes
from kvtierd.units.unit_state import UnitState
from kvtierd.units.views import ExtraCheck

STEADY_PROBE_SECONDS = 2.0  # between two probes of a ready unit, at least
PROBES_AT_ONCE = 16
_PROBED_STATES = frozenset({UnitState.STARTING, UnitState.READY, UnitState.DEGRADED})

_log = structlog.get_logger(__name__)


class Prober:
    """Runs probes and extra checks as tasks; results end up in ``Managed.probe``.

    Args:
        backend: Asked what a unit has logged.
        extra_checks: Further checks by kind of unit, run when the probes hold.
        clock: Monotonic seconds.
        poke: Called when a result may change something.
    """

    def __init__(
        self,
        backend: UnitBackend,
        extra_checks: Mapping[UnitKind, ExtraCheck],
        clock: Callable[[], float],
        poke: Callable[[], None],
    ) -> None:
        self._backend = backend
        self._extra_checks = dict(extra_checks)
        self._clock = clock
        self._poke = poke
        self._slots = asyncio.Semaphore(PROBES_AT_ONCE)

    def start_if_due(self, managed: Managed) -> None:
        """Starts a probe of a running unit when it is time for one."""
        process = managed.process
        if process is None or not process.running:
            return
        if managed.probed_instance != process.instance:
            managed.probe, managed.probed_instance, managed.next_probe_at = (
                None,
                process.instance,
                self._clock(),
            )
        if not self._has_something_to_ask(managed.spec):
            managed.probe = OK
        elif managed.probing is None and self._clock() >= managed.next_probe_at:
            managed.probing = asyncio.create_task(
                self._probe(managed, process), name=f"probe {managed.spec.id}"
            )

    def next_due(self, managed: Managed) -> float | None:
        """When the next probe is to start, or ``None`` when none is waiting for its time."""
        waits = managed.running and managed.probing is None and managed.status.state in _PROBED_STATES
        return managed.next_probe_at if waits and self._has_something_to_ask(managed.spec) else None

    def _has_something_to_ask(self, spec: UnitSpec) -> bool:
        return bool(spec.readiness.probes) or spec.kind in self._extra_checks

    async def _probe(self, managed: Managed, process: UnitProcess) -> None:
        spec = managed.spec_to_probe()
        readiness = spec.readiness

        async def has_logged(text: str) -> bool:
            return await self._backend.logged(spec.id, text)

        async with self._slots:
            result = await run_probes(
                readiness.probes, timeout_seconds=readiness.timeout_seconds, has_logged=has_logged
            )
            check = self._extra_checks.get(spec.kind)
            if result.ok and check is not None:
                result = await _run_check(check, spec, process, readiness.timeout_seconds)
        if managed.probed_instance != process.instance:  # it was restarted meanwhile
            return
        changed = managed.probe is None or managed.probe.ok != result.ok
        starting = managed.status.state in {UnitState.PLANNED, UnitState.STARTING}
        managed.probe = result
        managed.next_probe_at = self._next_time(readiness.interval_seconds, starting=starting)
        if changed or starting:
            self._poke()

    def _next_time(self, interval_seconds: float, *, starting: bool) -> float:
        """Ready units are probed on the same beat, so that the loop wakes once for all of them."""
        now = self._clock()
        if starting:
            return now + interval_seconds
        beat = max(interval_seconds, STEADY_PROBE_SECONDS)
        return (now // beat + 1) * beat


async def _run_check(
    check: ExtraCheck, spec: UnitSpec, process: UnitProcess, timeout_seconds: float
) -> ProbeResult:
    try:
        async with asyncio.timeout(timeout_seconds):
            reason = await check(spec, process)
    except TimeoutError:
        reason = f"its check took longer than {timeout_seconds:g} s"
    except KvtierError as error:
        reason = error.message
    except Exception as error:  # noqa: BLE001 - the check belongs to others
        _log.exception("a unit's check failed", unit=spec.id)
        reason = f"its check failed: {type(error).__name__}: {error}"
    return OK if reason is None else ProbeResult(ok=False, reason=reason)
