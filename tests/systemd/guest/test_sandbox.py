"""The sandbox of kvtierd.service lets the daemon do its work and nothing else, each thing tried from inside of it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox_probe import PROBES, TALKER

ROOT = Path(__file__).parents[3]
SERVICE = Path("/run/systemd/system/kvtierd-sandbox-test.service")
# What runs in it and when; all else of the unit file is the sandbox and what it is given.
NOT_SANDBOX = (
    "Type=", "NotifyAccess=", "ExecStart=", "ExecReload=", "Timeout", "WatchdogSec=", "Restart", "Slice=", "KillMode=",
)  # fmt: skip
FUSE = os.makedev(10, 229)  # a device of a driver, not one of those that every service may use


def sandbox() -> list[str]:
    lines = (ROOT / "systemd/kvtierd.service").read_text().splitlines()
    service = lines[lines.index("[Service]") + 1 : lines.index("[Install]")]
    return [line for line in service if line and not line.startswith(("#", *NOT_SANDBOX))]


def systemctl(*arguments: str) -> None:
    subprocess.run(["systemctl", *arguments], check=True, timeout=60)


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, str]]:
    device = Path("/dev/davinci0")
    if not device.exists():
        os.mknod(device, stat.S_IFCHR | 0o666, FUSE)
    talk = "while :; do echo talking; sleep 0.2; done"
    subprocess.run(
        [
            "systemd-run", "--quiet", "--collect", f"--unit={TALKER}", "--uid=nobody",
            # With the old control groups systemd may not hear of its end, and would wait for its time-out.
            "--property=KillSignal=SIGKILL", "--property=TimeoutStopSec=5s", "/bin/sh", "-c", talk,
        ],
        check=True, timeout=30,
    )  # fmt: skip
    probe = Path(__file__).with_name("sandbox_probe.py")
    output = Path("/var/lib/kvtierd-sandbox-test.json")
    SERVICE.write_text(
        "\n".join([
            "[Service]", "Type=oneshot", "TimeoutStartSec=120", f"ExecStart={sys.executable} {probe}",
            f"StandardOutput=truncate:{output}", f"WorkingDirectory={ROOT}", "Environment=PYTHONDONTWRITEBYTECODE=1",
            *sandbox(), f"BindReadOnlyPaths={ROOT}", "",  # it may lie in /tmp, of which the service has its own
        ])
    )  # fmt: skip
    systemctl("daemon-reload")
    try:
        systemctl("start", SERVICE.name)
        yield json.loads(output.read_text())
    finally:
        subprocess.run(["systemctl", "stop", TALKER, SERVICE.name], check=False, timeout=60)
        SERVICE.unlink()
        device.unlink()


@pytest.mark.parametrize("name", PROBES)
def test_from_inside(name: str, results: dict[str, str]) -> None:
    assert results[name] == ""


def test_no_directive_of_the_sandbox_is_unknown_to_this_systemd(results: dict[str, str]) -> None:
    said = subprocess.run(
        ["journalctl", "--quiet", "-u", SERVICE.name], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert "Unknown" not in said
    assert "ignoring" not in said.lower()
