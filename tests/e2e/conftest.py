"""Fixtures of the tests that run the real MemCache."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtierd.emulator.build import EmulatedDriver, ensure_driver
from kvtierd.errors import KvtierError
from kvtierd.workload.demo import DemoNode

# The test directories are no packages; this lets the tests of this directory say ``from lab import RealTier``.
sys.path.insert(0, str(Path(__file__).parent))

from lab import RealTier

MOST_EVENTS = 40


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A failure on a running node says what the node says, since the node is gone afterwards."""
    report = yield
    node = getattr(item, "funcargs", {}).get("node")
    if report.when == "call" and report.failed and isinstance(node, DemoNode):
        report.sections.append(("kvtierd's status and events", _told_by(node)))
    return report


def _told_by(node: DemoNode) -> str:
    try:
        status, events = node.status(), list(node.client.events())
    except (KvtierError, OSError) as error:
        return f"the daemon does not answer: {error}"
    lines = [f"at {status.at:.2f}: tier {status.tier_state} {list(status.tier_reasons)}"]
    lines += [f"problem: {problem}" for problem in status.problems]
    lines += [f"{u.id} {u.state} pid {u.pid} since {u.since:.2f}: {u.reason}" for u in status.units]
    lines += [f"{e.at:.2f} {e.kind} {e.unit} {e.message}" for e in events[-MOST_EVENTS:]]
    return "\n".join(lines)


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
