"""Fixtures of the tests that run the real MemCache."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtierd.emulator.build import EmulatedDriver, ensure_driver

# The test directories are no packages; this lets the tests of this directory say ``from lab import RealTier``.
sys.path.insert(0, str(Path(__file__).parent))

from lab import RealTier


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> EmulatedDriver:
    """The emulated driver, built once a session."""
    return ensure_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def make_tier(tmp_path: Path, driver: EmulatedDriver) -> Iterator[Callable[[], RealTier]]:
    """Makes tiers that end with the test: for tests that need more than one."""
    tiers: list[RealTier] = []

    def make() -> RealTier:
        tiers.append(RealTier(tmp_path / f"tier-{len(tiers)}", driver))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


@pytest.fixture
def real_tier(make_tier: Callable[[], RealTier]) -> RealTier:
    """One real MemCache tier, with nothing started yet."""
    return make_tier()
