"""Which units of ours run under systemd, by its files alone: also without a message bus, and for those who only plan."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from kvtierd.units.systemd_properties import SLICE, SUFFIX, read_marker

TRANSIENT = Path("/run/systemd/transient")
# Where a control group is: cgroup2 alone, beside the older one (hybrid), or the older one alone.
CGROUPS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup/systemd"))


def pids_under_systemd(
    owner: Path, transient: Path = TRANSIENT, cgroups: Sequence[Path] = CGROUPS
) -> dict[str, frozenset[int]]:
    """Process ids of each unit of this daemon that has any.

    Args:
        owner: The daemon's runtime directory; units of other daemons are left out.
        transient: Where systemd keeps the definitions of transient units.
        cgroups: Where control groups may be mounted.
    """
    found: dict[str, frozenset[int]] = {}
    for file in transient.glob(f"kvtier-*{SUFFIX}"):
        if _owner_of(file) != str(owner.absolute()):
            continue
        pids = frozenset(pid for base in cgroups for pid in _pids_in(base / SLICE / file.name))
        if pids:
            found[file.name.removesuffix(SUFFIX)] = pids
    return found


def _owner_of(file: Path) -> str | None:
    with contextlib.suppress(OSError):
        for line in file.read_text(errors="replace").splitlines():
            if line.startswith("Description="):
                # Written by systemd, which doubles its own sign for specifiers.
                marker = read_marker(line.removeprefix("Description=").replace("%%", "%"))
                return marker.owner if marker is not None else None
    return None


def _pids_in(group: Path) -> list[int]:
    pids: list[int] = []
    for file in group.rglob("cgroup.procs") if group.is_dir() else ():
        with contextlib.suppress(OSError):
            pids += [int(text) for text in file.read_text().split() if text != "0"]
    return pids
