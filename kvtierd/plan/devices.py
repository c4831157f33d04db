"""The dies that engines are given: each to one engine, there at all, and held by nobody else."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from kvtierd.plan.inventory import Inventory
from kvtierd.plan.remarks import Remarks
from kvtierd.settings import EngineSettings


def check_devices(
    engines: Sequence[EngineSettings], inventory: Inventory, remarks: Remarks, *, emulated: bool
) -> None:
    """Refuses dies that two engines want, and dies that are not there."""
    devices = [d for e in engines for d in e.devices]
    doubled = sorted({d for d in devices if devices.count(d) > 1})
    if doubled:
        users = ", ".join(e.name for e in engines if doubled[0] in e.devices)
        remarks.refuse("engine.device-shared", f"device {doubled[0]} is given to several engines: {users}")
    known = {npu.device for npu in inventory.npus}
    absent = sorted(set(devices) - known)
    if absent and not emulated:
        remarks.refuse(
            "engine.no-device",
            f"device {absent[0]} does not exist on this host (it has {_span(known)})",
            "correct the engine's devices",
        )


def held_card(engine: EngineSettings, inventory: Inventory, owned_pids: AbstractSet[int]) -> str | None:
    """A process of somebody else on one of the engine's cards: it would fail minutes later for want of memory."""
    places = {(n.card, n.chip): n.device for n in inventory.npus if n.device in engine.devices}
    for process in inventory.npu_processes:
        device = places.get((process.card, process.chip))
        if device is not None and process.pid not in owned_pids:
            who = f"{process.name or 'a process'} (pid {process.pid})"
            return f"device {device} is held by {who}; end it, then kvtierctl reload"
    return None


def _span(devices: set[int]) -> str:
    if not devices:
        return "no devices"
    ordered = sorted(devices)
    return f"devices {ordered[0]} to {ordered[-1]}" if len(ordered) > 1 else f"device {ordered[0]}"
