"""Knows whether the MetaService is there: asks once when a connection breaks, then often until it is back.

An open port is not an answer: a MetaService whose metrics port is taken opens its ports and then gives up, a
frozen one lets the kernel accept. So the question is a whole handshake, as a client without a rank.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import cast

from kvtierd.endpoint.relay import dial
from kvtierd.endpoint.state import EndpointState
from kvtierd.memcache import framing

_log = logging.getLogger(__name__)
FAST_SECONDS = 0.03
SLOW_SECONDS = 0.25
FAST_TRIES = 300
SETTLE_SECONDS = 0.1  # after a freeze: let it work off the broken connections first


class _Probe(asyncio.Protocol):
    def __init__(self) -> None:
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.transport = cast("asyncio.Transport", None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.write(framing.ANONYMOUS_HANDSHAKE)

    def data_received(self, data: bytes) -> None:
        if not self.answer.done():
            self.answer.set_result(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.answer.done():
            self.answer.set_exception(exc or ConnectionResetError("closed without an answer"))
            self.answer.exception()  # seen, even when nobody waits any more


class BackendWatcher:
    """Keeps ``state.backend`` true.

    Args:
        state: told of what is found.
        timeout_seconds: how long one question may take.
        on_change: called after the MetaService was found or found missing.
    """

    def __init__(self, state: EndpointState, timeout_seconds: float, on_change: Callable[[], None]) -> None:
        self._state = state
        self._timeout_seconds = timeout_seconds
        self._on_change = on_change
        self._doubt = asyncio.Event()
        self._doubt.set()

    def doubt(self) -> None:
        """Something broke: ask now."""
        self._doubt.set()

    async def run(self) -> None:
        """For ever."""
        while True:
            await self._doubt.wait()
            self._doubt.clear()
            await self._until_answered()

    async def _until_answered(self) -> None:
        tries, silent = 0, False
        while True:
            target = self._state.target
            started = time.monotonic()
            try:
                await self._ask()
            except TimeoutError:
                silent = True
                self._state.backend_silent(f"{target.meta} does not answer a handshake")
                self._on_change()
            except ConnectionRefusedError as error:
                silent = False
                self._gone(f"{target.meta}: {error.strerror or error}")
            except OSError as error:
                if tries:  # the first time it may be about to close its port
                    self._gone(f"{target.meta}: {error.strerror or error}")
            else:
                if target != self._state.target:
                    continue
                if silent:
                    await asyncio.sleep(SETTLE_SECONDS)
                if self._state.backend_found(time.time()):
                    _log.info("MetaService at %s answers", target.meta)
                self._on_change()
                return
            tries += 1
            pause = FAST_SECONDS if tries < FAST_TRIES else SLOW_SECONDS
            await asyncio.sleep(max(0.0, pause - (time.monotonic() - started)))

    def _gone(self, why: str) -> None:
        if self._state.backend.reachable or self._state.backend.since is not None:
            _log.warning("MetaService is gone: %s", why)
        self._state.backend_gone(why)
        self._on_change()

    async def _ask(self) -> None:
        probe: _Probe | None = None

        def opener() -> _Probe:
            nonlocal probe
            probe = _Probe()
            return probe

        try:
            await dial(self._state.target.meta, opener, self._timeout_seconds)
            assert probe is not None
            async with asyncio.timeout(self._timeout_seconds):
                answer = await probe.answer
            if answer[: framing.SERVER_HANDSHAKE_BYTES] != framing.HANDSHAKE_ACCEPTED:
                raise ConnectionError(f"handshake refused with {answer[:2].hex()}")
        finally:
            if probe is not None and probe.transport is not None:
                probe.transport.close()
