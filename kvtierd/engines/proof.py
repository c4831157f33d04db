"""Ready is proved by a real generated token, not by an open port: vLLM answers /health before it can generate,
and an engine whose worker died goes on answering.

Proved once a run of the engine; afterwards its health probe and metrics tell. The request goes out when the probes
already hold, so it costs a ready engine one token in its life.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

from kvtierd.engines.talk import ask
from kvtierd.errors import UnitError
from kvtierd.foreign import ForeignCalls, told_of
from kvtierd.plan.engine import EngineDriver
from kvtierd.plan.model import UnitSpec
from kvtierd.units.backend import UnitProcess

PROOF_SECONDS = 60.0  # the first token of a large model may take long: kernels are compiled then
RETRY_SECONDS = 2.0
DRIVER_SECONDS = 5.0

FindDriver = Callable[[str], EngineDriver | None]


class GenerationProof:
    """A readiness check of engines for the supervisor. It never waits itself: the request runs beside it."""

    def __init__(self, find_driver: FindDriver) -> None:
        self._find_driver = find_driver
        self._calls = ForeignCalls()
        self._proved: dict[str, str] = {}  # unit -> instance
        self._asking: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self._failed: dict[str, tuple[str, str, float]] = {}  # unit -> instance, why, when

    async def check(self, spec: UnitSpec, process: UnitProcess) -> str | None:
        """``None`` when this run has generated a token (or need not), else what it waits for."""
        if spec.talk is None or spec.talk.generation is None:
            return None
        if self._proved.get(spec.id) == process.instance:
            return None
        loop = asyncio.get_running_loop()
        instance, task = self._asking.get(spec.id, ("", None))
        if task is not None and instance != process.instance:
            task.cancel()
            task = None
        failed = self._failed.get(spec.id)
        known = failed if failed is not None and failed[0] == process.instance else None
        idle = task is None or task.done()
        if idle and (known is None or loop.time() - known[2] >= RETRY_SECONDS):
            task = asyncio.create_task(self._prove(spec, process), name=f"proof {spec.id}")
            self._asking[spec.id] = (process.instance, task)
            await asyncio.wait({task}, timeout=0.2)  # a small engine has answered by then
            if self._proved.get(spec.id) == process.instance:
                return None
        known = self._failed.get(spec.id)
        if known is not None and known[0] == process.instance:
            return f"it has not generated a token: {known[1]}"
        return "waits for its first generated token"

    async def _prove(self, spec: UnitSpec, process: UnitProcess) -> None:
        assert spec.talk is not None
        assert spec.talk.generation is not None
        driver = self._find_driver(spec.plugin or "")
        try:
            body = await ask(spec, spec.talk.generation, timeout_seconds=PROOF_SECONDS)
            if driver is not None:
                await self._calls.ask(
                    f"generated() for {spec.id}",
                    functools.partial(driver.generated, body),
                    seconds=DRIVER_SECONDS,
                )
        except UnitError as error:
            why = error.message + (f": {error.why}" if error.why else "")
        except Exception as error:  # noqa: BLE001 - the driver is foreign code
            why = told_of(error)
        else:
            self._proved[spec.id] = process.instance
            self._failed.pop(spec.id, None)
            return
        self._failed[spec.id] = (process.instance, why, asyncio.get_running_loop().time())

    async def close(self) -> None:
        """Ends requests under way."""
        for _, task in self._asking.values():
            task.cancel()
        await asyncio.gather(*(task for _, task in self._asking.values()), return_exceptions=True)
