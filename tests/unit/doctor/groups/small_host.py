"""A host in a temporary directory, for checks of one thing at a time."""

import asyncio
import json
from pathlib import Path

from kvtierd.checks import Outcome
from kvtierd.doctor.admission import Answers, admit
from kvtierd.doctor.recorded import DIRECTORY, recording_name
from kvtierd.doctor.registry import built_in
from kvtierd.doctor.run import examine
from kvtierd.plugins import PluginSet

NOW = 1_796_040_000.0  # 2026-11-30
MEMINFO = "MemTotal: 1073741824 kB\nMemAvailable: 900000000 kB\nHugepagesize: 2048 kB\n"


class SmallHost:
    """Files and recorded commands under ``root``; ``find`` is what one check says of them."""

    def __init__(self, root: Path) -> None:
        self.root = root / "host"
        self.put("/proc/meminfo", MEMINFO)
        self.put("/proc/mounts", "/dev/sda2 / ext4 rw 0 0\n")

    def put(self, path: str, text: str | bytes = "") -> Path:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return file

    def command(self, *argv: str, out: str = "", **about: object) -> None:
        self.put(f"/{DIRECTORY}/{recording_name(argv)}", out)
        if about:
            self.put(f"/{DIRECTORY}/{recording_name(argv)}.json", json.dumps(about))

    def process(self, pid: int, *argv: str, **environ: str) -> None:
        self.put(f"/proc/{pid}/cmdline", "\0".join(argv) + "\0")
        self.put(f"/proc/{pid}/environ", "\0".join(f"{k}={v}" for k, v in environ.items()) + "\0")

    def find(
        self, check: str, *, settings: str = "", confs: tuple[str, ...] = (), engine: tuple[str, ...] = (),
        daemon: dict[str, object] | None = None, now: float = NOW,
    ) -> Outcome:  # fmt: skip
        file = None
        if settings:
            file = self.root.parent / "kvtierd.toml"
            file.write_text('[pool]\ndram = "1GiB"\n[meta]\npython = "/opt/e/bin/python3"\n' + settings)
        patient = admit(
            PluginSet({}, ()), root=self.root, settings_file=file,
            confs=tuple(self.root / c.lstrip("/") for c in confs), engine_argv=engine,
            daemon=None if daemon is None else Answers(**daemon), now_unix=now, machine="aarch64",
        )  # fmt: skip
        assert not patient.settings_problems
        (examined,) = asyncio.run(examine(patient, [c for c in built_in() if c.id == check]))
        return examined.outcome
