from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtierd.errors import ConfError
from kvtierd.mmc_conf.attributes import META_ATTRIBUTES, STORAGE_ATTRIBUTES
from kvtierd.mmc_conf.keys import KEYS
from kvtierd.mmc_conf.keyspec import FileKind, ValueType
from kvtierd.mmc_conf.lookup import find_key, keys_of, nearest_key
from kvtierd.mmc_conf.ubsio import UBSIO_KEYS
from kvtierd.mmc_conf.versions import KNOWN_VERSIONS, MmcVersion, resolve_version

FIXTURES = Path(__file__).parents[2] / "fixtures" / "mmc_conf"
V = {text: resolve_version(text) for text in ("1.0.0", "1.0.4", "1.1.0", "1.1.6", "1.2.0", "1.2.1", "1.3.0")}


def names(kind: FileKind, version: str) -> set[str]:
    return {spec.name for spec in keys_of(kind, V[version]) if spec.name.startswith("ock.mmc.")}


MEASURED = json.loads((FIXTURES / "measured-keys.json").read_text())


@pytest.mark.parametrize("version", sorted(MEASURED))
@pytest.mark.parametrize("kind", ["meta", "local"])
def test_the_table_knows_the_keys_that_the_real_parsers_know(version: str, kind: FileKind) -> None:
    """measured-keys.json has the keys that the parser of each release did not call invalid."""
    real = set(MEASURED[version][kind])
    if kind == "local":
        # From 1.1.0 on the local file may hold it, where it has no effect: an error in our eyes.
        real.discard("ock.mmc.meta_service.config_store_url")
    assert names(kind, version) == real


@pytest.mark.parametrize(
    ("kind", "name", "first", "last"),
    [
        ("local", "ock.mmc.local_service.max.dram.size", "1.1.0", None),
        ("local", "ock.mmc.local_service.storage.enabled", "1.2.0", None),
        ("meta", "ock.mmc.rewarm.dram_watermark", "1.2.0", "1.2.0"),
        ("meta", "ock.mmc.meta.backup.enable", "1.1.3", "1.2.0"),
        ("meta", "ock.mmc.ubs_io.enable", "1.1.0", "1.1.6"),
        ("local", "ock.mmc.dynamic_config.enable", "1.1.3", None),
        ("meta", "ock.mmc.dynamic_config.enable", "1.3.0", None),
        ("meta", "ock.mmc.meta.lease_ttl_ms", "1.2.0", None),
        ("meta", "ock.mmc.meta_service.lru_shard_count", "1.3.0", None),
    ],
)
def test_since_and_until(kind: FileKind, name: str, first: str, last: str | None) -> None:
    spec = find_key(kind, name)
    assert spec is not None
    known = [str(v) for v in KNOWN_VERSIONS if spec.known_in(v)]
    assert known[0] == first
    assert known[-1] == (last or str(KNOWN_VERSIONS[-1]))


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        ("ock.mmc.evict_threshold_high", {"1.0.0": "70", "1.0.4": "70", "1.1.0": "90", "1.3.0": "90"}),
        ("ock.mmc.evict_threshold_low", {"1.0.4": "60", "1.1.0": "80"}),
        ("ock.mmc.meta_service.metrics_url", {"1.0.0": "127.0.0.1:8000", "1.0.4": "http://127.0.0.1:8000"}),
        ("ock.mmc.log_path", {"1.0.0": ".", "1.0.4": "/var/log/memcache_hybrid"}),
    ],
)
def test_defaults_by_release(name: str, defaults: dict[str, str]) -> None:
    spec = find_key("meta", name)
    assert spec is not None
    assert {version: spec.default_in(V[version]) for version in defaults} == defaults


def test_protocols_by_release() -> None:
    spec = find_key("local", "ock.mmc.local_service.protocol")
    assert spec is not None
    assert "host_shm" not in spec.choices_in(V["1.0.0"])
    assert "host_shm" in spec.choices_in(V["1.0.4"])
    assert "device_urma" not in spec.choices_in(V["1.1.6"])
    assert "device_uboe" in spec.choices_in(V["1.2.0"])


def test_hot_reload_is_by_file() -> None:
    hot = {spec.name for spec in keys_of("meta", V["1.3.0"]) if spec.hot_in("meta", V["1.3.0"])}
    assert hot == {
        "ock.mmc.log_level",
        "ock.mmc.evict_threshold_high",
        "ock.mmc.evict_threshold_low",
        "ock.mmc.meta.lease_ttl_ms",
    }
    assert not any(spec.hot_in("meta", V["1.2.1"]) for spec in keys_of("meta", V["1.2.1"]))


def test_the_table_is_sound() -> None:
    seen = set()
    for spec in (*KEYS, *UBSIO_KEYS):
        for kind in spec.kinds:
            assert (kind, spec.name) not in seen
            seen.add((kind, spec.name))
        assert spec.until is None or spec.until >= spec.since
        assert (spec.type is ValueType.ENUM) == bool(spec.choices)
        if spec.type is ValueType.INT and spec.low is not None and spec.high is not None:
            assert spec.low <= spec.high
        if spec.choices and (default := spec.default_in(KNOWN_VERSIONS[-1])) is not None:
            assert default in spec.choices_in(KNOWN_VERSIONS[-1])


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("ock.mcc.meta_service_url", "ock.mmc.meta_service_url"),
        ("OCK.MMC.META_SERVICE_URL", "ock.mmc.meta_service_url"),
        ("meta_service_url", "ock.mmc.meta_service_url"),
        ("\u043eck.mmc.meta_service_url", "ock.mmc.meta_service_url"),
        ("\u200bock.mmc.log_path", "ock.mmc.log_path"),
        ('"ock.mmc.log_path"', "ock.mmc.log_path"),
        ("ock.mmc.evict-threshold-high", "ock.mmc.evict_threshold_high"),
        ("ock.mmc.evict_treshold_high", "ock.mmc.evict_threshold_high"),
        ("completely.different.thing", None),
        ("", None),
    ],
)
def test_the_nearest_key(wrong: str, right: str | None) -> None:
    assert nearest_key(wrong, "meta", V["1.3.0"]) == right


def test_attributes_of_the_installed_wheel() -> None:
    """The attribute tables against the classes themselves."""
    mmc = pytest.importorskip("memcache_hybrid", reason="the MemCache wheel is not installed")
    for class_name, table in (("MetaConfig", META_ATTRIBUTES), ("LocalConfig", STORAGE_ATTRIBUTES)):
        instance = getattr(mmc, class_name)()
        real = {n for n in dir(instance) if not n.startswith("_") and not callable(getattr(instance, n))}
        ours = {
            n for n, a in table.items() if a.known_in(V["1.3.0"]) and (a.spec is not None or n == "lru_type")
        }
        assert ours == real
        for name in ours:
            expected = {"integer": int, "boolean": bool, "string": str}[table[name].types[0]]
            assert type(getattr(instance, name)) is expected


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("1.3.0", (1, 3, 0)),
        ("1.3", (1, 3, 0)),
        ("1.0", (1, 0, 4)),
        ("1.2.0", (1, 2, 0)),
        ("1.2.9", (1, 2, 1)),
        ("1.3.0.post1", (1, 3, 0)),
        ("v1.1.2", (1, 1, 2)),
    ],
)
def test_versions(text: str, version: tuple[int, int, int]) -> None:
    assert resolve_version(text) == MmcVersion(*version)


@pytest.mark.parametrize(
    ("text", "nearest"),
    [("1.4.0", "1.3.0"), ("2.0", "1.3.0"), ("0.9", "1.0.0"), ("latest", "1.3.0"), ("", "1.3.0")],
)
def test_an_unknown_version_needs_a_known_one_by_name(text: str, nearest: str) -> None:
    with pytest.raises(ConfError) as caught:
        resolve_version(text)
    assert caught.value.stable_code == "conf.version"
    assert nearest in caught.value.hint
    assert str(resolve_version(text, assume=nearest)) == nearest
