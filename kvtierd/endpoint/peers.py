"""What came from other nodes: links and bytes for each peer, and who was refused why. Pure."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from kvtierd.endpoint.clients import Counters

MAX_REMEMBERED_REFUSALS = 256
LOG_AGAIN_SECONDS = 3600.0


@dataclasses.dataclass(slots=True)
class PeerRow:
    """One peer. ``links`` are open now, ``links_total`` were ever let in; bytes are those of links that have ended."""

    name: str
    address: str
    links: int = 0
    links_total: int = 0
    bytes_from: int = 0
    bytes_to: int = 0
    refused: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    last_seen_unix_seconds: float | None = None

    def ended(self, counters: Counters) -> None:
        """One of its links is over."""
        self.links -= 1
        self.bytes_from += counters.bytes_from_client
        self.bytes_to += counters.bytes_to_client


class Refusals:
    """Counts refusals by reason, and says which of them are worth a line in the log.

    A line for each pair of reason and sender, and again after an hour. Senders are bounded: what is forgotten may be
    logged once more.
    """

    def __init__(self) -> None:
        self.by_reason: collections.Counter[str] = collections.Counter()
        self._logged: dict[tuple[str, str], float] = {}

    def count(self, reason: str, sender: str, now: float) -> bool:
        """One more. True when it should be logged."""
        self.by_reason[reason] += 1
        key = reason, sender
        last = self._logged.get(key)
        if last is not None and now - last < LOG_AGAIN_SECONDS:
            return False
        self._logged.pop(key, None)
        if len(self._logged) >= MAX_REMEMBERED_REFUSALS:
            del self._logged[next(iter(self._logged))]
        self._logged[key] = now
        return True

    def as_dict(self) -> dict[str, int]:
        """How many, by reason."""
        return dict(sorted(self.by_reason.items()))


def row_dict(row: PeerRow, live: list[Counters]) -> dict[str, Any]:
    """One row of ``status``; ``live`` are the counters of its open links."""
    return {
        "name": row.name,
        "address": row.address,
        "links": row.links,
        "links_total": row.links_total,
        "bytes_from": row.bytes_from + sum(c.bytes_from_client for c in live),
        "bytes_to": row.bytes_to + sum(c.bytes_to_client for c in live),
        "refused": dict(sorted(row.refused.items())),
        "last_seen_unix_seconds": row.last_seen_unix_seconds,
    }
