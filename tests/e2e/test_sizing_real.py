"""The hit rates that ``kvtierctl size --trace`` computes, against those of the real pool at three sizes."""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest
from lab import RealTier
from test_refengine_real import BLOCK, OBJECT_BYTES, Engine

from kvtierd.workload.dataset.records import Skips
from kvtierd.workload.sizing.hit_rates import hit_rates
from kvtierd.workload.sizing.trace import read_trace

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

TEXT = (resources.files("kvtierd") / "data" / "alice_in_wonderland.txt").read_text(encoding="ascii")
VALUE_BYTES = -(-OBJECT_BYTES // 4096) * 4096  # MemCache gives out memory in units of 4 KiB
REQUESTS = 240
HIGH, LOW = 80, 78  # what lies above must hold the values of a whole request, or some of them are refused
# Eviction follows at once, so that seconds of traffic stand for hours: MemCache looks every 5 s by itself, and keeps what
# was read in the last 10 s.
AT_ONCE = {
    "ock.mmc.evict_threshold_high": str(HIGH),
    "ock.mmc.evict_threshold_low": str(LOW),
    "ock.mmc.evict_check_interval_seconds": "0",
    "ock.mmc.meta.lease_ttl_ms": "1",
}


def questions() -> list[str]:
    """Documents of different popularity, each with a question of its own behind it or none."""
    rng = random.Random(7)
    documents = [TEXT[n * 1100 : n * 1100 + rng.randint(500, 1000)] for n in range(80)]
    asked = []
    for _ in range(REQUESTS):
        document = documents[min(int(rng.paretovariate(0.55)) - 1, rng.randrange(80))]
        asked.append(document + (f" {rng.random()} " * 6 if rng.random() < 0.4 else ""))
    return asked


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dataset") / "qa.jsonl"
    path.write_text("".join(json.dumps({"question": q, "answer": ""}) + "\n" for q in questions()))
    return path


def computed(dataset: Path, pool_bytes: int, percent: float) -> float:
    trace, _ = read_trace(dataset, block_tokens=BLOCK, skips=Skips())
    curve = trace.curve()
    rates = hit_rates(curve, block_tokens=BLOCK, bytes_per_token=VALUE_BYTES / BLOCK)
    assert rates.max_hit_rate > 0.5
    return float(curve.hits(pool_bytes * percent / 100 / VALUE_BYTES)) * BLOCK / rates.prompt_tokens


def measured(tier: RealTier, pool_bytes: int) -> float:
    tier.start_meta(conf=AT_ONCE)
    tier.start_pool(dram=str(pool_bytes))
    engine = Engine(tier, l1="1MiB", l3_cooldown="20ms")
    found = asked = 0
    for question in questions():
        request = urllib.request.Request(f"http://127.0.0.1:{engine.port}/reset_prefix_cache", b"")
        urllib.request.urlopen(request, timeout=10).close()  # hits come from the pool alone
        answer = engine.post("/v1/completions", {"prompt": question, "max_tokens": 1})
        usage = answer["usage"]["kvtier"]
        assert usage["l1_tokens"] == 0
        found += usage["l3_tokens"]
        asked += answer["usage"]["prompt_tokens"]
    refused, saved = (engine.metric(f"refengine:l3_{word}_blocks_total") for word in ("unsaved", "saved"))
    assert refused < 0.02 * saved
    return found / asked


@pytest.mark.parametrize("pool_mib", [6, 8, 12])
def test_the_computed_hit_rate_is_that_of_the_real_pool(
    make_tier: Callable[[], RealTier], dataset: Path, pool_mib: int
) -> None:
    pool_bytes = pool_mib * 1024**2
    real = measured(make_tier(), pool_bytes)
    # MemCache evicts from HIGH down to LOW: what it holds lies between.
    least, most = computed(dataset, pool_bytes, LOW), computed(dataset, pool_bytes, HIGH)
    print(f"{pool_mib} MiB: real {real:.4f}, computed {least:.4f} to {most:.4f}")
    assert most - least < 0.02
    assert real == pytest.approx((least + most) / 2, abs=0.02)
