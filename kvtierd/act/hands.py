"""What actions need of the node that they change. The daemon gives it; tests give something that remembers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from kvtierd.errors import ActionError, KvtierError
from kvtierd.observe.picture import Picture
from kvtierd.plan.adjustments import Adjustments


class HalfDoneError(ActionError):
    """Part of it is done and stays so."""

    code = "act.half-done"


class UndoneError(ActionError):
    """It did not work, and all is as before."""

    code = "act.undone"


def told(error: BaseException) -> str:
    """An error in one line: what happened, and why."""
    if isinstance(error, KvtierError):
        return f"{error.message}{f' ({error.why})' if error.why else ''}"
    return str(error) or type(error).__name__


@dataclasses.dataclass(frozen=True, slots=True)
class UnitNow:
    """A unit as the supervisor sees it. ``instance``: its run; ``None`` when it does not run."""

    state: str
    instance: str | None = None
    reason: str = ""


class Hands(Protocol):
    """One node. Every call has a deadline of its own and raises ``KvtierError`` when it did not work."""

    @property
    def node(self) -> str:
        """Its name."""
        ...

    def picture(self) -> Picture | None:
        """The newest."""
        ...

    def adjustments(self) -> Adjustments:
        """What is changed beside the settings, and kept."""
        ...

    async def adjust(self, change: Callable[[Adjustments], Adjustments]) -> None:
        """Makes another change part of the plan in force: hugepages are reserved, files written, units known."""
        ...

    def shortage(self) -> str:
        """What of the hugepages that the plan wants could not be had; "" for nothing."""
        ...

    def planned_bytes(self, unit: str) -> int | None:
        """The memory that an added holder brings by the plan; ``None``: the plan has no such unit."""
        ...

    def unit(self, unit: str) -> UnitNow | None:
        """A unit now; ``None``: there is none."""
        ...

    async def stop_unit(self, unit: str) -> None:
        """Stops it and waits until it has ended."""
        ...

    async def restart_unit(self, unit: str, reason: str) -> None:
        """Has it restarted in place. Returns at once."""
        ...

    async def roll_engine(self, unit: str, reason: str) -> None:
        """Puts an engine among those that are drained and restarted one by one. Returns at once."""
        ...

    def call_off_roll(self, unit: str) -> None:
        """Takes it from among those, if its turn has not come yet."""
        ...

    async def switch_l3(self, unit: str, *, on: bool) -> str:
        """Attaches or detaches an engine's L3; what there is to say of it."""
        ...

    async def purge(self) -> float:
        """Empties the pool; the seconds it took."""
        ...

    async def holder_elsewhere(
        self, node: str, token: str, reason: str, *, add_bytes: int = 0, remove_unit: str = ""
    ) -> tuple[str, int]:
        """Has another node add or remove a pool holder; its unit and memory. Only the master is listened to."""
        ...
