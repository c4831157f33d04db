"""Where the programs are that units run, as values: the planner looks at nothing itself."""

from __future__ import annotations

from pydantic import Field

from kvtierd.plan.inventory import Record


class Emulation(Record):
    """How units of series "emulated" are started: a prefix to argv, and what the emulated driver needs."""

    root: str
    prefix: tuple[str, ...]
    env: dict[str, str] = Field(default_factory=dict)


class Toolchain(Record):
    """Paths the plan is built from. ``python`` runs kvtierd's own programs (endpoint, launcher)."""

    python: str
    run_meta_script: str
    run_pool_script: str
    emulation: Emulation | None = None
    base_env: dict[str, str] = Field(
        default_factory=lambda: {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "PYTHONUNBUFFERED": "1",
        }
    )
