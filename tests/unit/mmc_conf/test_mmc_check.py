from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtierd.errors import ConfError
from kvtierd.mmc_conf.check import check_local, check_meta, check_pair
from kvtierd.mmc_conf.parse import MAX_PROBLEMS
from kvtierd.mmc_conf.problems import ConfProblem, PathInfo, check_conf_path, has_errors

META = """\
ock.mmc.meta_service_url = tcp://127.0.0.1:5000
ock.mmc.meta_service.config_store_url = tcp://127.0.0.1:6000
ock.mmc.meta_service.metrics_url = http://127.0.0.1:8000
"""
LOCAL = """\
ock.mmc.meta_service_url = tcp://127.0.0.1:5000
ock.mmc.local_service.config_store_url = tcp://127.0.0.1:6000
ock.mmc.local_service.protocol = device_rdma
ock.mmc.local_service.dram.size = 128GB
ock.mmc.local_service.max.dram.size = 128GB
"""


def meta(more: str, version: str = "1.3.0", **options: object) -> tuple[ConfProblem, ...]:
    return check_meta((META + more).encode(), version, **options)  # type: ignore[arg-type]


def local(more: str, version: str = "1.3.0", **options: object) -> tuple[ConfProblem, ...]:
    return check_local((LOCAL + more).encode(), version, **options)  # type: ignore[arg-type]


def found(problems: tuple[ConfProblem, ...]) -> list[tuple[int | None, str, str]]:
    return [(p.line, p.code, p.severity) for p in problems]


def test_good_files_have_no_problems() -> None:
    assert meta("# a comment\n\n   # another\nock.mmc.log_path = /var/log/mmc\n") == ()
    assert local("ubsio.mem.size_in_gb = 10\n") == ()


# Line 4 is the first line behind META. The real parser's side of these is in tests/e2e/test_conf_real.py.
@pytest.mark.parametrize(
    ("line", "code", "hint"),
    [
        (
            "ock.mmc.evict_threshold_low = 60  # comment",
            "inline-comment",
            "'ock.mmc.evict_threshold_low = 60'",
        ),
        ("ock.mmc.log_path = /var/log/mmc # here", "inline-comment", "'ock.mmc.log_path = /var/log/mmc'"),
        ("ock.mmc.log_level = info // here", "inline-comment", "line of its own"),
        ("ock.mmc.log_level = info ; here", "inline-comment", "line of its own"),
        ("ock.mcc.log_level = info", "unknown-prefix", "did you mean ock.mmc.log_level?"),
        ("OCK.MMC.log_level = info", "unknown-prefix", "did you mean ock.mmc.log_level?"),
        ("log_level = info", "unknown-prefix", "did you mean ock.mmc.log_level?"),
        ("export ock.mmc.log_level = info", "unknown-prefix", "did you mean ock.mmc.log_level?"),
        ("\u043eck.mmc.log_level = info", "lookalike-key", "did you mean ock.mmc.log_level?"),
        ("\u200bock.mmc.log_level = info", "lookalike-key", "did you mean ock.mmc.log_level?"),
        ("ock.mmc.log_level\u00a0= info", "lookalike-key", "did you mean ock.mmc.log_level?"),
        ("ock.mmc.Log_level = info", "unknown-key", "did you mean ock.mmc.log_level?"),
        ("ock.mmc.evict_threshold_hihg = 90", "unknown-key", "did you mean ock.mmc.evict_threshold_high?"),
        ("ock.mmc.zzz = 1", "unknown-key", "remove the line"),
        ("ock.mmc.rewarm.dram_watermark = 95", "key-removed", "remove the line"),
        ("ock.mmc.local_service.world_size = 2", "wrong-file", "move the line to mmc-local.conf"),
        ("ubsio.disk.path = /dev/nvme0n1", "wrong-file", "move the line to mmc-local.conf"),
        ("ock.mmc.log_level info", "no-equals", "'ock.mmc.log_level = info'"),
        ("ock.mmc.log_level: info", "no-equals", "'ock.mmc.log_level = info'"),
        ("= info", "empty-key", "key = value"),
        ("ock.mmc.meta.ha.enable = no", "bad-bool", "true or false"),
        ("ock.mmc.log_rotation_file_count = many", "bad-int", "from 1 to 50"),
        ("ock.mmc.log_rotation_file_count = 51", "out-of-range", "from 1 to 50"),
        ("ock.mmc.evict_threshold_high = 100", "out-of-range", "99 is the most"),
        ("ock.mmc.log_level = warning", "bad-choice", "debug, info, warn, error"),
        ('ock.mmc.log_level = "info"', "quoted-value", "without quotes: info"),
        ("ock.mmc.log_level =", "empty-value", "remove the line for the default info"),
        ("ock.mmc.log_path =", "empty-value", "absolute path"),
        ("ock.mmc.log_level = in\u200bfo", "odd-character", "plain ASCII"),
        ("ock.mmc.log_path = logs", "relative-path", "absolute path"),
        ("ock.mmc.log_path = ~/logs", "relative-path", "not expanded"),
        ("ock.mmc.log_path = /var/log/mmc/logs", "log-path-logs", "write /var/log/mmc"),
        ("ock.mmc.log_path = /var/log/mmc/logs/", "log-path-logs", "write /var/log/mmc"),
        ("ock.mmc.tls.ca.path = -----BEGIN CERTIFICATE-----", "secret-inline", "path of a file"),
        ("ock.mmc.tls.enable = true", "tls-incomplete", "ock.mmc.tls.ca.path"),
        ("ock.mmc.evict_threshold_high = 70", "thresholds", "below 70"),
        ("ock.mmc.evict_threshold_low = 95", "thresholds", "below 90"),
        ("ock.mmc.meta_service.lru_shard_count = 48", "not-a-power-of-two", "32 or 64"),
        (f"ock.mmc.tls.ca.path = /{'a' * 255}", "value-too-long", "shorter"),
        (f"ock.mmc.kv_events.model_name = {'x' * 5000}", "line-too-long", "shorten"),
        ("ock.mmc.log_level = in\x00fo", "nul-byte", "NUL|remove the byte"),
        ("ock.mmc.log_level = info\rock.mmc.x = 1", "lone-cr", "Unix line ends"),
    ],
)
def test_errors_name_line_code_and_remedy(line: str, code: str, hint: str) -> None:
    problems = meta(line + "\n")
    assert [(p.line, p.code) for p in problems if p.severity == "error"] == [(4, code)], problems
    (problem,) = (p for p in problems if p.severity == "error")
    assert any(part in problem.hint for part in hint.split("|")), problem.hint
    assert problem.message


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("; a comment", "foreign-comment"),
        ("; a = b", "foreign-comment"),
        ("// a comment", "foreign-comment"),
        ("[meta]", "foreign-comment"),
        ("ock.mmc.zmq.private_key = s3cret", "secret-inline"),
        ("ock.mmc.meta.ha.enable = true", "foreign-election"),
        ("ock.mmc.kv_events.enable = true", "events-without-endpoint"),
        ("ock.mmc.kv_events.endpoint = tcp://*:5557", "exposed"),
    ],
)
def test_warnings(line: str, code: str) -> None:
    assert found(meta(line + "\n")) == [(4, code, "warning")]


def test_a_secret_is_never_in_a_message() -> None:
    for value in ("s3cret", "s3cret # why", '"s3cret"'):
        problems = meta(f"ock.mmc.zmq.private_key = {value}\n")
        assert problems
        assert not any("s3cret" in p.message + p.hint for p in problems)


def test_duplicates_name_both_lines() -> None:
    problems = meta("ock.mmc.log_level = info\n# x\nock.mmc.log_level = debug\n")
    assert found(problems) == [(6, "duplicate-key", "error")]
    assert "line 4 and again in line 6" in problems[0].message


@pytest.mark.parametrize(
    ("data", "code", "severity"),
    [
        (b"\xef\xbb\xbf" + META.encode(), "bom", "error"),
        (META.encode("utf-16"), "encoding", "error"),
        (META.encode("utf-16-le"), "encoding", "error"),
        (META.encode("utf-32"), "encoding", "error"),
        (b"ock.mmc.log_level = caf\xe9\n" + META.encode(), "encoding", "error"),
        (META.replace("\n", "\r\n").encode(), "crlf", "warning"),
        (b"#" * (10 * 1024 * 1024 + 1), "file-too-big", "error"),
    ],
)
def test_bytes_that_are_no_plain_text(data: bytes, code: str, severity: str) -> None:
    assert [(p.code, p.severity) for p in check_meta(data, "1.3.0")] == [(code, severity)]


def test_latin_1_in_a_comment_is_fine() -> None:
    assert check_meta(b"# caf\xe9\n" + META.encode(), "1.3.0") == ()


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("tcp://127.0.0.1", "url"),
        ("tcp://127.0.0.1:1024", "url-port"),
        ("tcp://127.0.0.1:65536", "url-port"),
        (f"tcp://127.0.0.1:{'9' * 5000}", "line-too-long"),
        ("tcp://256.0.0.1:5000", "url-host"),
        ("tcp://-a:5000", "url-host"),
        ("tcp://*:5000", "url-host"),
        ("tcp://[::zz]:5000", "url-host"),
        ("tcp://[1.2.3.4]:5000", "url-host"),
        ("TCP://127.0.0.1:5000", "url-scheme"),
        ("127.0.0.1:5000", "url-scheme"),
        ("tcp://127.0.0.1:5000/", "url-trailing"),
        ("tcp://0.0.0.0:5000", "exposed"),
        ("tcp://[::]:5000", "exposed"),
        ("tcp://8.8.8.8:5000", "exposed"),
        ("tcp://127.0.0.1:6000", "same-port"),
        ("tcp://127.0.0.1:8000", "same-port"),
    ],
)
def test_addresses(url: str, code: str) -> None:
    problems = check_meta(f"ock.mmc.meta_service_url = {url}\n".encode(), "1.3.0")
    assert found(problems) == [(1, code, "error")]


@pytest.mark.parametrize(
    "url",
    ["tcp://10.0.0.1:5000", "tcp://node-1.cluster:5000", "tcp://[fd00::1]:5000", "tcp://localhost:5000"],
)
def test_addresses_of_a_cluster_are_fine(url: str) -> None:
    assert check_meta(f"ock.mmc.meta_service_url = {url}\n".encode(), "1.3.0") == ()


@pytest.mark.parametrize(
    ("version", "url", "result"),
    [
        ("1.0.0", "127.0.0.1:8000", []),
        ("1.0.0", "http://127.0.0.1:8000", [(1, "url-scheme", "error")]),
        ("1.0.4", "http://127.0.0.1:8000", []),
        ("1.3.0", "127.0.0.1:8000", [(1, "url-old-form", "warning")]),
        ("1.3.0", "https://127.0.0.1:8000", []),
        ("1.3.0", "http://127.0.0.1:8000/metrics", [(1, "url-trailing", "warning")]),
        ("1.3.0", "http://0.0.0.0:8000", [(1, "exposed", "error")]),
        ("1.3.0", "0.0.0.0:8000", [(1, "url-old-form", "warning"), (1, "exposed", "error")]),
        ("1.3.0", "http://8.8.8.8:8000", [(1, "exposed", "error")]),
        ("1.3.0", "http://10.0.0.1:8000", [(1, "exposed", "warning")]),
        ("1.3.0", "tcp://127.0.0.1:8000", [(1, "url-scheme", "error")]),
    ],
)
def test_the_two_forms_of_metrics_url_and_its_exposure(version: str, url: str, result: list[object]) -> None:
    assert found(check_meta(f"ock.mmc.meta_service.metrics_url = {url}\n".encode(), version)) == result


def test_exposure_can_be_allowed() -> None:
    data = b"ock.mmc.meta_service.metrics_url = http://0.0.0.0:8000\n"
    (problem,) = check_meta(data, "1.3.0", allow_exposed=True)
    assert (problem.code, problem.severity) == ("exposed", "warning")
    assert "no authentication" in problem.message


@pytest.mark.parametrize(
    ("version", "line", "result"),
    [
        ("1.1.0", "ock.mmc.meta.lease_ttl_ms = 5000", [(4, "key-too-new", "error")]),
        ("1.2.0", "ock.mmc.meta.lease_ttl_ms = 5000", []),
        ("1.1.6", "foo.bar = 1", [(4, "unknown-prefix", "error")]),
        ("1.1.6", "; a = b", [(4, "foreign-comment", "error")]),
        ("1.1.6", "ubsio.mem.size_in_gb = 1", [(4, "wrong-file", "error")]),
        ("1.2.0", "ock.mmc.rewarm.dram_watermark = 95", []),
        ("1.2.0", "ock.mmc.rewarm.dram_watermark = 90", [(4, "thresholds", "error")]),
        ("1.2.1", "ock.mmc.rewarm.dram_watermark = 95", [(4, "key-removed", "error")]),
    ],
)
def test_version_skew(version: str, line: str, result: list[object]) -> None:
    problems = meta(line + "\n", version)
    assert found(problems) == result
    if result and result[0][1] == "key-too-new":  # type: ignore[index]
        assert "since MemCache 1.2.0" in problems[0].message


def test_threshold_defaults_are_those_of_the_release() -> None:
    line = "ock.mmc.evict_threshold_high = 75\n"
    assert meta(line, "1.0.4") == ()
    assert [p.code for p in meta(line, "1.1.0")] == ["thresholds"]


def test_an_unknown_version_is_refused_unless_one_is_assumed() -> None:
    with pytest.raises(ConfError, match=r"1\.9"):
        meta("", "1.9")
    assert meta("", "1.9", assume_version="1.3.0") == ()


@pytest.mark.parametrize(
    ("values", "version", "options", "result"),
    [
        ({"dram.size": "1GiB"}, "1.3.0", {}, [(4, "bad-size-unit", "error")]),
        ({"dram.size": "640"}, "1.3.0", {}, [(4, "size-unaligned", "warning")]),
        ({"dram.size": "1.5GB", "max.dram.size": "2GB"}, "1.3.0", {}, [(4, "size-unaligned", "warning")]),
        ({"dram.size": "512MB", "protocol": "host_shm"}, "1.3.0", {}, []),
        (
            {"dram.size": "512MB", "protocol": "host_shm"},
            "1.3.0",
            {"a3": True},
            [(4, "size-unaligned", "error")],
        ),
        (
            {"dram.size": "2TB", "max.dram.size": "2TB"},
            "1.3.0",
            {},
            [(4, "size-too-big", "error"), (5, "size-too-big", "error")],
        ),
        ({"dram.size": "129GB"}, "1.3.0", {}, [(5, "size-above-max", "error")]),
        ({"dram.size": "0"}, "1.3.0", {}, []),
        ({"dram.size": "0", "max.dram.size": "0"}, "1.3.0", {}, [(4, "no-memory", "error")]),
        ({"dram.size": "0", "max.dram.size": None}, "1.3.0", {}, [(4, "no-memory", "error")]),
        ({"dram.size": "0"}, "1.1.0", {}, [(4, "no-memory", "error")]),
        ({"dram.size": "0"}, "1.1.6", {}, []),
        ({"protocol": None}, "1.3.0", {}, [(None, "missing-key", "error")]),
        ({"protocol": "device_urma"}, "1.1.6", {}, [(3, "bad-choice", "error")]),
        ({"world_size": "1025"}, "1.3.0", {}, [(6, "out-of-range", "error")]),
        ({"hbm.size": "1GB", "protocol": "host_shm"}, "1.3.0", {}, [(6, "protocol-memory", "error")]),
        ({"config_store_url": "tcp://127.0.0.1:5000"}, "1.3.0", {}, [(2, "same-port", "error")]),
        ({"storage.enabled": "true"}, "1.3.0", {}, [(6, "ssd-without-disk", "warning")]),
        ({"max.dram.size": "128GB"}, "1.0.4", {}, [(5, "key-too-new", "error")]),
        ({"max.dram.size": None}, "1.0.0", {}, [(None, "missing-key", "error")]),
    ],
)
def test_local_files(
    values: dict[str, str | None], version: str, options: dict[str, bool], result: list[tuple[int, str, str]]
) -> None:
    base = {
        "config_store_url": "tcp://127.0.0.1:6000",
        "protocol": "device_rdma",
        "dram.size": "128GB",
        "max.dram.size": "128GB",
    }
    merged = {**base, **values}
    rows = ["ock.mmc.meta_service_url = tcp://127.0.0.1:5000"]
    rows += [f"ock.mmc.local_service.{k} = {v}" for k, v in merged.items() if v is not None]
    assert found(check_local("\n".join(rows).encode(), version, **options)) == result


def test_links_are_asked_for_and_reported() -> None:
    links = {"/var/log/mmc": "/data/log", "/tls/cert": "/live/cert"}

    def lookup(path: str) -> PathInfo:
        return PathInfo(exists=path != "/tls/gone", symlink_target=links.get(path))

    assert found(meta("ock.mmc.log_path = /var/log/mmc\n", path_info=lookup)) == [(4, "symlink", "error")]
    paths = {"ca": "/tls/ca", "cert": "/tls/cert", "key": "/tls/gone"}
    tls = "ock.mmc.tls.enable = {}\n" + "".join(
        f"ock.mmc.tls.{name}.path = {path}\n" for name, path in paths.items()
    )
    assert found(meta(tls.format("true"), path_info=lookup)) == [
        (6, "symlink", "error"),
        (7, "missing-file", "error"),
    ]
    assert meta(tls.format("false"), path_info=lookup) == ()
    assert [p.code for p in check_conf_path("/var/log/mmc", lookup)] == ["symlink"]
    assert check_conf_path("/etc/mmc-meta.conf", lookup) == ()


@pytest.mark.parametrize(
    ("meta_line", "local_line", "result"),
    [
        ("", "", []),
        (
            "ock.mmc.meta_service_url = tcp://127.0.0.1:5000",
            "ock.mmc.meta_service_url = tcp://localhost:5000",
            [],
        ),
        ("ock.mmc.meta_service_url = tcp://127.0.0.1:5001", "", [(None, "pair-mismatch", "error")]),
        ("", "ock.mmc.meta_service_url = tcp://127.0.0.1:5001", [(3, "pair-mismatch", "error")]),
        (
            "",
            "ock.mmc.local_service.config_store_url = tcp://127.0.0.1:6001",
            [(3, "pair-mismatch", "error")],
        ),
        (
            "ock.mmc.meta_service_url = tcp://0.0.0.0:5000",
            "ock.mmc.meta_service_url = tcp://10.0.0.1:5000",
            [],
        ),
        (
            "ock.mmc.meta_service_url = tcp://10.0.0.1:5000",
            "ock.mmc.meta_service_url = tcp://master:5000",
            [(3, "pair-unknown", "warning")],
        ),
        ("ock.mmc.tls.enable = true", "", [(None, "pair-mismatch", "error")]),
    ],
)
def test_pairs(meta_line: str, local_line: str, result: list[object]) -> None:
    local_file = (
        f"ock.mmc.local_service.protocol = host_shm\nock.mmc.local_service.dram.size = 2MB\n{local_line}\n"
    )
    assert found(check_pair(meta_line.encode(), local_file.encode(), "1.3.0")) == result


def test_the_problem_as_json() -> None:
    (problem,) = meta("ock.mmc.log_level = x\n")
    assert problem.as_dict() == {
        "line": 4,
        "column": None,
        "key": "ock.mmc.log_level",
        "code": "bad-choice",
        "message": problem.message,
        "hint": problem.hint,
        "severity": "error",
    }


def test_the_samples_in_the_wheel_are_fine() -> None:
    mmc = pytest.importorskip("memcache_hybrid", reason="the MemCache wheel is not installed")
    config = Path(mmc.__file__).parent / "config"
    assert check_meta((config / "mmc-meta.conf").read_bytes(), "1.3.0") == ()
    assert check_local((config / "mmc-local.conf").read_bytes(), "1.3.0") == ()


@pytest.mark.parametrize("check", [check_meta, check_local])
def test_hostile_files_take_bounded_time_and_give_bounded_answers(check) -> None:  # type: ignore[no-untyped-def]
    hostile = [
        b"x" * 4000 + b"\n",
        b"ock.mmc.aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa = 1\n",
        b"=\n",
        b"a\n",
        b"\x00=\n",
        b"\xff=1\n",
        b"ock.mmc.local_service.dram.size = " + b"9" * 4000 + b"\n",
        b"ock.mmc.log_level = " + b"# " * 2000 + b"\n",
    ]
    for line in hostile:
        data = line * (300_000 // len(line))
        begin = time.process_time()
        problems = check(data, "1.3.0")
        assert time.process_time() - begin < 5.0
        assert 0 < len(problems) <= MAX_PROBLEMS + 20


PIECES = st.sampled_from(
    [b"ock.mmc.", b"log_level", b" = ", b"=", b"\n", b"\r\n", b"#", b"\x00", b"\xef\xbb\xbf", b"info", b"tcp://",
     b"127.0.0.1", b":", b"5000", b"GB", b"1", b".", b"-", b"\xff",
     b"ock.mmc.meta_service_url = ", b"ock.mmc.local_service.dram.size = ",
     b"ock.mmc.evict_threshold_high = ", b"http://[", b"]"]
)  # fmt: skip


@settings(max_examples=300, deadline=2000)
@given(st.one_of(st.binary(max_size=400), st.lists(PIECES, max_size=60).map(b"".join)))
def test_any_bytes_are_judged(data: bytes) -> None:
    for problems in (check_meta(data, "1.3.0"), check_local(data, "1.0.0"), check_pair(data, data, "1.3.0")):
        for problem in problems:
            assert problem.code
            assert problem.message
            assert problem.hint
            assert problem.message.isprintable()
            assert problem.line is None or problem.line >= 1
    assert has_errors(check_local(data, "1.3.0")) or b"protocol" in data
