"""Units' output from the journal, by ``journalctl --output=json`` as a child process with deadlines.

Only what a unit's processes wrote to their streams counts as output: neither systemd's own words about the unit nor
what somebody else writes under its name, since journald itself sets the fields that begin with an underscore.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

import structlog

from kvtierd.errors import UnitError

READ_LIMIT_SECONDS = 10.0
SYNC_LIMIT_SECONDS = 3.0
END_LIMIT_SECONDS = 2.0
LONGEST_ENTRY_BYTES = 4 << 20  # as JSON: a byte that is no text takes four or five
LONGEST_LINE_CHARS = 64 * 1024
KEPT_LINES = 64  # in memory, for each run
KEPT_CHARS = 256 * 1024
KEPT_RUNS = 256
BACKOFF_SECONDS = 1.0
OVERLAP_SECONDS = 2.0
LONGEST_BACKOFF_SECONDS = 30.0
_FIELDS = "MESSAGE,_SYSTEMD_INVOCATION_ID"

_log = structlog.get_logger(__name__)


class JournalEntry(NamedTuple):
    """One line of output. ``cursor`` is journald's name for its place."""

    cursor: str
    instance: str
    text: str

    def is_after(self, other: JournalEntry) -> bool:
        """Whether it was written later; journald numbers all entries (``i=`` in the cursor, of the series ``s=``)."""
        mine, theirs = _place(self.cursor), _place(other.cursor)
        return mine[0] != theirs[0] or mine[1] > theirs[1]


def _place(cursor: str) -> tuple[str, int]:
    fields = dict(part.partition("=")[::2] for part in cursor.split(";"))
    try:
        return fields.get("s", ""), int(fields.get("i", ""), 16)
    except ValueError:
        return "", 0


def parse_entry(line: bytes) -> JournalEntry | None:
    """One line of ``journalctl --output=json``; ``None`` when it is none (cut short, no message)."""
    try:
        entry = json.loads(line)
        message = entry["MESSAGE"]
        if isinstance(message, list) and message and isinstance(message[0], str | list):
            message = message[0]  # a field that occurs more than once
        text = message if isinstance(message, str) else bytes(message).decode(errors="replace")
        cursor, instance = entry.get("__CURSOR", ""), entry.get("_SYSTEMD_INVOCATION_ID", "")
    except (ValueError, KeyError, TypeError):
        return None
    if not isinstance(cursor, str) or not isinstance(instance, str):
        return None
    return JournalEntry(cursor, instance, text[:LONGEST_LINE_CHARS])


def _arguments(*more: str) -> list[str]:
    return [
        "journalctl",
        "--quiet",
        "--all",
        "--no-pager",
        # --follow alone asks for this boot only, by an id that a sandboxed process in a container may see wrongly. The
        # matches name runs, so no other entries come in by this.
        "--merge",
        "--output=json",
        f"--output-fields={_FIELDS}",
        *more,
    ]


def of_run(instance: str) -> list[str]:
    """Matches the output of one run."""
    return [f"_SYSTEMD_INVOCATION_ID={instance}", "_TRANSPORT=stdout"]


def of_service(service: str) -> list[str]:
    """Matches the output of all runs of a unit."""
    return [f"_SYSTEMD_UNIT={service}", "_TRANSPORT=stdout"]


@contextlib.asynccontextmanager
async def _running(arguments: Sequence[str]) -> AsyncIterator[asyncio.subprocess.Process]:
    """The child; it is gone afterwards."""
    try:
        process = await asyncio.create_subprocess_exec(
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=LONGEST_ENTRY_BYTES,
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8"},
            start_new_session=True,  # a Ctrl-C is for the daemon
        )
    except OSError as error:
        raise UnitError(
            "journalctl cannot be started",
            why=str(error),
            hint="Install systemd's tools.",
            code="unit.journal",
        ) from error
    try:
        yield process
    finally:
        if process.stdout is not None and process.stdout.at_eof():
            with contextlib.suppress(TimeoutError):  # it is ending by itself
                async with asyncio.timeout(END_LIMIT_SECONDS):
                    await process.wait()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()  # it only reads
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_LIMIT_SECONDS):
                    await process.wait()


async def _entries(stream: asyncio.StreamReader) -> AsyncIterator[JournalEntry]:
    """Entries until the child ends; one that is too long is left out."""
    while True:
        try:
            line = await stream.readuntil(b"\n")
        except asyncio.IncompleteReadError:
            return
        except asyncio.LimitOverrunError as error:
            await stream.readexactly(error.consumed)
            continue
        entry = parse_entry(line)
        if entry is not None:
            yield entry


async def read(arguments: Sequence[str], limit_seconds: float = READ_LIMIT_SECONDS) -> list[JournalEntry]:
    """What journalctl finds now. Raises ``UnitError`` (``unit.journal``) when it takes too long."""
    found: list[JournalEntry] = []
    try:
        async with asyncio.timeout(limit_seconds), _running(_arguments(*arguments)) as process:
            assert process.stdout is not None
            async for entry in _entries(process.stdout):
                found.append(entry)  # noqa: PERF401 - keeps what was read when the time is up
    except TimeoutError:
        raise UnitError(
            f"journalctl did not end within {limit_seconds:.0f} s",
            hint="A large journal on a slow disk: bound it with SystemMaxUse= in journald.conf.",
            code="unit.journal",
        ) from None
    return found


async def last_lines(instance: str, count: int) -> list[JournalEntry]:
    """The last lines of one run, oldest first."""
    return await read([f"--lines={max(0, count)}", *of_run(instance)]) if count > 0 else []


async def follow(matches: Sequence[str], lines: int) -> AsyncIterator[str]:
    """The last lines that match, then new ones until the caller stops.

    Args:
        matches: :func:`of_run` or :func:`of_service`.
        lines: How many of those that are there already.

    Raises:
        UnitError: ``unit.journal`` when journalctl ends.
    """
    since = f"--since=@{time.time() - OVERLAP_SECONDS:.0f}"
    before = await read([f"--lines={max(1, lines)}", *matches])
    for entry in before[-lines:] if lines > 0 else ():
        yield entry.text
    # Not by one call with --lines: that one may miss what comes when there was nothing before (systemd 252).
    start = f"--after-cursor={before[-1].cursor}" if before else since
    async with _running(_arguments("--follow", "--no-tail", start, *matches)) as process:
        assert process.stdout is not None
        async for entry in _entries(process.stdout):
            if not before or entry.is_after(before[-1]):
                yield entry.text
    raise UnitError(
        "journalctl ended", hint="Look at `systemctl status systemd-journald`.", code="unit.journal"
    )


async def synchronize() -> None:
    """Waits until journald has taken what was written so far; not for long, and no error when it does not."""
    with contextlib.suppress(UnitError, TimeoutError):
        async with asyncio.timeout(SYNC_LIMIT_SECONDS), _running(["journalctl", "--sync"]) as process:
            await process.wait()


class TextSearch:
    """Looks for texts in the output of runs, each line once: what was read is not read again."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], bool] = {}
        self._cursors: dict[tuple[str, str], str] = {}

    async def has(self, instance: str, text: str) -> bool:
        """Whether a line of this run contains the text."""
        key = (instance, text)
        if self._found.get(key):
            return True
        after = self._cursors.get(key)
        arguments = _arguments(*([f"--after-cursor={after}"] if after else []), *of_run(instance))
        with contextlib.suppress(TimeoutError):  # goes on from there the next time
            async with asyncio.timeout(READ_LIMIT_SECONDS), _running(arguments) as process:
                assert process.stdout is not None
                async for entry in _entries(process.stdout):
                    self._cursors[key] = entry.cursor
                    if text in entry.text:
                        self._forget_oldest()
                        self._found[key] = True
                        return True
        return False

    def _forget_oldest(self) -> None:
        while len(self._found) >= KEPT_RUNS:
            del self._found[next(iter(self._found))]
        while len(self._cursors) >= KEPT_RUNS:
            del self._cursors[next(iter(self._cursors))]


class _Lines:
    """The newest lines of one run.

    ``complete``: none is missing between the oldest and the newest. ``cut``: there are older ones.
    """

    def __init__(self) -> None:
        self.entries: deque[JournalEntry] = deque()
        self.chars = 0
        self.complete = self.cut = False

    def add(self, entry: JournalEntry) -> None:
        """Adds a line unless it is known already."""
        if self.entries and not entry.is_after(self.entries[-1]):
            return
        self.entries.append(entry)
        self.chars += len(entry.text)
        while len(self.entries) > KEPT_LINES or (self.chars > KEPT_CHARS and len(self.entries) > 1):
            self.chars -= len(self.entries.popleft().text)
            self.cut = True

    def put_before(self, older: Sequence[JournalEntry]) -> None:
        """What the journal had, before what has come since."""
        newer = list(self.entries)
        self.entries.clear()
        self.chars, self.complete, self.cut = 0, True, len(older) >= KEPT_LINES
        for entry in (*older, *newer):
            self.add(entry)


class LastLines:
    """The last lines of all units, from memory: one journalctl follows the slice, so that nothing is started at rest.

    Args:
        slice_name: Whose units.
    """

    def __init__(self, slice_name: str) -> None:
        self._slice = slice_name
        self._runs: dict[str, _Lines] = {}
        self._following: asyncio.Task[None] | None = None

    async def tail(self, instance: str, count: int) -> list[str]:
        """The last lines of a run, oldest first."""
        if count <= 0:
            return []
        if self._following is None:
            self._following = asyncio.create_task(self._follow(), name="journal of all units")
        run = self._run(instance)
        if not run.complete:
            run.put_before(await last_lines(instance, KEPT_LINES))
        if count > len(run.entries) and run.cut:
            return [entry.text for entry in await last_lines(instance, count)]
        return [entry.text for entry in run.entries][-count:]

    def forget(self, instance: str) -> None:
        """This run has ended: whoever asks now gets what the journal has, to the last line."""
        self._runs.pop(instance, None)

    async def close(self) -> None:
        """Ends the child."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
            self._following = None

    def _run(self, instance: str) -> _Lines:
        run = self._runs.get(instance)
        if run is None:
            while len(self._runs) >= KEPT_RUNS:
                del self._runs[next(iter(self._runs))]
            run = self._runs[instance] = _Lines()
        return run

    async def _follow(self) -> None:
        backoff = BACKOFF_SECONDS
        match = [f"_SYSTEMD_SLICE={self._slice}", "_TRANSPORT=stdout"]
        while True:
            # From a little earlier: between its start and its first look nothing may be missed.
            since = f"--since=@{time.time() - OVERLAP_SECONDS:.0f}"
            try:
                async with _running(_arguments("--follow", "--no-tail", since, *match)) as process:
                    assert process.stdout is not None
                    async for entry in _entries(process.stdout):
                        backoff = BACKOFF_SECONDS
                        if entry.instance in self._runs:
                            self._runs[entry.instance].add(entry)
            except UnitError as error:
                _log.warning("the journal cannot be followed", why=error.message)
            for run in self._runs.values():
                run.complete = False
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, LONGEST_BACKOFF_SECONDS)
