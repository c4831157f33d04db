"""What kvtierd raised of the kernel's hugepage counts, so that it never gives back what others own.

One JSON file in the state directory. Before the kernel is written to, the intent (from, to) goes to disk; after a
crash the next run compares it with the kernel and knows what was really raised. The kernel forgets hugepages
at a reboot, so a ledger of an earlier boot counts as empty.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field, ValidationError

from kvtierd.errors import HugepageError, StateError
from kvtierd.files import write_atomic
from kvtierd.plan.inventory import Record

LEDGER_VERSION = 1
_READ_LIMIT_BYTES = 1024 * 1024


class Intent(Record):
    """A change of the persistent page count that was begun."""

    from_pages: int
    to_pages: int


class Entry(Record):
    """One pool (a page size, host-wide or on one NUMA node) as kvtierd changed it. All counts are pages.

    ``asked_pages``: what the plan wanted for kvtierd's units at the last reserve.
    ``raised_pages``: how many of the pool's persistent pages are there because of kvtierd.
    ``others_pages``: what others had in use before kvtierd's units could have used any.
    """

    page_size_bytes: int = Field(gt=0)
    node: int | None = None
    before_pages: int = Field(ge=0)  # persistent pages before kvtierd first touched the pool
    asked_pages: int = Field(ge=0)
    raised_pages: int = Field(ge=0)
    others_pages: int = Field(ge=0)
    intent: Intent | None = None

    @property
    def key(self) -> tuple[int, int | None]:
        """(page size in bytes, NUMA node or ``None`` for the host)."""
        return self.page_size_bytes, self.node


class _File(Record):
    version: int
    boot_id: str
    entries: tuple[Entry, ...]


def settle(entry: Entry, persistent_pages: int) -> Entry:
    """The entry brought in line with the kernel's count. Pure.

    An intent that was never closed (a crash) is resolved: of the wanted change, what the kernel shows was done.
    If somebody lowered the count below what kvtierd raised, kvtierd owns that much less.
    A count that somebody else changed between the crash and now cannot be told from a partial grant.
    """
    raised = entry.raised_pages
    if entry.intent is not None:
        wanted = entry.intent.to_pages - entry.intent.from_pages
        done = persistent_pages - entry.intent.from_pages
        raised += max(min(0, wanted), min(done, max(0, wanted)))
    before = min(entry.before_pages, persistent_pages)
    raised = max(0, min(raised, persistent_pages - before))
    return entry.model_copy(update={"before_pages": before, "raised_pages": raised, "intent": None})


class Ledger:
    """The file. Use it inside ``locked()``: the daemon and the boot-time service may both want it.

    Args:
        path: The file; its directory must exist.
        boot_id: The kernel's ``/proc/sys/kernel/random/boot_id``.
    """

    def __init__(self, path: Path, boot_id: str) -> None:
        self.path = path
        self.boot_id = boot_id
        self._entries: dict[tuple[int, int | None], Entry] = {}

    @contextlib.contextmanager
    def locked(self, timeout_seconds: float = 5.0) -> Iterator[None]:
        """Holds the lock file and has the entries loaded.

        Raises:
            HugepageError: ``hugepages.busy``: another kvtierd is at it and does not finish in time.
            StateError: the ledger cannot be read, or is damaged.
        """
        deadline = time.monotonic() + timeout_seconds
        try:
            handle = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise self._cannot("written", exc) from exc
        try:
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise HugepageError(
                            "another process is reserving hugepages right now",
                            why=f"it holds {self.path.with_suffix('.lock')} for more than {timeout_seconds:g} s",
                            hint="wait for it, or look for a second kvtierd with the same state directory",
                            code="hugepages.busy",
                        ) from None
                    time.sleep(0.02)
            self._load()
            yield
        finally:
            os.close(handle)

    def entries(self) -> tuple[Entry, ...]:
        """All entries, by page size and node, the host-wide one first."""
        return tuple(
            self._entries[key]
            for key in sorted(self._entries, key=lambda k: (k[0], -1 if k[1] is None else k[1]))
        )

    def get(self, page_size_bytes: int, node: int | None) -> Entry | None:
        """The entry of one pool."""
        return self._entries.get((page_size_bytes, node))

    def put(self, entry: Entry) -> None:
        """Stores an entry, on disk before it returns.

        Raises:
            StateError: it cannot be stored (disk full, read-only); nothing has changed then.
        """
        self._store({**self._entries, entry.key: entry})

    def remove(self, entry: Entry) -> None:
        """Forgets a pool. Raises ``StateError`` as ``put`` does."""
        self._store({key: value for key, value in self._entries.items() if key != entry.key})

    def _load(self) -> None:
        self._entries = {}
        try:
            with self.path.open("rb") as file:
                raw = file.read(_READ_LIMIT_BYTES)
        except FileNotFoundError:
            return
        except OSError as exc:
            raise self._cannot("read", exc) from exc
        try:
            stored = _File.model_validate_json(raw)
        except ValidationError as exc:
            raise self._damaged(f"{exc.error_count()} fields are wrong or missing") from exc
        if stored.version != LEDGER_VERSION:
            raise self._damaged(f"its version is {stored.version}, this kvtierd knows {LEDGER_VERSION}")
        if stored.boot_id == self.boot_id:
            self._entries = {entry.key: entry for entry in stored.entries}

    def _store(self, entries: dict[tuple[int, int | None], Entry]) -> None:
        content = _File(version=LEDGER_VERSION, boot_id=self.boot_id, entries=tuple(entries.values()))
        write_atomic(self.path, content.model_dump_json(indent=2).encode() + b"\n", mode=0o600)
        self._entries = entries

    def _cannot(self, what: str, exc: OSError) -> StateError:
        return StateError(
            f"the hugepage ledger {self.path} cannot be {what}",
            why=exc.strerror or str(exc),
            hint="hugepages are not touched without it; make room in, or fix the rights of, the state directory",
            code="state.ledger",
        )

    def _damaged(self, why: str) -> StateError:
        return StateError(
            f"the hugepage ledger {self.path} is damaged",
            why=why,
            hint="move the file away: kvtierd then takes all present hugepages for those of others and gives none back",
            code="state.ledger-damaged",
        )
