"""Whether what a unit was started with is still what it would be started with: a digest of its files."""

from __future__ import annotations

import hashlib
import json

from kvtierd.mmc_conf.lookup import find_key
from kvtierd.mmc_conf.versions import resolve_version
from kvtierd.plan.direct import without_master
from kvtierd.plan.model import DirectPlan, FileSpec, UnitSpec


def _lasting(file: FileSpec, version: str) -> str:
    """A file without the lines that a running MetaService takes over by itself: they are no reason to restart it."""
    if not file.path.endswith("mmc-meta.conf") or not version:
        return file.content
    known = resolve_version(version)
    return "".join(
        line
        for line in file.content.splitlines(keepends=True)
        if not ((key := find_key("meta", line.partition("=")[0].strip())) and key.hot_in("meta", known))
    )


def with_files_digest(
    unit: UnitSpec, files: list[FileSpec], version: str, direct: DirectPlan | None
) -> UnitSpec:
    """Ties a unit to the content of its files, so that a changed conf shows up as a changed unit.

    Another master is no change: clients are brought there, or restarted, when it comes up.
    """
    mine = sorted(
        (
            f.path,
            _lasting(f, version) if unit.kind == "meta" else without_master(_lasting(f, version), direct),
        )
        for f in files
        if f.path in unit.files
    )
    digest = hashlib.sha256(json.dumps(mine).encode()).hexdigest()[:16]
    return unit.model_copy(update={"files_digest": digest})
