"""The observer on a real MetaService under eviction: what it says, over restarts, a hang, and its log's rotation."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from lab import RawClient, RealTier, wait_until

from kvtierd.errors import KvtierError
from kvtierd.host.view import HostView, RecordedRunner
from kvtierd.memcache.health import PoolState
from kvtierd.memcache.rest import MetaClient
from kvtierd.observe.exporter import Exporter
from kvtierd.observe.families import Exported
from kvtierd.observe.observer import Observer, PoolSource, Sources
from kvtierd.observe.picture import Picture

pytestmark = pytest.mark.real

KIB, MIB = 1024, 1024**2
LOG = "log/memcache_hybrid/logs/mmc-meta.log"
EVICTS_EARLY = {"ock.mmc.evict_threshold_high": "70", "ock.mmc.evict_threshold_low": "60"}


class Watched:
    """An observer of this tier, stepped by the test; each run of the MetaService is one instance."""

    def __init__(self, tier: RealTier, state_dir: Path) -> None:
        self.tier = tier
        self.run = 1
        self.state: PoolState | None = None
        self.observer = Observer(
            Sources(node=lambda: "host-a", cluster=lambda: ("host-a", True), pool=self._pool),
            view=HostView(Path("/"), RecordedRunner()),
            state_dir=state_dir,
            meta_seconds=0.0,
        )

    def _pool(self) -> PoolSource:
        return PoolSource(
            f"meta-{self.run}",
            state=self.state,
            metrics_base_url=f"http://127.0.0.1:{self.tier.metrics_port}",
            log_file=self.tier.root / LOG,
        )

    async def step(self) -> Picture:
        try:
            self.state = await MetaClient(
                f"http://127.0.0.1:{self.tier.metrics_port}", timeout_seconds=0.5
            ).pool_state()
        except KvtierError:
            self.state = None
        return await self.observer.step()


def fill(writer: RawClient, name: str, megabytes: int) -> None:
    for batch in range(megabytes):
        writer.put_many([f"{name}-{batch}-{n}" for n in range(4)], size=256 * KIB)


def test_a_real_pool_under_eviction_and_its_metaservices_end(real_tier: RealTier, tmp_path: Path) -> None:
    meta = real_tier.start_meta(conf=EVICTS_EARLY)
    real_tier.start_pool()
    # Joined once and kept: without the endpoint's ordering a client that joins after the MetaService was restarted
    # hangs about once in 13 times, while those that were there go on.
    writer = real_tier.client()

    async def scenario() -> None:
        watched = Watched(real_tier, tmp_path)
        first = await watched.step()
        assert first.pool is not None
        assert first.pool.capacity_bytes == 64 * MIB
        assert first.pool.totals["evicted_keys"] == 0
        assert [s.rank for s in first.pool.segments] == [0]

        await asyncio.to_thread(fill, writer, "a", 80)
        seen = await watched.step()
        assert seen.pool is not None
        evicted = seen.pool.totals["evicted_keys"]
        assert evicted > 100, "80 MB went through a pool of 64 MB that evicts above 70 %"
        assert seen.pool.totals["allocations"] == 320
        assert seen.pool.mean_value_bytes == pytest.approx(256 * KIB, rel=0.01)
        assert seen.pool.stored_keys == 320 - evicted
        assert seen.pool.used_bytes == seen.pool.stored_keys * 256 * KIB
        assert seen.pool.problem == ""
        assert seen.problems == ()

        meta.process.send_signal(signal.SIGSTOP)
        await watched.step()
        await asyncio.sleep(1.0)
        hung = await watched.step()
        assert hung.pool is not None
        assert hung.pool.hung_seconds >= 1.0
        assert hung.pool.capacity_bytes == 64 * MIB, "what was known stays, with its age"
        meta.process.send_signal(signal.SIGCONT)

        meta.kill()
        await asyncio.to_thread(real_tier.start_meta, conf=EVICTS_EARLY)
        watched.run = 2
        again = await watched.step()
        assert again.pool is not None
        assert again.pool.totals["evicted_keys"] == evicted, "the counter goes on"
        await asyncio.to_thread(
            wait_until,
            lambda: any(s.total_bytes for s in real_tier.ask(MetaClient.segments)),
            15,
            "the segment is back",
        )
        await asyncio.to_thread(
            wait_until, lambda: writer.put_many(["back"], size=KIB) == [0], 15, "the writer is back"
        )
        await asyncio.to_thread(fill, writer, "b", 80)
        after = await watched.step()
        assert after.pool is not None
        assert after.pool.totals["evicted_keys"] > evicted + 100
        # Its log is buffered, and was renamed at the start: what it told of both runs is there.
        told = after.pool.log_evictions
        assert told is not None
        assert told >= 2
        text = "".join(
            p.read_text()
            for p in (real_tier.root / LOG).parent.glob("mmc-meta*.log")
            if "audit" not in p.name
        )
        assert told == text.count("] Evicted ")
        await watched.observer.close()

        exporter = Exporter(lambda: Exported(after.now_seconds, 0.0, picture=after))
        exporter.note()
        assert exporter.history.as_dict(after.now_seconds)["evicted"] == [None], "no minute is full yet"

    asyncio.run(scenario())
