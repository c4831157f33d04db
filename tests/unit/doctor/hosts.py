"""The fixture hosts: small trees under tests/fixtures/hosts, each with what doctor is to find there.

A host is a directory ``NAME`` (its ``/``, with recorded commands in ``.commands``) and a file ``NAME.toml``::

    machine = "aarch64"                 # the architecture its kernel would say
    settings = "..."                    # settings text, if it has any
    confs = ["/etc/mmc-local.conf"]     # hand-written MemCache files in the tree
    engine = ["vllm", "serve", "..."]   # an engine's command line to check
    now = 2026-11-30T12:00:00Z
    [daemon]                            # what a running kvtierd says there; none when it is missing
    status = { tier_state = "joinable" }
    peers = { master = "host-a", peers = [] }

and ``NAME.expected.json``: check id -> [severity, found]. ``python -m tests.unit.doctor.hosts`` writes the expectations
anew; read the difference before you commit it.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import sys
import tempfile
import tomllib
from pathlib import Path

from kvtierd.doctor.admission import Answers, admit
from kvtierd.doctor.registry import built_in
from kvtierd.doctor.run import Examined, examine
from kvtierd.plugins import load_plugins

HOSTS = Path(__file__).parents[2] / "fixtures" / "hosts"
NOW = datetime.datetime(2026, 11, 30, 12, tzinfo=datetime.UTC)


def names() -> list[str]:
    """All fixture hosts."""
    return sorted(path.stem for path in HOSTS.glob("*.toml"))


def examined(name: str, only: frozenset[str] = frozenset()) -> tuple[Examined, ...]:
    """What doctor finds on this host."""
    about = tomllib.loads((HOSTS / f"{name}.toml").read_text())
    root = HOSTS / name
    with tempfile.TemporaryDirectory() as directory:
        settings = None
        if about.get("settings"):
            settings = Path(directory) / "kvtierd.toml"
            settings.write_text(about["settings"])
        patient = admit(
            load_plugins(),
            root=root,
            settings_file=settings,
            confs=tuple(root / path.lstrip("/") for path in about.get("confs", [])),
            engine_argv=tuple(about.get("engine", [])),
            daemon=Answers(**about["daemon"]) if "daemon" in about else None,
            now_unix=about.get("now", NOW).timestamp(),
            machine=about.get("machine"),
        )
        checks = [check for check in built_in() if not only or check.id in only]
        return asyncio.run(examine(patient, checks))


def told(results: tuple[Examined, ...]) -> dict[str, list[str]]:
    """Check id -> [severity, found], without the paths of this checkout and of the test's directory."""
    found = {}
    for one in results:
        text = one.outcome.found.replace(str(HOSTS), "HOSTS")
        words = [
            "SETTINGS" if word.rstrip(";:,").endswith("/kvtierd.toml") else word for word in text.split(" ")
        ]
        found[one.check.id] = [one.severity, " ".join(words)]
    return found


def expected(name: str) -> dict[str, list[str]]:
    """What is recorded."""
    return json.loads((HOSTS / f"{name}.expected.json").read_text())


def record(chosen: list[str]) -> None:
    """Writes the expectations anew."""
    for name in chosen or names():
        text = json.dumps(told(examined(name)), indent=1, ensure_ascii=False, sort_keys=True)
        (HOSTS / f"{name}.expected.json").write_text(text + "\n")


if __name__ == "__main__":
    record(sys.argv[1:])
