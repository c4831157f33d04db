"""A support bundle: what somebody far away needs to help, without secrets, in one file of bounded size.

Works with and without a running daemon: what cannot be had stands in the manifest with its reason.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import io
import json
import os
import platform
import sqlite3
import sys
import tarfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvtierd import __version__
from kvtierd.act.journal import FILE_NAME as JOURNAL
from kvtierd.checks import CannotTellError, Check, Patient
from kvtierd.control.client import ControlClient
from kvtierd.control.messages import message_dict
from kvtierd.doctor.redact import redactor
from kvtierd.doctor.run import examine
from kvtierd.errors import KvtierError
from kvtierd.http_get import http_get
from kvtierd.secret_files import read_secret

MIB: Final = 1024 * 1024
MOST_BYTES: Final = 32 * MIB
"""Of everything before packing; text packs to about a tenth."""
TAIL_BYTES: Final = MIB
LOG_FILES: Final = 60
DEPTH: Final = 5
EVENTS: Final = 2000
JOURNAL_ROWS: Final = 2000
PART_SECONDS: Final = 10.0
COMMANDS: Final = (
    ("npu-smi", "info"),
    ("npu-smi", "info", "-m"),
    ("systemctl", "status", "--no-pager", "--lines=0", "kvtierd.service", "kvtierd-hugepages.service"),
    ("systemctl", "cat", "kvtierd.service"),
    ("journalctl", "--no-pager", "--lines=2000", "--unit=kvtierd.service"),
    ("journalctl", "--no-pager", "--lines=500", "--dmesg"),
    ("ss", "-Htlnp"),
    ("df", "-kP"),
    ("ps", "-eo", "pid,ppid,user,rss,etimes,stat,args", "--sort=-rss"),
)
HOST_FILES: Final = (
    "/proc/meminfo", "/proc/cmdline", "/proc/buddyinfo", "/proc/mounts", "/etc/os-release", "/etc/ascend_install.info",
    "/etc/hccn.conf", "/proc/sys/kernel/osrelease",
)  # fmt: skip
"""No environment of a process is among them, and no file of keys."""


class Part(NamedTuple):
    """One file of the bundle, or why it is not there."""

    name: str
    size_bytes: int
    problem: str = ""


class Bundle(NamedTuple):
    """What was written."""

    path: Path
    size_bytes: int
    parts: tuple[Part, ...]


async def write_bundle(
    output: Path,
    patient: Patient,
    checks: Iterable[Check],
    client: ControlClient,
    *,
    most_bytes: int = MOST_BYTES,
) -> Bundle:
    """Gathers everything and writes ``output``, a ``.tar.gz`` that only its owner can read.

    Raises:
        KvtierError: It cannot be written.
    """
    gathering = _Gathering(patient, tuple(checks), client, most_bytes)
    await gathering.everything()
    try:
        size = await asyncio.to_thread(gathering.write, output)
    except OSError as error:
        raise KvtierError(
            f"{output} cannot be written: {error.strerror or error}",
            hint="--output names another place",
            code="bundle.write",
        ) from None
    return Bundle(output, size, tuple(gathering.parts))


class _Gathering:
    def __init__(
        self, patient: Patient, checks: tuple[Check, ...], client: ControlClient, most_bytes: int
    ) -> None:
        self._patient, self._checks, self._client = patient, checks, client
        self._room = most_bytes
        self._files: list[tuple[str, bytes]] = []
        self._redact = redactor(_known_secrets(patient))
        self.parts: list[Part] = []

    async def everything(self) -> None:
        """What matters most first: when the room is used up, the rest is left out and said so."""
        await self._part("versions.json", self._versions)
        await self._part("doctor.json", self._doctor)
        await self._part("settings.toml", self._settings)
        for name, ask in (
            ("status.json", self._client.status),
            ("peers.json", self._client.peers),
            ("policy.json", self._client.policy),
        ):
            await self._part(name, _json_of(ask))
        await self._part("plan.json", self._plan)
        await self._part("events.jsonl", self._events)
        await self._part("journal.jsonl", self._journal)
        await self._part("inventory.json", self._inventory)
        await self._part("metrics/kvtierd.txt", self._exporter)
        for url, name in await self._engine_metrics():
            await self._part(f"metrics/{name}.txt", functools.partial(_scrape, url))
        for argv in COMMANDS:
            name = " ".join(argv).replace("/", "%")
            await self._part(f"commands/{name}", functools.partial(self._command, argv))
        for name in HOST_FILES:
            await self._part(
                f"host{name}", functools.partial(asyncio.to_thread, self._patient.view.read, name)
            )
        for path, name in await asyncio.to_thread(self._logs_and_confs):
            await self._part(name, functools.partial(asyncio.to_thread, tail, path))

    async def _part(self, name: str, make: Callable[[], Awaitable[str]]) -> None:
        try:
            async with asyncio.timeout(PART_SECONDS):
                text = await make()
        except TimeoutError:
            self.parts.append(Part(name, 0, f"no answer within {PART_SECONDS:.0f} s"))
            return
        except KvtierError as error:
            self.parts.append(Part(name, 0, self._redact(error.message)))
            return
        except (CannotTellError, OSError, ValueError, sqlite3.Error) as error:
            self.parts.append(Part(name, 0, self._redact(str(error) or type(error).__name__)))
            return
        data = self._redact(text).encode("utf-8", "replace")
        if len(data) > self._room:
            self.parts.append(Part(name, 0, "left out: the bundle would become too large"))
            return
        self._room -= len(data)
        self._files.append((name, data))
        self.parts.append(Part(name, len(data)))

    def write(self, output: Path) -> int:
        """The archive; returns its size."""
        listing = "".join(
            f"{part.size_bytes:>10}  {part.name}{f'  NOT THERE: {part.problem}' if part.problem else ''}\n"
            for part in self.parts
        )
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as archive:
            now = int(time.time())
            for name, data in [("MANIFEST.txt", listing.encode()), *self._files]:
                entry = tarfile.TarInfo(f"{output.name.removesuffix('.tar.gz')}/{name}")
                entry.size, entry.mtime, entry.mode = len(data), now, 0o600
                archive.addfile(entry, io.BytesIO(data))
        return output.stat().st_size

    async def _versions(self) -> str:
        return _pretty(await asyncio.to_thread(_versions))

    async def _doctor(self) -> str:
        return _pretty(
            [
                one.as_dict()
                for one in await examine(self._patient, self._checks, all_seconds=PART_SECONDS - 1)
            ]
        )

    async def _settings(self) -> str:
        file = self._patient.settings_file
        if file is None:
            raise KvtierError("there is no settings file")
        drop_ins = sorted((file.parent / "conf.d").glob("*.toml"))
        texts = [f"# ---- {path}\n{await asyncio.to_thread(tail, path)}" for path in (file, *drop_ins)]
        variables = sorted(name for name in os.environ if name.startswith("KVTIERD_"))
        return "\n".join([*texts, f"# ---- variables that are set: {', '.join(variables) or 'none'}", ""])

    async def _plan(self) -> str:
        try:
            return await asyncio.to_thread(self._client.plan_json)
        except KvtierError:
            plan = await self._patient.plan()
            if plan is None:
                raise
            return plan.model_dump_json(indent=1)

    async def _inventory(self) -> str:
        return (await self._patient.inventory()).model_dump_json(indent=1)

    async def _events(self) -> str:
        events = await asyncio.to_thread(lambda: list(self._client.events(last=EVENTS)))
        return "".join(json.dumps(message_dict(event)) + "\n" for event in events)

    async def _journal(self) -> str:
        settings = self._patient.settings
        if settings is None:
            raise KvtierError("there are no settings that say where it is")
        return await asyncio.to_thread(journal_lines, Path(settings.paths.state) / JOURNAL)

    async def _exporter(self) -> str:
        settings = self._patient.settings
        if settings is None:
            raise KvtierError("there are no settings that say where it is")
        if settings.observe.exporter == "off":
            raise KvtierError("the exporter is off")
        return await _scrape(f"http://{settings.observe.exporter}/metrics")

    async def _engine_metrics(self) -> list[tuple[str, str]]:
        try:
            plan = await self._patient.plan()
        except Exception:  # noqa: BLE001 - said beside plan.json already
            return []
        urls = [(u.metrics_url, u.id) for u in plan.units if u.metrics_url] if plan else []
        if plan is not None and plan.meta is not None and plan.tls is None:
            urls.append((f"{plan.meta.metrics_url}/metrics", "MetaService"))
        return urls

    async def _command(self, argv: tuple[str, ...]) -> str:
        result = await self._patient.run(*argv, seconds=5.0)
        if result.error:
            raise KvtierError(result.error)
        said = result.describe()
        return (f"# {said}\n" if said else "") + result.stdout + result.stderr

    def _logs_and_confs(self) -> list[tuple[Path, str]]:
        """Log files by age, newest first, and MemCache's rendered files. No links are followed."""
        settings = self._patient.settings
        if settings is None:
            return []
        logs = sorted(_files(Path(settings.paths.logs), DEPTH), key=_age)[:LOG_FILES]
        confs = [p for p in _files(Path(settings.paths.state), DEPTH) if p.suffix == ".conf"]
        return [
            *((p, f"logs/{p.relative_to(settings.paths.logs)}") for p in logs),
            *((p, f"state/{p.relative_to(settings.paths.state)}") for p in confs),
        ]


def tail(path: Path, most_bytes: int = TAIL_BYTES) -> str:
    """The end of a file, from a whole line on; undecodable bytes are replaced. Never waits for a pipe.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        if not path.is_file():
            raise ValueError(f"{path} is no regular file")
        size = os.fstat(stream.fileno()).st_size
        if size > most_bytes:
            stream.seek(size - most_bytes)
            stream.readline()
        text = stream.read(most_bytes).decode("utf-8", "replace")
    return f"[the last {most_bytes} of {size} bytes]\n{text}" if size > most_bytes else text


def journal_lines(path: Path) -> str:
    """The newest entries of the journal of actions, as JSON lines, read without disturbing who writes it."""
    if not path.exists():
        raise KvtierError("there is no journal yet")
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=2.0) as db:
        db.row_factory = sqlite3.Row
        rows = db.execute("SELECT * FROM actions ORDER BY rowid DESC LIMIT ?", (JOURNAL_ROWS,)).fetchall()
    return "".join(json.dumps(dict(row)) + "\n" for row in reversed(rows))


def _json_of(ask: Callable[[], Any]) -> Callable[[], Awaitable[str]]:
    async def asking() -> str:
        return _pretty(message_dict(await asyncio.to_thread(ask)))

    return asking


async def _scrape(url: str) -> str:
    answer = await http_get(url, timeout_seconds=5.0)
    return answer.body.decode("utf-8", "replace")


def _files(directory: Path, depth: int) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(directory), key=lambda e: e.name)
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False) and depth:
            yield from _files(Path(entry.path), depth - 1)
        elif entry.is_file(follow_symlinks=False):
            yield Path(entry.path)


def _age(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except OSError:
        return 0.0


def _known_secrets(patient: Patient) -> list[str]:
    """What secret files under the state directory hold, as far as we may read them."""
    found: list[str] = []
    settings = patient.settings
    if settings is None:
        return found
    for path in _files(Path(settings.paths.state), DEPTH):
        if any(word in path.name.lower() for word in ("key", "secret", "token")):
            try:
                found.append(read_secret(str(path)))
            except (OSError, ValueError):
                continue
    return found


def _versions() -> dict[str, Any]:
    packages = {d.name: d.version for d in importlib.metadata.distributions()}
    return {
        "kvtierd": __version__,
        "python": sys.version,
        "platform": platform.platform(),
        "packages": dict(sorted(packages.items())),
    }


def _pretty(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"
