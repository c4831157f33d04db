"""The scheduler: where prompts' tokens come from, turns, limits, and that every block comes back."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator

import pytest
from kvtierd_refengine.core import (
    EngineCore,
    Event,
    Finished,
    QueueFullError,
    StoppingError,
    Token,
    Usage,
    build,
)
from kvtierd_refengine.l3tier import L3Tier, TierOptions
from kvtierd_refengine.model import PRESETS, Model
from kvtierd_refengine.stats import EngineStats
from kvtierd_refengine.tokenizer import decode, encode
from refengine_fakes import FakeStore, wait_for

BLOCK = 16
BLOCK_BYTES = PRESETS["tiny"].kv_bytes_per_token * BLOCK
PROMPT = encode("Call me Ishmael. Some years ago, never mind how long precisely, having little money. " * 2)[
    :150
]
FULL_BLOCKS = 150 // BLOCK


@dataclasses.dataclass
class Result:
    text: str
    reason: str
    usage: Usage

    @property
    def tiers(self) -> tuple[int, int, int]:
        return self.usage.l1_tokens, self.usage.l3_tokens, self.usage.computed_tokens


class Request:
    """One submitted request; ``result`` waits for its end."""

    def __init__(self, core: EngineCore, prompt: list[int], max_tokens: int = 8) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.tokens: list[int] = []
        self.cancel: Callable[[], None] = core.submit(
            prompt, max_tokens, ignore_eos=True, sink=self.events.put
        )

    def next(self) -> Event:
        return self.events.get(timeout=20)

    def result(self) -> Result:
        while isinstance(event := self.next(), Token):
            self.tokens.append(event.token)
        return Result(decode(self.tokens), event.reason, event.usage)


class Engine:
    """An engine core with or without L3 on a fake pool."""

    def __init__(
        self,
        store: FakeStore | None = None,
        *,
        blocks: int = 64,
        max_sequences: int = 4,
        max_queue: int = 8,
        prefix_cache: bool = True,
    ) -> None:
        model = Model(PRESETS["tiny"], block_size=BLOCK, max_tokens=60_000)
        self.core = build(
            model,
            l1_bytes=blocks * BLOCK_BYTES,
            max_sequences=max_sequences,
            max_queue=max_queue,
            prefix_cache=prefix_cache,
        )
        self.stats = EngineStats("tiny", load=self.core.load)
        self.tier: L3Tier | None = None
        if store is not None:
            self.tier = L3Tier(
                store,
                TierOptions("test", call_limit_seconds=0.2, cooldown_seconds=0.2),
                model_identity=self.core.identity,
                block_bytes=BLOCK_BYTES,
                events=self.stats,
            )
            self.tier.start()
            wait_for(lambda: self.tier is not None and self.tier.settled, "attached")
        self.core.start(self.stats, self.tier)

    def ask(self, prompt: list[int] = PROMPT, max_tokens: int = 8) -> Result:
        result = Request(self.core, prompt, max_tokens).result()
        if self.tier is not None:
            wait_for(self.tier.drained, "saved")
        return result

    def metric(self, name: str, **labels: str) -> float | None:
        return self.stats.registry.get_sample_value(name, {"engine": "0", "model_name": "tiny", **labels})

    def close(self) -> None:
        assert self.core.stop(5)
        if self.tier is not None:
            self.tier.close(1)


@pytest.fixture
def start() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(*arguments: object, **options: int) -> Engine:
        engines.append(Engine(*arguments, **options))  # type: ignore[arg-type]
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def test_cold_l1_and_l3_answer_the_same_to_the_bit(start: Callable[..., Engine]) -> None:
    store = FakeStore()
    first = start(store)
    cold, local = first.ask(), first.ask()
    second = start(store)  # as after a restart
    external, again = second.ask(), second.ask()
    cached = FULL_BLOCKS * BLOCK
    assert [r.tiers for r in (cold, local, external, again)] == [
        (0, 0, 150),
        (cached, 0, 150 - cached),
        (0, cached, 150 - cached),
        (cached, 0, 150 - cached),
    ]
    assert len({r.text for r in (cold, local, external, again)}) == 1
    assert len({r.usage.logits_digest for r in (cold, local, external, again)}) == 1
    assert cold.reason == "length"
    assert cold.usage.completion_tokens == 8


def test_metrics_say_where_tokens_came_from(start: Callable[..., Engine]) -> None:
    store = FakeStore()
    start(store).ask()
    engine = start(store)
    engine.ask()
    engine.ask()
    cached = FULL_BLOCKS * BLOCK
    assert engine.metric("vllm:prefix_cache_queries_total") == 300
    assert engine.metric("vllm:prefix_cache_hits_total") == cached
    assert engine.metric("vllm:external_prefix_cache_queries_total") == 150 + 150 - cached
    assert engine.metric("vllm:external_prefix_cache_hits_total") == cached
    assert engine.metric("vllm:prompt_tokens_total") == 300
    assert engine.metric("vllm:generation_tokens_total") == 16
    assert engine.metric("vllm:prompt_tokens_by_source_total", source="local_compute") == 300 - 2 * cached
    assert engine.metric("vllm:time_to_first_token_seconds_count") == 2
    assert engine.metric("vllm:request_success_total", finished_reason="length") == 2


def test_without_l3_nothing_external_is_counted(start: Callable[..., Engine]) -> None:
    engine = start()
    engine.ask()
    assert engine.metric("vllm:external_prefix_cache_queries_total") == 0


def test_another_prompt_is_another_answer(start: Callable[..., Engine]) -> None:
    engine = start()
    other = [PROMPT[0] ^ 1, *PROMPT[1:]]
    assert engine.ask().usage.logits_digest != engine.ask(other).usage.logits_digest
    assert engine.ask(other).tiers[0] == FULL_BLOCKS * BLOCK
    longer = engine.ask([*PROMPT, *PROMPT])
    assert longer.tiers[0] == FULL_BLOCKS * BLOCK  # the common prefix is reused


def test_the_last_token_is_always_computed(start: Callable[..., Engine]) -> None:
    engine = start()
    prompt = PROMPT[: 4 * BLOCK]
    cold, warm = engine.ask(prompt), engine.ask(prompt)
    assert warm.tiers == (3 * BLOCK, 0, BLOCK)
    assert warm.usage.logits_digest == cold.usage.logits_digest
    assert engine.ask(PROMPT[:1]).tiers == (0, 0, 1)


def test_a_wrong_block_in_the_pool_never_reaches_an_answer(start: Callable[..., Engine]) -> None:
    store = FakeStore()
    cold = start(store).ask()
    keys = list(store.objects)
    store.objects[keys[2]] = store.objects[keys[3]]
    engine = start(store)
    answer = engine.ask()
    assert answer.usage.logits_digest == cold.usage.logits_digest
    assert answer.tiers[1] == 2 * BLOCK
    assert engine.metric("refengine:l3_failed_loads_total", reason="wrong-bytes") == 1
    assert start(store).ask().tiers[1] == FULL_BLOCKS * BLOCK  # the recomputed block has replaced it


def test_a_hanging_pool_does_not_stop_the_others(start: Callable[..., Engine]) -> None:
    store = FakeStore()
    engine = start(store)
    cold = engine.ask()
    store.gates["exists"] = gate = threading.Event()
    engine.core.pool.reset()
    stuck = Request(engine.core, PROMPT)
    wait_for(lambda: "exists" in store.calls[-1:], "the lookup hangs")
    other = Request(engine.core, PROMPT[:10])  # too short for L3: must not wait for the first
    assert isinstance(other.next(), Token)
    answer = stuck.result()
    assert answer.usage.logits_digest == cold.usage.logits_digest
    assert answer.tiers == (0, 0, 150)
    assert engine.metric("refengine:l3_failed_lookups_total") == 1
    gate.set()


def test_requests_run_in_turns(start: Callable[..., Engine]) -> None:
    engine = start(blocks=200)
    long = Request(engine.core, PROMPT, max_tokens=2000)
    assert isinstance(long.next(), Token)
    assert engine.ask(PROMPT[:5], max_tokens=3).usage.completion_tokens == 3
    assert engine.core.load().running == 1
    long.cancel()
    assert long.result().reason == "abort"


def test_concurrent_answers_are_those_of_lone_ones(start: Callable[..., Engine]) -> None:
    prompts = [PROMPT[i:] for i in range(6)]
    alone = [start().ask(prompt) for prompt in prompts]
    engine = start(blocks=80)
    together = [r.result() for r in [Request(engine.core, prompt) for prompt in prompts]]
    assert [r.usage.logits_digest for r in together] == [r.usage.logits_digest for r in alone]


def test_waiting_for_blocks_then_for_room_in_the_queue(start: Callable[..., Engine]) -> None:
    engine = start(blocks=130, max_queue=1)
    first = Request(engine.core, PROMPT, max_tokens=1500)  # 104 blocks
    assert isinstance(first.next(), Token)
    second = Request(engine.core, PROMPT[1:], max_tokens=600)  # 47 blocks: must wait
    wait_for(lambda: engine.core.load().waiting == 1, "it waits")
    with pytest.raises(QueueFullError):
        Request(engine.core, PROMPT)
    assert engine.core.load().used_ratio == 104 / 130
    first.cancel()
    assert isinstance(second.next(), Token)
    second.cancel()
    assert second.result().reason == "abort"


@pytest.mark.parametrize("when", ["waiting", "running", "loading"])
def test_cancelling_gives_every_block_back(start: Callable[..., Engine], when: str) -> None:
    store = FakeStore()
    engine = start(store, blocks=130, max_sequences=1)
    runner = Request(engine.core, PROMPT[:10], max_tokens=1500)
    assert isinstance(runner.next(), Token)
    if when == "loading":
        runner.cancel()
        runner.result()
        store.gates["exists"] = gate = threading.Event()
        loading = Request(engine.core, PROMPT)
        wait_for(lambda: engine.core.load().running == 1, "it loads")
        loading.cancel()
        gate.set()
        assert loading.result().reason == "abort"
    elif when == "waiting":
        waiting = Request(engine.core, PROMPT)
        waiting.cancel()
        assert waiting.result().reason == "abort"
        runner.cancel()
    else:
        runner.cancel()
        assert runner.result().reason == "abort"
        assert len(runner.tokens) < 1500
    wait_for(lambda: engine.core.pool.owned == 0, "all blocks are back")
    assert engine.core.load().running == engine.core.load().waiting == 0


def test_a_failing_request_leaves_the_others_alone(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    forward = engine.core.model.forward

    def fail(tokens: list[int], start: int, blocks: list[object]) -> object:
        if tokens[0] == 255:
            raise MemoryError("no memory")
        return forward(tokens, start, blocks)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.core.model, "forward", fail)
    assert engine.ask([255, 1, 2]).reason == "error"
    assert engine.ask().reason == "length"
    assert engine.core.pool.owned == 0
    assert engine.metric("vllm:request_success_total", finished_reason="error") == 1


def test_a_receiver_that_fails_is_its_own_problem(start: Callable[..., Engine]) -> None:
    engine = start()

    def broken(_event: Event) -> None:
        raise RuntimeError("loop is closed")

    engine.core.submit(PROMPT, 3, ignore_eos=True, sink=broken)
    assert engine.ask().reason == "length"


def test_stopping_aborts_and_refuses(start: Callable[..., Engine]) -> None:
    engine = start(blocks=200)
    running = Request(engine.core, PROMPT, max_tokens=2000)
    assert isinstance(running.next(), Token)
    engine.close()
    assert running.result().reason == "abort"
    with pytest.raises(StoppingError):
        Request(engine.core, PROMPT)


def test_what_can_never_fit_is_refused_beforehand(start: Callable[..., Engine]) -> None:
    core = start(blocks=4).core
    assert core.refusal(40, 24) is None
    assert "64 KV blocks" not in str(core.refusal(40, 25))
    assert "needs 5 KV blocks; the cache has 4" in str(core.refusal(40, 25))
    assert "maximum context length is 60000" in str(core.refusal(59_999, 2))
    assert core.refusal(0, 1) == "The prompt is empty."
    with pytest.raises(ValueError, match="does not hold one block"):
        build(core.model, l1_bytes=BLOCK_BYTES - 1, max_sequences=1, max_queue=1)


def test_eviction_pressure_keeps_answers_right(start: Callable[..., Engine]) -> None:
    engine, prompts = start(blocks=12), [PROMPT[i * 7 :] + PROMPT for i in range(3)]
    prompts = [p[:120] for p in prompts]
    expected = [start().ask(p).usage.logits_digest for p in prompts]
    for _ in range(3):
        assert [engine.ask(p).usage.logits_digest for p in prompts] == expected
    assert engine.core.pool.evictions > 0
    assert engine.core.pool.owned == 0


def test_end_of_text_stops_unless_ignored(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    forward = engine.core.model.forward

    def ends(tokens: list[int], start: int, blocks: list[object]) -> object:
        logits = forward(tokens, start, blocks)  # type: ignore[arg-type]
        logits[256] = 1e6
        return logits

    monkeypatch.setattr(engine.core.model, "forward", ends)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    engine.core.submit(PROMPT, 5, ignore_eos=False, sink=events.put)
    end = events.get(timeout=10)
    assert isinstance(end, Finished)
    assert (end.reason, end.usage.completion_tokens) == ("stop", 1)
    assert engine.ask(max_tokens=5).usage.completion_tokens == 5


def test_without_its_prefix_cache_the_engine_computes_everything_again(start: Callable[..., Engine]) -> None:
    engine = start(prefix_cache=False)
    first, again = engine.ask(), engine.ask()
    assert again.tiers == first.tiers == (0, 0, len(PROMPT))
    assert again.text == first.text
