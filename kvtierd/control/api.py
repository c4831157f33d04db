"""What the control service asks of the node. The daemon implements it; tests use a fake."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Protocol

from kvtierd.control.v1 import control_pb2 as pb
from kvtierd.events import Event


class NodeApi(Protocol):
    """One method a verb. All raise ``KvtierError`` with a stable code; none may hang."""

    def status(self) -> pb.StatusReply:
        """The node as last seen; never waits."""
        ...

    def plan_json(self) -> str:
        """The plan in force."""
        ...

    async def reload(self, *, restart_changed: bool) -> pb.ReloadReply:
        """Reads settings again."""
        ...

    def events(self, last: int) -> list[Event]:
        """Kept events."""
        ...

    def follow_events(self, last: int) -> AsyncIterator[Event]:
        """Kept, then new events."""
        ...

    async def cluster_events(self, last: int) -> list[tuple[str, Event]]:
        """Kept events of all nodes, each with its node."""
        ...

    def follow_cluster_events(self, last: int) -> AsyncIterator[tuple[str, Event]]:
        """Kept, then new events of all nodes."""
        ...

    async def tail(self, unit: str, lines: int) -> list[str]:
        """Last output lines of a unit."""
        ...

    def follow_log(self, unit: str, lines: int) -> AsyncIterator[str]:
        """Last, then new output lines of a unit."""
        ...

    async def control_unit(self, unit: str, action: str, wait_seconds: float) -> pb.Unit:
        """start, stop or restart."""
        ...

    async def drain(self, unit: str, deadline_seconds: float) -> pb.ControlUnitReply:
        """Waits until an engine has no requests, then stops it."""
        ...

    async def stop_all(self, wait_seconds: float) -> list[pb.Unit]:
        """Stops every unit."""
        ...

    async def purge(self) -> pb.PurgeReply:
        """Empties the pool."""
        ...

    async def switch_l3(self, unit: str, *, on: bool, wait_seconds: float) -> pb.SwitchL3Reply:
        """Takes an engine's L3 off or on while it runs."""
        ...

    def peers(self) -> pb.PeersReply:
        """The nodes of the cluster as this one sees them; never waits."""
        ...

    async def switchover(self, node: str, wait_seconds: float) -> pb.SwitchoverReply:
        """Gives mastership to the named node."""
        ...

    async def promote(self, *, force: bool) -> pb.PeersReply:
        """Makes this node the master by an operator's word."""
        ...

    def pause(self, *, on: bool, reason: str) -> pb.PeersReply:
        """Holds this node back, or ends that."""
        ...

    async def why(self, unit: str, last: int) -> pb.WhyReply:
        """What the policy's rules see and do, of a unit or ("") of everything."""
        ...

    async def policy_in_force(self) -> pb.PolicyReply:
        """The policy, and what it has changed beside the settings."""
        ...

    async def reset_policy(self) -> pb.PolicyReply:
        """Takes back what it has changed."""
        ...

    def pictures(self) -> Iterator[str]:
        """What was seen in the last hour, lines of JSON."""
        ...

    def plugins(self) -> list[pb.Plugin]:
        """Installed plugins."""
        ...
