"""Knows whether the MetaService is there: asks once when a connection breaks, then often until it is back.

An open port is not an answer: a MetaService whose metrics port is taken opens its ports and then gives up, a
frozen one lets the kernel accept. So the question is a whole handshake, as a client without a rank. It takes the
way that a client's connection takes: to another node it goes through that node's endpoint, which says whether its
MetaService is gone; that the endpoint cannot be reached says nothing about the MetaService.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections.abc import Callable
from typing import cast

from kvtierd.endpoint.clients import Identity
from kvtierd.endpoint.dial import Dialer, HopError, MetaGoneError, NoRoute
from kvtierd.endpoint.hop import Answer, Port
from kvtierd.endpoint.identity import find_client
from kvtierd.endpoint.pump import Receiver
from kvtierd.endpoint.state import EndpointState
from kvtierd.endpoint.targets import PeerTarget
from kvtierd.memcache import framing

_log = logging.getLogger(__name__)
FAST_SECONDS = 0.03
SLOW_SECONDS = 0.25
FAST_TRIES = 300
# Every node asks the master's endpoint, and each question is a TLS handshake there.
HOP_FAST_SECONDS = 0.25
HOP_SLOW_SECONDS = 1.0
HOP_FAST_TRIES = 20
SETTLE_SECONDS = 0.1  # after a freeze: let it work off the broken connections first


class _Probe(Receiver):
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
        dialer: opens the connections.
        timeout_seconds: how long one question may take.
        on_change: called after the MetaService was found or found missing.
    """

    def __init__(
        self, state: EndpointState, dialer: Dialer, timeout_seconds: float, on_change: Callable[[], None]
    ) -> None:
        self._state = state
        self._dialer = dialer
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
            target, generation = self._state.target, self._state.generation
            started = time.monotonic()
            try:
                answer, process = await self._ask()
            except NoRoute as error:
                if self._state.route is None:
                    if self._state.target is None:
                        self._state.backend_silent(str(error))
                    self._on_change()
                    return
            except TimeoutError:
                silent = True
                self._lost(target, generation, f"{target} does not answer a handshake", gone=False)
            except MetaGoneError as error:
                silent = False
                self._lost(target, generation, str(error), gone=True)
            except HopError as error:
                self._lost(target, generation, str(error), gone=False)
            except OSError as error:
                if tries:  # the first time it may be about to close its port
                    gone = not isinstance(target, PeerTarget)
                    self._lost(target, generation, f"{target}: {error.strerror or error}", gone=gone)
            else:
                if (target, generation) != (self._state.target, self._state.generation):
                    continue
                if silent:
                    await asyncio.sleep(SETTLE_SECONDS)
                self._found(answer, process)
                return
            tries += 1
            pause = _pause(tries, hop=isinstance(target, PeerTarget)) - (time.monotonic() - started)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, pause)):
                    await self._target_changes(target, generation)

    async def _target_changes(self, target: object, generation: int) -> None:
        while (target, generation) == (self._state.target, self._state.generation):
            self._doubt.clear()
            await self._doubt.wait()

    def _found(self, answer: Answer | None, process: Identity | None) -> None:
        deaths = self._state.backend.deaths
        life = answer.life if answer is not None else secrets.randbits(63) | 1
        era = answer.era if answer is not None else secrets.randbits(63) | 1
        found = self._state.backend_found(time.time(), process=process, life=life, era=era)
        if self._state.backend.deaths > deaths:
            _log.warning("%s: another MetaService answers than before", self._state.target)
        if found:
            _log.info("MetaService at %s answers", self._state.target)
        self._on_change()

    def _lost(self, target: object, generation: int, why: str, *, gone: bool) -> None:
        if (target, generation) != (self._state.target, self._state.generation):
            return
        if gone:
            if self._state.backend.reachable or self._state.backend.since is not None:
                _log.warning("MetaService is gone: %s", why)
            self._state.backend_gone(why)
        else:
            if self._state.backend.reachable:
                _log.warning("MetaService does not answer: %s", why)
            self._state.backend_silent(why)
        self._on_change()

    async def _ask(self) -> tuple[Answer | None, Identity | None]:
        """What the master's endpoint said, or, without a hop, the process that answered, if it can be found."""
        probe: _Probe | None = None

        def opener() -> _Probe:
            nonlocal probe
            probe = _Probe()
            return probe

        try:
            answer = await self._dialer.open(Port.META, opener, self._timeout_seconds, question=True)
            assert probe is not None
            async with asyncio.timeout(self._timeout_seconds):
                greeting = await probe.answer
            if greeting[: framing.SERVER_HANDSHAKE_BYTES] != framing.HANDSHAKE_ACCEPTED:
                raise ConnectionError(f"handshake refused with {greeting[:2].hex()}")
            if answer is not None:
                return answer, None
            return None, await self._process_behind(probe.transport)
        finally:
            if probe is not None and probe.transport is not None:
                probe.transport.close()

    async def _process_behind(self, transport: asyncio.Transport) -> Identity | None:
        remote, local = transport.get_extra_info("peername")[:2], transport.get_extra_info("sockname")[:2]
        known = self._state.backend.process
        identity, _ = await asyncio.to_thread(find_client, remote, local, [known.pid] if known else [])
        return identity if identity.is_process else None


def _pause(tries: int, *, hop: bool) -> float:
    if not hop:
        return FAST_SECONDS if tries < FAST_TRIES else SLOW_SECONDS
    return (HOP_FAST_SECONDS if tries < HOP_FAST_TRIES else HOP_SLOW_SECONDS) * random.uniform(0.7, 1.3)
