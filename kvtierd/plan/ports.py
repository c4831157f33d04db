"""Which TCP ports the plan uses. No two users may want the same one, and no stranger may hold it.

Ports the operator wrote stay as written; a default gives way (the MetaService's HTTP port 8000 is also vLLM's).
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from kvtierd.plan.inventory import Inventory, PortOwner
from kvtierd.plan.model import PortUse
from kvtierd.plan.remarks import Remarks


class PortPlan:
    """Collects uses and finds free ports for defaults. Explicit ports must be claimed before defaults."""

    def __init__(
        self, inventory: Inventory, remarks: Remarks, *, owned_pids: AbstractSet[int] = frozenset()
    ) -> None:
        self._remarks = remarks
        self._uses: list[PortUse] = []
        self._foreign: dict[int, PortOwner] = {
            o.port: o for o in inventory.ports_in_use if o.pid is None or o.pid not in owned_pids
        }

    @property
    def uses(self) -> tuple[PortUse, ...]:
        """All claimed ports, in order."""
        return tuple(sorted(self._uses, key=lambda u: u.port))

    def claim(
        self, port: int, unit: str, purpose: str, *, address: str = "127.0.0.1", setting: str = ""
    ) -> int:
        """Takes a port that was written in the settings (or is fixed); collisions become refusals."""
        other = next((u for u in self._uses if u.port == port), None)
        if other:
            self._remarks.refuse(
                "port.collision",
                f"port {port} is wanted by {other.unit} ({other.purpose}) and by {unit} ({purpose})",
                f"give one of them another port{f': {setting}' if setting else ''}",
            )
        owner = self._foreign.get(port)
        if owner:
            who = (
                f"{owner.process or 'a process'} (pid {owner.pid})"
                if owner.pid
                else "a process we may not look at"
            )
            self._remarks.refuse(
                "port.taken",
                f"port {port} for {unit} ({purpose}) is held by {who}",
                f"end that process, or choose another port{f': {setting}' if setting else ''}",
            )
        self._uses.append(PortUse(port=port, address=address, unit=unit, purpose=purpose))
        return port

    def claim_default(
        self, preferred: int, unit: str, purpose: str, *, setting: str, avoid: AbstractSet[int]
    ) -> int:
        """Takes ``preferred`` or the next free port above it; says so when it had to move.

        ``avoid`` are ports that others will claim later because the operator wrote them.
        """
        port = preferred
        taken = {u.port for u in self._uses} | set(self._foreign) | avoid
        while port in taken:
            port += 1
        if port != preferred:
            self._remarks.note(
                "port.moved",
                f"port {preferred} is taken, so {unit} ({purpose}) uses {port}; to choose: {setting}",
            )
        self._uses.append(PortUse(port=port, unit=unit, purpose=purpose))
        return port
