"""Taking an engine's L3 off and on while it runs, and remembering what an operator took off.

An engine may want to be without requests for that (SGLang does). kvtierd cannot turn requests away, so it waits for
such a moment; a request that slips in makes the engine refuse, and then it waits again, up to the deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from kvtierd.engines.drain import Look, drain
from kvtierd.engines.talk import EngineRefusedError
from kvtierd.errors import UnitError
from kvtierd.files import write_atomic
from kvtierd.plan.model import HttpCall, UnitSpec

CALL_SECONDS = 60.0  # an engine with many ranks joins the pool in this time, or something is wrong
RETRY_SECONDS = 0.5
MOST_REFUSALS = 5  # of an engine that had nothing to do: more tries would not change its mind
NOT_ALLOWED = frozenset({401, 403, 404, 405, 501})  # answers that no wait changes
MOST_STATE_BYTES = 1024 * 1024

Ask = Callable[[HttpCall], Awaitable[bytes]]


def calls_of(spec: UnitSpec, *, on: bool) -> tuple[HttpCall, ...]:
    """The requests of the plan that attach or detach this engine's L3.

    Raises:
        UnitError: ``unit.not-engine``; or ``engine.l3-fixed`` with the reason why this engine cannot.
    """
    if spec.kind != "engine":
        raise UnitError(f"{spec.id} is not an engine: only engines have an L3", code="unit.not-engine")
    talk = spec.talk
    calls = () if talk is None else talk.l3_attach if on else talk.l3_detach
    if not calls:
        raise UnitError(
            f"the L3 of {spec.id} cannot be taken off and on while it runs",
            why=(talk.l3_fixed if talk else "") or "it serves no HTTP",
            hint='to run it without L3 write l3 = "off" in its args, where it has that; then kvtierctl apply restarts it',
            code="engine.l3-fixed",
        )
    return calls


@dataclasses.dataclass(frozen=True, slots=True)
class Switched:
    """How it went: the time it took in all, and how often the engine refused before it did it."""

    seconds: float
    refusals: int

    def describe(self) -> str:
        """For people."""
        again = f", after {self.refusals} refusal(s) because of requests" if self.refusals else ""
        return f"in {self.seconds:.1f} s{again}"


async def switch(
    unit_id: str,
    calls: tuple[HttpCall, ...],
    ask: Ask,
    look: Look,
    *,
    deadline_seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> Switched:
    """Makes the calls, each when the engine is ready for it.

    Args:
        unit_id: For messages.
        calls: What the plan says.
        ask: Makes one call; raises UnitError.
        look: One fresh observation of the engine.
        deadline_seconds: The longest to wait for a moment without requests, over all calls.
        clock: Monotonic seconds.

    Raises:
        UnitError: ``engine.busy``: it never was without requests. ``engine.refused``, ``engine.no-answer`` and the
            others of :func:`kvtierd.engines.talk.ask`. What calls before it did is done.
    """
    started = clock()
    refusals = 0
    for call in calls:
        while True:
            left_seconds = max(0.0, deadline_seconds - (clock() - started))
            if call.needs_idle:
                drained = await drain(look, deadline_seconds=left_seconds, clock=clock)
                if drained.left:
                    raise UnitError(
                        f"{unit_id} was not without requests for {deadline_seconds:.0f} s",
                        why=f"{drained.left} request(s) run or wait, and it does this between requests only",
                        hint="take it out of your balancer first, or wait longer: --deadline",
                        code="engine.busy",
                    )
            try:
                await ask(call)
                break
            except EngineRefusedError as error:
                refusals += 1
                over = clock() - started + RETRY_SECONDS > deadline_seconds
                if error.status in NOT_ALLOWED or over or refusals >= MOST_REFUSALS:
                    raise
            await asyncio.sleep(RETRY_SECONDS)
    return Switched(clock() - started, refusals)


OPERATOR, POLICY = "an operator", "the policy"


class DetachedEngines:
    """Which engines run without L3 because somebody took it off. A small file, so that a new daemon knows it.

    It is about one run of an engine: the next one starts with its L3, and what is written here says nothing of it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._instances: dict[str, str] = {}
        self._by: dict[str, str] = {}
        with contextlib.suppress(OSError, ValueError):
            if path.stat().st_size <= MOST_STATE_BYTES:
                found = json.loads(path.read_bytes())
                for unit, run in found.items() if isinstance(found, dict) else ():
                    instance, by = run if isinstance(run, list) and len(run) == 2 else (run, OPERATOR)
                    self._instances[str(unit)], self._by[str(unit)] = str(instance), str(by)

    def is_off(self, unit_id: str, instance: str | None) -> bool:
        """Whether this run of the engine had its L3 taken off."""
        return instance is not None and self._instances.get(unit_id) == instance

    def by(self, unit_id: str) -> str:
        """Who took it off, in words."""
        return self._by.get(unit_id, OPERATOR)

    def mark(self, unit_id: str, instance: str | None, by: str = OPERATOR) -> None:
        """L3 of this run is off; ``None``: it is on.

        Raises:
            StateError: it is known now, but a new daemon will not know it.
        """
        before = dict(self._instances)
        self._instances.pop(unit_id, None)
        if instance is not None:
            self._instances[unit_id], self._by[unit_id] = instance, by
        if self._instances != before:
            kept = {unit: [run, self.by(unit)] for unit, run in self._instances.items()}
            write_atomic(self._path, json.dumps(kept).encode() + b"\n", mode=0o600)
