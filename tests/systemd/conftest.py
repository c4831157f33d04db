"""Fixtures: this version's packages and a higher one's."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# The test directories are no packages; this lets their files import each other, and those of tests/packaging.
sys.path.insert(0, str(Path(__file__).parents[1] / "packaging"))
sys.path.insert(0, str(Path(__file__).parent))

from packages import NEXT_VERSION, build


@pytest.fixture(scope="session")
def dists(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Directories with this version's packages and with a higher one's, in both formats.

    KVTIERD_TEST_DIST and KVTIERD_TEST_DIST_NEXT name ones that are built already.
    """
    named, following = os.environ.get("KVTIERD_TEST_DIST"), os.environ.get("KVTIERD_TEST_DIST_NEXT")
    this = Path(named) if named else build(tmp_path_factory.mktemp("dist"))
    higher = Path(following) if following else build(
        tmp_path_factory.mktemp("next"), "--package-version", NEXT_VERSION
    )  # fmt: skip
    return this, higher


@pytest.fixture(scope="session")
def rpm_dists(dists: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same; built here when what is named holds no .rpm."""
    if all(any(directory.glob("kvtierd-[0-9]*.rpm")) for directory in dists):
        return dists
    this = build(tmp_path_factory.mktemp("dist"), "--form", "rpm")
    higher = build(tmp_path_factory.mktemp("next"), "--form", "rpm", "--package-version", NEXT_VERSION)
    return this, higher


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was proved from outside of the guests; what ran inside of one has its lines from ``test_systemd``."""
    words = {"passed": "holds", "failed": "FAILED", "error": "FAILED", "skipped": "skipped"}
    rows = [
        (report.nodeid, word)
        for outcome, word in words.items()
        for report in terminalreporter.stats.get(outcome, [])
        if "/test_systemd.py" not in report.nodeid and "/guest/" not in report.nodeid
    ]
    for nodeid, word in sorted(rows, key=lambda row: row[0].split("::")[0]):
        file, name = nodeid.split("/")[-1].split("::")[:2]
        what, _, how = name.removeprefix("test_").replace("_", " ").partition("[")
        room = file.removeprefix("test_").removesuffix(".py").replace("_", " ")
        where = f"cgroup {how.rstrip(']')}" if how else ""
        terminalreporter.write_line(f"{room:<13}  {where:<9}  {word:<7}  {what}")
