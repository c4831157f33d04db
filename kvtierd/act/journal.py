"""The journal of actions: what was done, why, and what came of it; in one sqlite file that outlives kill -9.

An action is written down before it begins and again when it has ended. One that has a beginning and no end when the
journal is opened was cut off with the process that carried it out: it is *half done*, and whoever opens the journal
is told so. Bounded: the oldest rows go first, half-done ones later, those under way never.

A journal that cannot be written (full disk) costs its entries and not the daemon: ``problem`` says so, calls go on
without it, and it is tried again. A file that is damaged is set aside under another name, never deleted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import structlog

from kvtierd.decide.proposals import Proposal, proposal_to_json
from kvtierd.files import aside_name

log = structlog.get_logger(__name__)

FILE_NAME = "actions.sqlite"
VERSION = 1
KEPT_ROWS = 10_000
_PRUNE_EVERY = 500
_BUSY_SECONDS = 1.0
_MOST_TEXT = 4000  # characters of a text; a longer one is cut
_REOPEN_SECONDS = 30.0

State = Literal["under way", "done", "failed", "undone", "half done", "dry run", "said"]
OPEN: tuple[State, ...] = ("under way", "half done")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS actions (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    at_unix_seconds REAL NOT NULL,
    ended_unix_seconds REAL,
    node TEXT NOT NULL,
    rule TEXT NOT NULL,
    target TEXT NOT NULL,
    what TEXT NOT NULL,
    why TEXT NOT NULL,
    proposal TEXT NOT NULL,
    precondition TEXT NOT NULL DEFAULT '',
    state TEXT NOT NULL,
    step TEXT NOT NULL DEFAULT '',
    outcome TEXT NOT NULL DEFAULT '',
    undo TEXT NOT NULL DEFAULT ''
);
CREATE INDEX IF NOT EXISTS actions_open ON actions (state) WHERE state IN ('under way', 'half done');
CREATE INDEX IF NOT EXISTS actions_target ON actions (target, id);
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One action.

    Attributes:
        id: Grows by one with each; 0: it could not be written down.
        at_unix_seconds: When it began.
        ended_unix_seconds: When it ended; ``None`` while it has not.
        node: Where.
        rule: Which rule wanted it; "operator" when a person did.
        target: What it changes.
        what: In words.
        why: In words, with the numbers.
        proposal: All of the proposal, as JSON values.
        precondition: What was made sure of before.
        state: How it stands.
        step: How far it has come; what a half-done one was doing.
        outcome: What came of it.
        undo: How it is taken back, or was.
    """

    id: int
    at_unix_seconds: float
    ended_unix_seconds: float | None
    node: str
    rule: str
    target: str
    what: str
    why: str
    proposal: Mapping[str, Any]
    precondition: str
    state: State
    step: str
    outcome: str
    undo: str


_COLUMNS = ", ".join(field.name for field in dataclasses.fields(Entry))


class ActionJournal:
    """The node's actions. Open it once; one process at a time (the state directory's lock sees to that).

    Args:
        directory: Where the file lives; made when needed.
        node: This node's name.
        kept_rows: So many are kept.
        now: Wall clock, unix seconds.
        told: Called with a sentence when something about the journal itself has to be said.
    """

    def __init__(
        self,
        directory: Path,
        node: str,
        *,
        kept_rows: int = KEPT_ROWS,
        now: Callable[[], float] = time.time,
        told: Callable[[str], None] | None = None,
    ) -> None:
        self.path = directory / FILE_NAME
        self.problem = ""
        """Why it cannot be written now; "" when it can."""
        self.unwritten = 0
        """Entries and changes of entries that were lost."""
        self.set_aside: Path | None = None
        """Where a damaged file went at the opening."""
        self.cut_off: tuple[Entry, ...] = ()
        """What was under way when the process before this one ended, as found at the opening."""
        self._node = node
        self._kept_rows = kept_rows
        self._now = now
        self._told = told or (lambda text: log.error(text, kind="act.journal"))
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = None
        self._since_prune = 0
        self._next_try = 0.0
        with self._lock:
            self._open()
            self._mark_half_done()

    # -- writing; none of these raises

    def begin(self, proposal: Proposal, *, precondition: str = "", undo: str = "") -> int:
        """An action begins; its number, for what follows, or 0 when it could not be written down."""
        return self._insert(proposal, "under way", precondition=precondition, undo=undo)

    def note(self, proposal: Proposal, state: State, outcome: str = "") -> int:
        """Something that begins and ends at once: a dry run, advice, an action that was refused."""
        return self._insert(proposal, state, outcome=outcome, ended=True)

    def step(self, entry_id: int, text: str, *, undo: str | None = None) -> None:
        """How far it has come: written before the step is taken, so that a half-done one says what it was doing."""
        self._update(entry_id, step=text, **({} if undo is None else {"undo": undo}))

    def end(self, entry_id: int, state: State, outcome: str) -> None:
        """How it ended."""
        self._update(entry_id, state=state, outcome=outcome, ended_unix_seconds=self._now())

    def close(self) -> None:
        """Gives the file up; what was written is on disk already."""
        with self._lock:
            self._drop()

    # -- reading

    def last(self, count: int = 100, *, target: str = "") -> list[Entry]:
        """The newest entries, oldest first; of one target when given. Empty when the file cannot be read."""
        where, values = ("WHERE target = ?", (target,)) if target else ("", ())
        return self._read(f"{where} ORDER BY id DESC LIMIT ?", (*values, count))[::-1]

    def open_entries(self) -> list[Entry]:
        """What is under way or half done, oldest first."""
        return self._read("WHERE state IN (?, ?) ORDER BY id", OPEN)

    def get(self, entry_id: int) -> Entry | None:
        """One entry."""
        return next(iter(self._read("WHERE id = ?", (entry_id,))), None)

    # -- inside

    def _insert(
        self,
        proposal: Proposal,
        state: State,
        *,
        precondition: str = "",
        undo: str = "",
        outcome: str = "",
        ended: bool = False,
    ) -> int:
        now = self._now()
        values = {
            "at_unix_seconds": now,
            "ended_unix_seconds": now if ended else None,
            "node": self._node,
            "rule": proposal.rule,
            "target": proposal.target,
            "what": proposal.action.text,
            "why": proposal.reason,
            "proposal": json.dumps(proposal_to_json(proposal)),
            "precondition": precondition,
            "state": state,
            "outcome": outcome,
            "undo": undo,
        }
        marks = ", ".join("?" * len(values))
        cursor = self._write(
            f"INSERT INTO actions ({', '.join(values)}) VALUES ({marks})",  # noqa: S608 - our own column names
            tuple(_cut(name, v) for name, v in values.items()),
        )
        return 0 if cursor is None or cursor.lastrowid is None else cursor.lastrowid

    def _update(self, entry_id: int, **values: Any) -> None:
        if entry_id:
            named = ", ".join(f"{name} = ?" for name in values)
            self._write(
                f"UPDATE actions SET {named} WHERE id = ?",  # noqa: S608 - our own column names
                (*(_cut(name, v) for name, v in values.items()), entry_id),
            )

    def _write(self, statement: str, values: tuple[Any, ...]) -> sqlite3.Cursor | None:
        with self._lock:
            try:
                if self._db is None:
                    self._reopen()
                if self._db is None:
                    self.unwritten += 1
                    return None
                with self._db:  # one transaction, rolled back when it fails
                    cursor = self._db.execute(statement, values)
                self._since_prune += 1
                if self._since_prune >= _PRUNE_EVERY:
                    self._prune()
            except (sqlite3.Error, OSError) as error:
                self.unwritten += 1
                self._failed(error)
                return None
            if self.problem:
                self._say(
                    f"the journal of actions can be written again; {self.unwritten} changes are missing in it"
                )
                self.problem = ""
            return cursor

    def _read(self, rest: str, values: tuple[Any, ...]) -> list[Entry]:
        with self._lock:
            if self._db is None:
                return []
            try:
                rows = self._db.execute(
                    f"SELECT {_COLUMNS} FROM actions {rest}",  # noqa: S608 - our own column names
                    values,
                ).fetchall()
            except (sqlite3.Error, OSError) as error:
                self._failed(error)
                return []
        return [_entry(row) for row in rows]

    def _open(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._db = self._connect()
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError) and not _damaged(error):
                self._failed(error)
                return
            self._set_aside(error)
            try:
                self._db = self._connect()
            except (sqlite3.Error, OSError) as again:
                self._failed(again)
        except OSError as error:
            self._failed(error)

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, timeout=_BUSY_SECONDS, check_same_thread=False)
        try:
            # With WAL a commit is one append; "NORMAL" loses nothing when the process is killed, and at a power cut at
            # most the last commits, never the file's order.
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("PRAGMA journal_size_limit = 4194304")
            (intact,) = db.execute("PRAGMA quick_check(1)").fetchone()
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if intact != "ok":
                raise sqlite3.DatabaseError(f"it is damaged: {intact}")
            if version not in {0, VERSION}:
                raise sqlite3.DatabaseError(f"it is of version {version}, this kvtierd writes {VERSION}")
            if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'actions'").fetchone():
                self._check_columns(db)  # before anything is written to it
            with db:
                db.executescript(_SCHEMA)
                db.execute(f"PRAGMA user_version = {VERSION}")
        except BaseException:
            db.close()
            raise
        return db

    @staticmethod
    def _check_columns(db: sqlite3.Connection) -> None:
        try:
            db.execute(f"SELECT {_COLUMNS} FROM actions LIMIT 1")  # noqa: S608 - our own column names
        except sqlite3.OperationalError as error:
            raise sqlite3.DatabaseError(f"it is not a journal of actions: {error}") from error

    def _set_aside(self, error: Exception) -> None:
        target = aside_name(self.path, "set-aside", self._now())
        try:
            self.path.replace(target)
        except OSError as moving:
            self._say(f"{self.path} cannot be used ({error}) and cannot be set aside: {moving}")
            return
        # The log belongs to the file: beside a new one it would be mistaken for that one's.
        for suffix in ("-wal", "-shm"):
            with contextlib.suppress(OSError):
                Path(f"{self.path}{suffix}").replace(f"{target}{suffix}")
        self.set_aside = target
        self._say(f"{self.path} cannot be used ({error}); it was set aside as {target}, and a new one begun")

    def _reopen(self) -> None:
        now = time.monotonic()
        if now >= self._next_try:
            self._next_try = now + _REOPEN_SECONDS
            self._open()

    def _failed(self, error: Exception) -> None:
        """Says it once; a file that turned out damaged is opened anew at the next write."""
        text = f"{self.path} cannot be used: {error}"
        if text != self.problem:
            self.problem = text
            self._say(f"{text}; actions go on without being written down")
        if _damaged(error):
            self._drop()
            self._next_try = 0.0

    def _say(self, text: str) -> None:
        self._told(text)

    def _drop(self) -> None:
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.close()
            self._db = None

    def _mark_half_done(self) -> None:
        if self._db is None:
            return
        try:
            rows = self._db.execute(
                f"SELECT {_COLUMNS} FROM actions WHERE state = 'under way' ORDER BY id"  # noqa: S608 - our own names
            ).fetchall()
            self.cut_off = tuple(_entry(row) for row in rows)
            with self._db:
                self._db.execute(
                    "UPDATE actions SET state = 'half done', outcome = 'kvtierd ended while this was under way'"
                    " WHERE state = 'under way'"
                )
            self._prune()
        except (sqlite3.Error, OSError) as error:
            self._failed(error)

    def _prune(self) -> None:
        assert self._db is not None
        self._since_prune = 0
        with self._db:
            self._db.execute(
                "DELETE FROM actions WHERE state NOT IN ('under way', 'half done')"
                " AND id <= (SELECT max(id) FROM actions) - ?",
                (self._kept_rows,),
            )
            # Half-done ones stay longer, but not for ever either.
            self._db.execute(
                "DELETE FROM actions WHERE state = 'half done' AND id <= (SELECT max(id) FROM actions) - ?",
                (2 * self._kept_rows,),
            )


def _damaged(error: Exception) -> bool:
    """Whether the file itself is at fault, and not the disk, a lock or our rights."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and (code & 0xFF) in {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


def _cut(name: str, value: Any) -> Any:
    long = isinstance(value, str) and name != "proposal" and len(value) > _MOST_TEXT
    return f"{value[:_MOST_TEXT]}..." if long else value


def _entry(row: tuple[Any, ...]) -> Entry:
    values = dict(zip((field.name for field in dataclasses.fields(Entry)), row, strict=True))
    try:
        proposal = json.loads(values["proposal"])
    except ValueError:
        proposal = {}
    return Entry(**{**values, "proposal": MappingProxyType(proposal)})
