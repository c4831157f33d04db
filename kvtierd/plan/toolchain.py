"""Where the programs are that units run, as values: the planner looks at nothing itself."""

from __future__ import annotations

from pydantic import Field

from kvtierd.plan.inventory import Record

UNIT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


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
    docker: str | None = None  # where docker is, when a unit's PATH would not find the same one
    base_env: dict[str, str] = Field(
        default_factory=lambda: {
            "PATH": UNIT_PATH,
            "LANG": "C.UTF-8",
            "PYTHONUNBUFFERED": "1",
        }
    )

    @property
    def prefix(self) -> tuple[str, ...]:
        """What stands in front of every unit's command: the emulation's launcher, or nothing."""
        return self.emulation.prefix if self.emulation else ()

    @property
    def namespace(self) -> str | None:
        """The emulation root whose private mounts units enter, or ``None``."""
        return self.emulation.root if self.emulation else None
