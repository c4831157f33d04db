"""The control service: gRPC on a unix socket, mode 0660, with the standard health service beside it."""

from __future__ import annotations

import contextlib
import grp
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import grpc
import structlog
from grpc_health.v1 import _async as health_async
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvtierd import __version__
from kvtierd.control.api import NodeApi
from kvtierd.control.v1 import control_pb2 as pb
from kvtierd.control.v1 import control_pb2_grpc
from kvtierd.control.wire import CHANNEL_OPTIONS, MAX_SOCKET_PATH_BYTES, SERVICE, pack, status_for
from kvtierd.errors import KvtierError, StateError
from kvtierd.events import Event
from kvtierd.plan.engine import API_VERSION

log = structlog.get_logger(__name__)

SOCKET_GROUP = "kvtierd"
MAX_WAIT_SECONDS = 600.0
MAX_LOG_LINES = 10_000
_ACTIONS = {
    pb.ControlUnitRequest.ACTION_START: "start",
    pb.ControlUnitRequest.ACTION_STOP: "stop",
    pb.ControlUnitRequest.ACTION_RESTART: "restart",
    pb.ControlUnitRequest.ACTION_DRAIN: "drain",
}

Reply = TypeVar("Reply")
Context = grpc.aio.ServicerContext[Any, Any]


class _Servicer(control_pb2_grpc.ControlServicer):
    """Translates between protobuf and the node; holds no state."""

    def __init__(self, node: NodeApi) -> None:
        self._node = node

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusReply:  # noqa: N802
        return await _guarded(context, self._status)

    async def _status(self) -> pb.StatusReply:
        return self._node.status()

    async def GetPlan(self, request: pb.GetPlanRequest, context: Context) -> pb.GetPlanReply:  # noqa: N802
        async def answer() -> pb.GetPlanReply:
            return pb.GetPlanReply(plan_json=self._node.plan_json())

        return await _guarded(context, answer)

    async def Reload(self, request: pb.ReloadRequest, context: Context) -> pb.ReloadReply:  # noqa: N802
        return await _guarded(context, lambda: self._node.reload(restart_changed=request.restart_changed))

    async def Events(self, request: pb.EventsRequest, context: Context) -> AsyncIterator[pb.Event]:  # noqa: N802
        if request.cluster:
            async for named in self._cluster_events(request, context):
                yield named
            return
        if not request.follow:
            for event in self._node.events(request.last):
                yield _event(event)
            return
        async with contextlib.aclosing(self._node.follow_events(request.last)) as events:  # type: ignore[type-var]
            async for event in events:
                yield _event(event)

    async def _cluster_events(self, request: pb.EventsRequest, context: Context) -> AsyncIterator[pb.Event]:
        try:
            if not request.follow:
                for node, event in await self._node.cluster_events(request.last):
                    yield _event(event, node)
                return
            async with contextlib.aclosing(self._node.follow_cluster_events(request.last)) as events:  # type: ignore[type-var]
                async for node, event in events:
                    yield _event(event, node)
        except KvtierError as error:
            await _abort(context, error)

    async def Logs(self, request: pb.LogsRequest, context: Context) -> AsyncIterator[pb.LogLine]:  # noqa: N802
        lines = min(request.lines or 20, MAX_LOG_LINES)
        try:
            if not request.follow:
                for line in await self._node.tail(request.unit, lines):
                    yield pb.LogLine(text=line)
                return
            async with contextlib.aclosing(self._node.follow_log(request.unit, lines)) as stream:  # type: ignore[type-var]
                async for line in stream:
                    yield pb.LogLine(text=line)
        except KvtierError as error:
            await _abort(context, error)

    async def ControlUnit(self, request: pb.ControlUnitRequest, context: Context) -> pb.ControlUnitReply:  # noqa: N802
        async def answer() -> pb.ControlUnitReply:
            action = _ACTIONS.get(request.action)
            if action is None:
                raise KvtierError("the request names no action", code="control.bad-request")
            wait = min(max(request.wait_seconds, 0.0), MAX_WAIT_SECONDS)
            if action == "drain":
                return await self._node.drain(request.unit, wait)
            return pb.ControlUnitReply(unit=await self._node.control_unit(request.unit, action, wait))

        return await _guarded(context, answer)

    async def StopAll(self, request: pb.StopAllRequest, context: Context) -> pb.StopAllReply:  # noqa: N802
        async def answer() -> pb.StopAllReply:
            wait = min(max(request.wait_seconds, 0.0), MAX_WAIT_SECONDS)
            return pb.StopAllReply(units=await self._node.stop_all(wait))

        return await _guarded(context, answer)

    async def Purge(self, request: pb.PurgeRequest, context: Context) -> pb.PurgeReply:  # noqa: N802
        return await _guarded(context, self._node.purge)

    async def SwitchL3(self, request: pb.SwitchL3Request, context: Context) -> pb.SwitchL3Reply:  # noqa: N802
        async def answer() -> pb.SwitchL3Reply:
            wait = min(max(request.wait_seconds, 0.0), MAX_WAIT_SECONDS)
            return await self._node.switch_l3(request.unit, on=request.on, wait_seconds=wait)

        return await _guarded(context, answer)

    async def Peers(self, request: pb.PeersRequest, context: Context) -> pb.PeersReply:  # noqa: N802
        async def answer() -> pb.PeersReply:
            return self._node.peers()

        return await _guarded(context, answer)

    async def Switchover(self, request: pb.SwitchoverRequest, context: Context) -> pb.SwitchoverReply:  # noqa: N802
        wait = min(max(request.wait_seconds, 0.0), MAX_WAIT_SECONDS)
        return await _guarded(context, lambda: self._node.switchover(request.node, wait))

    async def Promote(self, request: pb.PromoteRequest, context: Context) -> pb.PeersReply:  # noqa: N802
        return await _guarded(context, lambda: self._node.promote(force=request.force))

    async def Pause(self, request: pb.PauseRequest, context: Context) -> pb.PeersReply:  # noqa: N802
        async def answer() -> pb.PeersReply:
            return self._node.pause(on=request.on, reason=request.reason)

        return await _guarded(context, answer)

    async def Why(self, request: pb.WhyRequest, context: Context) -> pb.WhyReply:  # noqa: N802
        return await _guarded(context, lambda: self._node.why(request.unit, request.last))

    async def Policy(self, request: pb.PolicyRequest, context: Context) -> pb.PolicyReply:  # noqa: N802
        return await _guarded(context, self._node.policy_in_force)

    async def ResetPolicy(self, request: pb.ResetPolicyRequest, context: Context) -> pb.PolicyReply:  # noqa: N802
        return await _guarded(context, self._node.reset_policy)

    async def Pictures(self, request: pb.PicturesRequest, context: Context) -> AsyncIterator[pb.Picture]:  # noqa: N802
        try:
            for line in self._node.pictures():
                yield pb.Picture(line=line)
        except KvtierError as error:
            await _abort(context, error)

    async def Plugins(self, request: pb.PluginsRequest, context: Context) -> pb.PluginsReply:  # noqa: N802
        return pb.PluginsReply(plugins=self._node.plugins())

    async def Version(self, request: pb.VersionRequest, context: Context) -> pb.VersionReply:  # noqa: N802
        return pb.VersionReply(version=__version__, api_version=API_VERSION)


async def _guarded(context: Context, answer: Callable[[], Awaitable[Reply]]) -> Reply:
    """An operator's mistake crosses as our error; anything else is logged here and crosses as INTERNAL."""
    try:
        return await answer()
    except KvtierError as error:
        await _abort(context, error)
    except Exception as error:
        log.exception("control.failed")
        internal = KvtierError(f"internal error: {type(error).__name__}: {error}", hint="see kvtierd's log")
        await _abort(context, internal, grpc.StatusCode.INTERNAL)


async def _abort(context: Context, error: KvtierError, status: grpc.StatusCode | None = None) -> NoReturn:
    await context.abort(status or status_for(error), error.message, pack(error))
    raise AssertionError  # abort always raises


def _event(event: Event, node: str = "") -> pb.Event:
    return pb.Event(
        id=event.id, at=event.at_unix_seconds, severity=event.severity, kind=event.kind, unit=event.unit,
        message=event.message, node=node,
    )  # fmt: skip


class ControlServer:
    """Serves ``node`` at ``path`` until closed."""

    def __init__(self, node: NodeApi, path: Path) -> None:
        self._path = path
        self._server = grpc.aio.server(options=CHANNEL_OPTIONS, maximum_concurrent_rpcs=64)
        self._health = health_async.HealthServicer()
        control_pb2_grpc.add_ControlServicer_to_server(_Servicer(node), self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    async def start(self) -> None:
        """Listens.

        Raises:
            StateError: the path is too long for a socket, or cannot be used.
        """
        if len(os.fsencode(self._path)) > MAX_SOCKET_PATH_BYTES:
            raise StateError(
                f"the control socket's path is longer than {MAX_SOCKET_PATH_BYTES} bytes: {self._path}",
                hint="choose a shorter [paths] runtime",
                code="state.path-too-long",
            )
        self._remove_stale()
        umask = os.umask(0o117)
        try:
            self._server.add_insecure_port(f"unix:{self._path}")
        except RuntimeError as error:
            raise StateError(f"the control socket {self._path} cannot be made", why=str(error)) from error
        finally:
            os.umask(umask)
        await self._server.start()
        self._path.chmod(0o660)
        with contextlib.suppress(KeyError, PermissionError):
            os.chown(self._path, -1, grp.getgrnam(SOCKET_GROUP).gr_gid)
        for service in ("", SERVICE):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)

    async def close(self, grace_seconds: float = 1.0) -> None:
        """Ends streams and stops listening."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_seconds)
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _remove_stale(self) -> None:
        """A socket nobody answers is left from a daemon that was killed; the directory lock guards the rest."""
        if not self._path.is_socket():
            return
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(0.5)
            try:
                probe.connect(str(self._path))
            except OSError:
                self._path.unlink(missing_ok=True)
                return
        raise StateError(
            f"another process answers on {self._path}",
            hint="stop the other kvtierd",
            code="state.socket-in-use",
        )
