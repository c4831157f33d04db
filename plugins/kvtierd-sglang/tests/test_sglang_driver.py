"""The driver as the planner asks it: command line, environment, tiers by role, what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest
from kvtierd_sglang.plugin import SglangCpuDriver, SglangDriver
from sglang_contexts import GIB, context, pool, value_of

from kvtierd.hookspecs import ENTRY_POINT_GROUP
from kvtierd.plan.model import HttpProbe, LogProbe

DRIVER = SglangDriver()
CPU = SglangCpuDriver()


def codes(remarks: Any) -> list[str]:
    return [remark.code for remark in remarks]


def test_found_through_its_entry_point_and_light_to_import() -> None:
    (entry,) = metadata.entry_points(group=ENTRY_POINT_GROUP, name="sglang")
    assert entry.value == "kvtierd_sglang.plugin"
    code = (
        "import sys, kvtierd_sglang.plugin\n"
        "heavy = {'torch', 'numpy', 'aiohttp', 'prometheus_client', 'sglang', 'yaml'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_three_tiers_of_the_seed() -> None:
    launch = DRIVER.launch(context(l2_bytes=100 * GIB))
    assert launch.refusals == ()
    argv = launch.argv
    assert argv[:3] == ("/opt/engine/bin/python", "-m", "sglang.launch_server")
    assert "--disable-radix-cache" not in argv  # L1
    assert "--enable-hierarchical-cache" in argv  # L2
    assert value_of(argv, "--hicache-io-backend") == "kernel_ascend"
    assert value_of(argv, "--attention-backend") == "ascend"
    assert value_of(argv, "--hicache-mem-layout") == "page_first_kv_split"
    assert value_of(argv, "--hicache-size") == "53"  # 107.37 GB over two ranks
    assert value_of(argv, "--hicache-storage-backend") == "npu_memcache"  # L3
    assert json.loads(value_of(argv, "--hicache-storage-backend-extra-config") or "") == {
        "meta_service_url": "tcp://127.0.0.1:5000",
        "config_store_url": "tcp://127.0.0.1:6000",
        "log_level": "info",
        "world_size": 256,
        "protocol": "device_sdma",
        "dram_size": "50GB",
        "max_dram_size": "50GB",
        "prefetch_threshold": 1,
    }
    assert {"--enable-metrics", "--enable-cache-report"} <= set(argv)
    assert launch.clients == 2
    (file,) = launch.files
    assert file.path == "/var/lib/kvtierd/engines/e1/metaservice_config.json"
    assert json.loads(file.content)["meta_service_url"] == "tcp://127.0.0.1:5000"


def test_readiness_has_a_deadline_since_a_taken_port_leaves_sglang_running() -> None:
    launch = DRIVER.launch(context(args={"tp-size": 2, "ready-deadline": "90s", "drain": "20s"}))
    listens, warm, probe = launch.readiness.probes
    # Another SGLang may answer the warm-up and /health on the port that this one did not get.
    assert listens == LogProbe(contains="Uvicorn running on ")
    assert warm == LogProbe(contains="The server is fired up and ready to roll!")
    assert probe == HttpProbe(url="http://127.0.0.1:8869/health")
    assert launch.readiness.deadline_seconds == 90
    assert launch.readiness.timeout_seconds > 1  # /health itself takes one second
    assert any("Errno 98" in pattern for pattern in launch.restart.fatal_patterns)
    assert launch.stop.signal == "SIGTERM"
    assert launch.stop.timeout_seconds == 20
    assert "--ready-deadline" not in launch.argv
    assert "--drain" not in launch.argv


def test_a_pool_holder_of_its_own_leaves_the_ranks_without_memory_but_with_the_same_maximum() -> None:
    launch = DRIVER.launch(context(pool=pool(placement="standalone", clients=2, providers=1)))
    extra = json.loads(value_of(launch.argv, "--hicache-storage-backend-extra-config") or "")
    assert (extra["dram_size"], extra["max_dram_size"]) == ("0", "50GB")


def test_prefill_has_all_tiers_and_decode_only_l1() -> None:
    prefill = DRIVER.launch(context(role="prefill", index=1))
    assert value_of(prefill.argv, "--disaggregation-mode") == "prefill"
    assert value_of(prefill.argv, "--disaggregation-bootstrap-port") == "8999"
    assert prefill.extra_ports == {"meeting point of prefill and decode": 8999}
    assert "--enable-hierarchical-cache" in prefill.argv
    decode = DRIVER.launch(context(role="decode"))
    assert value_of(decode.argv, "--disaggregation-mode") == "decode"
    assert not [argument for argument in decode.argv if "hicache" in argument or "hierarchical" in argument]
    assert (decode.clients, decode.files) == (0, ())
    assert "engine.decode-tiers" in codes(decode.notes)
    refused = DRIVER.launch(context(role="decode", l2_bytes=GIB))
    assert codes(refused.refusals) == ["engine.decode-tiers"]


def test_deepseek_v4_has_its_own_layout_and_no_size() -> None:
    model = "/data/weights/DeepSeek-V4-Flash"
    launch = DRIVER.launch(context(model=model, args={"tp-size": 2, "hicache-ratio": 3}))
    assert launch.refusals == ()
    assert value_of(launch.argv, "--hicache-mem-layout") == "page_first_direct"
    assert value_of(launch.argv, "--hicache-ratio") == "3"
    assert "--hicache-size" not in launch.argv
    (refusal,) = DRIVER.launch(context(model=model, l2_bytes=100 * GIB)).refusals
    assert refusal.code == "engine.l2-unsupported"
    assert "hicache-ratio" in refusal.hint


def test_values_from_toml_become_arguments() -> None:
    args = {
        "tp_size": 2,
        "mem-fraction-static": 0.8,
        "trust-remote-code": True,
        "enable-lora": False,
        "cuda-graph-bs": [1, 2],
        "json-model-override-args": {"a": 1},
    }
    argv = DRIVER.launch(context(args=args)).argv
    tail = argv[argv.index("--tp-size") :]
    assert tail == (
        *(
            "--tp-size",
            "2",
            "--mem-fraction-static",
            "0.8",
            "--trust-remote-code",
            "--cuda-graph-bs",
            "1",
            "2",
        ),
        *("--json-model-override-args", '{"a": 1}'),
    )


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        ({"disable-radix-cache": True}, "engine.l1-off", "L1"),
        ({"disable_radix": True}, "engine.l1-off", "L1"),
        ({"port": 1}, "engine.arg-ours", "port"),
        ({"model": "x"}, "engine.arg-ours", "model"),
        ({"enable-metrics": True}, "engine.arg-ours", "enable-metrics"),
        ({"hicache-size": 150}, "engine.arg-ours", "per rank"),
        ({"hicache-siz": 150}, "engine.arg-ours", "per rank"),
        ({"hicache-storage-backend": "file"}, "engine.arg-ours", "l3"),
        ({"admin-api-key": "s"}, "engine.arg-ours", "l3_switch = true"),
        ({"--tp-size": 2}, "engine.arg-unknown", "tp-size"),
        ({"hicache-storage-backend-extra-config": "{}"}, "engine.arg-value", "prefetch_threshold"),
        ({"hicache-storage-backend-extra-config": {"dram_size": "1GB"}}, "conf.extra-conflict", "dram_size"),
        ({"hicache-storage-backend-extra-config": {"nonsense": 1}}, "conf.unknown-key", "nonsense"),
        (
            {"hicache-storage-backend-extra-config": {"prefetch_threshold": "1"}},
            "conf.wrong-type",
            "prefetch",
        ),
        ({"l2": "yes"}, "engine.arg-value", "l2"),
        ({"l2": "off", "l3": "on"}, "engine.l3-needs-l2", "L2"),
        ({"drain": 3}, "engine.arg-value", "drain"),
        ({"log-level": "a\0b"}, "engine.arg-value", "NUL"),
    ],
)
def test_refused(args: dict[str, Any], code: str, text: str) -> None:
    (refusal,) = DRIVER.launch(context(args={"tp-size": 2, **args})).refusals
    assert refusal.code == code
    assert text in f"{refusal.message} {refusal.hint}"


def test_the_same_flag_twice_and_ranks_that_do_not_fit_the_devices() -> None:
    assert codes(DRIVER.launch(context(args={"tp-size": 2, "tp_size": 2})).refusals) == ["engine.arg-twice"]
    (refusal,) = DRIVER.launch(context(args={"tp-size": 4})).refusals
    assert refusal.code == "engine.ranks"
    assert "tp-size = 2" in refusal.hint
    assert DRIVER.launch(context(args={"dp-size": 2})).refusals == ()
    by_devices = DRIVER.launch(context(args={}))  # one rank a device where nothing else is said
    assert by_devices.refusals == ()
    assert value_of(by_devices.argv, "--tp-size") == "2"


def test_the_operators_storage_keys_go_beside_ours() -> None:
    extra = {"prefetch_threshold": 256, "prefetch_timeout_base": 2, "client_timeout_seconds": 30}
    launch = DRIVER.launch(context(args={"tp-size": 2, "hicache-storage-backend-extra-config": extra}))
    assert launch.refusals == ()
    got = json.loads(value_of(launch.argv, "--hicache-storage-backend-extra-config") or "")
    assert {name: got[name] for name in extra} == extra
    assert got["dram_size"] == "50GB"


def test_tiers_can_be_left_off() -> None:
    launch = DRIVER.launch(context(args={"tp-size": 2, "l3": "off"}))
    assert not [argument for argument in launch.argv if "hicache" in argument]
    assert launch.clients == 0
    only_l2 = DRIVER.launch(context(args={"tp-size": 2, "l3": False, "l2": True}))
    assert "--enable-hierarchical-cache" in only_l2.argv
    assert "--hicache-storage-backend" not in only_l2.argv


def test_an_engine_over_two_hosts() -> None:
    hosts: dict[str, Any] = {
        "nodes": ("a", "b"),
        "addresses": {"a": "10.0.0.1", "b": "10.0.0.2"},
        "args": {"tp-size": 4, "nnodes": 2},
    }
    head = DRIVER.launch(context(node_index=0, **hosts))
    assert head.refusals == ()
    assert value_of(head.argv, "--node-rank") == "0"
    assert value_of(head.argv, "--dist-init-addr") == "10.0.0.1:20000"
    assert head.serves_http
    second = context(node_index=1, **hosts)
    launch = DRIVER.launch(second)
    assert value_of(launch.argv, "--node-rank") == "1"
    assert value_of(launch.argv, "--dist-init-addr") == "10.0.0.1:20000"
    assert not launch.serves_http
    assert DRIVER.metrics_url(second) is None
    assert codes(DRIVER.launch(context(args={"tp-size": 4, "nnodes": 2})).refusals) == ["engine.nodes"]


def test_environment() -> None:
    env = DRIVER.launch(context(env={"LD_LIBRARY_PATH": "/mine", "HF_HUB_OFFLINE": "1"})).env
    assert env["PYTHONHASHSEED"] == "0"
    assert env["ASCEND_RT_VISIBLE_DEVICES"] == "0,1"
    assert env["ASCEND_HOME_PATH"] == "/cann"
    assert env["LD_LIBRARY_PATH"] == "/wheel/lib:/mine"
    assert env["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in DRIVER.launch(context()).env


@pytest.mark.parametrize("seed", ["random", "", "-1", "4294967296", "٣"])
def test_a_random_hash_seed_is_refused(seed: str) -> None:
    assert codes(DRIVER.launch(context(env={"PYTHONHASHSEED": seed})).refusals) == ["engine.hash-seed"]


def test_a_hash_seed_of_the_operators_own_is_kept() -> None:
    launch = DRIVER.launch(context(env={"PYTHONHASHSEED": "7"}))
    assert (launch.env["PYTHONHASHSEED"], launch.refusals) == ("7", ())


def test_a_second_source_of_memcache_keys_is_refused() -> None:
    env = {"SGLANG_HICACHE_MEMCACHE_CONFIG_PATH": "/x.json"}
    assert codes(DRIVER.launch(context(env=env)).refusals) == ["engine.env-ours"]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"version": None}, "engine.version-unknown"),
        ({"version": "0.5.9"}, "engine.version-untested"),
        ({"version": "0.6.0"}, "engine.version-untested"),
        ({"host": "0.0.0.0"}, "engine.open-admin"),
        ({"args": {"tp-size": 2, "log-level-http": "warning"}}, "engine.quiet-log"),
        ({"runner": "docker", "python": "python3"}, "engine.memcache-version"),
        ({"args": {"tp-size": 2, "config": "/etc/kvtierd/sglang.yaml"}}, "engine.config-file"),
    ],
)
def test_what_the_operator_should_know(changes: dict[str, Any], code: str) -> None:
    launch = DRIVER.launch(context(**changes))
    assert launch.refusals == ()
    assert code in codes(launch.notes)
    assert code not in codes(DRIVER.launch(context()).notes)


def test_l1_and_l2_are_flushed_together() -> None:
    (near,) = DRIVER.flush(context(), frozenset({"L1", "L2"}))
    assert near.path.startswith("/flush_cache")
    for alone in ("L1", "L2"):
        with pytest.raises(ValueError, match="together"):
            DRIVER.flush(context(), frozenset({alone}))
    (far,) = DRIVER.flush(context(), frozenset({"L3"}))
    assert far.path == "/hicache/storage-backend/clear"
    assert len(DRIVER.flush(context(), frozenset({"L1", "L2", "L3"}))) == 2
    assert DRIVER.flush(context(), frozenset()) == ()
    decode = context(role="decode")
    assert len(DRIVER.flush(decode, frozenset({"L1"}))) == 1
    with pytest.raises(ValueError, match="no L3"):
        DRIVER.flush(decode, frozenset({"L3"}))


def test_l3_at_run_time_takes_a_key_and_an_idle_engine() -> None:
    asked = context(l3_switch=True)
    launch = DRIVER.launch(asked)
    assert launch.refusals == ()
    (attach,), (detach,) = (DRIVER.l3_switch(asked, on=on) for on in (True, False))
    assert (attach.method, attach.path) == ("PUT", "/hicache/storage-backend")
    assert attach.body == {
        "hicache_storage_backend": "npu_memcache",
        "hicache_storage_backend_extra_config_json": value_of(
            launch.argv, "--hicache-storage-backend-extra-config"
        ),
    }
    assert (detach.method, detach.path, detach.body) == ("DELETE", "/hicache/storage-backend", None)
    assert attach.needs_idle
    assert detach.needs_idle
    (key,) = (file for file in launch.files if file.secret)
    assert (key.mode, key.content) == ("0600", "admin-api-key: <secret>\n")
    assert value_of(launch.argv, "--config") == key.path
    assert attach.bearer_file == detach.bearer_file == key.path
    assert not any("admin" in argument and argument != key.path for argument in launch.argv)
    assert "engine.key-readable" in codes(launch.notes)
    calls = DRIVER.flush(asked, frozenset({"L1", "L2", "L3"}))
    assert [call.bearer_file for call in calls] == [key.path, key.path], "SGLang wants the key for these too"


def test_without_the_setting_there_is_no_key() -> None:
    launch = DRIVER.launch(context())
    assert "--config" not in launch.argv
    assert not any(file.secret for file in launch.files)
    assert "engine.l3-at-run-time" in codes(launch.notes)
    assert {call.bearer_file for call in DRIVER.flush(context(), frozenset({"L1", "L2", "L3"}))} == {None}
    with pytest.raises(ValueError, match="l3_switch = true"):
        DRIVER.l3_switch(context(), on=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7"])
def test_an_engine_with_a_key_listens_on_loopback_only(host: str) -> None:
    launch = DRIVER.launch(context(l3_switch=True, host=host))
    (refusal,) = launch.refusals
    assert refusal.code == "engine.key-exposed"
    assert "127.0.0.1" in refusal.hint


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1"])
def test_loopback_is_more_than_one_address(host: str) -> None:
    assert DRIVER.launch(context(l3_switch=True, host=host)).refusals == ()


def test_sglang_reads_one_config_file_only() -> None:
    launch = DRIVER.launch(context(l3_switch=True, args={"config": "/etc/mine.yaml"}))
    assert codes(launch.refusals) == ["engine.config-twice"]
    assert "/etc/mine.yaml" in launch.refusals[0].hint


@pytest.mark.parametrize("changes", [{"role": "decode"}, {"args": {"l3": "off"}}])
def test_an_engine_without_l3_gets_no_key(changes: dict[str, Any]) -> None:
    asked = context(l3_switch=True, **changes)
    launch = DRIVER.launch(asked)
    assert "--config" not in launch.argv
    assert not launch.files
    with pytest.raises(ValueError, match="no L3"):
        DRIVER.l3_switch(asked, on=True)
    assert {call.bearer_file for call in DRIVER.flush(asked, frozenset({"L1", "L2"}))} <= {None}


def test_the_cpu_driver_attaches_files() -> None:
    asked = context(devices=(), args={"l3": "on"}, series="emulated", l2_bytes=GIB, l3_switch=True)
    (attach,) = CPU.l3_switch(asked, on=True)
    assert attach.body == {"hicache_storage_backend": "file"}
    assert "engine.key-readable" in codes(CPU.launch(asked).notes)


def test_the_cpu_driver_uses_no_memcache() -> None:
    launch = CPU.launch(context(devices=(), args={"l3": "on"}, series="emulated", l2_bytes=GIB))
    assert launch.refusals == ()
    assert value_of(launch.argv, "--device") == "cpu"
    assert value_of(launch.argv, "--hicache-storage-backend") == "file"
    assert value_of(launch.argv, "--hicache-io-backend") == "direct"
    assert value_of(launch.argv, "--hicache-size") == "1"
    assert launch.env["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] == "/var/lib/kvtierd/engines/e1/hicache"
    assert (launch.clients, launch.files) == (0, ())
    assert "ASCEND_HOME_PATH" not in launch.env
    assert "engine.cpu" in codes(launch.notes)
    plain = CPU.launch(context(devices=(), args={}, series="emulated"))
    assert not [argument for argument in plain.argv if "hicache" in argument]
    assert value_of(
        CPU.launch(context(args={"attention-backend": "intel_amx"})).argv, "--attention-backend"
    ) == ("intel_amx")


def test_memcache_s_own_tls_is_refused_since_its_json_would_be_without() -> None:
    plain = context()
    conf = plain.local_conf.model_copy(update={"extra": {"ock.mmc.tls.enable": "true"}})
    launch = DRIVER.launch(plain.model_copy(update={"local_conf": conf}))
    assert "engine.memcache-tls" in [r.code for r in launch.refusals]
