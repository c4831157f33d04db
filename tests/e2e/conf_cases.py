"""The table of test_conf_real.py: files, what the operator meant, what the checker and the real MemCache say."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

META, STORE, HTTP = 22011, 22012, 22013
GB = 1024**3

REFUSED, MISREAD, HARM, FINE = "refused", "misread", "refused or misread", "as meant"


@dataclass
class Case:
    """One file, what the operator meant, what the checker says and what the real MemCache does.

    ``codes`` are the errors expected of the checker. ``stricter`` says why the checker refuses what works.
    """

    name: str
    data: bytes
    codes: set[str] = field(default_factory=set)
    real: str = FINE
    kind: str = "meta"
    stricter: str = ""
    ports: tuple[int, int, int] = (META, STORE, HTTP)
    host: str = "127.0.0.1"
    log_path: str = ""
    log_level: int | None = None
    dram: int | None = None


BASE = {
    "ock.mmc.meta_service_url": f"tcp://127.0.0.1:{META}",
    "ock.mmc.meta_service.config_store_url": f"tcp://127.0.0.1:{STORE}",
    "ock.mmc.meta_service.metrics_url": f"http://127.0.0.1:{HTTP}",
    "ock.mmc.log_path": "LOGDIR",
}
LOCAL_BASE = {
    "ock.mmc.meta_service_url": f"tcp://127.0.0.1:{META}",
    "ock.mmc.local_service.config_store_url": f"tcp://127.0.0.1:{STORE}",
    "ock.mmc.local_service.protocol": "host_shm",
    "ock.mmc.local_service.dram.size": "2MB",
}


def text(**changes: str | None) -> str:
    """The base file, with ``**{key: value}`` in place of its own values; None leaves a key out."""
    return lines({**BASE, **changes})


def lines(values: dict[str, str | None]) -> str:
    return "".join(f"{key} = {value}\n" for key, value in values.items() if value is not None)


def meta(name: str, more: str, codes: set[str] | str = "", real: str = FINE, **changes: Any) -> Case:
    """The base file with ``more`` in front."""
    return Case(name, (more + text()).encode(), _codes(codes), real, **changes)


def changed(
    name: str, key: str, value: str | None, codes: set[str] | str = "", real: str = FINE, **changes: Any
) -> Case:
    """The base file with one value changed."""
    return Case(name, text(**{key: value}).encode(), _codes(codes), real, **changes)


def renamed(name: str, new: str, codes: set[str] | str, real: str) -> Case:
    """The base file with the first key written otherwise."""
    return Case(name, text().replace("ock.mmc.meta_service_url", new, 1).encode(), _codes(codes), real)


def local(
    name: str, values: dict[str, str | None], codes: set[str] | str = "", real: str = FINE, **changes: Any
) -> Case:
    data = lines({**LOCAL_BASE, **values}).encode()
    return Case(name, data, _codes(codes), real, kind="local", **{"dram": 2 * 1024**2, **changes})


def _codes(codes: set[str] | str) -> set[str]:
    return {codes} - {""} if isinstance(codes, str) else codes


URL, STORE_URL, METRICS = (
    "ock.mmc.meta_service_url",
    "ock.mmc.meta_service.config_store_url",
    "ock.mmc.meta_service.metrics_url",
)
DRAM, MAX, PROTOCOL = (f"ock.mmc.local_service.{name}" for name in ("dram.size", "max.dram.size", "protocol"))
AS_DIGITS = "MemCache stops reading the port at the first other character; other readers of the file do not"

META_CASES = [
    meta("plain", ""),
    meta("comment on its own line", "# comment = x\n\n  # another\n"),
    Case("no blanks around =", text().replace(" = ", "=").encode()),
    Case("blanks at both ends", text().replace("ock", "  ock").replace("\n", " \t\n").encode()),
    Case("no newline at the end", text().rstrip("\n").encode()),
    Case("CR LF is only a warning", text().replace("\n", "\r\n").encode()),
    Case("lone CR", text().replace("\n", "\r").encode(), {"lone-cr"}, HARM),
    Case("byte order mark", b"\xef\xbb\xbf" + text().encode(), {"bom"}, HARM),
    Case("UTF-16", text().encode("utf-16"), {"encoding"}, HARM),
    Case("UTF-16 without mark", text().encode("utf-16-le"), {"encoding"}, HARM),
    Case("Latin-1 in a comment", b"# caf\xe9\n" + text().encode()),
    meta("NUL in a value", "ock.mmc.log_level = debug\x00x\n", "nul-byte", REFUSED),
    Case("no-break blanks", text().replace(" = ", "\xa0=\xa0").encode(), {"lookalike-key"}, HARM),
    meta("semicolon comment", "; comment\n"),
    meta("semicolon comment with =", "; a = b\n"),
    meta("section header", "[meta]\n"),
    meta("no equals sign", "ock.mmc.log_level debug\n", "no-equals", MISREAD, log_level=0),
    meta("colon for equals", "ock.mmc.log_level: debug\n", "no-equals", MISREAD, log_level=0),
    meta("empty key", "= 3\n", "empty-key", REFUSED),
    meta("export", "export ock.mmc.log_level = debug\n", "unknown-prefix", MISREAD, log_level=0),
    meta("duplicate", f"{METRICS} = http://127.0.0.1:{HTTP}\n", "duplicate-key", REFUSED),
    renamed("misspelt prefix", "ock.mcc.meta_service_url", "unknown-prefix", HARM),
    renamed("upper case", "OCK.MMC.meta_service_url", "unknown-prefix", HARM),
    renamed("no prefix", "meta_service_url", "unknown-prefix", HARM),
    renamed("quoted key", '"ock.mmc.meta_service_url"', "unknown-prefix", HARM),
    renamed("Cyrillic o", "\u043eck.mmc.meta_service_url", "lookalike-key", HARM),
    renamed("zero-width blank", "\u200bock.mmc.meta_service_url", "lookalike-key", HARM),
    renamed("case of one letter", "ock.mmc.Meta_service_url", "unknown-key", REFUSED),
    renamed("hyphens", "ock.mmc.meta-service-url", "unknown-key", REFUSED),
    renamed("typing error", "ock.mmc.meta_service_ulr", "unknown-key", REFUSED),
    meta("key of another release", "ock.mmc.rewarm.dram_watermark = 95\n", "key-removed", REFUSED),
    meta("key of the local file", "ock.mmc.local_service.world_size = 2\n", "wrong-file", REFUSED),
    meta(
        "ubsio key",
        "ubsio.mem.size_in_gb = 10\n",
        "wrong-file",
        stricter="the key does nothing in the meta file",
    ),
    meta("inline comment, integer", "ock.mmc.evict_threshold_low = 60  # c\n", "inline-comment", REFUSED),
    meta("inline comment, boolean", "ock.mmc.meta.ha.enable = false # c\n", "inline-comment", REFUSED),
    meta("inline comment, choice", "ock.mmc.log_level = info # c\n", "inline-comment", REFUSED),
    changed("inline comment, path", "ock.mmc.log_path", "LOGDIR # c", "inline-comment", MISREAD),
    changed(
        "inline comment, address", URL, f"tcp://127.0.0.1:{META} # c", "inline-comment", stricter=AS_DIGITS
    ),
    meta("bad boolean", "ock.mmc.meta.ha.enable = no\n", "bad-bool", REFUSED),
    meta("boolean 0", "ock.mmc.meta.ha.enable = 0\n"),
    meta("boolean FALSE", "ock.mmc.meta.ha.enable = FALSE\n"),
    meta("bad integer", "ock.mmc.log_rotation_file_count = 4.0\n", "bad-int", REFUSED),
    meta("integer with sign", "ock.mmc.log_rotation_file_count = +4\n"),
    meta("integer out of range", "ock.mmc.log_rotation_file_count = 51\n", "out-of-range", REFUSED),
    meta("huge integer", f"ock.mmc.log_rotation_file_count = {'9' * 30}\n", "out-of-range", REFUSED),
    meta("unsigned out of range", "ock.mmc.evict_check_interval_seconds = 86401\n", "out-of-range", REFUSED),
    meta("bad choice", "ock.mmc.log_level = warning\n", "bad-choice", REFUSED),
    meta("choice in capitals", "ock.mmc.log_level = DEBUG\n", log_level=0),
    meta("quoted choice", 'ock.mmc.log_level = "info"\n', "quoted-value", REFUSED),
    meta("empty integer", "ock.mmc.log_rotation_file_count =\n", "empty-value", REFUSED),
    meta("empty text", "ock.mmc.kv_events.model_name =\n"),
    meta("threshold 100", "ock.mmc.evict_threshold_high = 100\n", "out-of-range", REFUSED),
    meta("threshold 99/98", "ock.mmc.evict_threshold_high = 99\nock.mmc.evict_threshold_low = 98\n"),
    meta("threshold 2/1", "ock.mmc.evict_threshold_high = 2\nock.mmc.evict_threshold_low = 1\n"),
    meta(
        "thresholds equal",
        "ock.mmc.evict_threshold_high = 50\nock.mmc.evict_threshold_low = 50\n",
        "thresholds",
        REFUSED,
    ),
    meta("threshold against the default", "ock.mmc.evict_threshold_high = 70\n", "thresholds", REFUSED),
    meta("threshold low 0", "ock.mmc.evict_threshold_low = 0\n", "out-of-range", REFUSED),
    meta("shards 3", "ock.mmc.meta_service.lru_shard_count = 3\n", "not-a-power-of-two", REFUSED),
    meta("shards 32", "ock.mmc.meta_service.lru_shard_count = 32\n"),
    meta("TLS without files", "ock.mmc.tls.enable = true\n", "tls-incomplete", REFUSED),
    meta("long path", f"ock.mmc.tls.ca.path = /{'a' * 255}\n", "value-too-long", REFUSED),
    meta("longest path", f"ock.mmc.tls.ca.path = /{'a' * 254}\n"),
    meta("long line", f"ock.mmc.kv_events.model_name = {'x' * 5000}\n", "line-too-long", REFUSED),
    meta("long comment", f"# {'x' * 5000}\n"),
    changed("no port", URL, "tcp://127.0.0.1", "url", REFUSED),
    changed("port 1024", URL, "tcp://127.0.0.1:1024", "url-port", REFUSED),
    changed("port 65536", URL, "tcp://127.0.0.1:65536", "url-port", REFUSED),
    changed("port 0", URL, "tcp://127.0.0.1:0", "url-port", REFUSED),
    changed("bad IPv4", URL, f"tcp://256.0.0.1:{META}", "url-host", REFUSED),
    changed("scheme in capitals", URL, f"TCP://127.0.0.1:{META}", "url-scheme", REFUSED),
    changed("quoted address", URL, f'"tcp://127.0.0.1:{META}"', "quoted-value", REFUSED),
    changed("blank in the address", URL, f"tcp:// 127.0.0.1:{META}", "url", REFUSED),
    changed("user in the address", URL, f"tcp://me@127.0.0.1:{META}", "url-host", REFUSED),
    changed("star host", URL, f"tcp://*:{META}", "url-host", REFUSED),
    changed("empty address", URL, "", "empty-value", REFUSED),
    changed("localhost", URL, f"tcp://localhost:{META}"),
    changed(
        "no scheme",
        URL,
        f"127.0.0.1:{META}",
        "url-scheme",
        stricter="the same form is refused for config_store_url",
    ),
    changed(
        "http scheme", URL, f"http://127.0.0.1:{META}", "url-scheme", stricter="only tcp:// is documented"
    ),
    changed("port with letter", URL, f"tcp://127.0.0.1:{META}x", "url-trailing", stricter=AS_DIGITS),
    changed("blank in the port", URL, "tcp://127.0.0.1:2201 1", "url-trailing", MISREAD),
    changed(
        "all interfaces",
        URL,
        f"tcp://0.0.0.0:{META}",
        "exposed",
        host="0.0.0.0",
        stricter="no authentication",
    ),
    changed("store without scheme", STORE_URL, f"127.0.0.1:{STORE}", "url-scheme", REFUSED),
    changed("store http", STORE_URL, f"http://127.0.0.1:{STORE}", "url-scheme", REFUSED),
    changed("store empty", STORE_URL, "", "empty-value", REFUSED),
    changed("same port, meta and store", STORE_URL, f"tcp://127.0.0.1:{META}", "same-port", REFUSED),
    changed("same port, meta and HTTP", METRICS, f"http://127.0.0.1:{META}", "same-port", REFUSED),
    changed("same port, store and HTTP", METRICS, f"http://127.0.0.1:{STORE}", "same-port", REFUSED),
    changed("bare HTTP address is only a warning", METRICS, f"127.0.0.1:{HTTP}"),
    changed("HTTP path is only a warning", METRICS, f"http://127.0.0.1:{HTTP}/metrics"),
    changed("HTTP tcp scheme", METRICS, f"tcp://127.0.0.1:{HTTP}", "url-scheme", REFUSED),
    changed("HTTP without port", METRICS, "http://127.0.0.1", "url", REFUSED),
    changed("HTTP port 65536", METRICS, "http://127.0.0.1:65536", "url-port", REFUSED),
    changed("HTTP empty", METRICS, "", "empty-value", REFUSED),
    changed("HTTP only a port", METRICS, f"{HTTP}", "url-scheme", REFUSED),
    changed(
        "HTTP on all interfaces",
        METRICS,
        f"http://0.0.0.0:{HTTP}",
        "exposed",
        stricter="PUT and DELETE for anybody",
    ),
    changed("log path ends in logs", "ock.mmc.log_path", "LOGDIR/logs", "log-path-logs", MISREAD),
    changed(
        "relative log path", "ock.mmc.log_path", "../../../../../../../../..LOGDIR", "relative-path", MISREAD
    ),
    changed("symbolic link as log path", "ock.mmc.log_path", "LOGLINK", "symlink", REFUSED),
]

LOCAL_CASES = [
    local("plain", {}),
    local("dram 1GB is 2^30", {DRAM: "1GB"}, dram=GB),
    local("lower case and a blank", {DRAM: "1 gb"}, dram=GB),
    local("fraction", {DRAM: "0.5G"}, dram=GB // 2),
    local("bytes", {DRAM: "4194304"}, dram=4194304),
    local("GiB", {DRAM: "1GiB"}, "bad-size-unit", REFUSED),
    local("no unit known", {DRAM: "1PB"}, "bad-size", REFUSED),
    local("negative", {DRAM: "-1GB"}, "bad-size", REFUSED),
    local("exponent", {DRAM: "1e3MB"}, "bad-size", REFUSED),
    local("thousands comma", {DRAM: "1,000MB"}, "bad-size", REFUSED),
    local("two points", {DRAM: "1.2.3GB"}, "bad-size", MISREAD, dram=int(1.23 * GB)),
    local("empty size", {DRAM: ""}, "empty-value", REFUSED),
    local("inline comment", {DRAM: "1GB # c"}, "inline-comment", REFUSED),
    local(
        "beyond 1TB",
        {DRAM: "2TB"},
        "size-too-big",
        dram=2 * 1024 * GB,
        stricter="the documented limit; 1.2.0 enforces it",
    ),
    local("unaligned is rounded up, a warning", {DRAM: "3MB"}, dram=4 * 1024**2),
    local("unaligned for device_*", {PROTOCOL: "device_sdma", DRAM: "1.5GB"}, dram=2 * GB),
    local("dram above max", {DRAM: "80GB", MAX: "64GB"}, "size-above-max", REFUSED),
    local("dram equals max", {DRAM: "4MB", MAX: "4MB"}, dram=4 * 1024**2),
    local("dram rounded up above max", {DRAM: "3MB", MAX: "2MB"}, "size-above-max", REFUSED),
    local("client only", {DRAM: "0", MAX: "1GB"}, dram=0),
    local("no protocol", {PROTOCOL: None}, "missing-key", REFUSED),
    local("no dram.size", {DRAM: None}, "missing-key", REFUSED),
    local("unknown protocol", {PROTOCOL: "host_roce"}, "bad-choice", REFUSED),
    local("world_size 0", {"ock.mmc.local_service.world_size": "0"}, "out-of-range", REFUSED),
    local("world_size 1025", {"ock.mmc.local_service.world_size": "1025"}, "out-of-range", REFUSED),
    local("key of the meta file", {"ock.mmc.evict_threshold_high": "90"}, "wrong-file", REFUSED),
    local(
        "key of the meta file that is dropped",
        {STORE_URL: "tcp://127.0.0.1:5999"},
        "wrong-file",
        stricter="it is dropped",
    ),
    local("thread pool", {"ock.mmc.client.read_thread_pool.size": "65"}, "out-of-range", REFUSED),
    local(
        "hcom TLS without files", {"ock.mmc.local_service.hcom.tls.enable": "1"}, "tls-incomplete", REFUSED
    ),
    local("ubsio key", {"ubsio.mem.size_in_gb": "10"}),
    local(
        "unknown ubsio key",
        {"ubsio.mem.size": "10"},
        "unknown-key",
        stricter="UBS IO drops it without a word",
    ),
    local(
        "store port 1024",
        {"ock.mmc.local_service.config_store_url": "tcp://127.0.0.1:1024"},
        "url-port",
        REFUSED,
    ),
    local(
        "store without scheme",
        {"ock.mmc.local_service.config_store_url": f"127.0.0.1:{STORE}"},
        "url-scheme",
        REFUSED,
    ),
    local(
        "store with path",
        {"ock.mmc.local_service.config_store_url": f"tcp://127.0.0.1:{STORE}/"},
        "url-trailing",
        stricter=AS_DIGITS,
    ),
]


def sglang(
    name: str, data: str, codes: set[str] | str = "", real: str = FINE, kind: str = "sglang-meta", **more: Any
) -> Case:
    return Case(name, data.encode(), _codes(codes), real, kind=kind, **more)


def meta_json(**values: Any) -> str:
    base = {
        "meta_service_url": f"tcp://127.0.0.1:{META}",
        "config_store_url": f"tcp://127.0.0.1:{STORE}",
        "metrics_url": f"http://127.0.0.1:{HTTP}",
        "log_path": "LOGDIR",
    }
    return json.dumps({**base, **values})


def storage_json(**values: Any) -> str:
    base = {
        "meta_service_url": f"tcp://127.0.0.1:{META}",
        "config_store_url": f"tcp://127.0.0.1:{STORE}",
        "protocol": "host_shm",
        "dram_size": "2MB",
        "max_dram_size": "2MB",
    }
    return json.dumps({k: v for k, v in {**base, **values}.items() if v is not None})


STORAGE = {"kind": "sglang-storage"}
SGLANG_CASES = [
    sglang("plain", meta_json()),
    sglang("numbers and booleans", meta_json(evict_threshold_high=85, ha_enable=False, lru_shard_count=32)),
    sglang("comment", meta_json().replace("{", "{\n  // comment\n", 1), "json-comment", REFUSED),
    sglang("trailing comma", meta_json().replace("}", ",}"), "json-trailing-comma", REFUSED),
    sglang("byte order mark", "\ufeff" + meta_json(), "bom", REFUSED),
    sglang("boolean as text", meta_json(ha_enable="false"), "wrong-type", REFUSED),
    sglang("number as text", meta_json(evict_threshold_high="90"), "wrong-type", REFUSED),
    sglang("number with point", meta_json(evict_threshold_high=90.0), "wrong-type", REFUSED),
    sglang("text as number", meta_json(log_level=1), "wrong-type", REFUSED),
    sglang("null", meta_json(evict_threshold_high=None), "wrong-type", REFUSED),
    sglang("unknown key", meta_json(log_lvl="debug"), "unknown-key", MISREAD, log_level=0),
    sglang(
        "conf file's name", meta_json(**{"ock.mmc.log_level": "debug"}), "unknown-key", MISREAD, log_level=0
    ),
    sglang(
        "duplicate",
        meta_json(log_level="debug").replace("}", ', "log_level": "info"}'),
        "duplicate-key",
        MISREAD,
        log_level=0,
    ),
    sglang(
        "threshold 100",
        meta_json(evict_threshold_high=100),
        "out-of-range",
        stricter="the same file as mmc-meta.conf is refused",
    ),
    sglang("thresholds", meta_json(evict_threshold_high=70), "thresholds", REFUSED),
    sglang("same port", meta_json(metrics_url=f"http://127.0.0.1:{META}"), "same-port", REFUSED),
    sglang("storage plain", storage_json(), **STORAGE),
    sglang(
        "storage of the seed", storage_json(prefetch_threshold=1, world_size=256, log_level="info"), **STORAGE
    ),
    sglang("dram_size as number", storage_json(dram_size=2097152), "wrong-type", REFUSED, **STORAGE),
    sglang("world_size as text", storage_json(world_size="8"), "wrong-type", REFUSED, **STORAGE),
]

ALL_CASES = [*META_CASES, *LOCAL_CASES, *SGLANG_CASES]
