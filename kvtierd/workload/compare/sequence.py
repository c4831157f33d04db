"""The comparison: each mode set, the engine started anew, the pool emptied, the load sent; then the settings put back."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kvtierd.control.client import ControlClient
from kvtierd.errors import KvtierError, WorkloadError
from kvtierd.files import write_atomic
from kvtierd.settings import load_settings
from kvtierd.settings.load import DROP_IN_DIRECTORY
from kvtierd.workload.compare.modes import DROP_IN, Args, Mode, drop_in, modes_for
from kvtierd.workload.load.results import RESULT
from kvtierd.workload.load.runner import Say
from kvtierd.workload.load.start import RunRequest, run_load
from kvtierd.workload.load.target import engine_target, engine_unit

PASSES: Final = ("cold", "warm")


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """What to compare.

    ``request.output`` gets a directory for each pass of each mode. ``settings`` is the file that the daemon reads.
    """

    engine: str
    settings: Path
    request: RunRequest
    ready_seconds: float = 600.0


@dataclasses.dataclass(slots=True)
class Compared:
    """What came of it: directories of the passes by mode, in order, and why it ended early ("" = it did not)."""

    runs: dict[str, list[Path]] = dataclasses.field(default_factory=dict)
    ended: str = ""

    @property
    def last_passes(self) -> list[Path]:
        """The warm pass of each mode: what is compared."""
        return [directories[-1] for directories in self.runs.values() if directories]

    @property
    def all_passes(self) -> list[Path]:
        """All, in the order in which they ran."""
        return [directory for directories in self.runs.values() for directory in directories]


def compare(
    comparison: Comparison, client: ControlClient, *, api_key: str | None = None, say: Say = lambda _: None
) -> Compared:
    """Runs all modes. Whatever happens, the settings are as before when it returns or raises.

    Raises:
        KvtierError: a mode could not be set or measured.
    """
    unit = engine_unit(client, comparison.engine)
    modes = modes_for(unit.get("plugin") or "")
    written = _written_args(comparison, unit)
    place = comparison.settings.parent / DROP_IN_DIRECTORY / DROP_IN
    if place.exists():
        raise WorkloadError(
            f"{place} is left over from a comparison that was killed",
            hint="remove it and run kvtierctl apply; then again",
            code="compare.left-over",
        )
    taken = [m.name for m in modes for p in PASSES if (_directory(comparison, m, p) / RESULT).exists()]
    if taken:
        raise WorkloadError(
            f"{comparison.request.output} already holds a comparison", hint="name another directory",
            code="load.output-taken",
        )  # fmt: skip
    done = Compared()
    changed = False  # the engine runs, or is about to, with other settings than the operator's
    try:
        for mode in modes:
            changed = True
            _set(comparison, client, unit["id"], place, mode, written, say)
            if not mode.args:
                changed = False
                say(f"{mode.label}: emptying the pool")
                client.purge()
            if not _measure(comparison, client, mode, done, api_key, say):
                break
    finally:
        with _uninterrupted():
            say("putting the settings back")
            _restore(comparison, client, unit["id"], place, changed=changed)
            say("")
    return done


def _measure(
    comparison: Comparison, client: ControlClient, mode: Mode, done: Compared, api_key: str | None, say: Say
) -> bool:
    """Both passes of one mode, with one salt. False: it was ended early."""
    target = engine_target(client, comparison.engine)
    salt = secrets.token_hex(4)
    done.runs[mode.label] = []
    for which in PASSES:
        request = dataclasses.replace(
            comparison.request,
            output=_directory(comparison, mode, which),
            salt=salt,
            label=mode.label if which == PASSES[-1] else f"{mode.label}, {which}",
        )

        def tell(text: str, which: str = which) -> None:
            say(f"{mode.label}, {which}: {text}" if text else "")

        result, problem = run_load(request, target, api_key=api_key, say=tell)
        done.runs[mode.label].append(request.output)
        if problem is not None:
            raise problem
        if result["ended"] != "finished":
            done.ended = result["ended"]
            return False
    return True


def _directory(comparison: Comparison, mode: Mode, which: str) -> Path:
    return comparison.request.output / f"{mode.name}-{which}"


def _written_args(comparison: Comparison, unit: dict[str, Any]) -> Args:
    for engine in load_settings(comparison.settings).engine:
        if unit["id"].endswith(f"-{engine.name}"):
            return engine.args
    raise WorkloadError(
        f"{comparison.settings} has no engine named {comparison.engine!r}",
        hint="name the file that the daemon reads: kvtierctl --settings FILE bench compare",
        code="compare.settings",
    )


def _name_of(comparison: Comparison, unit_id: str) -> str:
    return next(e.name for e in load_settings(comparison.settings).engine if unit_id.endswith(f"-{e.name}"))


def _set(
    comparison: Comparison,
    client: ControlClient,
    unit_id: str,
    place: Path,
    mode: Mode,
    written: Args,
    say: Say,
) -> None:
    say(f"{mode.label}: starting the engine anew")
    if mode.args:
        text = drop_in(_name_of(comparison, unit_id), mode.args, written)
        write_atomic(place, text.encode())
    else:
        place.unlink(missing_ok=True)
    _apply(comparison, client, unit_id)
    planned = engine_unit(client, comparison.engine)
    if mode.args and planned["uses_pool"]:
        raise WorkloadError(
            f"the engine still uses the pool in the mode {mode.label!r}",
            hint="does the daemon read these settings? kvtierctl status and kvtierctl apply say what they see",
            code="compare.settings",
        )


def _apply(comparison: Comparison, client: ControlClient, unit_id: str) -> None:
    """Takes over the settings, starts the engine anew in any case, and waits until it is ready."""
    # Not restarted by the reload: that drains first, one engine after the other, and says nothing when it is done.
    client.reload(restart_changed=False)
    client.control_unit(unit_id, "restart", comparison.ready_seconds)
    unit = next((u for u in client.status().units if u.id == unit_id), None)
    if unit is None or unit.state != "ready" or unit.stale:
        what = "is gone" if unit is None else f"is {unit.state}: {unit.reason}"
        raise WorkloadError(
            f"the engine is not ready after its restart: it {what}",
            why="" if unit is None else "\n".join(unit.last_lines[-5:]),
            hint="kvtierctl status and kvtierctl logs say more; --ready gives it longer",
            code="compare.engine",
        )


def _restore(
    comparison: Comparison, client: ControlClient, unit_id: str, place: Path, *, changed: bool
) -> None:
    place.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        place.parent.rmdir()  # only when it is empty
    if not changed:
        return
    try:
        _apply(comparison, client, unit_id)
    except KvtierError as error:
        raise WorkloadError(
            "the settings are as before, but the engine is not",
            why=error.message,
            hint="kvtierctl apply, then kvtierctl status",
            code="compare.not-restored",
        ) from error


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    try:
        before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
