"""L3 over a pool that fails in every way a pool can: the engine gets good blocks or none."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from kvtierd_refengine.blockobject import HEADER_BYTES, object_key
from kvtierd_refengine.l3attach import Attachment
from kvtierd_refengine.l3store import Span
from kvtierd_refengine.l3tier import FloatArray, L3Tier, LoadJob, SaveJob, TierBusyError, TierOptions
from refengine_fakes import CountingEvents, FakeStore, wait_for

MODEL = b"m" * 32
SHAPE = (2, 2, 1, 4, 8)
BLOCK_BYTES = int(np.prod(SHAPE)) * 4
COUNT = 19  # more than two lanes
HASHES = [bytes([i]) * 32 for i in range(COUNT)]
BLOCKS = [np.full(SHAPE, i, dtype=np.float32) for i in range(COUNT)]


class Lab:
    """A tier over a fake store, attached."""

    def __init__(self, *, most_pending_saves: int = 100, call_limit_seconds: float = 1.0) -> None:
        self.store, self.events = FakeStore(), CountingEvents()
        options = TierOptions(
            namespace="test",
            call_limit_seconds=call_limit_seconds,
            cooldown_seconds=0.2,
            most_pending_saves=most_pending_saves,
        )
        self.tier = L3Tier(
            self.store, options, model_identity=MODEL, block_bytes=BLOCK_BYTES, events=self.events
        )
        self.released: list[int] = []
        self.tier.start()
        wait_for(lambda: self.tier.settled, "attached")

    def save(self, hashes: list[bytes] = HASHES) -> None:
        blocks = [BLOCKS[HASHES.index(h)] for h in hashes]
        self.tier.submit_save(SaveJob(hashes, blocks, self.released.append))
        wait_for(self.tier.drained, "saved")

    def load(self, count: int = COUNT) -> tuple[int, list[FloatArray]]:
        blocks = [np.full(SHAPE, -1, dtype=np.float32) for _ in range(count)]
        results: list[int] = []
        if not self.tier.submit_load(LoadJob(HASHES[:count], blocks, results.append)):
            return 0, blocks
        wait_for(lambda: results, "loaded")
        return results[0], blocks

    def key(self, index: int) -> str:
        return object_key("test", MODEL, HASHES[index])


@pytest.fixture
def lab() -> Iterator[Lab]:
    lab = Lab()
    yield lab
    for gate in lab.store.gates.values():
        gate.set()
    lab.tier.close(1)


def test_saved_blocks_are_loaded_as_they_were(lab: Lab) -> None:
    lab.save()
    assert len(lab.store.objects) == COUNT
    assert sorted(lab.released) == list(range(COUNT))
    assert lab.events.took == COUNT
    loaded, blocks = lab.load()
    assert loaded == COUNT
    assert all((block == index).all() for index, block in enumerate(blocks))
    assert lab.events.failed == {}


def test_a_hole_ends_the_usable_prefix(lab: Lab) -> None:
    lab.save()
    del lab.store.objects[lab.key(11)]
    assert lab.load()[0] == 11
    assert lab.events.failed == {}  # a miss is no failure


def test_only_missing_blocks_are_put(lab: Lab) -> None:
    lab.save(HASHES[:5])
    calls = lab.store.calls.count("put")
    lab.save(HASHES[:5])
    assert lab.store.calls.count("put") == calls
    lab.save(HASHES[:7])
    assert lab.events.took == 7
    assert lab.events.refused == 0
    assert len(lab.released) == 5 + 5 + 7


@pytest.mark.parametrize("damage", ["bit", "swapped", "size", "zeros"])
def test_wrong_bytes_are_found_counted_and_removed(lab: Lab, damage: str) -> None:
    lab.save()
    wrong = bytearray(lab.store.objects[lab.key(4)])
    if damage == "bit":
        wrong[HEADER_BYTES + 100] ^= 1
    elif damage == "swapped":
        wrong[:] = lab.store.objects[lab.key(5)]
    elif damage == "size":
        wrong += b"!"
    else:
        wrong[:] = bytes(len(wrong))
    lab.store.objects[lab.key(4)] = bytes(wrong)
    assert lab.load()[0] == 4
    assert lab.events.failed == {"wrong-bytes": 1}
    assert lab.key(4) not in lab.store.objects  # a put would leave the wrong value in place
    assert not lab.tier.skipping
    lab.save()
    assert lab.load()[0] == COUNT


def test_a_block_evicted_between_lookup_and_get_is_no_fault(lab: Lab) -> None:
    lab.save()
    lab.store.answers["exists"] = 1
    del lab.store.objects[lab.key(9)]
    assert lab.load()[0] == 9
    assert lab.events.failed == {"gone": 1}
    assert not lab.tier.skipping


@pytest.mark.parametrize(("call", "code"), [("exists", -3014), ("get", -3000)])
def test_an_unreachable_pool_is_skipped_and_tried_again(lab: Lab, call: str, code: int) -> None:
    lab.save()
    lab.store.answers[call] = code
    assert lab.load()[0] == 0
    assert lab.tier.skipping
    made = len(lab.store.calls)
    assert lab.load()[0] == 0
    lab.save(HASHES[:3])
    assert len(lab.store.calls) == made  # nobody asks while it is skipped
    assert lab.events.refused == 3
    assert (lab.events.lookups, lab.events.failed) == ((1, {}) if call == "exists" else (0, {"error": 1}))
    lab.store.answers.clear()
    wait_for(lambda: not lab.tier.skipping, "the cool-down is over")
    assert lab.load()[0] == COUNT


@pytest.mark.parametrize("call", ["exists", "get"])
def test_a_hanging_call_costs_its_limit_and_keeps_its_memory(lab: Lab, call: str) -> None:
    lab.save()
    lab.store.gates[call] = gate = threading.Event()
    started = time.monotonic()
    loaded, blocks = lab.load()
    assert loaded == 0
    assert time.monotonic() - started < 2
    assert lab.tier.skipping
    wait_for(lambda: not lab.tier.skipping, "the cool-down is over")
    del lab.store.gates[call]
    assert lab.load()[0] == COUNT  # the stuck call's lane is its own; the others do
    lanes = lab.tier._free_lanes
    assert lanes.qsize() == (3 if call == "get" else 4)
    gate.set()
    wait_for(lambda: lanes.qsize() == 4, "the lane is back")
    time.sleep(0.05)
    assert all((block == -1).all() for block in blocks)  # a late answer reaches nobody


def test_every_lane_stuck_means_no_tier_and_no_harm(lab: Lab) -> None:
    lab.save()
    lab.store.gates["get"] = gate = threading.Event()
    for _ in range(3):
        assert lab.load()[0] == 0
        time.sleep(0.25)
    assert lab.tier.skipping  # for as long as they hang
    gate.set()
    del lab.store.gates["get"]
    wait_for(lambda: not lab.tier.skipping, "the calls have returned")
    assert lab.load()[0] == COUNT


def test_a_refusing_pool_loses_nothing_but_the_cache(lab: Lab) -> None:
    lab.store.answers["put"] = -1
    lab.save(HASHES[:5])
    assert lab.store.objects == {}
    assert (lab.events.took, lab.events.refused) == (0, 5)
    assert sorted(lab.released) == [0, 1, 2, 3, 4]


def test_a_hanging_save_lets_go_of_the_engines_blocks(lab: Lab) -> None:
    lab.store.gates["put"] = threading.Event()
    lab.save(HASHES[:3])
    assert sorted(lab.released) == [0, 1, 2]
    assert lab.events.refused == 3


def test_the_save_queue_is_bounded() -> None:
    lab = Lab(most_pending_saves=4)
    gate = lab.store.gates["exists"] = threading.Event()
    lab.tier.submit_save(SaveJob(HASHES, BLOCKS, lab.released.append))
    assert sorted(lab.released) == list(range(4, COUNT))
    assert lab.events.refused == COUNT - 4
    lab.tier.submit_save(SaveJob(HASHES[:4], BLOCKS[:4], lab.released.append))  # already under way
    assert lab.events.refused == COUNT - 4
    del lab.store.gates["exists"]
    gate.set()
    wait_for(lab.tier.drained, "saved")
    assert lab.events.took == 4
    assert sorted(lab.released) == sorted([*range(COUNT), *range(4)])
    lab.tier.close(1)


def test_an_unexpected_fault_costs_a_hit_not_the_tier(lab: Lab) -> None:
    lab.save()
    lab.store.answers["exists"] = None  # type: ignore[assignment]
    lab.store.exists = lambda keys: [1] * (len(keys) - 1)  # type: ignore[method-assign]
    assert lab.load()[0] == 0
    del lab.store.exists
    lab.store.answers.clear()
    wait_for(lambda: not lab.tier.skipping, "the cool-down is over")
    assert lab.load()[0] == COUNT


def test_close_says_goodbye_and_takes_nothing_more(lab: Lab) -> None:
    lab.save()
    assert lab.tier.close(1)
    assert lab.store.closed
    assert not lab.tier.submit_load(LoadJob(HASHES, BLOCKS, lambda _: None))
    assert lab.tier.state == "closed"


def test_close_under_a_stuck_call_is_left_out(lab: Lab) -> None:
    lab.save()
    lab.store.gates["get"] = threading.Event()
    lab.load()
    assert not lab.tier.close(0.3)
    assert not lab.store.closed  # closing under a running call can crash the process


def test_nothing_is_asked_of_a_pool_that_was_never_joined() -> None:
    store = FakeStore()
    store.open_codes = [-1]
    tier = L3Tier(
        store, TierOptions("test"), model_identity=MODEL, block_bytes=BLOCK_BYTES, events=CountingEvents()
    )
    tier.start()
    wait_for(lambda: tier.settled, "the first attempt")
    assert tier.state == "failed"
    assert "-1" in tier.problem
    assert not tier.submit_load(LoadJob(HASHES, BLOCKS, lambda _: None))
    released: list[int] = []
    tier.submit_save(SaveJob(HASHES, BLOCKS, released.append))
    assert len(released) == COUNT
    tier.close(1)
    assert store.calls == ["open"]


def attach(store: FakeStore, deadline_seconds: float = 5.0) -> tuple[Attachment, list[str]]:
    changes: list[str] = []
    attachment = Attachment(
        store,
        [Span(1, 2)],
        deadline_seconds=deadline_seconds,
        on_change=changes.append,
        first_retry_seconds=0.05,
    )
    attachment.start()
    return attachment, changes


def test_a_failed_init_is_tried_again() -> None:
    store = FakeStore()
    store.open_codes = [-1, -3000]
    attachment, changes = attach(store)
    wait_for(lambda: attachment.state == "attached", "the third attempt")
    assert changes == ["failed", "failed", "attached"]
    assert store.registered == [Span(1, 2)]
    attachment.close(1)


def test_a_hanging_init_is_not_tried_again_and_may_still_come() -> None:
    store = FakeStore()
    gate = store.gates["open"] = threading.Event()
    attachment, changes = attach(store, deadline_seconds=0.1)
    wait_for(lambda: attachment.settled, "the deadline")
    assert attachment.state == "hung"
    time.sleep(0.2)
    assert store.calls == ["open"]  # a second init beside it would do nothing
    gate.set()
    wait_for(lambda: attachment.state == "attached", "it came after all")
    wait_for(lambda: changes == ["hung", "attached"], "both were reported")
    attachment.close(1)


def test_closing_does_not_wait_for_a_hanging_init() -> None:
    store = FakeStore()
    store.gates["open"] = gate = threading.Event()
    attachment, _ = attach(store)
    started = time.monotonic()
    assert attachment.close(5)
    assert time.monotonic() - started < 1
    gate.set()
    time.sleep(0.05)
    assert attachment.state == "closed"


def test_a_hanging_close_is_bounded() -> None:
    store = FakeStore()
    attachment, _ = attach(store)
    wait_for(lambda: attachment.state == "attached", "attached")
    store.gates["close"] = gate = threading.Event()
    assert not attachment.close(0.1)
    gate.set()


def test_a_missing_library_is_said_once() -> None:
    store = FakeStore()

    def missing() -> int:
        store.calls.append("open")
        raise ModuleNotFoundError("No module named 'memcache_hybrid'")

    store.open = missing  # type: ignore[method-assign]
    attachment, _ = attach(store)
    wait_for(lambda: attachment.state == "failed", "it failed")
    time.sleep(0.2)
    assert store.calls == ["open"]
    assert "memcache_hybrid" in attachment.problem


def test_memory_that_cannot_be_registered_is_not_used() -> None:
    store = FakeStore()
    store.answers["register"] = -1
    attachment, _ = attach(store)
    wait_for(lambda: attachment.state == "failed", "it failed")
    assert "register_buffer" in attachment.problem


def test_detached_it_is_not_asked_and_attached_again_it_has_what_was_saved(lab: Lab) -> None:
    lab.save()
    for _ in range(2):
        lab.tier.detach()
        lab.tier.detach()  # twice does no harm
        assert (lab.tier.state, lab.store.closed) == ("closed", True)
        calls = list(lab.store.calls)
        assert lab.load()[0] == 0
        released = len(lab.released)
        lab.save(HASHES[:3])
        assert len(lab.released) == released + 3, "blocks come back at once"
        assert lab.store.calls == calls
        lab.store.closed = False
        lab.tier.attach()
        lab.tier.attach()
        wait_for(lambda: lab.tier.usable, "attached again")
        loaded, blocks = lab.load()
        assert loaded == COUNT
        assert all((block == index).all() for index, block in enumerate(blocks))
    assert lab.store.calls.count("open") == 3


def test_a_load_under_way_ends_before_the_client_is_closed(lab: Lab) -> None:
    lab.save()
    gate = lab.store.gates["get"] = threading.Event()
    results: list[int] = []
    blocks = [np.full(SHAPE, -1, dtype=np.float32) for _ in range(COUNT)]
    assert lab.tier.submit_load(LoadJob(HASHES, blocks, results.append))
    wait_for(lambda: "get" in lab.store.calls, "the get began")
    leaving = threading.Thread(target=lab.tier.detach)
    leaving.start()
    time.sleep(0.1)
    assert not lab.store.closed, "never under a call"
    gate.set()
    leaving.join(10)
    wait_for(lambda: results, "the request went on")
    assert lab.store.closed
    assert results[0] < COUNT, "the rest is computed"


def test_with_a_call_stuck_it_stays_as_it_is() -> None:
    lab = Lab(call_limit_seconds=0.1)
    lab.save()
    gate = lab.store.gates["get"] = threading.Event()
    assert lab.load()[0] == 0  # given up on, but the call is still there
    with pytest.raises(TierBusyError, match="have not returned"):
        lab.tier.detach(0.1)
    assert (lab.tier.state, lab.store.closed) == ("attached", False)
    gate.set()
    wait_for(lambda: lab.tier.usable, "used again")
    assert lab.load()[0] == COUNT
    lab.tier.detach()
    assert lab.store.closed


def test_an_init_that_hangs_is_neither_left_nor_repeated() -> None:
    store = FakeStore()
    gate = store.gates["open"] = threading.Event()
    options = TierOptions(namespace="test", init_deadline_seconds=0.1)
    tier = L3Tier(store, options, model_identity=MODEL, block_bytes=BLOCK_BYTES, events=CountingEvents())
    tier.start()
    wait_for(lambda: tier.state == "hung", "hung")
    with pytest.raises(TierBusyError, match="init"):
        tier.detach()
    tier.attach()
    gate.set()
    wait_for(lambda: tier.state == "attached", "attached late")
    tier.detach()
    assert (store.closed, store.calls.count("open")) == (True, 1)


def test_it_does_not_join_again_while_the_old_client_is_being_closed(lab: Lab) -> None:
    gate = lab.store.gates["close"] = threading.Event()
    lab.tier.detach(0.05)
    assert lab.tier.state == "closed"
    with pytest.raises(TierBusyError, match="closed its client"):
        lab.tier.attach()
    gate.set()
    wait_for(lambda: lab.store.closed, "closed")

    def attached() -> bool:
        try:
            lab.tier.attach()
        except TierBusyError:
            return False
        return lab.tier.usable

    wait_for(attached, "attached again")


def test_one_that_joins_after_it_was_told_to_leave_leaves() -> None:
    store = FakeStore()
    gate = store.gates["open"] = threading.Event()
    attachment = Attachment(store, [], deadline_seconds=0.05)
    attachment.start()
    wait_for(lambda: attachment.state == "hung", "hung")
    assert attachment.close(0.1)
    gate.set()
    wait_for(lambda: store.closed, "closed")
    wait_for(lambda: not attachment.busy, "done")
    assert attachment.state == "closed"
