"""Boots a real systemd and runs tests inside it, each file on a guest of its own; prints what was proved."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from lab import OPEN_HUGEPAGES, ROOT, CannotBootError, Guest, booted, image

SUITE = "tests/e2e/test_unit_backends.py"
BACKEND = "tests/systemd/guest/test_systemd_backend.py"
DAEMON = "tests/systemd/guest/test_daemon.py"
SANDBOX = "tests/systemd/guest/test_sandbox.py"
pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(600)]
PROVED: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def root_file_system() -> None:
    """Made once, outside the time limit of a single test; without it all are skipped."""
    try:
        image()
    except CannotBootError as error:
        pytest.skip(f"no systemd can be booted here: {error}")


@pytest.fixture(params=["v2", "v1"])
def guest(request: pytest.FixtureRequest) -> Iterator[Guest]:
    """``v1``: the hybrid control groups of older distributions."""
    try:
        with booted("test", request.param) as running:
            yield running
    except CannotBootError as error:
        pytest.skip(f"no systemd can be booted here: {error}")


@pytest.mark.parametrize("file", [SUITE, BACKEND, DAEMON, SANDBOX])
def test_inside_a_booted_systemd(guest: Guest, file: str, request: pytest.FixtureRequest) -> None:
    version = guest.run("systemctl", "--version").stdout.split("(")[0].strip()
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=120",
        "--junitxml=/mnt/report.xml", "--basetemp=/tmp/pytest", file,
    ]  # fmt: skip
    if file == SUITE:
        command += ["-k", "systemd"]
    if file == SANDBOX:
        guest.run("sh", "-ec", OPEN_HUGEPAGES)
    done = subprocess.run(guest.argv(*command), capture_output=True, text=True, timeout=580, check=False)
    report = guest.shared / "report.xml"
    assert report.exists(), f"pytest did not run inside: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    cases = list(ET.parse(report).getroot().iter("testcase"))
    bad = [
        case.get("name")
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = [case.get("name") for case in cases if case.find("skipped") is not None]
    layout = request.node.callspec.params["guest"]
    for case in cases:
        result = (
            "FAILED" if case.get("name") in bad else "skipped" if case.get("name") in skipped else "holds"
        )
        name = str(case.get("name")).removeprefix("test_").replace("_", " ")
        PROVED.append(f"{version}  cgroup {layout}  {result:<7}  {name}")
    assert not bad, f"inside the guest failed {bad}:\n{done.stdout[-12000:]}"
    assert done.returncode == 0, done.stdout[-3000:]
    assert len(cases) > len(skipped)


def test_nothing_of_the_guests_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    mounts = Path("/proc/mounts").read_text()
    assert "kvtierd-guest" not in mounts
    groups = [p for p in Path("/sys/fs/cgroup").glob("**/kvtierd-test-*") if p.is_dir()]
    assert groups == []
    assert ROOT.exists()
    with capsys.disabled():
        print("\n" + "\n".join(PROVED))
