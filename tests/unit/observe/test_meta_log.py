from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.observe.meta_log import ERROR_KINDS, MetaLogCounts

REAL = (Path(__file__).parents[2] / "fixtures" / "memcache" / "mmc-meta.log").read_bytes()
FILE = "2026-11-29 16:10:43.856478 8 {} [MMC mmc_x.cpp:294 Function] {}\n"
STDOUT = "2026-11-29 16:10:43.856478 {} [8-8][MMC mmc_x.cpp:12 Function] {}\n"


def counted(*lines):
    counts = MetaLogCounts()
    counts.add("".join(lines).encode())
    return counts


def test_a_real_log_of_evictions_misses_and_values_that_did_not_fit():
    counts = MetaLogCounts()
    counts.add(REAL)
    assert (counts.evictions, counts.evicted_keys) == (6, 152)
    assert counts.errors == dict.fromkeys(ERROR_KINDS, 0) | {"miss": 2, "no-room": 12}


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("Evicted 6 keys from DRAM. Candidate count: 58.", 6),
        ("Evicted 12 keys from DRAM. Number of keys: 1000 => 988.", 12),
        ("Touched threshold evict, total size: 1000, evict size: 12", 12),
        ("Evicted 1 keys from HBM. Candidate count: 5.", 1),
    ],
)
@pytest.mark.parametrize("form", [FILE, STDOUT], ids=["file", "stdout"])
def test_the_forms_of_an_eviction(form, text, keys):
    level = "info" if form is FILE else "INFO"
    counts = counted(form.format(level, text))
    assert (counts.evictions, counts.evicted_keys) == (1, keys)


def test_an_empty_list_that_wraps_around_adds_nothing_and_is_flagged():
    counts = counted(
        FILE.format("info", "Evicted 1 keys from DRAM. Number of keys: 0 => 18446744073709551615."),
        FILE.format("info", "Evicted 18446744073709551615 keys from DRAM. Candidate count: 58."),
    )
    assert (counts.evictions, counts.evicted_keys, counts.odd_evictions) == (2, 0, 2)


@pytest.mark.parametrize(
    "line",
    [
        FILE.format("info", "Key Evicted 9 keys from DRAM. was evicted."),
        FILE.format("info", "Key a] Evicted 9 keys from DRAM. was evicted."),
        FILE.format("warning", "Metrics summary: keys=55 evict=144 dram_used=57671680/67108864"),
        FILE.format("info", "Key 2026-11-29 16:10:43.856478 8 error [MMC x:1 f] was evicted."),
        FILE.format("info", "Evicted  keys from DRAM."),
        "Evicted 9 keys from DRAM. Candidate count: 58.\n",
        "\n",
        "2026-11-30 08:45:28.505623 27209 Log default format: yyyy-mm-dd hh:mm:ss.uuuuuu threadid loglevel msg\n",
    ],
)
def test_keys_and_other_levels_do_not_count(line):
    assert counted(line) == MetaLogCounts()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Get key: nope failed. ErrCode: -3102", "miss"),
        ("Allocation failed for key: huge0, error: -1", "no-room"),
        ("RandomAssign failed to allocate all blobs. Requested: 1", "no-room"),
        ("HeartBeat timeout for rank=0, linkId=21, clearing resource", "heartbeat"),
        ("reconnect to peer failed", "link"),
        ("alloc key exists, ret -3006", "duplicate"),
        ("something new", "other"),
    ],
)
def test_errors_by_kind(text, kind):
    for line in (FILE.format("error", text), STDOUT.format("ERROR", text), FILE.format("fatal", text)):
        assert counted(line).errors == dict.fromkeys(ERROR_KINDS, 0) | {kind: 1}


def test_bytes_that_are_no_text_do_no_harm():
    counts = MetaLogCounts()
    counts.add(b"\xff\xfe\x00 error [\n" + FILE.format("error", "x").encode().replace(b"x\n", b"\xff\xff\n"))
    assert sum(counts.errors.values()) == 1


@given(st.binary(max_size=200))
def test_whatever_stands_before_a_line_it_is_counted_once(noise):
    counts = MetaLogCounts()
    counts.add(noise + b"\n" + FILE.format("info", "Evicted 6 keys from DRAM. Candidate count: 58.").encode())
    assert counts.evictions == 1


def test_thresholds_that_it_took_over_and_values_that_it_refused() -> None:
    counts = MetaLogCounts()
    counts.add(
        b"2026-11-30 09:16:26.953339 25701 trace [MMC mmc_meta_manager.cpp:2706 UpdateConfig] meta evictThresholdHigh"
        b" hot-reloaded from 90 to 80\n"
        b"2026-11-30 09:16:26.953363 25701 trace [MMC mmc_meta_service.cpp:447 UpdateConfig] Meta service config"
        b" hot-reloaded, leaseTtlMs=10000, evictThresholdHigh=80, evictThresholdLow=70\n"
        b"2026-11-30 09:16:31.953311 25701 error [MMC mmc_config_reload_utils.cpp:38 GetValidatedInt] Invalid value for"
        b" <ock.mmc.evict_threshold_high>: 100, Invalid value for <ock.mmc.evict_threshold_high>, it should be\n"
        b"2026-11-30 09:16:36.953314 25701 error [MMC mmc_meta_config_reload.cpp:76 ApplyEvictThresholds] Invalid new evict"
        b" thresholds, high must be greater than low, but got high=60 low=70\n"
    )
    assert counts.thresholds == (80, 70)
    assert counts.errors["config"] == 2
