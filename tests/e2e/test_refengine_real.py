"""The reference engine on the real pool: what it saves comes back, what is wrong is noticed, what dies is survived."""

from __future__ import annotations

import concurrent.futures
import json
import signal
import time
import urllib.error
import urllib.request
from importlib import resources
from typing import Any

import pytest
from kvtierd_refengine.plugin import RefengineDriver
from lab import RawClient, RealTier, Unit, wait_until

from kvtierd.memcache.rest import MetaClient
from kvtierd.plan.engine import EngineContext
from kvtierd.plan.inventory import Inventory
from kvtierd.plan.model import HttpProbe
from kvtierd.workload.demo import free_ports

pytestmark = pytest.mark.real

TEXT = (resources.files("kvtierd") / "data" / "alice_in_wonderland.txt").read_text(encoding="ascii")
DRIVER = RefengineDriver()
BLOCK = 64
# The tiny model: 2 layers x (keys, values) x 2 heads x 64 tokens x 16 numbers x 4 bytes, and the header.
OBJECT_BYTES = 2 * 2 * 2 * BLOCK * 16 * 4 + 128


class Engine:
    """An engine launched as its driver says, in the emulation."""

    def __init__(self, tier: RealTier, *, wait: bool = True, **args: Any) -> None:
        (self.port,) = free_ports(1)
        conf = tier.write_local_conf(f"engine-{self.port}", dram="0", max_dram="64MB")
        self.context = EngineContext(
            name="ref",
            node="test",
            series="emulated",
            model="refengine",
            port=self.port,
            python=tier.python,
            args={"preset": "tiny", "l3_init_deadline": "5s", "stats_interval": "500ms"} | args,
            local_conf_path=str(conf),
            meta_service_url="",
            config_store_url="",
            pool_placement="standalone",
            work_dir=str(tier.work),
            inventory=Inventory(hostname="test", memory_total_bytes=1, memory_available_bytes=1),
        )
        launch = DRIVER.launch(self.context)
        assert launch.refusals == ()
        self.unit: Unit = tier.spawn("engine", list(launch.argv), launch.env)
        (self.probe,) = launch.readiness.probes
        if wait:
            wait_until(self.ready, 40, "the engine is ready")

    def ready(self) -> bool:
        """As the supervisor probes it."""
        assert self.unit.alive, self.unit.output()[-3000:]
        assert isinstance(self.probe, HttpProbe)
        try:
            with urllib.request.urlopen(self.probe.url, timeout=2) as answer:
                return (self.probe.body_contains or "") in answer.read().decode()
        except (urllib.error.URLError, OSError):
            return False

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            return str(answer.read().decode())

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def ask(self, number: int = 0, length: int = 2000, max_tokens: int = 24) -> Any:
        """Asks about the text from a place of its own: the answer with ``usage`` moved to the top."""
        prompt = TEXT[number * length : (number + 1) * length]
        answer = self.post(
            "/v1/completions", {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        )
        return {"text": answer["choices"][0]["text"], **answer["usage"]["kvtier"]}

    @property
    def l3(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self.get("/health"))["l3"]
        return state

    def metric(self, name: str, label: str = "") -> float:
        lines = [x for x in self.get("/metrics").splitlines() if x.startswith(f"{name}{{") and label in x]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def await_saved(self, blocks: int) -> None:
        wait_until(
            lambda: self.metric("refengine:l3_saved_blocks_total") >= blocks, 10, f"{blocks} blocks are saved"
        )


def blocks_of(tier: RealTier) -> list[str]:
    """The keys in the pool."""
    return sorted(tier.ask(MetaClient.keys))


@pytest.fixture
def warm_tier(real_tier: RealTier) -> RealTier:
    """A MetaService and a pool holder."""
    real_tier.start_meta()
    real_tier.start_pool()
    return real_tier


def test_cold_then_l1_then_the_pool_after_a_restart(warm_tier: RealTier) -> None:
    first = Engine(warm_tier)
    assert first.l3 == {"enabled": True, "state": "attached", "skipping": False, "problem": ""}
    cold, local = first.ask(), first.ask()
    assert (cold["l1_tokens"], cold["l3_tokens"], cold["computed_tokens"]) == (0, 0, 2000)
    assert (local["l1_tokens"], local["l3_tokens"]) == (1984, 0)
    first.await_saved(31)
    assert first.unit.stop() == 0
    second = Engine(warm_tier)
    restarted = second.ask()
    assert (restarted["l1_tokens"], restarted["l3_tokens"], restarted["computed_tokens"]) == (0, 1984, 16)
    assert cold["text"] == local["text"] == restarted["text"]
    assert cold["logits_digest"] == local["logits_digest"] == restarted["logits_digest"]
    seen = DRIVER.observe(second.get("/metrics"))
    assert (seen.l3_query_tokens, seen.l3_hit_tokens, seen.l1_hit_tokens) == (2000, 1984, 0)
    assert "External prefix cache hit rate: 99.2%" in second.unit.await_output("Engine 000:", 15)


def test_the_base_model_is_faster_from_the_pool_than_cold(real_tier: RealTier) -> None:
    real_tier.start_meta()
    real_tier.start_pool()
    engine = Engine(real_tier, preset="base")
    engine.ask(1, length=10, max_tokens=1)
    started = time.monotonic()
    cold = engine.ask(max_tokens=1)
    cold_seconds = time.monotonic() - started
    engine.await_saved(31)
    engine.post("/reset_prefix_cache", {})
    started = time.monotonic()
    external = engine.ask(max_tokens=1)
    external_seconds = time.monotonic() - started
    assert external["l3_tokens"] == 1984
    assert external["logits_digest"] == cold["logits_digest"]
    assert external_seconds < cold_seconds / 2, (cold_seconds, external_seconds)


def test_another_seed_shares_nothing(warm_tier: RealTier) -> None:
    first = Engine(warm_tier)
    answer = first.ask()
    first.await_saved(31)
    other = Engine(warm_tier, seed=1).ask()
    assert other["l3_tokens"] == 0
    assert other["text"] != answer["text"]


@pytest.mark.parametrize("size", [OBJECT_BYTES, 4096], ids=["same-size", "other-size"])
def test_a_corrupted_block_is_noticed_and_computed_again(warm_tier: RealTier, size: int) -> None:
    engine = Engine(warm_tier)
    cold = engine.ask()
    engine.await_saved(31)
    keys = blocks_of(warm_tier)
    assert len(keys) == 31
    assert all(key.startswith("refengine@") for key in keys)
    client: RawClient = warm_tier.client()
    for key in keys:  # whichever is first in the chain will be among them
        assert client.remove(key) == 0
        assert client.put(key, size=size) == 0
    engine.post("/reset_prefix_cache", {})
    again = engine.ask()
    assert (again["l3_tokens"], again["computed_tokens"]) == (0, 2000)
    assert again["logits_digest"] == cold["logits_digest"]
    assert engine.metric("refengine:l3_failed_loads_total", 'reason="wrong-bytes"') == 1
    engine.await_saved(32)  # the wrong one was removed and has been put anew
    engine.post("/reset_prefix_cache", {})
    healed = engine.ask()
    assert healed["l3_tokens"] == BLOCK
    assert healed["logits_digest"] == cold["logits_digest"]


def test_the_metaservice_dies_under_requests_and_none_fails(warm_tier: RealTier) -> None:
    engine = Engine(warm_tier, l1="1MiB", max_num_seqs=4, l3_call_limit="500ms", l3_cooldown="1s")
    expected = [engine.ask(number, length=600)["logits_digest"] for number in range(12)]
    meta = warm_tier.units[0]
    longest = 0.0

    def ask(number: int) -> tuple[str, float]:
        started = time.monotonic()
        return engine.ask(number % 12, length=600)["logits_digest"], time.monotonic() - started

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(ask, number) for number in range(36)]
        wait_until(lambda: sum(f.done() for f in futures) >= 4, 30, "requests are under way")
        assert (
            engine.metric("vllm:external_prefix_cache_hits_total") > 0
        )  # L1 is too small: they come from the pool
        meta.kill()
        for number, future in enumerate(futures):
            digest, seconds = future.result(60)
            assert digest == expected[number % 12]
            longest = max(longest, seconds)
    assert longest < 15, longest  # a call that hangs does so for 60 s
    assert engine.metric("vllm:request_success_total", 'finished_reason="error"') == 0
    assert engine.ready()
    # And it comes back by itself.
    warm_tier.start_meta()

    def hits_again() -> bool:
        engine.ask(20, length=600)
        engine.post("/reset_prefix_cache", {})
        return bool(engine.ask(20, length=600)["l3_tokens"])

    wait_until(hits_again, 30, "the tier hits again")


def test_a_frozen_metaservice_costs_one_limit(warm_tier: RealTier) -> None:
    engine = Engine(warm_tier, l3_call_limit="300ms", l3_cooldown="2s")
    cold = engine.ask()
    engine.await_saved(31)
    engine.post("/reset_prefix_cache", {})
    meta = warm_tier.units[0]
    meta.signal(signal.SIGSTOP)
    try:
        started = time.monotonic()
        answer = engine.ask()
        assert time.monotonic() - started < 5
        assert answer["logits_digest"] == cold["logits_digest"]
        assert answer["l3_tokens"] == 0
        assert engine.l3["skipping"]
        started = time.monotonic()
        assert engine.unit.stop() == 0  # with a call stuck in the client
        assert time.monotonic() - started < 10
    finally:
        meta.signal(signal.SIGCONT)


def test_starts_and_stops_without_a_metaservice(real_tier: RealTier) -> None:
    engine = Engine(real_tier, l3_init_deadline="500ms")
    assert engine.l3["state"] == "hung"  # init does not return while there is no MetaService
    assert engine.ask()["computed_tokens"] == 2000
    started = time.monotonic()
    assert engine.unit.stop() == 0  # the hanging init has MemCache's own signal handlers in place
    assert time.monotonic() - started < 3


def test_a_failed_join_is_named_and_tried_again(warm_tier: RealTier) -> None:
    engine = Engine(warm_tier, wait=False)
    path = warm_tier.work / f"engine-{engine.port}.conf"
    path.rename(path.with_suffix(".away"))
    wait_until(engine.ready, 40, "ready without L3")
    assert engine.l3["state"] in {"failed", "attaching"}
    assert "MemCache init answered -1" in engine.l3["problem"]
    assert engine.ask()["computed_tokens"] == 2000
    path.with_suffix(".away").rename(path)
    wait_until(lambda: engine.l3["state"] == "attached", 30, "attached after the repair")
    engine.ask(1)
    engine.await_saved(31)


def test_sigterm_finishes_the_running_request_and_leaves_the_pool(warm_tier: RealTier) -> None:
    engine = Engine(warm_tier)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        future = threads.submit(engine.ask, 0, 1000, 600)
        wait_until(lambda: engine.metric("vllm:num_requests_running") == 1, 10, "it runs")
        assert engine.unit.stop(timeout_seconds=30) == 0
        assert len(future.result(5)["text"]) == 600
    wait_until(
        lambda: len(warm_tier.ask(MetaClient.cluster_status).ranks) == 1, 10, "only the pool holder is left"
    )
    assert len(blocks_of(warm_tier)) == 15  # and what it saved is still there
