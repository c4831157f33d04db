"""What a check of ``kvtierctl doctor`` is: a plain function over a host that can be anywhere.

A plugin brings checks of its own by the hook ``kvtierd_doctor_checks``. A check looks and changes nothing; it takes
at most ``CHECK_SECONDS``, and what it cannot find out is ``unknown`` with the reason, never a guess.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeVar

from kvtierd.errors import KvtierError, PluginError
from kvtierd.foreign import ForeignCalls
from kvtierd.host.view import CommandResult, HostView
from kvtierd.plan.inventory import Inventory
from kvtierd.plan.model import NodePlan
from kvtierd.settings import Settings

T = TypeVar("T")
Severity = Literal["ok", "note", "unknown", "warn", "fail"]
SEVERITIES: Final[tuple[Severity, ...]] = ("ok", "note", "unknown", "warn", "fail")
"""From good to bad. Only ``fail`` makes the exit status 1."""

CHECK_SECONDS: Final = 6.0
COMMAND_SECONDS: Final = 4.0


class Outcome(NamedTuple):
    """What one check found: values, in words. ``fix`` overrides the check's own when it knows better."""

    severity: Severity
    found: str
    fix: str = ""


def ok(found: str) -> Outcome:
    """As it should be."""
    return Outcome("ok", found)


def note(found: str, fix: str = "") -> Outcome:
    """Worth knowing, nothing to mend."""
    return Outcome("note", found, fix)


def warn(found: str, fix: str = "") -> Outcome:
    """It works now and will hurt."""
    return Outcome("warn", found, fix)


def fail(found: str, fix: str = "") -> Outcome:
    """It does not work, or gives wrong results."""
    return Outcome("fail", found, fix)


def unknown(found: str, fix: str = "") -> Outcome:
    """It could not be found out; ``found`` says why."""
    return Outcome("unknown", found, fix)


def absent(reason: str) -> Outcome:
    """There is nothing here for this check to look at."""
    return Outcome("ok", f"does not apply: {reason}")


def worst(outcomes: Iterable[Outcome], good: str) -> Outcome:
    """One outcome of many: the worst severity with everything that was found at it; ``good`` when there is none."""
    found = [o for o in outcomes if o.severity != "ok"]
    if not found:
        return ok(good)
    severity = max((o.severity for o in found), key=SEVERITIES.index)
    chosen = [o for o in found if o.severity == severity]
    return Outcome(severity, "; ".join(o.found for o in chosen), next((o.fix for o in chosen if o.fix), ""))


class CannotTellError(Exception):
    """Raised by a check, or by what it asks: the reason becomes its ``unknown``."""


class Daemon(Protocol):
    """A kvtierd that answered: what its ``status`` and ``peers`` say, as JSON values."""

    status: Mapping[str, Any]
    peers: Mapping[str, Any]


class Patient:
    """The host, the settings and the files that are looked at. Everything is asked for once and kept.

    Args:
        view: The host's files and commands; its root may be anywhere.
        settings: Valid settings, or ``None`` when there are none (``settings_problems`` then says why, if it was their
            fault).
        settings_file: Where they are.
        confs: Hand-written MemCache files to check, paths on the machine doctor runs on.
        engine_argv: An engine's command line to check, or nothing.
        daemon: What a running kvtierd says, or ``None``.
        inventory: Takes the inventory of ``view``.
        plan: Plans for it, or ``None`` where nothing can be planned (no settings).
        now_unix: The time, for certificates and clocks.
    """

    def __init__(
        self,
        view: HostView,
        *,
        inventory: Callable[[], Awaitable[Inventory]],
        settings: Settings | None = None,
        settings_file: Path | None = None,
        settings_problems: tuple[str, ...] = (),
        confs: tuple[Path, ...] = (),
        engine_argv: tuple[str, ...] = (),
        daemon: Daemon | None = None,
        plan: Callable[[Inventory], Awaitable[NodePlan]] | None = None,
        now_unix: float = 0.0,
    ) -> None:
        self.view = view
        self.settings = settings
        self.settings_file = settings_file
        self.settings_problems = settings_problems
        self.confs = confs
        self.engine_argv = engine_argv
        self.daemon = daemon
        self.now_unix = now_unix
        self._take_inventory, self._make_plan = inventory, plan
        self._asked: dict[object, asyncio.Future[Any]] = {}
        self._looks = ForeignCalls()

    def read(self, name: str) -> str:
        """A file's text, as ``HostView.read``. Raises ``CannotTellError``."""
        try:
            return self.view.read(name)
        except OSError as error:
            raise CannotTellError(f"{name} cannot be read: {error.strerror or error}") from None

    async def run(self, *argv: str, seconds: float = COMMAND_SECONDS) -> CommandResult:
        """The result of a command on that host; the same words are run once."""

        async def asking() -> CommandResult:
            return await self.view.runner.run(argv, timeout_seconds=seconds)

        result: CommandResult = await self.once(argv, asking)
        return result

    async def inventory(self) -> Inventory:
        """What the host has. Raises ``CannotTellError``."""

        async def asking() -> Inventory:
            try:
                return await self._take_inventory()
            except KvtierError as error:
                raise CannotTellError(f"there is no inventory: {error.message}") from None

        result: Inventory = await self.once("inventory", asking)
        return result

    async def plan(self) -> NodePlan | None:
        """The plan for this host, ``None`` without settings. Raises ``CannotTellError``."""

        async def asking() -> NodePlan | None:
            if self._make_plan is None:
                return None
            try:
                return await self._make_plan(await self.inventory())
            except KvtierError as error:
                raise CannotTellError(f"there is no plan: {error.message}") from None

        result: NodePlan | None = await self.once("plan", asking)
        return result

    async def look(self, what: str, function: Callable[[], T]) -> T:
        """What a blocking function finds, for checks that are coroutines: a file may be a pipe, or of a dead mount.

        Raises:
            CannotTellError: no answer in time.
            Exception: whatever the function raised.
        """
        try:
            return await self._looks.ask(what, function, seconds=COMMAND_SECONDS)
        except PluginError as error:
            if error.stable_code != "plugin.hangs":
                raise
            raise CannotTellError(f"{what}: no answer within {COMMAND_SECONDS:.0f} s") from None

    async def once(self, key: object, ask: Callable[[], Awaitable[Any]]) -> Any:
        """One asking for all checks that want the same; one check's deadline does not end it for the others."""
        if key not in self._asked:
            self._asked[key] = asyncio.ensure_future(ask())
        return await asyncio.shield(self._asked[key])


Examine = Callable[[Patient], Outcome | Awaitable[Outcome]]
Unless = Callable[[Patient], str]


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One check: what it is called, why it matters, how to mend it, and the function that looks.

    Attributes:
        id: ``group.name``, stable.
        title: What should be so, a short sentence.
        why: What goes wrong otherwise.
        fix: How to mend it; a command where there is one.
        blocks: Kinds of units that must not start when it fails: "meta", "pool", "engine".
        unless: Why it does not apply to this host; an empty text when it does. Asked first, in a thread.
    """

    id: str
    title: str
    why: str
    fix: str
    examine: Examine
    blocks: frozenset[str] = frozenset()
    unless: Unless | None = None

    @property
    def group(self) -> str:
        """The part of its id before the dot."""
        return self.id.partition(".")[0]


class Group:
    """The checks of one module, in the order in which they are written: use ``check`` as a decorator."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.checks: list[Check] = []

    def check(
        self,
        name: str,
        *,
        title: str,
        why: str,
        fix: str,
        blocks: Iterable[str] = (),
        unless: Unless | None = None,
    ) -> Callable[[Examine], Examine]:
        """Makes a check of a function.

        Raises:
            ValueError: The name is not of the form ``[a-z0-9-]+`` or is taken.
        """
        if not re.fullmatch(r"[a-z0-9-]+", name) or any(c.id == f"{self.name}.{name}" for c in self.checks):
            raise ValueError(f"{name!r} is no name for a check of {self.name}")

        def add(examine: Examine) -> Examine:
            made = Check(f"{self.name}.{name}", title, why, fix, examine, frozenset(blocks), unless)
            self.checks.append(made)
            return examine

        return add
