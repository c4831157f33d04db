"""The shell around ``TierMachine``: looks at MetaService and endpoint, carries out what the machine asks for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from kvtierd.errors import KvtierError, MemcacheError
from kvtierd.events import EventLog, Severity
from kvtierd.files import write_atomic
from kvtierd.host.view import SystemRunner
from kvtierd.memcache.health import PoolState
from kvtierd.memcache.rest import MetaClient
from kvtierd.memcache.run_purge import EXIT_CONFIG
from kvtierd.plan.model import NodePlan
from kvtierd.tier.machine import Action, TierInputs, TierMachine, TierView
from kvtierd.tier.meta_check import tls_files

PURGE_SECONDS = 30.0
QUIESCE_SECONDS = 5.0


class Endpoint(Protocol):
    """What the keeper needs of the endpoint's control client."""

    async def serve(self) -> object:
        """Everything passes."""
        ...

    async def recover(self) -> object:
        """Only registrations pass."""
        ...

    async def admit(self, who: str) -> object:
        """``survivors`` or ``all``."""
        ...

    async def cut(self) -> object:
        """Closes every client's connection once."""
        ...

    async def quiesce(self, timeout_seconds: float) -> object:
        """Holds new requests; returns when nothing is in flight."""
        ...


class TierKeeper:
    """Keeps the tier honest. One instance a plan; ``close`` it before making the next."""

    def __init__(
        self,
        plan: NodePlan,
        machine: TierMachine,
        *,
        state_file: Path,
        endpoint: Endpoint | None,
        purge_argv: tuple[str, ...],
        purge_env: dict[str, str],
        restart_providers: Callable[[str], None],
        events: EventLog,
        purge_ended: Callable[[], None] = lambda: None,
    ) -> None:
        if plan.meta is None:
            raise MemcacheError("the plan has no MetaService address")
        self.pool: PoolState | None = None
        self.pool_seen_unix_seconds: float | None = None
        self._machine = machine
        self._state_file = state_file
        self._client = MetaClient(plan.meta.metrics_url, timeout_seconds=1.0, tls=tls_files(plan.tls))
        self._endpoint = endpoint
        self._purge_argv = purge_argv
        self._purge_env = purge_env
        self._restart_providers = restart_providers
        self._events = events
        self._purge_ended = purge_ended
        self._purge_task: asyncio.Task[None] | None = None
        self._kept: dict[str, object] | None = None
        self._view = machine.view

    @property
    def view(self) -> TierView:
        """What the tier was at the last step."""
        return self._machine.view

    def recall(self) -> None:
        """Takes up what an earlier daemon knew. A file that cannot be read counts as an unclean end."""
        try:
            kept = json.loads(self._state_file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            self._events.add("warning", "tier.state-damaged", f"{self._state_file} cannot be read: {error}")
            kept = {}
        self._machine.recall(kept)

    async def look(self) -> PoolState | None:
        """The pool as the MetaService describes it now; ``None`` when it does not answer in time."""
        try:
            self.pool = await self._client.pool_state()
            self.pool_seen_unix_seconds = time.time()
        except KvtierError:
            self.pool = None
        return self.pool

    async def step(self, seen: TierInputs) -> None:
        """One look, and what follows from it."""
        for action in self._machine.step(seen):
            await self._carry_out(action)
        self._report_change()
        self._remember()

    async def quiesce(self) -> bool:
        """Holds new requests at the endpoint until nothing is in flight: before a planned stop. False: not quiet."""
        if self._endpoint is None:
            return False
        try:
            await self._endpoint.quiesce(QUIESCE_SECONDS)
        except KvtierError as error:
            self._events.add("warning", "tier.quiesce-failed", error.message)
            return False
        return True

    async def purge(self) -> float:
        """Empties the pool; the seconds it took.

        Raises:
            MemcacheError: the MetaService refused, or did not answer in time.
        """
        started = time.monotonic()
        result = await SystemRunner().run(
            self._purge_argv, timeout_seconds=PURGE_SECONDS, env=self._purge_env
        )
        if result.timed_out:
            raise MemcacheError(f"the purge did not end within {PURGE_SECONDS:.0f} s", code="memcache.purge")
        if not result.ok:
            raise MemcacheError(
                f"the pool could not be purged: {result.describe()}",
                hint="[meta] python names an interpreter that has memcache-hybrid, in the image with runner docker"
                if result.code == EXIT_CONFIG
                else "",
                code="memcache.purge",
            )
        return time.monotonic() - started

    async def close(self) -> None:
        """Ends a purge that is under way."""
        if self._purge_task is not None:
            self._purge_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._purge_task

    async def _carry_out(self, action: Action) -> None:
        try:
            if action == "purge":
                self._purge_task = asyncio.create_task(self._purge_and_report())
            elif action == "restart-providers":
                self._restart_providers("its rank did not come back after the MetaService's restart")
            elif self._endpoint is not None:
                await self._tell_endpoint(self._endpoint, action)
        except KvtierError as error:
            self._events.add("warning", "tier.action-failed", f"{action}: {error.message}")

    async def _tell_endpoint(self, endpoint: Endpoint, action: Action) -> None:
        if action == "serve":
            await endpoint.serve()
        elif action == "recover":
            await endpoint.recover()
        elif action == "admit-all":
            await endpoint.admit("all")
        elif action == "cut":
            self._events.add(
                "warning", "tier.role-lost", "a rank's role report was lost: cutting the connections once"
            )
            await endpoint.cut()

    async def _purge_and_report(self) -> None:
        try:
            seconds = await self.purge()
        except (KvtierError, OSError) as error:
            self._machine.purge_ended(ok=False, now_seconds=time.monotonic())
            self._events.add("error", "tier.purge-failed", str(error))
        else:
            self._machine.purge_ended(ok=True, now_seconds=time.monotonic())
            self._events.add(
                "info",
                "tier.purged",
                f"the pool was emptied after an unclean end of the MetaService ({seconds:.1f} s)",
            )
        self._purge_ended()

    def _report_change(self) -> None:
        before, now = self._view, self._machine.view
        if (before.state, before.purge_due) != (now.state, now.purge_due):
            severity: Severity = "info" if now.state == "joinable" else "warning"
            reasons = f": {'; '.join(now.reasons)}" if now.reasons else ""
            self._events.add(
                severity, f"tier.{now.state}", f"the tier is {now.state.replace('_', ' ')}{reasons}"
            )
        self._view = now

    def _remember(self) -> None:
        kept = self._machine.remember()
        if kept == self._kept:
            return
        with contextlib.suppress(KvtierError):  # a full disk: tried again at the next change
            write_atomic(self._state_file, json.dumps(kept).encode(), mode=0o600)
            self._kept = kept
