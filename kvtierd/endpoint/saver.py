"""Keeps the state file in step with the state: soon after a change, or at once when a change must not be forgotten."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

from kvtierd.endpoint.epochs import Epochs
from kvtierd.endpoint.state import EndpointState
from kvtierd.endpoint.statefile import is_of_this_boot, read_state, save_state
from kvtierd.endpoint.targets import AnyTarget, target_dict
from kvtierd.errors import EndpointError

_log = logging.getLogger(__name__)
SAVE_EVERY_SECONDS = 0.5


class StateSaver:
    """Writes one file; writes never overtake each other."""

    def __init__(self, path: Path, state: EndpointState) -> None:
        self._path = path
        self._state = state
        self._lock = asyncio.Lock()
        self._saved: object = None

    def restore(self) -> None:
        """What an earlier endpoint wrote. A damaged file costs its survivors, but not its epochs."""
        saved = read_state(self._path)
        if saved is None:
            return
        if is_of_this_boot(saved):
            try:
                self._state.restore(saved, time.monotonic(), time.time())
            except (EndpointError, KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
                _log.warning("state file %s is damaged (%r): starting anew", self._path, error)
            else:
                return
        self._state.restore_epochs(saved)

    async def run(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(SAVE_EVERY_SECONDS)
            async with self._lock:
                if (value := self._unsaved()) is not None:
                    await asyncio.to_thread(self._save, value)

    def save_now(self) -> None:
        """At the end, on the loop."""
        if (value := self._unsaved()) is not None:
            self._save(value)

    async def save_epochs(self, epochs: Epochs, target: AnyTarget | None) -> None:
        """Has the file say this already. Only when this has returned may it be acted upon.

        Raises:
            EndpointError: (``endpoint.state-file``) it could not be written; nothing has changed.
        """
        async with self._lock:
            value = self._state.to_save() | {"epochs": epochs.to_save()}
            if target is not None:
                value |= {"target": target_dict(target), "suspended": False}
            elif self._state.target is not None:
                value |= {"suspended": True}
            await asyncio.to_thread(save_state, self._path, value)

    def _unsaved(self) -> dict[str, Any] | None:
        """What has to be saved, taken on the loop: beside it, clients could come and go while it is collected."""
        state = self._state
        mark = state.revision, sum(client.provider for client in state.clients)
        if mark == self._saved:
            return None
        self._saved = mark
        return state.to_save()

    def _save(self, value: dict[str, Any]) -> None:
        try:
            save_state(self._path, value)
        except EndpointError as error:
            _log.error("%s", error)
