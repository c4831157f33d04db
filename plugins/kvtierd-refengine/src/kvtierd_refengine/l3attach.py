"""Joining the pool without letting it hold up the engine.

``init`` can fail at once (wrong configuration: -1 or -3000) or never return (MetaService down, or a joiner caught in a
half-finished handshake). A failed one is tried again; a hanging one cannot be helped, because a process has one client
and a second ``init`` beside it does nothing. The engine then serves from L1, and attaches late if it does return.

MemCache reads a configuration file that it can parse once in a process (1.3.0): another attempt helps against a missing
or broken file and against faults of the pool, not against wrong values. Those need a restart of the engine.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Literal

from kvtierd_refengine.l3store import BlockStore, Span

AttachState = Literal["attaching", "attached", "failed", "hung", "closed"]
_log = logging.getLogger(__name__)
_FIRST_RETRY_SECONDS = 2.0
_LONGEST_RETRY_SECONDS = 30.0


class Attachment:
    """The state of one store's membership. Thread-safe."""

    def __init__(
        self,
        store: BlockStore,
        spans: Sequence[Span],
        *,
        deadline_seconds: float,
        on_change: Callable[[AttachState], None] = lambda _state: None,
        first_retry_seconds: float = _FIRST_RETRY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._spans = spans
        self._deadline_seconds = deadline_seconds
        self._on_change = on_change
        self._first_retry_seconds = first_retry_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._settled = threading.Event()
        self._state: AttachState = "attaching"
        self._since = clock()
        self._threads: list[threading.Thread] = []
        self.problem = ""

    @property
    def state(self) -> AttachState:
        """``hung`` is an attempt that has passed the deadline; it may still become ``attached``."""
        with self._lock:
            late = self._clock() - self._since > self._deadline_seconds
            return "hung" if self._state == "attaching" and late else self._state

    def start(self) -> None:
        """Begins to join in the background."""
        self._in_thread(self._run, "l3-attach")
        threading.Thread(target=self._watch, name="l3-attach-watch", daemon=True).start()

    def _in_thread(self, work: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    @property
    def busy(self) -> bool:
        """Whether a call to join or to leave has not returned: nobody else may use the store until then."""
        return any(thread.is_alive() for thread in self._threads)

    @property
    def settled(self) -> bool:
        """Whether the first attempt has an outcome, or has passed its deadline."""
        return self._settled.is_set() or self.state == "hung"

    def close(self, timeout_seconds: float) -> bool:
        """Leaves the pool, waiting at most so long. True when the client said goodbye in time or never joined."""
        self._closing.set()
        with self._lock:
            was, self._state = self._state, "closed"
        if was != "attached":
            return True
        thread = self._in_thread(self._close_store, "l3-close")
        thread.join(timeout_seconds)
        return not thread.is_alive()

    def _close_store(self) -> None:
        try:
            self._store.close()
        except Exception as error:  # noqa: BLE001 - leaving is best effort
            _log.warning("MemCache close failed: %s", error)

    def _run(self) -> None:
        delay = self._first_retry_seconds
        while not self._closing.is_set():
            with self._lock:
                if self._closing.is_set():
                    return
                self._state, self._since = "attaching", self._clock()
            problem, may_retry = self._attempt()
            with self._lock:
                left = self._closing.is_set()
                self._state = "closed" if left else "failed" if problem else "attached"
                self.problem = problem
                took = self._clock() - self._since
            if left:  # it has joined after it was told to leave
                if not problem:
                    self._close_store()
                return
            self._settled.set()
            if not problem:
                _log.info("L3 attached in %.2f s", took)
                self._on_change("attached")
                return
            retry = f"trying again in {delay:.0f} s" if may_retry else "not trying again"
            _log.warning("L3 not attached: %s. Serving from L1 only; %s.", problem, retry)
            self._on_change("failed")
            if not may_retry or self._closing.wait(delay):
                return
            delay = min(2 * delay, _LONGEST_RETRY_SECONDS)

    def _attempt(self) -> tuple[str, bool]:
        """What went wrong (empty: nothing), and whether another attempt can help."""
        try:
            code = self._store.open()
        except ImportError as error:
            return f"memcache_hybrid cannot be imported: {error}", False
        except Exception as error:  # noqa: BLE001 - the native client's errors have no common type
            return f"MemCache init failed: {error}", True
        if code != 0:
            why = "its own lines above say why; new values in mmc-local.conf need a restart of the engine"
            return f"MemCache init answered {code}; {why}", True
        for span in self._spans:
            code = self._store.register(span)
            if code != 0:
                return f"MemCache register_buffer of {span.size_bytes} bytes answered {code}", False
        return "", False

    def _watch(self) -> None:
        if self._settled.wait(self._deadline_seconds) or self._closing.is_set():
            return
        _log.warning(
            "L3 not attached: MemCache init has not returned for %.0f s. Serving from L1 only; "
            "it will attach if init still returns.",
            self._deadline_seconds,
        )
        self._on_change("hung")
