"""Tests that run inside a guest which ``tests/systemd`` boots; elsewhere they are skipped."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "e2e"))

from backend_lab import Factory, backends


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("TESTS_RUN_IN_GUEST") == "1":
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="runs inside a booted systemd: make test-systemd"))


@pytest.fixture
async def make_backend(tmp_path: Path) -> AsyncIterator[Factory]:
    async with backends("systemd", tmp_path) as make:
        yield make
