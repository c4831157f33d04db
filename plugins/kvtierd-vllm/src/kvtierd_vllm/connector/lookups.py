"""The scheduler's side: which blocks of a new request the pool has.

A lookup takes about a millisecond. It runs beside the scheduler, which waits a few milliseconds for it and asks again
in its next step: a MetaService that hangs then holds up the request that asks, and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from .guard import PendingCall, TierGuard, TierUnavailableError
from .keys import all_rank_keys
from .planning import Planner
from .store import BlockStore

_INLINE_SECONDS: Final = 0.005


class Lookups:
    """Answers "how many blocks can be loaded" for one request after the other. For one thread.

    Args:
        store: The pool.
        guard: Limits every lookup.
        joined: Whether the pool can be used at all.
        planner: Learns what is in the pool.
        ranks: How many objects a block has.
        inline_seconds: How long one question may hold up the caller.
    """

    def __init__(
        self,
        store: BlockStore,
        guard: TierGuard,
        joined: Callable[[], bool],
        planner: Planner,
        *,
        ranks: int = 1,
        inline_seconds: float = _INLINE_SECONDS,
    ) -> None:
        self._store = store
        self._guard = guard
        self._joined = joined
        self._planner = planner
        self._ranks = ranks
        self._inline_seconds = inline_seconds
        self._pending: dict[str, PendingCall[list[int]]] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def loadable_blocks(self, request_id: str, prompt_tokens: int, computed_tokens: int) -> int | None:
        """How many blocks behind the computed tokens; None: not known yet, ask again."""
        pending = self._pending.get(request_id)
        try:
            if pending is None:
                pending = self._start(request_id, prompt_tokens)
            if pending is None:
                return 0
            self._pending[request_id] = pending
            pending.finished.wait(self._inline_seconds)
            codes = self._guard.poll(pending)
        except TierUnavailableError:
            self.forget(request_id)
            return 0
        if codes is None:
            return None
        self.forget(request_id)
        present = self._present(codes)
        return self._planner.hit_blocks(request_id, present, computed_tokens) if present else 0

    def forget(self, request_id: str) -> None:
        """The answer is not wanted any more."""
        self._pending.pop(request_id, None)

    def forget_all(self) -> None:
        """No answer is wanted any more."""
        self._pending.clear()

    def _start(self, request_id: str, prompt_tokens: int) -> PendingCall[list[int]] | None:
        if not self._joined() or not self._planner.may_load(request_id):
            return None
        keys = all_rank_keys(self._planner.keys_to_look_up(request_id, prompt_tokens), self._ranks)
        return self._guard.start("exist", lambda: self._store.exists(keys)) if keys else None

    def _present(self, codes: Sequence[int]) -> list[bool]:
        """Per block whether all its parts are there; empty when the pool did not answer properly."""
        failed = [code for code in codes if code < 0]
        if failed:
            self._guard.trip(f"exist answered {failed[0]}")
            return []
        return [all(codes[i : i + self._ranks]) for i in range(0, len(codes), self._ranks)]
