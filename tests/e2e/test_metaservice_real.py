"""The real MetaService: how it starts, fails to start, and what its health is worth."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from lab import RealTier, Unit, wait_until

from kvtierd.errors import MemcacheError
from kvtierd.memcache.health import ExpectedPool, MetaObservation, Verdict, meta_conditions, pool_ready
from kvtierd.memcache.listening import listening_addresses
from kvtierd.memcache.rest import MetaClient

pytestmark = pytest.mark.real

PLAIN_MAIN = "from memcache_hybrid import MetaService; MetaService.main()"
MALFORMED = {"ock.mmc.evict_threshold_low": "60  # inline comments are no comments"}
MIB = 1024**2


def observe(tier: RealTier, unit: Unit) -> MetaObservation:
    async def ask() -> MetaObservation:
        client = MetaClient(f"http://127.0.0.1:{tier.metrics_port}", timeout_seconds=0.2)
        try:
            health = await client.health()
        except MemcacheError:
            health = None
        return MetaObservation(
            instance=str(unit.pid) if unit.alive else None,
            health=health,
            listening=listening_addresses(unit.pid),
        )

    return tier.ask(lambda _client: ask())


def test_failed_start_is_a_failed_process(real_tier: RealTier) -> None:
    meta = real_tier.start_meta(wait=False, conf=MALFORMED)
    assert meta.wait(15) == 1
    assert "failed to start" in meta.output().splitlines()[-1]
    assert "evict_threshold_low" in meta.output()


def test_plain_main_hides_a_failed_start(real_tier: RealTier) -> None:
    """Why run_meta.py exists. When this fails, MemCache has mended it."""
    conf = real_tier.write_meta_conf(MALFORMED)
    plain = real_tier.spawn(
        "plain", [real_tier.python, "-c", PLAIN_MAIN], {"MMC_META_CONFIG_PATH": str(conf)}
    )
    assert plain.wait(15) == 0


def test_sigterm_is_a_clean_exit_and_its_logs_stay_in_the_root(real_tier: RealTier) -> None:
    meta = real_tier.start_meta()
    assert set(real_tier.addresses) <= listening_addresses(meta.pid)
    assert meta.stop() == 0
    assert (real_tier.root / "log/memcache_hybrid/logs/mmc-meta.log").stat().st_size > 0
    assert listening_addresses(meta.pid) == frozenset()


@pytest.mark.parametrize("occupant", ["silent", "another MetaService"])
def test_busy_metrics_port_is_never_up(make_tier: Callable[[], RealTier], occupant: str) -> None:
    tier = make_tier()
    with socket.socket() as silent:
        if occupant == "silent":
            silent.bind(("127.0.0.1", tier.metrics_port))
            silent.listen()
        else:
            # The worst case: /health on this port says ok, but it is not this process that says so.
            other = make_tier()
            other.metrics_port = tier.metrics_port
            other.start_meta()
        meta = tier.start_meta(wait=False)
        looked_open, seen_reasons = False, set()
        deadline = time.monotonic() + 15
        while meta.alive:
            assert time.monotonic() < deadline
            observation = observe(tier, meta)
            looked_open |= set(tier.addresses[:2]) <= set(observation.listening)
            verdict = meta_conditions(observation, tier.addresses)
            assert not verdict.ok
            seen_reasons.update(verdict.reasons)
    assert looked_open, "a probe of the open ports would not have been fooled"
    assert any(f"127.0.0.1:{tier.metrics_port}" in reason for reason in seen_reasons)
    assert meta.wait(1) == 1


def test_up_without_capacity_is_not_a_pool(real_tier: RealTier) -> None:
    meta = real_tier.start_meta()
    wait_until(lambda: meta_conditions(observe(real_tier, meta), real_tier.addresses).ok, 10, "it is up")
    expected = ExpectedPool(capacity_bytes=64 * MIB, providers=1, alignment_bytes=2 * MIB)
    verdict = pool_ready(real_tier.ask(MetaClient.pool_state), expected)
    assert verdict == Verdict(False, ("the pool has no DRAM; 64 MiB are planned",))
    real_tier.start_pool()
    assert pool_ready(real_tier.ask(MetaClient.pool_state), expected).ok


def test_second_metaservice_of_a_root_is_refused_until_the_first_has_gone(real_tier: RealTier) -> None:
    first = real_tier.start_meta()
    ports = real_tier.meta_port, real_tier.store_port, real_tier.metrics_port
    real_tier.meta_port, real_tier.store_port, real_tier.metrics_port = (
        ports[0] + 1,
        ports[1] + 1,
        ports[2] + 1,
    )
    assert real_tier.start_meta(wait=False).wait(15) == 1
    first.kill()
    second = real_tier.start_meta()
    assert second.stop() == 0


def test_two_tiers_side_by_side_leave_the_host_alone(make_tier: Callable[[], RealTier]) -> None:
    host_lock, install_info = Path("/tmp/mmc_meta_service.lock"), Path("/etc/ascend_install.info")
    before = host_lock.exists(), install_info.exists()
    tiers = [make_tier(), make_tier()]
    clients = []
    for version, tier in enumerate(tiers):
        tier.start_meta()
        tier.start_pool()
        clients.append(tier.client())
        assert clients[-1].put("same key", size=10_000, version=version) == 0
    for version, client in enumerate(clients):
        assert client.rank() == 1
        assert client.get_into("same key", size=10_000, version=version) == "ok"
    assert (host_lock.exists(), install_info.exists()) == before
