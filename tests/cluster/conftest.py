"""The tests of whole clusters. At the end they print what each fault cost."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# The test directories are no packages; this lets the tests of this directory say ``from cluster_lab import cluster``.
sys.path.insert(0, str(Path(__file__).parent.parent / "e2e"))  # netns_lab
sys.path.insert(0, str(Path(__file__).parent.parent / "etcd"))  # etcd_lab
sys.path.insert(0, str(Path(__file__).parent))

from fault_table import FAULTS, table


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not FAULTS:
        return
    terminalreporter.section("faults of a cluster, seconds from the fault")
    lines = table()
    for line in lines:
        terminalreporter.write_line(line)
    if file := os.environ.get("FAULT_TABLE"):
        with Path(file).open("a", encoding="utf-8") as out:
            out.write("\n".join(lines) + "\n")
