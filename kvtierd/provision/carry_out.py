"""Carrying out a plan's parts on this host that need no loop: files, directories, hugepages."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import pwd
import stat
from pathlib import Path

from kvtierd.errors import HostError, KvtierError
from kvtierd.files import write_atomic
from kvtierd.host.hugepage_files import HugepageFiles
from kvtierd.host.hugepages import Hugepages
from kvtierd.host.ledger import Ledger
from kvtierd.plan.model import SECRET_MARK, FileSpec, HugepagePlan, NodePlan
from kvtierd.secret_files import kept_secret, new_secret
from kvtierd.settings import Settings

LAST_PLAN = "plan.json"
LEDGER = "hugepages.json"
MAX_PLAN_BYTES = 16 * 1024 * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class HugepageState:
    """What the last reservation gave; ``got_pages`` is ``None`` when it was not tried or failed."""

    got_pages: int | None = None
    problem: str = ""


def sync_files(files: tuple[FileSpec, ...]) -> list[str]:
    """Writes the files whose content, mode or owner differ; returns the paths written. A link in place of a file counts.

    A secret that is there is kept, since an engine may run with it.

    Raises:
        HostError: an unknown user.
        StateError: one cannot be written; those before it are.
    """
    changed = []
    for spec in files:
        path = Path(spec.path)
        mode = int(spec.mode, 8)
        owner = owner_of(spec.user)
        content = spec.content
        if spec.secret:
            before, _, after = content.partition(SECRET_MARK)
            content = before + (kept_secret(spec.path, before, after) or new_secret()) + after
        data = content.encode()
        if not _same(path, data, mode, owner):
            write_atomic(path, data, mode=mode, owner=owner)
            changed.append(spec.path)
    return changed


def owner_of(user: str | None) -> tuple[int, int] | None:
    """The numbers of a user (by name or number) and of its group, for chown; ``None``: nothing is to be given away.

    Raises:
        HostError: there is no such user.
    """
    if user is None or os.geteuid() != 0:
        return None
    try:
        entry = pwd.getpwuid(int(user)) if user.isdigit() else pwd.getpwnam(user)
    except KeyError:
        raise HostError(
            f"there is no user {user!r} on this host",
            hint="make it, or change user in the settings",
            code="host.no-user",
        ) from None
    return entry.pw_uid, entry.pw_gid


def _same(path: Path, data: bytes, mode: int, owner: tuple[int, int] | None) -> bool:
    try:
        status = path.lstat()
        return (
            stat.S_ISREG(status.st_mode)
            and status.st_mode & 0o7777 == mode
            and (owner is None or (status.st_uid, status.st_gid) == owner)
            and status.st_size == len(data)
            and path.read_bytes() == data
        )
    except OSError:
        return False


def make_directories(settings: Settings, plan: NodePlan) -> None:
    """Directories that units write to, owned by the user that runs the unit.

    Raises:
        HostError: an unknown user, or a directory that cannot be made.
    """
    wanted: list[tuple[Path, str | None]] = [(Path(settings.paths.logs) / "memcache", settings.meta.user)]
    wanted += [
        (Path(settings.paths.state) / "engines" / unit.name, unit.user)
        for unit in plan.units
        if unit.kind == "engine"
    ]
    for directory, user in wanted:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            owner = owner_of(user)
            if owner is not None:
                os.chown(directory, *owner)
        except OSError as error:
            raise HostError(f"{directory} cannot be made: {error.strerror}", code="host.directory") from None


def hugepage_keeper(settings: Settings) -> Hugepages:
    """Reserving and releasing on this host, with this installation's ledger."""
    files = HugepageFiles()
    return Hugepages(files, Ledger(Path(settings.paths.state) / LEDGER, files.boot_id))


async def reserve_hugepages(settings: Settings, plan: HugepagePlan, bytes_per_rank: int) -> HugepageState:
    """Reserves what the plan needs; a shortage or a refusal is told, not raised: the daemon must go on."""
    keeper = hugepage_keeper(settings)
    try:
        if not plan.pages:
            await asyncio.to_thread(_give_back, keeper)
            return HugepageState()
        report = await asyncio.to_thread(keeper.reserve, plan)
    except KvtierError as error:
        return HugepageState(None, f"{error.message}{f' ({error.why})' if error.why else ''}")
    return HugepageState(report.got_pages, "" if report.complete else report.text(bytes_per_rank or None))


def _give_back(keeper: Hugepages) -> None:
    if keeper.raised():
        keeper.release()


async def owned_pages(settings: Settings, default_size_bytes: int | None) -> int:
    """Pages of the plan's size that are kvtierd's own from an earlier start; 0 when nothing is known of any."""
    size = settings.pool.hugepage_size or default_size_bytes
    if size is None or not (Path(settings.paths.state) / LEDGER).exists():
        return 0
    try:
        return await asyncio.to_thread(hugepage_keeper(settings).own_pages, size)
    except KvtierError:
        return 0


def save_plan(settings: Settings, plan: NodePlan) -> None:
    """Keeps the plan in force, so that a restarted daemon knows its units even when no new plan can be made."""
    write_atomic(Path(settings.paths.state) / LAST_PLAN, plan.model_dump_json(indent=1).encode(), mode=0o600)


def last_plan(settings: Settings) -> NodePlan | None:
    """The plan an earlier daemon worked to, if it can still be read."""
    with contextlib.suppress(OSError, ValueError):
        path = Path(settings.paths.state) / LAST_PLAN
        if path.stat().st_size <= MAX_PLAN_BYTES:
            return NodePlan.model_validate_json(path.read_bytes())
    return None
