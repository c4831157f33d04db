"""Talks to one member of an etcd at a time, and to the next one when that fails. Knows nothing of masters.

One request is one attempt: whoever asks decides what to do when it fails, since a request that failed may still have
been carried out. A member that does not answer in time loses its connection too: after a cut the kernel would try it
again only after as long as the cut was.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import grpc

from kvtierd.cluster.clock import boottime_seconds
from kvtierd.cluster.etcd_v3 import rpc_pb2 as pb
from kvtierd.cluster.etcd_v3 import rpc_pb2_grpc as _stubs
from kvtierd.settings.cluster import EtcdTlsSettings

stubs: Any = _stubs  # generated without types
_log = logging.getLogger(__name__)
_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel is a new connection
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
# A member that is cut off from the others says so instead of waiting for them.
_METADATA = (("hasleader", "true"),)
_OTHER_MEMBER = frozenset({
    grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNIMPLEMENTED,
})  # fmt: skip
_ERRORS = (grpc.aio.AioRpcError, grpc.aio.UsageError, grpc.aio.InternalError, OSError, ValueError)


class EtcdError(Exception):
    """A member did not do what was asked, or did not say so. The text names the member and is for operators.

    ``refused``: it answered that it will not, so nothing was done, and another member would say the same.
    """

    def __init__(self, text: str, *, refused: bool = False) -> None:
        super().__init__(text)
        self.refused = refused


@dataclasses.dataclass(slots=True)
class Contact:
    """With one member. ``at_seconds``: when it last answered, ``None``: never."""

    at_seconds: float | None = None
    problem: str = ""


class EtcdClient:
    """All calls come from one asyncio loop."""

    def __init__(
        self,
        endpoints: tuple[str, ...],
        tls: EtcdTlsSettings | None,
        *,
        attempt_seconds: float,
        clock: Callable[[], float] = boottime_seconds,
    ) -> None:
        self.contacts = {endpoint: Contact() for endpoint in endpoints}
        self._endpoints = endpoints
        self._tls = tls
        self._attempt_seconds = attempt_seconds
        self._clock = clock
        self._current = 0
        self._channel: grpc.aio.Channel | None = None

    @property
    def endpoint(self) -> str:
        """The member that is asked next."""
        return self._endpoints[self._current]

    async def read(self, request: pb.RangeRequest) -> pb.RangeResponse:
        """Raises ``EtcdError``."""
        answer: pb.RangeResponse = await self._ask(lambda channel: stubs.KVStub(channel).Range, request)
        return answer

    async def change(self, request: pb.TxnRequest) -> pb.TxnResponse:
        """Raises ``EtcdError``; it may have been carried out all the same, even later."""
        answer: pb.TxnResponse = await self._ask(lambda channel: stubs.KVStub(channel).Txn, request)
        return answer

    async def grant(self, ttl_seconds: int) -> pb.LeaseGrantResponse:
        """A lease; etcd may give a longer one. Raises ``EtcdError``."""
        answer: pb.LeaseGrantResponse = await self._ask(
            lambda channel: stubs.LeaseStub(channel).LeaseGrant, pb.LeaseGrantRequest(TTL=ttl_seconds)
        )
        return answer

    async def revoke(self, lease: int) -> None:
        """Gives a lease back that nothing hangs on; when that fails it ends by itself."""
        request = pb.LeaseRevokeRequest(ID=lease)
        with contextlib.suppress(EtcdError):
            await self._ask(lambda channel: stubs.LeaseStub(channel).LeaseRevoke, request)

    async def keep_alive(self, lease: int) -> pb.LeaseKeepAliveResponse:
        """Renews once; a TTL of 0 says that there is no such lease. Raises ``EtcdError``."""
        request = pb.LeaseKeepAliveRequest(ID=lease)
        endpoint = self.endpoint
        try:
            keeping = stubs.LeaseStub(self._open()).LeaseKeepAlive(
                iter([request]), timeout=self._attempt_seconds, metadata=_METADATA
            )
            answer: pb.LeaseKeepAliveResponse
            async for answer in keeping:
                keeping.cancel()
                self._answered(endpoint)
                return answer
        except _ERRORS as error:
            raise await self._failed(endpoint, error) from None
        raise await self._failed(endpoint, OSError("ended without an answer"))

    async def watch(self, request: pb.WatchRequest) -> AsyncGenerator[pb.WatchResponse, None]:
        """Answers as they come, until the member or the connection ends. Raises ``EtcdError``."""
        endpoint = self.endpoint
        try:
            watching = stubs.WatchStub(self._open()).Watch(metadata=_METADATA)
            try:
                await watching.write(request)
                async for answer in watching:
                    yield answer
            finally:
                watching.cancel()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Nobody cancelled this task: the connection was given up.
            raise EtcdError(f"etcd {endpoint}: given up") from None
        except _ERRORS as error:
            raise EtcdError(f"etcd {endpoint}: {_words(endpoint, error)}") from None

    async def close(self) -> None:
        """Lets go of the connection."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)

    # -- inside

    def _open(self) -> grpc.aio.Channel:
        """Raises ``OSError``: a certificate file cannot be read."""
        if self._channel is None:
            if self._tls is None:
                self._channel = grpc.aio.insecure_channel(self.endpoint, options=_OPTIONS)
            else:
                ca, key, certificate = (
                    Path(path).read_bytes() for path in (self._tls.ca, self._tls.key, self._tls.cert)
                )
                credentials = grpc.ssl_channel_credentials(ca, key, certificate)
                self._channel = grpc.aio.secure_channel(self.endpoint, credentials, options=_OPTIONS)
        return self._channel

    async def _ask(self, method: Callable[[grpc.aio.Channel], Any], request: Any) -> Any:
        endpoint = self.endpoint
        try:
            answer = await method(self._open())(
                request, timeout=self._attempt_seconds, metadata=_METADATA
            )  # fmt: skip
        except _ERRORS as error:
            raise await self._failed(endpoint, error) from None
        self._answered(endpoint)
        return answer

    def _answered(self, endpoint: str) -> None:
        contact = self.contacts[endpoint]
        contact.at_seconds, contact.problem = self._clock(), ""

    async def _failed(self, endpoint: str, error: Exception) -> EtcdError:
        words = _words(endpoint, error)
        if words != self.contacts[endpoint].problem:
            _log.info("etcd %s: %s", endpoint, words)
        self.contacts[endpoint].problem = words
        other_member = not isinstance(error, grpc.aio.AioRpcError) or error.code() in _OTHER_MEMBER
        if other_member and endpoint == self.endpoint:
            self._current = (self._current + 1) % len(self._endpoints)
            await self.close()
        return EtcdError(f"etcd {endpoint}: {words}", refused=not other_member)


def _words(endpoint: str, error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return "does not answer"
        # gRPC tells a failed connection as "failed to connect to all addresses; last error: UNKNOWN: ipv4:...: what".
        details = (error.details() or "").rpartition("last error: ")[2].rpartition(f"{endpoint}: ")[2]
        details = details.removeprefix("etcdserver: ")
        return details or error.code().name
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__
