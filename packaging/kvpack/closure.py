"""Which of the locked requirements an installed kvtierd needs: the lock also has what developers need."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

OURS = frozenset({"kvtierd", "kvtierd-refengine", "kvtierd-vllm", "kvtierd-sglang"})


def closure(roots: Iterable[str], *, extras: frozenset[str] = frozenset()) -> frozenset[str]:
    """Names of all distributions that these need, themselves included, by the metadata of what is installed here.

    Raises:
        importlib.metadata.PackageNotFoundError: one of them is not installed: run ``make setup`` first.
    """
    needed: set[str] = set()
    waiting = [(canonicalize_name(root), extras) for root in roots]
    while waiting:
        name, chosen = waiting.pop()
        if name in needed and not chosen:
            continue
        needed.add(name)
        for text in importlib.metadata.requires(name) or ():
            requirement = Requirement(text)
            environments = [{"extra": extra} for extra in sorted(chosen)] or [{"extra": ""}]
            if requirement.marker is None or any(requirement.marker.evaluate(e) for e in environments):
                other = canonicalize_name(requirement.name)
                if other not in needed or requirement.extras:
                    waiting.append((other, frozenset(requirement.extras)))
    return frozenset(needed)


def locked(lock: Path, names: Iterable[str]) -> dict[str, str]:
    """The lock's entries, hashes included, for these distributions (not ours, which are built from the checkout).

    Raises:
        ValueError: one is not in the lock, so what would be built is not what was tested.
    """
    entries: dict[str, str] = {}
    for entry in re.split(r"\n(?=\S)", lock.read_text(encoding="utf-8")):
        line = entry.splitlines()[0] if entry.strip() else ""
        match = re.match(r"([A-Za-z0-9._-]+)==\S+", line)
        if match is None:
            continue
        marker = Requirement(line.rstrip("\\ ")).marker
        if marker is None or marker.evaluate():
            entries[canonicalize_name(match[1])] = entry.strip() + "\n"
    wanted = {canonicalize_name(n) for n in names} - OURS
    missing = sorted(wanted - entries.keys())
    if missing:
        raise ValueError(f"not in {lock.name}: {', '.join(missing)}; run make lock")
    return {name: entries[name] for name in sorted(wanted)}
