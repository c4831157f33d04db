"""Connections that never came to a call: gRPC refuses a caller without a right certificate before any of our code.

What can be seen is that a handshake began (the server asks for its certificate then) and that no call followed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvtierd.cluster.refusals import Refusals

LOOK_SECONDS = 5.0  # a node calls as soon as it is connected
KEPT_ADDRESSES = 4096
STRANGER = "(unknown)"


class Handshakes:
    """Compares how many began with how many callers came.

    Args:
        begun: How many handshakes have begun so far.
    """

    def __init__(self, begun: Callable[[], int], refusals: Refusals) -> None:
        self._begun = begun
        self._refusals = refusals
        self._callers: dict[str, None] = {}
        self._arrived = 0
        self._before = 0
        self._noted = 0

    def arrived(self, address: str) -> None:
        """A call has come from this address and port."""
        if address in self._callers:
            del self._callers[address]
        else:
            self._arrived += 1
            if len(self._callers) >= KEPT_ADDRESSES:
                del self._callers[next(iter(self._callers))]
        self._callers[address] = None

    async def run(self) -> None:
        """Works until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.look()

    def look(self) -> None:
        """Those that had begun when this was called the last time have had their time."""
        missing = self._before - self._arrived
        self._before = self._begun()
        for _ in range(min(missing - self._noted, 1000)):
            self._refusals.note(
                STRANGER,
                "no-handshake",
                "connections came to nothing: no certificate, one that is not accepted here, or a look at the port",
            )
        self._noted = max(self._noted, missing)
