"""The connector's parts without vLLM, torch and MemCache: keys, plans, limits, lanes, transfers, lookups."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from kvtierd_vllm.connector.guard import TierGuard, TierUnavailableError
from kvtierd_vllm.connector.keys import SEAL_BYTES, KeyMaker, ModelIdentity, all_rank_keys, rank_key, seal
from kvtierd_vllm.connector.lanes import SEALS_BYTES, Lanes, cut_lanes, lane_blocks
from kvtierd_vllm.connector.lookups import Lookups
from kvtierd_vllm.connector.membership import Membership
from kvtierd_vllm.connector.options import Options
from kvtierd_vllm.connector.planning import BlockRef, LoadJob, Planner, ScheduledRequest
from kvtierd_vllm.connector.signals import kept_handlers
from kvtierd_vllm.connector.store import KEY_GONE, SIZE_DIFFERS, Span
from kvtierd_vllm.connector.transfers import FinishedLoad, Transfers

BLOCK = 4  # tokens
BLOCK_BYTES = 16
IDENTITY = ModelIdentity(
    model="m", dtype="bfloat16", layers=2, kv_heads=2, head_size=64, tensor_parallel_size=1,
    hash_algorithm="sha256", kv_bytes=4096, extra=("kv=auto",),
)  # fmt: skip


def eventually(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class FakeStore:
    """A pool in a dictionary. ``hang`` makes calls wait until ``release`` is set; codes can be overridden."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.memory = memoryview(bytearray())
        self.hang = False
        self.release = threading.Event()
        self.codes: dict[str, list[int]] = {}
        self.open_code = 0
        self.calls: list[str] = []

    def _call(self, what: str) -> None:
        self.calls.append(what)
        if self.hang:
            self.release.wait(10)

    def open(self) -> int:
        self._call("open")
        return self.open_code

    def register(self, span: Span) -> int:
        self.calls.append(f"register {span.size_bytes}")
        return 0

    def exists(self, keys: Sequence[str]) -> list[int]:
        self._call("exists")
        return self.codes.get("exists") or [int(key in self.objects) for key in keys]

    def put(self, keys: Sequence[str], spans: Sequence[Span]) -> list[int]:
        self._call("put")
        if "put" in self.codes:
            return self.codes["put"]
        for key, span in zip(keys, spans, strict=True):
            # As MemCache does: what is there stays.
            self.objects.setdefault(key, bytes(self.memory[span.address : span.address + span.size_bytes]))
        return [0] * len(keys)

    def get(self, keys: Sequence[str], spans: Sequence[Span]) -> list[int]:
        self._call("get")
        codes = []
        for key, span in zip(keys, spans, strict=True):
            value = self.objects.get(key)
            if value is None:
                codes.append(KEY_GONE)
            elif len(value) != span.size_bytes:
                codes.append(SIZE_DIFFERS)
            else:
                self.memory[span.address : span.address + span.size_bytes] = value
                codes.append(0)
        return self.codes.get("get") or codes

    def remove(self, keys: Sequence[str]) -> list[int]:
        self._call("remove")
        for key in keys:
            self.objects.pop(key, None)
        return [0] * len(keys)

    def close(self) -> int:
        self._call("close")
        return 0


class FakeCache:
    """A KV cache in a dictionary; offsets are those of the lanes' memory."""

    block_bytes = BLOCK_BYTES

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.blocks: dict[int, bytes] = {}

    def copy_out(self, block_id: int, offset: int) -> None:
        self.memory[offset : offset + BLOCK_BYTES] = self.blocks[block_id]

    def copy_in(self, block_id: int, offset: int) -> None:
        self.blocks[block_id] = bytes(self.memory[offset : offset + BLOCK_BYTES])


def content(number: int) -> bytes:
    return bytes([number]) * BLOCK_BYTES


@dataclasses.dataclass
class Worker:
    store: FakeStore
    cache: FakeCache
    guard: TierGuard
    transfers: Transfers
    load_lanes: Lanes

    def load(self, *blocks: BlockRef) -> FinishedLoad:
        self.transfers.submit_load(LoadJob("r", blocks))
        found: list[FinishedLoad] = []
        eventually(lambda: found.extend(self.transfers.finished_loads()) or found)
        assert len(found) == 1
        return found[0]

    def save(self, *blocks: BlockRef) -> None:
        assert self.transfers.save(blocks) == 0
        eventually(lambda: all(block.key in self.store.objects for block in blocks))


def make_worker(*, lane_count: int = 2, rank: int = 0, ranks: int = 1) -> Worker:
    memory = memoryview(bytearray(2 * lane_count * 2 * (BLOCK_BYTES + SEALS_BYTES)))
    load_lanes, save_lanes = cut_lanes(memory, 0, BLOCK_BYTES, 2, (lane_count, lane_count))
    store, cache = FakeStore(), FakeCache(memory)
    store.memory = memory
    guard = TierGuard("test", limit_seconds=0.15, probe_seconds=0.01, probe=lambda: store.exists(["probe"]))
    transfers = Transfers(store, guard, lambda: True, cache, load_lanes, save_lanes, rank=rank, ranks=ranks)
    transfers.start()
    return Worker(store, cache, guard, transfers, load_lanes)


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = make_worker()
    yield made
    made.store.release.set()
    made.guard.shut()


def refs(*pairs: tuple[str, int]) -> list[BlockRef]:
    return [BlockRef(key, block_id) for key, block_id in pairs]


# --- without the engine's libraries ------------------------------------------------------------------------------------


def test_the_parts_need_neither_vllm_nor_torch() -> None:
    modules = [
        "guard",
        "keys",
        "lanes",
        "lookups",
        "membership",
        "options",
        "planning",
        "signals",
        "store",
        "transfers",
    ]
    code = "import sys\n" + "\n".join(f"import kvtierd_vllm.connector.{name}" for name in modules)
    code += "\nprint(sorted({'vllm', 'torch', 'numpy', 'memcache_hybrid', 'kvtierd', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


# --- options ------------------------------------------------------------------------------------------------------------


def test_options_have_defaults_and_take_what_is_given() -> None:
    assert Options.read({}) == Options()
    assert Options.read({"namespace": "a", "call_limit_seconds": 2, "lane_bytes": 1024}) == Options(
        namespace="a", call_limit_seconds=2.0, lane_bytes=1024
    )


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"name_space": "a"}, "did you mean namespace"),
        ({"zzz": 1}, "known: namespace"),
        ({"namespace": "a@b"}, "without @"),
        ({"namespace": ""}, "1 to 64"),
        ({"call_limit_seconds": 0}, "positive"),
        ({"call_limit_seconds": True}, "positive"),
        ({"probe_seconds": "1"}, "positive"),
        ({"lane_bytes": float("nan")}, "positive"),
    ],
)
def test_wrong_options_are_named(extra: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Options.read(extra)


# --- keys ---------------------------------------------------------------------------------------------------------------


def test_a_key_holds_namespace_identity_block_size_and_hash() -> None:
    key = KeyMaker("ns", IDENTITY, 128).key(b"\x01\xff")
    assert key == f"ns@{IDENTITY.digest()}@128@01ff"
    assert len(IDENTITY.digest()) == 24


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ModelIdentity)])
def test_every_part_of_the_identity_changes_the_key(field: str) -> None:
    value = getattr(IDENTITY, field)
    other: Any = (*value, "x") if isinstance(value, tuple) else value + type(value)(1)
    assert dataclasses.replace(IDENTITY, **{field: other}).digest() != IDENTITY.digest()


def test_renewed_keys_differ_and_ranks_have_their_own() -> None:
    maker = KeyMaker("ns", IDENTITY, 128)
    before = maker.key(b"a")
    maker.renew("1234")
    assert maker.key(b"a") != before
    assert maker.key(b"a").startswith(maker.prefix)
    assert rank_key("k", 0, 1) == "k"
    assert all_rank_keys(["a", "b"], 2) == ["a@0.2", "a@1.2", "b@0.2", "b@1.2"]
    assert len(seal("k")) == SEAL_BYTES
    assert seal("k") != seal("l")


# --- planning -----------------------------------------------------------------------------------------------------------


def hashes(count: int) -> list[bytes]:
    return [bytes([i]) for i in range(count)]


def make_planner(*, loads: bool = True, saves: bool = True) -> Planner:
    return Planner(lambda block_hash: f"k{block_hash[0]}", BLOCK, loads=loads, saves=saves)


def new(
    tokens: int, *, computed: int = 0, ids: Sequence[int] = range(10, 20), request: str = "r"
) -> ScheduledRequest:
    return ScheduledRequest(request, list(ids), True, computed, tokens)


def test_the_last_token_is_always_computed() -> None:
    planner = make_planner()
    planner.track("r", hashes(3))
    assert planner.keys_to_look_up("r", 12) == ["k0", "k1"]
    assert planner.keys_to_look_up("r", 13) == ["k0", "k1", "k2"]
    assert planner.keys_to_look_up("r", 0) == []
    assert planner.keys_to_look_up("r", 100) == ["k0", "k1", "k2"]


@pytest.mark.parametrize(
    ("present", "computed", "expected"),
    [
        ([1, 1, 1], 0, 3),
        ([1, 0, 1], 0, 1),  # only what is before the hole
        ([0, 1, 1], 0, 0),
        ([0, 1, 1], 4, 2),  # the first block is in the engine's cache
        ([1, 1, 1], 12, 0),
        ([1, 1, 1], 16, 0),
        ([], 0, 0),
    ],
)
def test_hits_end_at_the_first_hole(present: list[int], computed: int, expected: int) -> None:
    planner = make_planner()
    planner.track("r", hashes(4))
    assert planner.hit_blocks("r", [bool(p) for p in present], computed) == expected


def test_loads_go_to_the_blocks_behind_the_computed_ones_once() -> None:
    planner = make_planner()
    planner.track("r", hashes(4))
    assert planner.hit_blocks("r", [True] * 3, 4) == 2
    planner.allocated("r", [10, 11, 12, 13], 2 * BLOCK)
    plan = planner.step([])
    assert plan.loads == [LoadJob("r", tuple(refs(("k1", 11), ("k2", 12))))]
    assert plan.saves == []
    assert planner.step([]).loads == []


def test_nothing_is_loaded_when_the_offer_is_not_taken() -> None:
    planner = make_planner()
    planner.track("r", hashes(4))
    planner.hit_blocks("r", [True] * 3, 0)
    planner.allocated("r", [10, 11, 12, 13], 0)
    planner.allocated("stranger", [1], BLOCK)
    assert planner.step([]).loads == []


def test_full_blocks_are_saved_once_over_chunked_prefill_and_decode() -> None:
    planner = make_planner()
    known = hashes(2)
    planner.track("r", known)
    assert planner.step([new(6, ids=[10, 11])]).saves == refs(("k0", 10))
    assert planner.step([ScheduledRequest("r", [], False, 6, 3)]).saves == refs(("k1", 11))
    assert planner.step([ScheduledRequest("r", [12], False, 9, 2)]).saves == []
    # The block is full, but its hash comes with the last token: it waits for the next step.
    assert planner.step([ScheduledRequest("r", [], False, 11, 1)]).saves == []
    known.append(b"\x02")
    assert planner.step([ScheduledRequest("r", [13], False, 12, 1)]).saves == refs(("k2", 12))
    assert planner.step([ScheduledRequest("r", [], False, 13, 1)]).saves == []


def test_what_the_pool_has_is_not_saved_and_what_it_lost_is() -> None:
    planner = make_planner()
    planner.track("r", hashes(4))
    # Blocks 0 and 1 are in the engine's cache, block 1 is not in the pool any more; 3 is, behind a hole.
    planner.hit_blocks("r", [True, False, False, True], 8)
    assert planner.step([new(8, computed=8)]).saves == refs(("k1", 11), ("k2", 12))


def test_a_resumed_request_has_other_blocks() -> None:
    planner = make_planner()
    planner.track("r", hashes(4))
    planner.step([new(8, ids=[10, 11])])
    # Preempted; asked again, nothing in the pool, computed from the start in other blocks.
    planner.hit_blocks("r", [False, False], 0)
    saves = planner.step([ScheduledRequest("r", [20, 21, 22], True, 0, 12)]).saves
    assert saves == refs(("k0", 20), ("k1", 21), ("k2", 22))


def test_after_a_failed_load_the_request_is_computed_and_saved_again() -> None:
    planner = make_planner()
    planner.track("r", hashes(4))
    planner.hit_blocks("r", [True] * 3, 0)
    planner.allocated("r", [10, 11, 12, 13], 3 * BLOCK)
    planner.step([])
    assert planner.may_load("r")
    planner.loaded("r", {12, 99})
    assert not planner.may_load("r")
    assert [ref.key for ref in planner.step([new(6, computed=8)]).saves] == ["k0", "k1", "k2"]


def test_a_good_load_leaves_the_request_alone() -> None:
    planner = make_planner()
    planner.track("r", hashes(4))
    planner.hit_blocks("r", [True] * 3, 0)
    planner.allocated("r", [10, 11, 12, 13], 3 * BLOCK)
    planner.step([])
    planner.loaded("r", {99})
    planner.loaded("gone", {10})
    assert planner.may_load("r")
    assert planner.step([new(4, computed=12)]).saves == refs(("k3", 13))


def test_roles_are_kept() -> None:
    consumer, producer = make_planner(saves=False), make_planner(loads=False)
    for planner in (consumer, producer):
        planner.track("r", hashes(4))
    assert consumer.may_load("r")
    assert consumer.step([new(16)]).saves == []
    assert not producer.may_load("r")
    assert len(producer.step([new(16)]).saves) == 4


def test_nothing_is_kept_of_a_finished_request() -> None:
    planner = make_planner()
    planner.track("r", hashes(4))
    planner.track("r", hashes(1))
    assert len(planner) == 1
    planner.finished("r")
    planner.finished("r")
    assert len(planner) == 0
    assert planner.step([new(16)]).saves == []


def test_after_a_reset_everything_is_saved_again() -> None:
    planner = make_planner()
    planner.track("r", hashes(4))
    planner.step([new(8)])
    planner.forget_stored()
    assert [r.key for r in planner.step([ScheduledRequest("r", [], False, 8, 4)]).saves] == ["k0", "k1", "k2"]


# --- the guard ----------------------------------------------------------------------------------------------------------


def test_a_call_gives_its_result_or_its_error() -> None:
    guard = TierGuard("test", limit_seconds=5)
    assert guard.call("fine", lambda: [1]) == [1]

    def fail() -> list[int]:
        raise OSError("broken")

    with pytest.raises(TierUnavailableError, match="bad: broken") as caught:
        guard.call("bad", fail)
    assert not caught.value.late
    assert guard.skipping
    with pytest.raises(TierUnavailableError, match="skipped"):
        guard.call("fine", lambda: [1])
    guard.shut()


def test_a_hanging_call_is_left_behind_and_told_of_when_it_ends() -> None:
    release, late = threading.Event(), threading.Event()
    guard = TierGuard("test", limit_seconds=0.02, probe_seconds=30)
    with pytest.raises(TierUnavailableError, match="not returned") as caught:
        guard.call("slow", lambda: release.wait(10), on_late=late.set)
    assert caught.value.late
    assert guard.in_flight == 1
    assert not late.is_set()
    release.set()
    assert late.wait(5)
    assert guard.in_flight == 0
    guard.shut()


def test_a_hang_costs_one_caller_and_a_probe_brings_the_tier_back() -> None:
    broken = threading.Event()
    broken.set()
    probes: list[bool] = []

    def probe() -> None:
        probes.append(broken.is_set())
        if broken.is_set():
            raise RuntimeError("still down")

    guard = TierGuard("test", limit_seconds=1, probe=probe, probe_seconds=0.005)
    guard.trip("it broke")
    guard.trip("it broke again")  # one prober is enough
    eventually(lambda: len(probes) >= 2)
    assert guard.skipping
    broken.clear()
    eventually(lambda: not guard.skipping)
    assert guard.call("fine", lambda: 1) == 1


def test_no_more_than_so_many_calls_are_left_behind() -> None:
    release = threading.Event()
    guard = TierGuard("test", limit_seconds=0.001, probe=lambda: release.wait(10), probe_seconds=0.001)
    guard.trip("hang")
    time.sleep(0.3)
    assert guard.in_flight <= TierGuard.MOST_LATE + 1
    release.set()
    eventually(lambda: not guard.skipping)
    guard.shut()


# --- transfers ----------------------------------------------------------------------------------------------------------


def test_what_is_saved_comes_back_into_other_blocks(worker: Worker) -> None:
    worker.cache.blocks = {i: content(i) for i in range(5)}
    worker.save(*refs(*((f"k{i}", i) for i in range(5))))  # more than a lane
    finished = worker.load(*refs(*((f"k{i}", 100 + i) for i in range(5))))
    assert finished == FinishedLoad("r", frozenset())
    assert [worker.cache.blocks[100 + i] for i in range(5)] == [content(i) for i in range(5)]


def test_a_load_ends_at_the_first_missing_block_and_names_the_rest(worker: Worker) -> None:
    worker.cache.blocks = {i: content(i) for i in range(4)}
    worker.save(*refs(*((f"k{i}", i) for i in range(4))))
    del worker.store.objects["k1"]
    finished = worker.load(*refs(*((f"k{i}", 100 + i) for i in range(4))))
    assert finished.failed_block_ids == {101, 102, 103}
    assert worker.cache.blocks[100] == content(0)
    assert not {101, 102, 103} & set(worker.cache.blocks)
    assert not worker.guard.skipping  # eviction is everyday life


def test_bytes_of_another_key_are_never_used_and_removed(worker: Worker) -> None:
    worker.cache.blocks = {1: content(1), 2: content(2)}
    worker.save(*refs(("k1", 1), ("k2", 2)))
    worker.store.objects["k2"] = worker.store.objects["k1"]
    assert worker.load(*refs(("k1", 11), ("k2", 12))).failed_block_ids == {12}
    assert 12 not in worker.cache.blocks
    assert "k2" not in worker.store.objects


def test_an_object_of_another_size_is_removed(worker: Worker) -> None:
    worker.store.objects["k1"] = b"short"
    assert worker.load(*refs(("k1", 11))).failed_block_ids == {11}
    assert worker.store.objects == {}


def test_a_get_that_lies_about_success_does_not_pass_old_bytes_on(worker: Worker) -> None:
    worker.cache.blocks = {1: content(1)}
    worker.save(*refs(("k1", 1)))
    for _ in range(2):  # both lanes hold k1 now
        worker.load(*refs(("k1", 11)))
    worker.store.codes["get"] = [0]
    del worker.store.objects["k1"]
    assert worker.load(*refs(("k1", 12))).failed_block_ids == {12}


def test_an_error_skips_the_tier(worker: Worker) -> None:
    worker.store.codes["get"] = [-3000]
    worker.store.codes["exists"] = [0]
    worker.guard._probe_seconds = 30
    assert worker.load(*refs(("k1", 11))).failed_block_ids == {11}
    assert worker.guard.skipping
    assert worker.transfers.save(refs(("k1", 1))) == 1


def test_a_hanging_get_ends_the_load_in_time_and_writes_to_no_block(worker: Worker) -> None:
    worker.cache.blocks = {1: content(1)}
    worker.save(*refs(("k1", 1)))
    worker.store.hang = True
    started = time.monotonic()
    assert worker.load(*refs(("k1", 11))).failed_block_ids == {11}
    assert time.monotonic() - started < 1
    worker.cache.blocks[11] = content(7)  # computed meanwhile
    worker.store.release.set()  # now the old call goes on and finds its lane
    eventually(lambda: worker.guard.in_flight == 0)
    assert worker.cache.blocks[11] == content(7)


def test_a_hanging_put_stores_what_was_there_when_it_was_saved(worker: Worker) -> None:
    worker.cache.blocks = {1: content(1)}
    worker.store.hang = True
    assert worker.transfers.save(refs(("k1", 1))) == 0
    worker.cache.blocks[1] = content(9)  # the block serves another request
    eventually(lambda: worker.guard.skipping)
    worker.store.release.set()
    worker.store.hang = False
    eventually(lambda: "k1" in worker.store.objects)
    assert worker.store.objects["k1"] == seal("k1") + content(1) + seal("k1")


def test_a_pool_that_takes_nothing_is_left_alone_for_a_moment_but_still_read(worker: Worker) -> None:
    worker.cache.blocks = {1: content(1), 2: content(2)}
    worker.save(*refs(("k1", 1)))
    worker.store.codes["put"] = [-3000]
    assert worker.transfers.save(refs(("k2", 2))) == 0
    eventually(lambda: worker.transfers.save(refs(("k2", 2))) == 1)
    assert not worker.guard.skipping
    assert worker.load(*refs(("k1", 11))).failed_block_ids == frozenset()


def test_every_lane_comes_back(worker: Worker) -> None:
    worker.store.hang = True
    worker.load(*refs(("k1", 11)))
    worker.store.release.set()
    worker.store.hang = False
    eventually(lambda: not worker.guard.skipping and worker.guard.in_flight == 0)
    lanes = [worker.load_lanes.take(1), worker.load_lanes.take(1)]
    assert None not in lanes
    assert worker.load_lanes.take(0) is None


def test_saves_that_find_no_lane_are_dropped_without_waiting(worker: Worker) -> None:
    worker.cache.blocks = {i: content(i) for i in range(8)}
    worker.store.hang = True
    started = time.monotonic()
    assert worker.transfers.save(refs(*((f"k{i}", i) for i in range(8)))) == 4
    assert time.monotonic() - started < 1


def test_a_rank_has_its_own_object() -> None:
    worker = make_worker(rank=1, ranks=2)
    worker.cache.blocks = {1: content(1)}
    worker.transfers.save(refs(("k", 1)))
    eventually(lambda: list(worker.store.objects) == ["k@1.2"])
    assert worker.load(*refs(("k", 11))).failed_block_ids == frozenset()


def test_lanes_hold_at_least_one_block_and_fit_their_memory() -> None:
    assert lane_blocks(1, 1000) == 1
    assert lane_blocks(10 * (1000 + SEALS_BYTES), 1000) == 10
    with pytest.raises(ValueError, match="do not make"):
        cut_lanes(memoryview(bytearray(10)), 0, 1000, 1, (1,))


# --- lookups ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Scheduler:
    store: FakeStore
    guard: TierGuard
    planner: Planner
    lookups: Lookups


def make_scheduler(*, ranks: int = 1, joined: bool = True, inline: float = 0.5) -> Scheduler:
    store, planner = FakeStore(), make_planner()
    guard = TierGuard("test", limit_seconds=0.1, probe_seconds=30)
    planner.track("r", hashes(4))
    lookups = Lookups(store, guard, lambda: joined, planner, ranks=ranks, inline_seconds=inline)
    return Scheduler(store, guard, planner, lookups)


def test_a_lookup_counts_blocks_behind_the_computed_ones() -> None:
    scheduler = make_scheduler()
    scheduler.store.objects = {"k0": b"", "k1": b"", "k2": b""}
    assert scheduler.lookups.loadable_blocks("r", 17, 4) == 2
    assert len(scheduler.lookups) == 0


def test_a_block_needs_the_parts_of_all_ranks() -> None:
    scheduler = make_scheduler(ranks=2)
    scheduler.store.objects = {"k0@0.2": b"", "k0@1.2": b"", "k1@0.2": b""}
    assert scheduler.lookups.loadable_blocks("r", 17, 0) == 1


def test_a_slow_lookup_is_asked_for_again_and_given_up_in_time() -> None:
    scheduler = make_scheduler(inline=0.005)
    scheduler.store.hang = True
    started = time.monotonic()
    answers: list[int | None] = []
    eventually(
        lambda: answers.append(scheduler.lookups.loadable_blocks("r", 17, 0)) or answers[-1] is not None
    )
    assert answers[0] is None
    assert answers[-1] == 0
    assert scheduler.store.calls == ["exists"]  # one call, however often it is asked for
    assert 0.09 < time.monotonic() - started < 1
    assert scheduler.guard.skipping
    assert scheduler.lookups.loadable_blocks("r", 17, 0) == 0
    assert len(scheduler.lookups) == 0
    scheduler.store.release.set()


def test_a_lookup_that_fails_is_no_hit_and_skips_the_tier() -> None:
    scheduler = make_scheduler()
    scheduler.store.codes["exists"] = [1, 1, -3014, 1]
    assert scheduler.lookups.loadable_blocks("r", 17, 0) == 0
    assert scheduler.guard.skipping


def test_nothing_is_looked_up_outside_the_pool_or_after_a_failed_load() -> None:
    outside = make_scheduler(joined=False)
    assert outside.lookups.loadable_blocks("r", 17, 0) == 0
    failed = make_scheduler()
    failed.planner.hit_blocks("r", [True], 0)
    failed.planner.allocated("r", [10], BLOCK)
    failed.planner.loaded("r", {10})
    assert failed.lookups.loadable_blocks("r", 17, 0) == 0
    assert outside.store.calls == failed.store.calls == []


# --- membership and signals ---------------------------------------------------------------------------------------------


def test_joining_registers_and_leaving_closes() -> None:
    store = FakeStore()
    membership = Membership("test", store, [Span(0, 64)], deadline_seconds=5)
    membership.start()
    eventually(lambda: membership.state == "joined")
    assert membership.leave(5)
    assert store.calls == ["open", "register 64", "close"]


def test_a_failed_join_is_tried_again() -> None:
    store = FakeStore()
    store.open_code = -1
    membership = Membership("test", store, [], deadline_seconds=5, first_retry_seconds=0.01)
    membership.start()
    eventually(lambda: store.calls.count("open") >= 2)
    store.open_code = 0
    eventually(lambda: membership.state == "joined")


def test_a_hanging_join_is_named_and_may_still_succeed() -> None:
    store = FakeStore()
    store.hang = True
    membership = Membership("test", store, [], deadline_seconds=0.01)
    membership.start()
    eventually(lambda: membership.state == "hung")
    store.release.set()
    eventually(lambda: membership.state == "joined")


def test_leaving_while_joining_hangs_does_not_wait() -> None:
    store = FakeStore()
    store.hang = True
    membership = Membership("test", store, [], deadline_seconds=30)
    membership.start()
    assert membership.leave(5)
    assert membership.state == "left"
    store.release.set()


def test_leaving_waits_only_so_long() -> None:
    store = FakeStore()
    membership = Membership("test", store, [], deadline_seconds=5)
    membership.start()
    eventually(lambda: membership.state == "joined")
    store.hang = True
    assert not membership.leave(0.01)
    store.release.set()


def test_handlers_that_a_library_replaces_are_put_back() -> None:
    # In a process of its own: the handler is replaced behind Python's back, as MemCache's init does.
    code = """
import ctypes, os, signal, sys, threading, time
from kvtierd_vllm.connector.signals import kept_handlers
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
libc = ctypes.CDLL(None)
libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
def join():
    with kept_handlers():
        libc.signal(signal.SIGTERM, 1)  # ignored from here on
        time.sleep(0.3)                 # put back while the body still runs
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
threading.Thread(target=join, daemon=True).start()
time.sleep(20)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=15, check=False, capture_output=True)
    assert done.returncode == 7, done.stderr


def test_handlers_are_put_back_behind_the_body() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with kept_handlers():
        pass
    assert signal.getsignal(signal.SIGTERM) == before


# --- the environment's set-up -------------------------------------------------------------------------------------------

SETUP = Path(__file__).resolve().parents[1] / "engine-env" / "setup.py"


def test_the_set_up_says_what_is_wrong_and_exits_3(tmp_path: Path) -> None:
    (tmp_path / "busy").mkdir()
    (tmp_path / "busy" / "file").touch()
    argv = [sys.executable, str(SETUP), str(tmp_path / "busy")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert "cannot be set up here" in done.stderr
    assert (tmp_path / "busy" / "file").exists()
    missing = subprocess.run(
        [*argv[:2], str(tmp_path / "new"), "--python", str(tmp_path / "none")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert missing.returncode == 3
    assert "cannot be run" in missing.stderr
