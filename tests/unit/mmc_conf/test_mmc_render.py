from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtierd.errors import ConfError
from kvtierd.mmc_conf.keyspec import ValueType
from kvtierd.mmc_conf.lookup import keys_of
from kvtierd.mmc_conf.model import LocalConf, MetaConf
from kvtierd.mmc_conf.render import read_local, read_meta, render_local, render_meta
from kvtierd.mmc_conf.sglang import (
    SglangMetaConf,
    SglangStorageConf,
    render_sglang_meta,
    render_sglang_storage,
)
from kvtierd.mmc_conf.versions import KNOWN_VERSIONS, resolve_version

GB = 1024**3
FIXTURES = Path(__file__).parents[2] / "fixtures" / "mmc_conf"
META = MetaConf(
    meta_service_url="tcp://127.0.0.1:15000",
    config_store_url="tcp://127.0.0.1:16000",
    metrics_url="http://127.0.0.1:18000",
    log_path="/var/log/kvtierd/memcache",
    lease_ttl_ms=10000,
)
LOCAL = LocalConf(
    protocol="device_rdma", world_size=16, dram_size_bytes=128 * GB, max_dram_size_bytes=128 * GB
)
VERSIONS = ["1.0.0", "1.0.4", "1.1.0", "1.2.0", "1.3.0"]


@pytest.mark.parametrize("version", VERSIONS)
def test_golden_files(version: str) -> None:
    assert render_meta(META, version) == (FIXTURES / f"mmc-meta-{version}.conf").read_text()
    assert render_local(LOCAL, version) == (FIXTURES / f"mmc-local-{version}.conf").read_text()


def test_golden_sglang_json() -> None:
    expected = (FIXTURES / "metaservice_config-1.3.0.json").read_text()
    assert render_sglang_meta(SglangMetaConf.from_meta(META), "1.3.0") == expected
    storage = SglangStorageConf.from_local(LOCAL, prefetch_threshold=1)
    assert (
        render_sglang_storage(storage, "1.3.0") + "\n" == (FIXTURES / "sglang-storage-1.3.0.json").read_text()
    )


@pytest.mark.parametrize("version", [str(v) for v in KNOWN_VERSIONS])
def test_only_keys_of_the_release_are_written(version: str) -> None:
    for kind, text in (("meta", render_meta(META, version)), ("local", render_local(LOCAL, version))):
        known = {spec.name for spec in keys_of(kind, resolve_version(version))}  # type: ignore[arg-type]
        written = {line.partition(" = ")[0] for line in text.splitlines() if not line.startswith("#")}
        assert written <= known


def test_max_dram_size_is_always_written_and_never_below_dram_size() -> None:
    assert "max.dram.size = 128GB" in render_local(
        LOCAL.model_copy(update={"max_dram_size_bytes": None}), "1.3.0"
    )
    client = LOCAL.model_copy(update={"dram_size_bytes": 0})
    assert (
        "ock.mmc.local_service.dram.size = 0\nock.mmc.local_service.max.dram.size = 128GB\n"
        in render_local(client, "1.3.0")
    )


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"evict_threshold_high": 100}, "conf.out-of-range"),
        ({"evict_threshold_high": 0}, "conf.out-of-range"),
        ({"evict_threshold_low": 0}, "conf.out-of-range"),
        ({"evict_threshold_low": 99}, "conf.out-of-range"),
        ({"evict_threshold_high": 80}, "conf.thresholds"),
        ({"lease_ttl_ms": 0}, "conf.out-of-range"),
        ({"meta_service_url": "tcp://127.0.0.1:16000"}, "conf.same-port"),
        ({"meta_service_url": "tcp://127.0.0.1:1024"}, "conf.url-port"),
        ({"meta_service_url": "tcp://127.0.0.1:015000"}, "conf.url-form"),
        ({"meta_service_url": "tcp://0.0.0.0:15000"}, "conf.exposed"),
        ({"metrics_url": "http://0.0.0.0:18000"}, "conf.exposed"),
        ({"metrics_url": "http://8.8.8.8:18000"}, "conf.exposed"),
        ({"metrics_url": "http://127.0.0.1:18000/metrics"}, "conf.url-trailing"),
        ({"log_path": "logs"}, "conf.relative-path"),
        ({"log_path": "/var/log/logs"}, "conf.log-path-logs"),
        ({"log_path": "/var/log/../log/mmc"}, "conf.path-form"),
        ({"log_path": "/var/log/mmc "}, "conf.unwritable"),
        ({"log_path": "/var/log/#mmc"}, "conf.unwritable"),
        ({"log_level": "info\nock.mmc.log_path = /tmp"}, "conf.unwritable"),
        ({"log_level": "warning"}, "conf.bad-choice"),
        ({"extra": {"ock.mmc.log_level": "debug"}}, "conf.extra-conflict"),
        ({"extra": {"ock.mmc.nothing": "1"}}, "conf.unknown-key"),
        ({"extra": {"ock.mmc.local_service.tag": "x"}}, "conf.wrong-file"),
        ({"extra": {"ock.mmc.tls.enable": "true"}}, "conf.tls-incomplete"),
        ({"extra": {"a\nb": "1"}}, "conf.unwritable"),
        ({"extra": {"a=b": "1"}}, "conf.unwritable"),
    ],
)
def test_what_memcache_would_refuse_or_misread_is_not_written(changes: dict[str, Any], code: str) -> None:
    with pytest.raises(ConfError) as caught:
        render_meta(META.model_copy(update=changes), "1.3.0")
    assert caught.value.stable_code == code
    assert caught.value.hint


@pytest.mark.parametrize(
    ("changes", "version", "code"),
    [
        ({"dram_size_bytes": 256 * GB}, "1.3.0", "conf.size-above-max"),
        ({"dram_size_bytes": GB // 2}, "1.3.0", "conf.size-unaligned"),
        ({"dram_size_bytes": -1}, "1.3.0", "conf.bad-size"),
        ({"dram_size_bytes": 2048 * GB, "max_dram_size_bytes": None}, "1.3.0", "conf.size-too-big"),
        ({"dram_size_bytes": 0, "max_dram_size_bytes": None}, "1.3.0", "conf.no-memory"),
        ({"dram_size_bytes": 0}, "1.1.0", "conf.no-memory"),
        ({"protocol": "device_urma"}, "1.1.0", "conf.bad-choice"),
        ({"world_size": 1025}, "1.3.0", "conf.out-of-range"),
        ({"extra": {"ock.mmc.local_service.tag": "x"}}, "1.2.0", "conf.key-too-new"),
        ({"extra": {"ubsio.disk.pth": "x"}}, "1.3.0", "conf.unknown-key"),
    ],
)
def test_local_files_are_checked_too(changes: dict[str, Any], version: str, code: str) -> None:
    with pytest.raises(ConfError) as caught:
        render_local(LOCAL.model_copy(update=changes), version)
    assert caught.value.stable_code == code


def test_a3_aligns_every_protocol_to_1_gb() -> None:
    conf = LOCAL.model_copy(update={"protocol": "host_shm", "dram_size_bytes": GB // 2})
    assert "dram.size = 512MB" in render_local(conf, "1.3.0")
    with pytest.raises(ConfError, match="multiple of 1GB"):
        render_local(conf, "1.3.0", a3=True)


def test_exposure_must_be_asked_for_and_the_error_says_why() -> None:
    conf = META.model_copy(update={"metrics_url": "http://0.0.0.0:18000"})
    with pytest.raises(ConfError, match="no authentication"):
        render_meta(conf, "1.3.0")
    assert "http://0.0.0.0:18000" in render_meta(conf, "1.3.0", allow_exposed=True)


def test_an_unknown_version_needs_an_assumed_one() -> None:
    with pytest.raises(ConfError, match="1\\.9"):
        render_meta(META, "1.9.0")
    assert render_meta(META, "1.9.0", assume_version="1.3.0") == render_meta(META, "1.3.0")


def test_a_secret_that_cannot_be_written_is_not_shown() -> None:
    conf = META.model_copy(update={"extra": {"ock.mmc.zmq.private_key": "s3cret#"}})
    with pytest.raises(ConfError) as caught:
        render_meta(conf, "1.3.0")
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"dram_size": "50GiB"}, "conf.bad-size-unit"),
        ({"dram_size": "1.5GB", "max_dram_size": "2GB"}, "conf.size-unaligned"),
        ({"dram_size": "2GB", "max_dram_size": "1GB"}, "conf.size-above-max"),
        ({"extra": {"world_size": 8}}, "conf.extra-conflict"),
        ({"extra": {"aggregate_num": "122"}}, "conf.wrong-type"),
        ({"extra": {"nothing": 1}}, "conf.unknown-key"),
    ],
)
def test_sglang_storage_is_checked(changes: dict[str, Any], code: str) -> None:
    conf = SglangStorageConf(protocol="device_sdma", dram_size="50GB").model_copy(update=changes)
    with pytest.raises(ConfError) as caught:
        render_sglang_storage(conf, "1.3.0")
    assert caught.value.stable_code == code


def test_sglangs_own_keys_may_be_set() -> None:
    conf = SglangStorageConf(
        protocol="device_sdma", dram_size="50GB", extra={"device_id": {"0": 3}, "check_server": True}
    )
    assert '"device_id": {"0": 3}' in render_sglang_storage(conf, "1.3.0")


# -- properties

ports = st.lists(st.integers(1025, 65535), min_size=4, max_size=4, unique=True)
hosts = st.sampled_from(["127.0.0.1", "localhost", "10.1.2.3", "node-1.lan", "::1", "fd00::5"])


def at(host: str, port: int, scheme: str = "tcp") -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


@st.composite
def meta_confs(draw: st.DrawFn) -> MetaConf:
    first, second, third, _ = draw(ports)
    high = draw(st.integers(2, 99))
    names = st.text(
        st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="#'\"/;"),
        min_size=1,
        max_size=20,
    )
    extra = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "ock.mmc.kv_events.model_name": names,
                "ock.mmc.log_rotation_file_count": st.integers(1, 50).map(str),
                "ock.mmc.log_output_target": st.sampled_from(["screen", "file", "both"]),
            },
        )
    )
    return MetaConf(
        meta_service_url=at(draw(hosts), first),
        config_store_url=at(draw(hosts), second),
        metrics_url=at("127.0.0.1", third, "http"),
        log_level=draw(st.sampled_from(["debug", "info", "warn", "error"])),
        log_path="/"
        + draw(
            st.lists(st.sampled_from(["var", "data", "a b", "mmc.d"]), min_size=1, max_size=4).map("/".join)
        ),
        evict_threshold_high=high,
        evict_threshold_low=draw(st.integers(1, high - 1)),
        lease_ttl_ms=draw(st.none() | st.integers(1, 2**31 - 1)),
        extra=extra,
    )


@st.composite
def local_confs(draw: st.DrawFn) -> LocalConf:
    first, second, third, _ = draw(ports)
    protocol = draw(st.sampled_from(["host_shm", "host_tcp", "device_rdma", "device_sdma"]))
    step = GB if protocol.startswith("device") else 2 * 1024**2
    limit = draw(st.integers(1, 1024**4 // step))
    return LocalConf(
        meta_service_url=at(draw(hosts), first),
        config_store_url=at(draw(hosts), second),
        hcom_url=at(draw(hosts), third),
        world_size=draw(st.integers(1, 1024)),
        protocol=protocol,
        dram_size_bytes=draw(st.integers(0, limit)) * step,
        max_dram_size_bytes=limit * step,
        extra=draw(
            st.fixed_dictionaries({}, optional={"ubsio.mem.size_in_gb": st.integers(0, 3072).map(str)})
        ),
    )


def assert_clean(text: str) -> None:
    assert text.endswith("\n")
    assert "\r" not in text
    for line in text.splitlines():
        assert line == line.rstrip()
        assert line.startswith("#") or ("#" not in line and " = " in line)


@settings(deadline=None)
@given(meta_confs())
def test_a_rendered_meta_conf_is_clean_and_reads_back(conf: MetaConf) -> None:
    text = render_meta(conf, "1.3.0")
    assert_clean(text)
    assert read_meta(text.encode(), "1.3.0") == conf


@settings(deadline=None)
@given(local_confs())
def test_a_rendered_local_conf_is_clean_and_reads_back(conf: LocalConf) -> None:
    text = render_local(conf, "1.3.0")
    assert_clean(text)
    assert read_local(text.encode(), "1.3.0") == conf


@settings(deadline=None)
@given(meta_confs(), st.sampled_from(VERSIONS))
def test_every_release_reads_back_but_for_keys_it_does_not_know(conf: MetaConf, version: str) -> None:
    plain = conf.model_copy(update={"extra": {}, "lease_ttl_ms": None})
    assert read_meta(render_meta(plain, version).encode(), version) == plain


text_keys = [s.name for s in keys_of("meta", resolve_version("1.3.0")) if s.type is ValueType.TEXT]


@settings(deadline=None)
@given(st.sampled_from(text_keys), st.text(max_size=30))
def test_no_extra_value_can_smuggle_in_another_line(name: str, value: str) -> None:
    try:
        text = render_meta(META.model_copy(update={"extra": {name: value}}), "1.3.0")
    except ConfError:
        return
    assert text.count("\n") == render_meta(META, "1.3.0").count("\n") + 2
    assert read_meta(text.encode(), "1.3.0").extra == {name: value}


def test_a_file_with_errors_is_not_read() -> None:
    with pytest.raises(ConfError) as caught:
        read_meta(b"ock.mmc.log_level = x\n", "1.3.0")
    assert caught.value.stable_code == "conf.bad-choice"
    assert read_meta(b"", "1.0.0").evict_threshold_high == 70
