import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.errors import MemcacheError
from kvtierd.observe.counters import Counters
from kvtierd.observe.meta_metrics import COUNTERS, MOST_CHARS, MOST_SEGMENTS, read_meta_metrics

FIXTURES = Path(__file__).parents[2] / "fixtures" / "memcache"
FRESH = (FIXTURES / "metrics.txt").read_text()
EVICTING = (FIXTURES / "metrics-evicting.txt").read_text()


def test_a_real_scrape_of_a_fresh_pool():
    read = read_meta_metrics(FRESH)
    assert set(read.counters) == set(COUNTERS), "1.3.0 has all that we read"
    assert set(read.counters.values()) == {0.0}
    assert read.stored_keys == 0
    assert read.media["dram"].capacity_bytes == 64 * 1024**2
    assert read.segments["rank-0-dram"].capacity_bytes == 64 * 1024**2
    assert read.problems == ()


def test_a_real_scrape_after_evictions_and_values_that_did_not_fit():
    """331 keys were put, three of them too large; 8 keys were looked up by exist and none by query."""
    read = read_meta_metrics(EVICTING)
    assert read.counters["evicted_keys"] == 153
    assert read.counters["allocations"] == 10 + 1 + 320 + 3
    assert read.counters["failed_allocations"] == 3
    assert (read.counters["looked_up_keys"], read.counters["found_keys"]) == (7, 3)
    assert (read.counters["get_keys"], read.counters["missed_get_keys"]) == (7, 4)
    assert read.stored_keys == 178
    assert read.segments["rank-0-dram"].allocated_bytes == 46661632
    assert read.segments["rank-0-dram"].fragmentation_bytes == 0


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("<!DOCTYPE html><html><body>502 Bad Gateway</body></html>", "a web page"),
        ("<html>memcache_stored_keys is down</html>", "a web page"),
        ("", "empty"),
        ("up 1\ngo_goroutines 3\n", "no metric of MemCache's"),
        ("\x00\x01\x02", "no metric"),
        ("memcache_" + "x" * MOST_CHARS, "the limit is"),
    ],
    ids=["html", "html-that-names-one", "empty", "another-service", "binary", "too-long"],
)
def test_what_is_not_memcaches_metrics_is_an_error_that_says_so(body, why):
    with pytest.raises(MemcacheError) as caught:
        read_meta_metrics(body)
    assert caught.value.stable_code == "memcache.metrics"
    assert why in caught.value.why
    assert len(caught.value.why) < 400


def test_one_bad_line_does_not_cost_the_others():
    text = (
        "memcache_stored_keys 5\nmemcache_evict_operations_total {oops 7\n"
        "memcache_alloc_requests_total nothing\nmemcache_alloc_failures_total 2\n"
    )
    read = read_meta_metrics(text)
    assert read.stored_keys == 5
    assert read.counters == {"failed_allocations": 2.0}
    assert len(read.problems) == 2


def test_lies_are_named_and_unknown():
    text = (
        'memcache_stored_keys NaN\nmemcache_allocated_bytes{medium="dram"} -5\n'
        'memcache_total_capacity_bytes{medium="dram"} +Inf\nmemcache_evict_operations_total NaN\n'
        'memcache_segment_capacity_bytes{wrong="x"} 5\n'
    )
    read = read_meta_metrics(text)
    assert read.stored_keys is None
    assert read.media["dram"].allocated_bytes is None
    assert read.media["dram"].capacity_bytes is None
    assert read.segments == {}
    assert len(read.problems) == 4
    counters = Counters((60,))
    counters.take(0, "a", {"evicted_keys": 3})
    counters.take(1, "a", read.counters)
    assert math.isnan(read.counters["evicted_keys"])
    assert counters.flags == ("evicted_keys: is NaN or infinite",)


def test_unknown_families_and_labels_do_no_harm():
    text = EVICTING + 'memcache_new_thing_total{a="b"} 5\nmemcache_evict_operations_total_more 8\n'
    assert read_meta_metrics(text) == read_meta_metrics(EVICTING)
    split = (
        'memcache_evict_operations_total{medium="dram"} 5\nmemcache_evict_operations_total{medium="ssd"} 2\n'
    )
    assert read_meta_metrics(split).counters["evicted_keys"] == 7


def test_segments_and_problems_are_bounded():
    text = "".join(
        f'memcache_segment_capacity_bytes{{segment="rank-{n}-dram"}} 5\n' for n in range(MOST_SEGMENTS + 50)
    )
    read = read_meta_metrics(text)
    assert len(read.segments) == MOST_SEGMENTS
    assert len(read.problems) <= 8


@given(st.text(max_size=200), st.integers(0, len(EVICTING)))
def test_whatever_stands_in_between_it_is_read_or_refused(noise, at):
    try:
        read = read_meta_metrics(EVICTING[:at] + noise + EVICTING[at:])
    except MemcacheError:
        return
    assert len(read.problems) <= 8
