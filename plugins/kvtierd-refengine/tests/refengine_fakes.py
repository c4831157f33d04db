"""A pool in memory that fails on demand, and helpers shared by the tests."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvtierd_refengine.l3store import KEY_GONE, SIZE_DIFFERS, Span
from kvtierd_refengine.l3tier import FailedLoad


def wait_for(condition: Callable[[], Any], what: str, timeout_seconds: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_seconds} s: {what}"
        time.sleep(0.002)


class FakeStore:
    """Objects by key, written and read through raw addresses as the real client does.

    ``answers`` maps a method to a code that it answers for every key; ``gates`` maps a method to an event that its
    calls wait for, so that they hang until a test sets it.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.answers: dict[str, int] = {}
        self.gates: dict[str, threading.Event] = {}
        self.calls: list[str] = []
        self.open_codes: list[int] = []
        self.registered: list[Span] = []
        self.closed = False

    def _called(self, method: str) -> int | None:
        self.calls.append(method)
        if gate := self.gates.get(method):
            assert gate.wait(30), "the test forgot its gate"
        return self.answers.get(method)

    def open(self) -> int:
        self._called("open")
        return self.open_codes.pop(0) if self.open_codes else 0

    def register(self, span: Span) -> int:
        self.registered.append(span)
        return self._called("register") or 0

    def exists(self, keys: Sequence[str]) -> list[int]:
        code = self._called("exists")
        return [code if code is not None else int(key in self.objects) for key in keys]

    def put(self, keys: Sequence[str], spans: Sequence[Span]) -> list[int]:
        if (code := self._called("put")) is not None:
            return [code for _ in keys]
        for key, span in zip(keys, spans, strict=True):
            self._check(span)
            self.objects.setdefault(key, ctypes.string_at(span.address, span.size_bytes))
        return [0 for _ in keys]

    def get(self, keys: Sequence[str], spans: Sequence[Span]) -> list[int]:
        if (code := self._called("get")) is not None:
            return [code for _ in keys]
        return [self._get(key, span) for key, span in zip(keys, spans, strict=True)]

    def _get(self, key: str, span: Span) -> int:
        self._check(span)
        value = self.objects.get(key)
        if value is None:
            return KEY_GONE
        if len(value) != span.size_bytes:
            return SIZE_DIFFERS
        ctypes.memmove(span.address, value, len(value))
        return 0

    def remove(self, keys: Sequence[str]) -> list[int]:
        self._called("remove")
        return [0 if self.objects.pop(key, None) is not None else -3102 for key in keys]

    def close(self) -> int:
        self._called("close")
        self.closed = True
        return 0

    def _check(self, span: Span) -> None:
        """Only registered memory may be used."""
        end = span.address + span.size_bytes
        assert any(r.address <= span.address and end <= r.address + r.size_bytes for r in self.registered)


class CountingEvents:
    """Implements TierEvents."""

    def __init__(self) -> None:
        self.failed: dict[str, int] = {}
        self.lookups = self.took = self.refused = 0

    def failed_load(self, reason: FailedLoad, blocks: int) -> None:
        self.failed[reason] = self.failed.get(reason, 0) + blocks

    def failed_lookup(self) -> None:
        self.lookups += 1

    def saved(self, blocks: int) -> None:
        self.took += blocks

    def not_saved(self, blocks: int) -> None:
        self.refused += blocks
