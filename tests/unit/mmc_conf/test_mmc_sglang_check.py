from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtierd.mmc_conf.sglang_check import check_sglang_meta, check_sglang_storage

SEED_META = """{
    "meta_service_url": "tcp://127.0.0.1:5000",
    "config_store_url": "tcp://127.0.0.1:6000",
    "metrics_url": "http://127.0.0.1:8000"
}"""
SEED_STORAGE = (
    '{"meta_service_url":"tcp://127.0.0.1:5000", "config_store_url":"tcp://127.0.0.1:6000", "log_level":"info", '
    '"world_size":256, "protocol": "device_sdma", "prefetch_threshold": 1, "dram_size": "50GB"}'
)


def test_the_documented_files_are_fine() -> None:
    assert check_sglang_meta(SEED_META.encode(), "1.3.0") == ()
    assert check_sglang_storage(SEED_STORAGE.encode(), "1.3.0") == ()


@pytest.mark.parametrize(
    ("text", "line", "column", "code"),
    [
        ('{\n  "a": 1, // b\n}', 2, 11, "json-comment"),
        ('{\n  # b\n  "log_level": "info"\n}', 2, 3, "json-comment"),
        ('{ /* b */ "log_level": "info" }', 1, 3, "json-comment"),
        ('{"log_level": "info"} // end', 1, 23, "json-comment"),
        ('{\n  "log_level": "info",\n}', 3, 1, "json-trailing-comma"),
        ('{"log_level": "info" "log_path": "/x"}', 1, 22, "json"),
        ("{'log_level': 'info'}", 1, 2, "json-quotes"),
        ('{"ha_enable": True}', 1, 15, "json"),
        ('{"log_level" "info"}', 1, 14, "json"),
        ('{"log_level": }', 1, 15, "json"),
        ('{"log_level": "in\nfo"}', 1, 18, "json"),
        ('{"log_level": "info', 1, 15, "json"),
        ("[1]", 1, 1, "json"),
        ("", 1, 1, "json"),
        ('{"log_level": "info"', 1, 21, "json"),
        ('{"x": ' + "[" * 100_000, 1, 7, "json"),
        ('{"x": ' + "1" * 5000 + "}", 1, 7, "json"),
    ],
)
def test_text_that_is_not_json(text: str, line: int, column: int, code: str) -> None:
    (problem,) = check_sglang_meta(text.encode(), "1.3.0")
    assert (problem.line, problem.column, problem.code) == (line, column, code)
    assert problem.hint


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\xef\xbb\xbf" + SEED_META.encode(), "bom"),
        (SEED_META.encode("utf-16"), "encoding"),
        (SEED_META.encode("utf-16-le"), "encoding"),
        (b'{"log_level": "\xff"}', "encoding"),
        (b" " * (1024 * 1024 + 1), "file-too-big"),
    ],
)
def test_bytes_that_are_no_text(data: bytes, code: str) -> None:
    assert [p.code for p in check_sglang_meta(data, "1.3.0")] == [code]


@pytest.mark.parametrize(
    ("name", "value", "code", "hint"),
    [
        ("ha_enable", "false", "wrong-type", "write false without quotes"),
        ("ha_enable", 0, "wrong-type", "write false without quotes"),
        ("evict_threshold_high", "90", "wrong-type", "write 90 without quotes"),
        ("evict_threshold_high", 90.5, "wrong-type", "write an integer"),
        ("evict_threshold_high", True, "wrong-type", "write an integer"),
        ("log_rotation_file_size", "20", "wrong-type", "write 20 without quotes"),
        ("log_level", 1, "wrong-type", 'write "1" in double quotes'),
        ("log_level", None, "wrong-type", "write a string"),
        ("log_level", ["info"], "wrong-type", "write a string"),
        ("log_level", "warning", "bad-choice", "debug"),
        ("log_lvl", "info", "unknown-key", "did you mean log_level?"),
        ("ock.mmc.log_level", "info", "unknown-key", "did you mean log_level?"),
        ("evictThresholdHigh", 90, "unknown-key", "evict_threshold_high"),
        ("dram_size", "1GB", "unknown-key", ""),
        ("evict_threshold_high", 100, "out-of-range", "99 is the most"),
        ("evict_threshold_high", 70, "thresholds", "below 70"),
        ("metrics_url", "http://0.0.0.0:8000", "exposed", "127.0.0.1"),
        ("metrics_url", "http://127.0.0.1:5000", "same-port", "5001"),
        ("log_path", "/var/log/logs", "log-path-logs", "/var/log"),
        ("tls_enable", True, "tls-incomplete", "tls_ca_path"),
        ("lru_type", "sharded_lru", "wrong-type", "write an integer"),
    ],
)
def test_keys_types_and_rules_by_line_and_column(name: str, value: object, code: str, hint: str) -> None:
    text = "{\n  " + json.dumps(name) + ": " + json.dumps(value) + "\n}"
    (problem,) = check_sglang_meta(text.encode(), "1.3.0")
    assert (problem.line, problem.column, problem.code, problem.severity) == (2, 3, code, "error")
    assert hint in problem.hint
    if name != "ock.mmc.log_level":
        assert "ock.mmc." not in problem.message + problem.hint


@pytest.mark.parametrize(
    ("change", "version", "result"),
    [
        ({"dram_size": 53687091200}, "1.3.0", [("wrong-type", "error")]),
        ({"dram_size": "50GiB"}, "1.3.0", [("bad-size-unit", "error")]),
        ({"dram_size": "1.5GB"}, "1.3.0", [("size-unaligned", "warning")]),
        ({"world_size": "256"}, "1.3.0", [("wrong-type", "error")]),
        ({"dram_size": "80GB"}, "1.3.0", []),
        # LocalConfig's max_dram_size is 64GB before 1.3.
        ({"dram_size": "80GB"}, "1.2.0", [("size-above-max", "error")]),
        ({"dram_size": "80GB", "max_dram_size": "80GB"}, "1.2.0", []),
        ({"dram_size": None}, "1.3.0", [("default-used", "warning")]),
        ({"protocol": None}, "1.3.0", [("default-used", "warning")]),
        ({"protocol": "device_urma"}, "1.1.0", [("bad-choice", "error")]),
        ({"prefetch_threshold": "1"}, "1.3.0", [("wrong-type", "error")]),
        ({"prefetch_timeout_base": 1, "prefetch_timeout_per_ki_token": 0.25}, "1.3.0", []),
        ({"device_id": {"0": 0}}, "1.3.0", []),
        ({"tag": "x"}, "1.2.0", [("key-too-new", "error")]),
        ({"ubs_io_enable": True}, "1.3.0", [("key-removed", "error")]),
        ({}, "1.0.4", [("too-old", "error")]),
    ],
)
def test_storage(change: dict[str, object], version: str, result: list[tuple[str, str]]) -> None:
    values = {k: v for k, v in {**json.loads(SEED_STORAGE), **change}.items() if v is not None}
    problems = check_sglang_storage(json.dumps(values).encode(), version)
    assert [(p.code, p.severity) for p in problems] == result


def test_duplicates_name_both_lines() -> None:
    (problem,) = check_sglang_meta(b'{"log_level": "info",\n"log_level": "debug"}', "1.3.0")
    assert problem.code == "duplicate-key"
    assert "line 1 and again in line 2" in problem.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=10,
)
NAMES = st.sampled_from(
    ["log_level", "metrics_url", "dram_size", "evict_threshold_high", "tls_enable", "zmq_private_key"]
)


@settings(max_examples=300, deadline=2000)
@given(
    st.one_of(
        st.binary(max_size=200),
        st.dictionaries(NAMES | st.text(max_size=10), JSON).map(lambda v: json.dumps(v).encode()),
    )
)
def test_anything_is_judged(data: bytes) -> None:
    for problems in (check_sglang_meta(data, "1.3.0"), check_sglang_storage(data, "1.1.0")):
        for problem in problems:
            assert problem.code
            assert problem.hint
            assert problem.message.isprintable()
