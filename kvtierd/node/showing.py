"""The exporter and the status page of a running node. A fault of theirs costs the page and nothing else."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import structlog

from kvtierd import __version__
from kvtierd.cluster.clock import boottime_seconds
from kvtierd.errors import KvtierError
from kvtierd.node.pilot import Pilot
from kvtierd.node.state import Node
from kvtierd.observe.exporter import Exporter, ListenAddress
from kvtierd.observe.families import ClusterFacts, Exported
from kvtierd.observe.tls import ServerFiles

log = structlog.get_logger(__name__)

SHOWN_EVENTS = 50
AGAIN_SECONDS = 30.0
NOTE_SECONDS = 5.0  # the history has a point every 15 s


class Showing:
    """Listens where [observe] says, and moves when that changes."""

    def __init__(self, node: Node, pilot: Pilot) -> None:
        self._node = node
        self._pilot = pilot
        self._exporter: Exporter | None = None
        self._wanted: Any = None
        self._changing: asyncio.Task[None] | None = None
        self._next_try_seconds = 0.0
        self._next_note_seconds = 0.0

    def round(self) -> None:
        """Follows the settings, and takes a point of the history. Returns at once."""
        if self._exporter is not None and time.monotonic() >= self._next_note_seconds:
            self._next_note_seconds = time.monotonic() + NOTE_SECONDS
            self._exporter.note()
        observe = self._node.settings.observe
        wanted = (observe.exporter, observe.tls)
        late = self._exporter is None and time.monotonic() >= self._next_try_seconds
        if (wanted != self._wanted or late) and (self._changing is None or self._changing.done()):
            again, self._wanted = wanted == self._wanted, wanted
            self._next_try_seconds = time.monotonic() + AGAIN_SECONDS
            self._changing = asyncio.create_task(self._change(again=again))

    async def _change(self, *, again: bool) -> None:
        node, observe = self._node, self._node.settings.observe
        before, self._exporter = self._exporter, None
        if before is not None:
            await before.close()
        tls = observe.tls
        files = ServerFiles(tls.ca, tls.cert, tls.key) if tls is not None else None
        try:
            address = ListenAddress.parse(observe.exporter, tls=tls is not None)
            if address is None:
                node.exporter_problem = ""
                self._next_try_seconds = float("inf")
                return
            exporter = Exporter(self.look, tls=files)
            await exporter.start(address)
        except Exception as error:
            ours = isinstance(error, KvtierError)
            if not ours:
                log.exception("exporter.failed")
            text = str(error) if ours else f"internal error: {type(error).__name__}: {error}"
            node.exporter_problem = text.splitlines()[0]
            if not again:
                node.events.add("error", "exporter.failed", text)
            return
        self._exporter, node.exporter_problem = exporter, ""
        scheme = "https" if files is not None else "http"
        node.events.add(
            "info", "exporter.listens", f"metrics and status page at {scheme}://{observe.exporter}/"
        )

    def look(self) -> Exported:
        """All that is shown now."""
        node = self._node
        state = node.snapshot()
        return Exported(
            now_seconds=boottime_seconds(),
            now_unix_seconds=time.time(),
            version=__version__,
            picture=self._pilot.observer.picture,
            units=state.views,
            tier=state.tier,
            cluster=ClusterFacts(
                node.role,  # type: ignore[arg-type]  # one of them
                node.master,
                node.epoch,
                node.view_age_seconds,
                node.paused is not None,
            ),
            problems=state.problems,
            events=node.events.last(SHOWN_EVENTS),
            actions=dict(self._pilot.counts),
        )

    async def close(self) -> None:
        """Stops listening."""
        if self._changing is not None:
            self._changing.cancel()
            await asyncio.gather(self._changing, return_exceptions=True)
        if self._exporter is not None:
            await self._exporter.close()
