"""The shim stays small because of what it does not import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import kvtierd

ROOT = str(Path(kvtierd.__file__).parent.parent)


def modules_of(module: str) -> set[str]:
    code = f"import sys; sys.path.append({ROOT!r}); import {module}, json; print(json.dumps(sorted(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, check=True, timeout=30
    )
    return set(json.loads(run.stdout))


def test_the_keeper_imports_only_what_it_needs() -> None:
    heavy = {
        "subprocess",
        "ctypes",
        "typing",
        "dataclasses",
        "asyncio",
        "pathlib",
        "inspect",
        "logging",
        "pydantic",
    }
    assert not heavy & modules_of("kvtierd.units.shim")


def test_both_phases_need_the_standard_library_only() -> None:
    for module in ("kvtierd.units.shim", "kvtierd.units.shim_start"):
        foreign = (
            {name.partition(".")[0] for name in modules_of(module)}
            - set(sys.stdlib_module_names)
            - {"kvtierd", "__main__"}
        )
        assert not foreign, module
