"""Joining the pool without holding up the engine, and leaving it in time.

``init`` can fail at once (wrong configuration, a full world) or never return (MetaService down, a half-finished
handshake). A failed one is tried again. A hanging one cannot be helped: a process has one client, and a second ``init``
beside it does nothing. The engine then serves without the tier, and joins late if ``init`` does return.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final, Literal

from .store import BlockStore, Span

State = Literal["joining", "joined", "failed", "hung", "left"]
_log = logging.getLogger(__name__)
_FIRST_RETRY_SECONDS: Final = 2.0
_LONGEST_RETRY_SECONDS: Final = 30.0


class Membership:
    """One store's place in the pool. Thread-safe.

    Args:
        name: Stands in front of log lines.
        store: Whose ``open``, ``register`` and ``close`` are called.
        spans: Memory to register.
        deadline_seconds: When ``open`` counts as hung.
        around_open: What to hold while ``open`` runs.
    """

    def __init__(
        self,
        name: str,
        store: BlockStore,
        spans: Sequence[Span],
        *,
        deadline_seconds: float,
        around_open: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        first_retry_seconds: float = _FIRST_RETRY_SECONDS,
    ) -> None:
        self._name = name
        self._store = store
        self._spans = spans
        self._deadline_seconds = deadline_seconds
        self._around_open = around_open
        self._first_retry_seconds = first_retry_seconds
        self._lock = threading.Lock()
        self._leaving = threading.Event()
        self._settled = threading.Event()
        self._state: State = "joining"

    @property
    def state(self) -> State:
        """``hung`` may still become ``joined``."""
        with self._lock:
            return self._state

    def start(self) -> None:
        """Begins to join, in the background."""
        threading.Thread(target=self._run, name=f"kvtierd-{self._name}-join", daemon=True).start()
        threading.Thread(target=self._watch, name=f"kvtierd-{self._name}-join-watch", daemon=True).start()

    def leave(self, timeout_seconds: float) -> bool:
        """Leaves the pool, waiting at most so long. False when the client has not said goodbye in time."""
        self._leaving.set()
        self._settled.set()
        with self._lock:
            was, self._state = self._state, "left"
        if was != "joined":
            return True
        thread = threading.Thread(target=self._close, name=f"kvtierd-{self._name}-leave", daemon=True)
        thread.start()
        thread.join(timeout_seconds)
        return not thread.is_alive()

    def _close(self) -> None:
        try:
            self._store.close()
        except Exception as error:  # noqa: BLE001 - leaving is best effort
            _log.warning("kvtierd: %s: MemCache close failed: %s", self._name, error)

    def _run(self) -> None:
        delay = self._first_retry_seconds
        while not self._leaving.is_set():
            self._become("joining")
            started = time.monotonic()
            problem, may_retry = self._attempt()
            self._settled.set()
            if self._leaving.is_set():
                return
            if not problem:
                self._become("joined")
                _log.info("kvtierd: %s: joined the pool in %.2f s", self._name, time.monotonic() - started)
                return
            self._become("failed")
            after = f"trying again in {delay:.0f} s" if may_retry else "not trying again"
            _log.warning(
                "kvtierd: %s: not in the pool: %s. Serving without it; %s.", self._name, problem, after
            )
            if not may_retry or self._leaving.wait(delay):
                return
            delay = min(2 * delay, _LONGEST_RETRY_SECONDS)

    def _become(self, state: State) -> None:
        with self._lock:
            if self._state != "left":
                self._state = state

    def _attempt(self) -> tuple[str, bool]:
        """What went wrong (empty: nothing), and whether another attempt can help."""
        try:
            with self._around_open():
                code = self._store.open()
        except ImportError as error:
            return f"memcache_hybrid cannot be imported: {error}", False
        except Exception as error:  # noqa: BLE001 - the native client's errors have no common type
            return f"MemCache init failed: {error}", True
        if code != 0:
            return f"MemCache init answered {code}; its own lines above say why", True
        for span in self._spans:
            code = self._store.register(span)
            if code != 0:
                return f"MemCache register_buffer of {span.size_bytes} bytes answered {code}", False
        return "", False

    def _watch(self) -> None:
        if self._settled.wait(self._deadline_seconds):
            return
        with self._lock:
            if self._state != "joining":
                return
            self._state = "hung"
        _log.warning(
            "kvtierd: %s: MemCache init has not returned for %.0f s. Serving without the pool; "
            "it is used if init still returns.",
            self._name,
            self._deadline_seconds,
        )
