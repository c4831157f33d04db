"""The client side of the control service, for kvtierctl and tests. Blocking; every call has a deadline."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from kvtierd.control.v1 import control_pb2 as pb
from kvtierd.control.v1 import control_pb2_grpc
from kvtierd.control.wire import CHANNEL_OPTIONS, unpack
from kvtierd.errors import DaemonUnreachableError, KvtierError

CALL_SECONDS = 5.0
RELOAD_SECONDS = 600.0  # hundreds of GiB of hugepages take minutes
DRAIN_EXTRA_SECONDS = 90.0  # the stop behind the drain
STOP_EXTRA_SECONDS = 20.0  # the quiesce of the MetaService comes on top
SWITCH_EXTRA_SECONDS = 90.0  # an engine that joins or leaves the pool at the end of the wait
Reply = TypeVar("Reply")


class ControlClient:
    """Talks to the kvtierd at ``path``. Use as a context manager.

    ``call_seconds`` is the deadline of calls that only look.
    """

    def __init__(self, path: Path, *, call_seconds: float = CALL_SECONDS) -> None:
        self._path = path
        self._call_seconds = call_seconds
        self._channel = grpc.insecure_channel(f"unix:{path}", options=CHANNEL_OPTIONS)
        self._stub = control_pb2_grpc.ControlStub(self._channel)  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hangs up. Calls after it fail."""
        self._channel.close()

    def status(self) -> pb.StatusReply:
        """The node as it is."""
        return self._call(self._stub.Status, pb.StatusRequest(), pb.StatusReply)

    def plan_json(self) -> str:
        """The plan in force, JSON text."""
        return str(self._call(self._stub.GetPlan, pb.GetPlanRequest(), pb.GetPlanReply).plan_json)

    def reload(self, *, restart_changed: bool) -> pb.ReloadReply:
        """Makes the daemon read its settings again."""
        return self._call(
            self._stub.Reload,
            pb.ReloadRequest(restart_changed=restart_changed),
            pb.ReloadReply,
            seconds=RELOAD_SECONDS,
        )

    def events(self, *, last: int = 0, follow: bool = False, cluster: bool = False) -> Iterator[pb.Event]:
        """Events of this node, or of all; with ``follow`` it does not end by itself."""
        request = pb.EventsRequest(last=last, follow=follow, cluster=cluster)
        return self._stream(self._stub.Events, request, follow=follow)

    def logs(self, unit: str, *, lines: int = 20, follow: bool = False) -> Iterator[str]:
        """Output lines of a unit."""
        request = pb.LogsRequest(unit=unit, lines=lines, follow=follow)
        for line in self._stream(self._stub.Logs, request, follow=follow):
            yield line.text

    def control_unit(self, unit: str, action: str, wait_seconds: float) -> pb.Unit:
        """start, stop or restart; waits up to ``wait_seconds`` until the unit has settled."""
        request = pb.ControlUnitRequest(
            unit=unit, action=f"ACTION_{action.upper()}", wait_seconds=wait_seconds
        )
        reply = self._call(
            self._stub.ControlUnit, request, pb.ControlUnitReply, seconds=wait_seconds + STOP_EXTRA_SECONDS
        )
        return reply.unit

    def drain(self, unit: str, deadline_seconds: float) -> pb.ControlUnitReply:
        """Drains an engine for up to ``deadline_seconds`` and stops it."""
        request = pb.ControlUnitRequest(unit=unit, action="ACTION_DRAIN", wait_seconds=deadline_seconds)
        seconds = deadline_seconds + DRAIN_EXTRA_SECONDS
        return self._call(self._stub.ControlUnit, request, pb.ControlUnitReply, seconds=seconds)

    def stop_all(self, wait_seconds: float) -> list[pb.Unit]:
        """Stops every unit of the node."""
        request = pb.StopAllRequest(wait_seconds=wait_seconds)
        return list(
            self._call(
                self._stub.StopAll, request, pb.StopAllReply, seconds=wait_seconds + STOP_EXTRA_SECONDS
            ).units
        )

    def peers(self) -> pb.PeersReply:
        """The nodes of the cluster."""
        return self._call(self._stub.Peers, pb.PeersRequest(), pb.PeersReply)

    def switchover(self, node: str, wait_seconds: float) -> pb.SwitchoverReply:
        """Moves mastership to this node; waits up to ``wait_seconds`` until it serves."""
        request = pb.SwitchoverRequest(node=node, wait_seconds=wait_seconds)
        return self._call(
            self._stub.Switchover, request, pb.SwitchoverReply, seconds=wait_seconds + STOP_EXTRA_SECONDS
        )

    def promote(self, *, force: bool) -> pb.PeersReply:
        """Makes the node this client talks to the master."""
        return self._call(self._stub.Promote, pb.PromoteRequest(force=force), pb.PeersReply, seconds=30)

    def pause(self, *, on: bool, reason: str = "") -> pb.PeersReply:
        """Pauses or resumes the node."""
        return self._call(self._stub.Pause, pb.PauseRequest(on=on, reason=reason), pb.PeersReply)

    def purge(self) -> pb.PurgeReply:
        """Empties the pool."""
        return self._call(self._stub.Purge, pb.PurgeRequest(), pb.PurgeReply, seconds=60)

    def switch_l3(self, unit: str, *, on: bool, wait_seconds: float) -> pb.SwitchL3Reply:
        """Takes an engine's L3 off or on; waits up to ``wait_seconds`` for a moment without requests."""
        request = pb.SwitchL3Request(unit=unit, on=on, wait_seconds=wait_seconds)
        seconds = wait_seconds + SWITCH_EXTRA_SECONDS
        return self._call(self._stub.SwitchL3, request, pb.SwitchL3Reply, seconds=seconds)

    def why(self, unit: str = "", *, last: int = 10) -> pb.WhyReply:
        """What the policy's rules see and do, of a unit or of everything."""
        return self._call(self._stub.Why, pb.WhyRequest(unit=unit, last=last), pb.WhyReply)

    def policy(self) -> pb.PolicyReply:
        """The policy in force, and what it has changed."""
        return self._call(self._stub.Policy, pb.PolicyRequest(), pb.PolicyReply)

    def reset_policy(self) -> pb.PolicyReply:
        """Takes back what the policy has changed."""
        return self._call(self._stub.ResetPolicy, pb.ResetPolicyRequest(), pb.PolicyReply, seconds=300)

    def pictures(self) -> Iterator[str]:
        """What was seen in the last hour, lines of JSON."""
        for picture in self._stream(self._stub.Pictures, pb.PicturesRequest(), follow=False):
            yield picture.line

    def plugins(self) -> list[pb.Plugin]:
        """The plugins the daemon has loaded."""
        return list(self._call(self._stub.Plugins, pb.PluginsRequest(), pb.PluginsReply).plugins)

    def version(self) -> pb.VersionReply:
        """The daemon's version."""
        return self._call(self._stub.Version, pb.VersionRequest(), pb.VersionReply)

    def _call(self, method: Any, request: Any, reply: type[Reply], *, seconds: float | None = None) -> Reply:
        seconds = self._call_seconds if seconds is None else seconds
        try:
            answer = method(request, timeout=seconds)
        except grpc.RpcError as error:
            raise self._explained(error, seconds) from None
        assert isinstance(answer, reply)
        return answer

    def _stream(self, method: Any, request: Any, *, follow: bool) -> Iterator[Any]:
        try:
            yield from method(request, timeout=None if follow else 30.0)
        except grpc.RpcError as error:
            raise self._explained(error, 30.0) from None

    def _explained(self, error: Any, seconds: float) -> KvtierError:
        ours = unpack(error.trailing_metadata())
        if ours is not None:
            return ours
        if error.code() == grpc.StatusCode.UNAVAILABLE:
            return self._unreachable(error)
        if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            return DaemonUnreachableError(
                f"kvtierd did not answer on {self._path} within {seconds:.0f} s", hint="see kvtierd's log"
            )
        return KvtierError(f"kvtierd answered {error.code().name}: {error.details()}")

    def _unreachable(self, error: Any) -> DaemonUnreachableError:
        if not self._path.exists():
            return DaemonUnreachableError(
                f"no kvtierd runs here: there is no control socket at {self._path}",
                hint="systemctl start kvtierd; or name its settings: kvtierctl --settings FILE",
            )
        return DaemonUnreachableError(
            f"kvtierd cannot be reached at {self._path}",
            why=str(error.details()).split("; last error:")[-1].strip(),
            hint="only root and the group kvtierd may use the socket; is the daemon running?",
        )
