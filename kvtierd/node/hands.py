"""What actions may do to this node, by the same ways that operators use."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable

from kvtierd.act.hands import UnitNow
from kvtierd.engines.l3_switch import POLICY
from kvtierd.engines.rolling import ask_for
from kvtierd.errors import ActionError, ClusterError, UnitError
from kvtierd.node.mastership import Mastership
from kvtierd.node.state import Node
from kvtierd.node.takeover import Takeover
from kvtierd.node.verbs import NodeVerbs
from kvtierd.observe.picture import Picture
from kvtierd.plan.adjustments import Adjustments

STOP_SECONDS = 60.0
L3_WAIT_SECONDS = 120.0  # for a moment without requests
ELSEWHERE_SECONDS = 420.0  # a holder of hundreds of GiB has to be registered there
POLL_SECONDS = 0.1


class NodeHands:
    """``kvtierd.act.hands.Hands`` over a running node.

    Attributes:
        mastership: This node's part in its cluster, once it has one.
        newest: The newest picture.
    """

    def __init__(self, node: Node, takeover: Takeover, verbs: NodeVerbs) -> None:
        self._node = node
        self._takeover = takeover
        self._verbs = verbs
        self.mastership: Mastership | None = None
        self.newest: Picture | None = None
        # A daemon that has lost count of its proposals must not be given the answer to an earlier one.
        self._run = secrets.token_hex(4)

    @property
    def node(self) -> str:
        """Its name."""
        return self._node.plan.node if self._node.plan is not None else ""

    def picture(self) -> Picture | None:
        """The newest."""
        return self.newest

    def adjustments(self) -> Adjustments:
        """As in the plan in force, and on disk."""
        return self._node.adjusted

    async def adjust(self, change: Callable[[Adjustments], Adjustments]) -> None:
        """Makes it part of the plan in force; the loop's next round does the rest. Whoever gives up does not leave half."""
        await asyncio.shield(asyncio.ensure_future(self._takeover.adjust(change)))
        self._node.supervisor.poke()

    def shortage(self) -> str:
        """Of hugepages."""
        return self._node.hugepages.problem.splitlines()[0] if self._node.hugepages.problem else ""

    def planned_bytes(self, unit: str) -> int | None:
        """By the plan in force."""
        plan = self._node.plan
        if plan is None or plan.unit(unit) is None:
            return None
        kept = next((h for h in self.adjustments().holders if unit.endswith(f"-{h.name}")), None)
        return min(kept.dram_bytes, plan.pool.dram_bytes_per_provider) if kept is not None else None

    def unit(self, unit: str) -> UnitNow | None:
        """As the supervisor sees it."""
        view = self._node.view(unit)
        if view is None:
            return None
        return UnitNow(view.state, view.instance if view.pid is not None else None, view.reason or "")

    async def stop_unit(self, unit: str) -> None:
        """Stops it and waits until it has ended.

        Raises:
            UnitError: it has not ended in time.
        """
        self._node.supervisor.request_stop(unit, remember=False)
        deadline = time.monotonic() + STOP_SECONDS
        while (view := self._node.view(unit)) is not None and (view.pid or view.state == "stopping"):
            if time.monotonic() >= deadline:
                raise UnitError(f"{unit} did not stop within {STOP_SECONDS:.0f} s", code="unit.stop-late")
            await asyncio.sleep(POLL_SECONDS)

    async def restart_unit(self, unit: str, reason: str) -> None:
        """In place; a MetaService is quiesced before."""
        await self._verbs.act(unit, "restart", reason)

    async def roll_engine(self, unit: str, reason: str) -> None:
        """Waits for its turn, is drained and started anew."""
        node = self._node
        node.events.add("warning", "policy.roll", f"it is drained and started anew: {reason}", unit=unit)
        ask_for(node.due_engines, unit)
        node.supervisor.poke()

    def call_off_roll(self, unit: str) -> None:
        """Its turn does not come any more; one that is being drained goes on."""
        if unit in self._node.due_engines:
            self._node.due_engines.remove(unit)

    async def switch_l3(self, unit: str, *, on: bool) -> str:
        """As kvtierctl l3 does."""
        reply = await self._verbs.switch_l3(unit, on=on, wait_seconds=L3_WAIT_SECONDS, by=POLICY)
        return reply.note

    async def purge(self) -> float:
        """Empties the pool. Raises ``UnitError``: no MetaService runs here."""
        return (await self._verbs.purge(by=POLICY)).seconds

    async def holder_elsewhere(
        self, node: str, token: str, reason: str, *, add_bytes: int = 0, remove_unit: str = ""
    ) -> tuple[str, int]:
        """By that node's kvtierd.

        Raises:
            ClusterError: this is not the master, or the other one refuses or cannot be reached.
        """
        mastership = self.mastership
        if mastership is None or not mastership.is_master:
            raise ActionError("this node is not the master any more", code="act.not-master")
        network = mastership.part.network
        if node not in network.links:
            raise ClusterError(f"{node} is no other node of this cluster", code="cluster.no-such-node")
        epoch = mastership.coordinator.standing.epoch
        return await network.change_holders(
            node, epoch, f"{epoch}-{self._run}-{token}", reason, ELSEWHERE_SECONDS,
            add_bytes=add_bytes, remove_unit=remove_unit,
        )  # fmt: skip
