"""The real pool: capacity, joining, leaving, purging, dying."""

from __future__ import annotations

import ctypes
import re
import signal
import subprocess
import time
from importlib import metadata

import pytest
from lab import RealTier, wait_until

from kvtierd.emulator.build import EmulatedDriver
from kvtierd.memcache.answers import PROVIDER, PROXY
from kvtierd.memcache.health import joinable
from kvtierd.memcache.rest import MetaClient

pytestmark = pytest.mark.real

MIB, GIB = 1024**2, 1024**3
PLAIN_CLIENT = """
from memcache_hybrid import DistributedObjectStore
DistributedObjectStore().init(0)
"""


@pytest.mark.parametrize(
    ("written", "size_bytes"),
    [("64MB", 64 * MIB), ("1GB", GIB), ("66MB", 66 * MIB)],
    ids=["64MB", "1GB", "66MB"],
)
def test_capacity_is_what_was_written_in_powers_of_1024(
    real_tier: RealTier, written: str, size_bytes: int
) -> None:
    real_tier.start_meta()
    real_tier.start_pool(dram=written, max_dram=written)
    assert real_tier.ask(MetaClient.capacity).dram.total_bytes == size_bytes
    (segment,) = real_tier.ask(MetaClient.segments)
    assert (segment.name, segment.rank, segment.total_bytes) == ("rank-0-dram", 0, size_bytes)


def test_pool_holder_says_when_it_is_in_and_leaves_in_good_order(real_tier: RealTier) -> None:
    real_tier.start_meta()
    pool = real_tier.start_pool()
    assert pool.await_output("kvtierd-pool ready", 1).startswith(
        "kvtierd-pool ready rank=0 device=0 seconds="
    )
    pool.signal(signal.SIGHUP)  # nothing to reload, and no reason to die
    time.sleep(0.3)
    assert pool.alive
    assert pool.stop(timeout_seconds=10) == 0
    assert real_tier.ask(MetaClient.segments) == ()
    assert real_tier.ask(MetaClient.cluster_status).ranks == ()


def test_joinable_names_who_is_missing(real_tier: RealTier) -> None:
    real_tier.start_meta()
    pool = real_tier.start_pool()
    real_tier.client()
    real_tier.client(init_bm=False)  # takes no rank
    state = real_tier.ask(MetaClient.pool_state)
    expected = {0: PROVIDER, 1: PROXY}
    assert state.cluster.roles() == expected
    assert joinable(state, expected).ok
    pool.kill()
    wait_until(lambda: real_tier.ask(MetaClient.segments) == (), 5, "the dead rank's segment is gone")
    verdict = wait_until(
        lambda: [v for v in [joinable(real_tier.ask(MetaClient.pool_state), expected)] if not v.ok],
        5,
        "not joinable",
    )[0]
    assert any("rank 0" in reason for reason in verdict.reasons)


def test_sigterm_ends_a_pool_holder_that_waits_for_the_metaservice(real_tier: RealTier) -> None:
    pool = real_tier.start_pool(wait=False)
    pool.await_output("Trying to connect", 10)
    started = time.monotonic()
    assert pool.stop(timeout_seconds=5) == 0
    assert time.monotonic() - started < 3
    assert "told to stop before it had joined" in pool.output()


def test_sigterm_is_swallowed_by_a_plain_client_that_waits(real_tier: RealTier) -> None:
    """Why run_pool.py fetches signals itself. When this fails, MemCache has mended it."""
    conf = real_tier.write_local_conf("plain", dram="64MB", max_dram="64MB")
    plain = real_tier.spawn(
        "plain", [real_tier.python, "-c", PLAIN_CLIENT], {"MMC_LOCAL_CONFIG_PATH": str(conf)}
    )
    plain.await_output("Trying to connect", 10)
    plain.signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        plain.wait(3)


def test_pool_holder_gives_up_at_its_deadline(real_tier: RealTier) -> None:
    pool = real_tier.start_pool(wait=False, init_deadline_seconds=1.0)
    assert pool.wait(8) == 75
    assert "init did not end within 1 s" in pool.output()


def test_pool_holder_that_is_refused_exits_1(real_tier: RealTier) -> None:
    real_tier.start_meta()
    real_tier.start_pool(max_dram="64MB")
    refused = real_tier.start_pool(max_dram="128MB", device=1, wait=False)  # must be equal on all ranks
    assert refused.wait(15) == 1
    assert "init was refused" in refused.output()


def test_killed_holder_takes_its_segment_along(real_tier: RealTier) -> None:
    real_tier.start_meta()
    first, _second = real_tier.start_pool(), real_tier.start_pool(device=1)
    assert real_tier.ask(MetaClient.capacity).dram.total_bytes == 128 * MIB
    first.kill()
    wait_until(lambda: real_tier.ask(MetaClient.capacity).dram.total_bytes == 64 * MIB, 5, "capacity halves")
    (left,) = real_tier.ask(MetaClient.segments)
    assert left.rank == 1


def test_purge_removes_every_key_before_it_returns(real_tier: RealTier) -> None:
    real_tier.start_meta()
    real_tier.start_pool()
    client = real_tier.client()
    keys = [f"key-{n}" for n in range(500)]
    assert set(client.put_many(keys, size=50_000)) == {0}
    assert set(client.get_many(keys[:50], size=50_000)) == {"ok"}  # freshly read keys hold a lease
    assert len(real_tier.ask(MetaClient.keys)) == 500
    purge = real_tier.purge()
    assert purge.process.returncode == 0, purge.output()
    assert "kvtierd-purge done seconds=" in purge.output()
    assert real_tier.ask(MetaClient.keys) == ()
    assert set(client.exist_many(keys)) == {0}
    assert real_tier.ask(MetaClient.capacity).dram.used_bytes == 0
    # A put of an existing key keeps the old value: only gone keys can take a new one.
    assert set(client.put_many(keys, size=50_000, version=2)) == {0}
    assert set(client.get_many(keys, size=50_000, version=2)) == {"ok"}


def test_purge_under_load_removes_what_was_there(real_tier: RealTier) -> None:
    real_tier.start_meta()
    real_tier.start_pool()
    client = real_tier.client()
    keys = [f"old-{n}" for n in range(300)]
    assert set(client.put_many(keys, size=4096)) == {0}
    client.start_load("new", size=20_000, threads=2)
    time.sleep(0.5)
    assert real_tier.purge().process.returncode == 0
    assert not set(real_tier.ask(MetaClient.keys)) & set(keys)
    stopped = client.stop_load()
    assert stopped["stuck"] == 0
    assert stopped.get("gets_wrong", 0) == 0
    assert stopped["puts"] > 0


def test_purge_counts_only_when_every_provider_is_back(real_tier: RealTier) -> None:
    """After a restart the survivors bring their keys with them: a purge that was earlier has removed nothing."""
    meta = real_tier.start_meta()
    pool = real_tier.start_pool()
    client = real_tier.client()
    keys = [f"key-{n}" for n in range(200)]
    assert set(client.put_many(keys, size=4096)) == {0}
    time.sleep(0.5)
    pool.signal(signal.SIGSTOP)  # it cannot return before the early purge is done
    meta.kill()
    real_tier.start_meta()
    early = real_tier.purge()
    assert early.process.returncode == 0, early.output()
    pool.signal(signal.SIGCONT)
    wait_until(lambda: real_tier.ask(MetaClient.segments), 30, "the provider's segment is back")
    assert len(real_tier.ask(MetaClient.keys)) == 200
    late = real_tier.purge()
    assert late.process.returncode == 0, late.output()
    assert real_tier.ask(MetaClient.keys) == ()
    time.sleep(2)
    assert real_tier.ask(MetaClient.keys) == ()


def test_purge_gives_up_at_its_deadline(real_tier: RealTier) -> None:
    purge = real_tier.purge(deadline_seconds=1.0)
    assert purge.process.returncode == 75
    assert "not done within 1 s" in purge.output()


def test_emulated_driver_has_every_symbol_that_memfabric_looks_up(driver: EmulatedDriver) -> None:
    """The names stand in MemFabric's libraries as text; a new version that wants more is found here."""
    prefixes = rb"acl|rt|hal|drv|Ra|ra_|Hccl|Hcomm|devmm_|Tsd|dcmiv2_|svm_"
    wanted: set[str] = set()
    for file in metadata.files("memfabric-hybrid") or ():
        if file.name in {"libmf_hybm_core.so", "libmf_smem.so"}:
            text = file.locate().read_bytes()
            wanted |= {
                m.decode() for m in re.findall(rb"\0((?:%s)[A-Z0-9_][A-Za-z0-9_]{3,})(?=\0)" % prefixes, text)
            }
    assert len(wanted) > 100
    library = ctypes.CDLL(str(driver.library_dir / "libascendcl.so"))
    assert sorted(name for name in wanted if not hasattr(library, name)) == []
