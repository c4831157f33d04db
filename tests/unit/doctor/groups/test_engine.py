"""Engines' command lines, seeds and left-over workers, where the fixture hosts have no case."""

import json
import os

import pytest

from kvtierd.host import interpreters
from kvtierd.plan.inventory import MemcacheInstall, NpuProcess, PortOwner
from kvtierd.plan.model import PortUse

from ..bedside import GIB, engine, examined, host, npus, planned, said, written
from ..test_processes import SERVE, process

PY = "/opt/v/bin/python3"
STORE = {
    "kv_connector": "AscendStoreConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"backend": "memcache", "lookup_rpc_port": "0"},
}


def vllm(*options, transfer=STORE, model="/w/Qwen3-32B"):
    text = transfer if isinstance(transfer, str) else json.dumps(transfer)
    return (
        "/opt/v/bin/vllm",
        "serve",
        model,
        *(("--kv-transfer-config", text) if transfer else ()),
        *options,
    )


def installed(memcache="1.3.0", **packages):
    install = MemcacheInstall(runtime="wheel", python=PY, memcache_version=memcache, packages=packages)
    return host(memcache=(install,))


def look(check, root, argv, **fields):
    return examined(f"engine.{check}", root, argv=argv, **fields)


@pytest.mark.parametrize(
    "check", ["command", "versions", "pipeline", "port", "reuse", "hash-seed", "advisories", "hicache-size"]
)
def test_without_an_engine_there_is_nothing_to_say(tmp_path, check):
    assert "does not apply" in look(check, tmp_path, ()).found


@pytest.mark.parametrize(
    ("argv", "severity", "text"),
    [
        (vllm(), "ok", "vllm with AscendStoreConnector"),
        (("ls", "-l"), "note", "none of vllm serve"),
        (vllm(transfer=None), "note", "nothing is put into L3"),
        (vllm(transfer='{"use_layerwise": false # no\n}'), "fail", "not JSON (column"),
        (vllm(transfer="[]"), "fail", "not a JSON object"),
        (vllm(transfer={"kv_role": "kv_both"}), "fail", "no kv_connector"),
        (vllm(transfer={**STORE, "kv_role": "both"}), "fail", "kv_role is 'both'"),
        (vllm(transfer={**STORE, "kv_connector_extra_config": {}}), "warn", "default is mooncake"),
        (vllm("--config", "/etc/vllm.yaml"), "note", "/etc/vllm.yaml"),
    ],
)
def test_the_command_line(tmp_path, argv, severity, text):
    outcome = look("command", tmp_path, argv)
    assert outcome.severity == severity
    assert text in outcome.found


@pytest.mark.parametrize(
    ("options", "severity"),
    [
        ((), "fail"),
        (("--enforce-eager",), "ok"),
        (("--compilation-config", '{"cudagraph_mode": "PIECEWISE"}'), "ok"),
        (("--compilation-config.cudagraph_mode", "PIECEWISE"), "ok"),
        (("--compilation-config", '{"cudagraph_mode": "FULL"}'), "fail"),
    ],
)
def test_layerwise_transfer_needs_graphs_cut_at_the_layers(tmp_path, options, severity):
    extra = {**STORE["kv_connector_extra_config"], "use_layerwise": True}
    argv = vllm(*options, transfer={**STORE, "kv_connector_extra_config": extra})
    assert look("command", tmp_path, argv).severity == severity


@pytest.mark.parametrize(
    ("versions", "key", "severity", "text"),
    [
        ({"vllm": "0.23.0", "vllm_ascend": "0.23.0rc1"}, "lookup_rpc_port", "ok", "vllm-ascend 0.23.0rc1"),
        ({"vllm_ascend": "0.23.0"}, "mooncake_rpc_port", "warn", "does not know mooncake_rpc_port"),
        ({"vllm_ascend": "0.13.0"}, "lookup_rpc_port", "warn", "does not know lookup_rpc_port"),
        ({"vllm_ascend": "0.13.0"}, "mooncake_rpc_port", "note", "6229"),
        ({"vllm": "0.22.1", "vllm_ascend": "0.23.0"}, "lookup_rpc_port", "fail", "with vllm 0.22.1"),
        ({"memcache": "1.0.4", "vllm_ascend": "0.23.0"}, "lookup_rpc_port", "warn", "MemCache 1.0.4"),
        ({}, "lookup_rpc_port", "unknown", "version of vllm-ascend is not known"),
    ],
)
def test_versions(tmp_path, versions, key, severity, text):
    transfer = {**STORE, "kv_connector_extra_config": {"backend": "memcache", key: "0"}}
    inventory = installed(
        **{name.replace("_", "-") if name != "memcache" else name: v for name, v in versions.items()}
    )
    outcome = look("versions", tmp_path, vllm(transfer=transfer), inventory=inventory)
    assert outcome.severity == severity
    assert text in outcome.found


def test_an_option_of_an_older_release(tmp_path):
    old = vllm("--additional-config", '{"ascend_scheduler_config": {}}')
    inventory = installed(**{"vllm-ascend": "0.23.0"})
    assert "ascend_scheduler_config" in look("versions", tmp_path, old, inventory=inventory).found


def test_the_interpreter_of_a_bare_name_is_found_by_the_scripts_first_line(tmp_path):
    written(tmp_path, {"/usr/local/bin/vllm": "#!/opt/x/bin/python3.11\nimport sys\n"})
    answer = {"python": "3.11.9", "versions": {}, "dirs": [], "packages": {"vllm": "0.8.4"}}
    probe = said(
        *("/opt/x/bin/python3.11", "-I", "-c", interpreters._PROBE, "sglang", "vllm", "vllm-ascend"),
        stdout=f"\nKVTIERD-PROBE {json.dumps(answer)}\n",
    )
    argv = ("vllm", "serve", "/m", "--kv-transfer-config", json.dumps(STORE))
    outcome = look("advisories", tmp_path, argv, commands=[probe])
    assert outcome.severity == "fail"
    assert "0.8.4" in outcome.found


def test_a_pipe_in_place_of_the_program_is_unknown(tmp_path):
    (tmp_path / "usr/bin").mkdir(parents=True)
    os.mkfifo(tmp_path / "usr/bin/vllm")
    outcome = look("versions", tmp_path, ("vllm", "serve", "/m"))
    assert outcome.severity == "unknown"
    assert "no answer within" in outcome.found


@pytest.mark.parametrize(
    ("version", "severity"), [("0.8.4", "fail"), ("0.8.5", "ok"), ("0.8.5.post1", "ok"), ("0.23.0", "ok")]
)
def test_the_advisories_floor(tmp_path, version, severity):
    assert look("advisories", tmp_path, vllm(), inventory=installed(vllm=version)).severity == severity


@pytest.mark.parametrize(
    ("options", "severity"),
    [((), "ok"), (("-pp", "1"), "ok"), (("-pp", "2"), "fail"), (("--pipeline_parallel_size=4",), "fail")],
)
def test_pipeline_parallelism(tmp_path, options, severity):
    assert look("pipeline", tmp_path, vllm(*options)).severity == severity


def multi(outer=None, inner=None):
    child = {**STORE, **({"kv_load_failure_policy": inner} if inner else {})}
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        **({"kv_load_failure_policy": outer} if outer else {}),
        "kv_connector_extra_config": {"connectors": [child]},
    }


@pytest.mark.parametrize(
    ("transfer", "model", "severity"),
    [
        (STORE, "Qwen3-32B", "ok"),
        ({**STORE, "kv_load_failure_policy": "fail"}, "Qwen3.5-122B", "ok"),
        ({**STORE, "kv_load_failure_policy": "recompute"}, "Qwen3-32B", "warn"),
        ({**STORE, "kv_load_failure_policy": "recompute"}, "Qwen3.5-122B", "fail"),
        (multi(outer="recompute"), "Qwen3-32B", "warn"),
        (multi(inner="recompute"), "Qwen3-32B", "warn"),
        (multi(outer="fail"), "Qwen3-32B", "ok"),
        (
            {"kv_connector": "X", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"},
            "Qwen3-32B",
            "ok",
        ),
    ],
)
def test_failure_policy(tmp_path, transfer, model, severity):
    assert look("failure-policy", tmp_path, vllm(transfer=transfer, model=model)).severity == severity


class TestPort:
    def test_taken_by_a_listener_or_by_the_plan(self, tmp_path):
        taken = host(ports_in_use=(PortOwner(address="::", port=8113),))
        assert look("port", tmp_path, vllm("--port", "8113"), inventory=taken).severity == "fail"
        plan = planned(ports=(PortUse(port=8113, unit="kvtier-meta", purpose="MetaService HTTP"),))
        settings = {"node": {"series": "800I-A2"}, "pool": {"dram": "8GiB"}}
        outcome = look("port", tmp_path, vllm("--port", "8113"), plan=plan, settings=settings)
        assert outcome.severity == "fail"
        assert "MetaService HTTP" in outcome.found

    @pytest.mark.parametrize(
        ("url", "severity"),
        [
            ("http://127.0.0.1:8113", "fail"),
            ("127.0.0.1:8113", "fail"),
            ("http://127.0.0.1:8000", "ok"),
            ("", "ok"),
        ],
    )
    def test_the_metrics_port_of_a_hand_written_file(self, tmp_path, url, severity):
        conf = tmp_path / "mmc-meta.conf"
        conf.write_text(f"ock.mmc.meta_service.metrics_url = {url}\n")
        outcome = look("port", tmp_path / "root", vllm("--port", "8113"), confs=[conf])
        assert outcome.severity == severity

    def test_a_pipe_as_conf(self, tmp_path):
        os.mkfifo(tmp_path / "conf")
        assert look("port", tmp_path, vllm(), confs=[tmp_path / "conf"]).severity == "unknown"

    def test_the_two_defaults_are_one_port(self, tmp_path):
        assert look("port", tmp_path, vllm()).severity == "warn"
        assert look("port", tmp_path, vllm(transfer=None)).severity == "ok"


class TestLookupPort:
    def running(self, root, pid, number, cgroup=None):
        transfer = json.dumps(
            {**STORE, "kv_connector_extra_config": {"backend": "memcache", "lookup_rpc_port": number}}
        )
        process(root, pid, 1, "vllm", *SERVE, "--kv-transfer-config", transfer, cgroup=cgroup)

    def test_two_that_run(self, tmp_path):
        self.running(tmp_path, 20, "0")
        self.running(tmp_path, 21, "1")
        assert look("lookup-port", tmp_path, ()).severity == "ok"
        self.running(tmp_path, 22, "1")
        outcome = look("lookup-port", tmp_path, ())
        assert outcome == ("fail", "vllm (pid 21) and vllm (pid 22) share 1", "")

    def test_containers_do_not_share_sockets(self, tmp_path):
        self.running(tmp_path, 20, "0")
        self.running(tmp_path, 21, "0", cgroup=f"0::/docker/{'ab' * 32}\n")
        assert look("lookup-port", tmp_path, ()).severity == "ok"

    def test_a_planned_engine_may_be_the_one_that_runs(self, tmp_path):
        self.running(tmp_path, 20, "0")
        plan = planned(engine("a", argv=vllm()))
        assert look("lookup-port", tmp_path, (), plan=plan).severity == "ok"
        both = planned(engine("a", argv=vllm()), engine("b", argv=vllm()))
        assert look("lookup-port", tmp_path, (), plan=both).severity == "fail"


class TestSeeds:
    @pytest.mark.parametrize(
        ("seeds", "severity"),
        [
            (("0", "0"), "ok"),
            (("0", "1"), "fail"),
            (("random", "random"), "fail"),
            (("4294967296", "4294967296"), "fail"),
            ((None, None), "warn"),
        ],
    )
    def test_planned(self, tmp_path, seeds, severity):
        units = [
            engine(f"e{n}", argv=vllm(), env={} if seed is None else {"PYTHONHASHSEED": seed})
            for n, seed in enumerate(seeds)
        ]
        assert look("hash-seed", tmp_path, (), plan=planned(*units)).severity == severity

    @pytest.mark.parametrize(
        ("server", "worker", "severity"),
        [
            (["PYTHONHASHSEED=0"], ["PYTHONHASHSEED=0"], "ok"),
            (["PYTHONHASHSEED=0"], [], "fail"),
            (["PYTHONHASHSEED=0"], ["PYTHONHASHSEED=1"], "fail"),
            (["PYTHONHASHSEED=random"], ["PYTHONHASHSEED=random"], "fail"),
            ([], [], "warn"),
            (None, None, "unknown"),
        ],
    )
    def test_running(self, tmp_path, server, worker, severity):
        process(tmp_path, 20, 1, "vllm", *SERVE, env=server)
        process(tmp_path, 21, 20, "VLLM::Worker_TP", "VLLM::Worker_TP0", env=worker)
        assert look("running-seed", tmp_path, ()).severity == severity


class TestStaleWorkers:
    def test_one_that_holds_a_card_is_named_with_its_device(self, tmp_path):
        process(tmp_path, 1, 0, "systemd")
        process(tmp_path, 20, 1, "VLLM::EngineCor", "VLLM::EngineCore")
        inventory = host(npus=npus(4), npu_processes=(NpuProcess(card=3, pid=20),))
        outcome = look("stale-workers", tmp_path, (), inventory=inventory)
        assert outcome.severity == "fail"
        assert outcome.found.endswith("holds device 3")
        assert outcome.fix.startswith("kill 20;")

    def test_one_without_a_card(self, tmp_path):
        process(tmp_path, 1, 0, "systemd")
        process(tmp_path, 20, 1, "VLLM::EngineCor", "VLLM::EngineCore")
        assert look("stale-workers", tmp_path, ()).severity == "warn"

    def test_a_root_without_proc_is_unknown(self, tmp_path):
        assert look("stale-workers", tmp_path, ()).severity == "unknown"


@pytest.mark.parametrize(
    ("options", "severity"),
    [
        ((), "ok"),
        (("--block-size", "128"), "ok"),
        (("--block-size", "64"), "warn"),
        (("--no-enable-prefix-caching",), "note"),
    ],
)
def test_reuse(tmp_path, options, severity):
    inventory = installed(**{"vllm-ascend": "0.23.0"})
    assert look("reuse", tmp_path, vllm(*options), inventory=inventory).severity == severity


def sglang(*options, model="/w/Qwen3-32B"):
    return (PY, "-m", "sglang.launch_server", "--model-path", model, "--enable-hierarchical-cache", *options)


EXTRA = json.dumps(
    {
        "meta_service_url": "tcp://127.0.0.1:5000",
        "config_store_url": "tcp://127.0.0.1:6000",
        "protocol": "device_rdma",
        "dram_size": "32gb",
        "max_dram_size": "32gb",
    }
)
L3 = ("--hicache-io-backend", "kernel_ascend", "--hicache-storage-backend", "npu_memcache",
      "--hicache-storage-backend-extra-config")  # fmt: skip


class TestSglang:
    @pytest.mark.parametrize(
        ("options", "severity", "text"),
        [
            ((*L3, EXTRA), "ok", "npu_memcache"),
            (L3[:-1], "warn", "127.0.0.1:5000 with 1 GB"),
            ((*L3, "{"), "fail", ""),
            ((*L3, EXTRA.replace('"32gb"', "32", 1)), "fail", "dram_size"),
            ((*L3, EXTRA.replace("dram_size", "dram_sise", 1)), "fail", "dram_sise"),
            (("--hicache-storage-backend", "ascend_memcache"), "warn", ""),
            (("--hicache-storage-backend", "file"), "ok", "file"),
        ],
    )
    def test_storage(self, tmp_path, options, severity, text):
        inventory = host(npus=npus(8), memcache=installed(sglang="0.5.23").memcache)
        outcome = look("sglang-storage", tmp_path, sglang(*options), inventory=inventory)
        assert outcome.severity == severity, outcome
        assert text in outcome.found

    def test_storage_hangs_on_the_second_tier(self, tmp_path):
        argv = tuple(word for word in sglang(*L3, EXTRA) if word != "--enable-hierarchical-cache")
        assert "without --enable-hierarchical-cache" in look("sglang-storage", tmp_path, argv).found

    @pytest.mark.parametrize(
        ("options", "severity"),
        [
            (("--hicache-storage-prefetch-policy", "wait_complete"), "ok"),
            ((), "note"),
            (("--hicache-write-policy", "write_back"), "warn"),
            (("--hicache-write-policy", "write_through_selective"), "note"),
        ],
    )
    def test_policy(self, tmp_path, options, severity):
        argv = sglang("--hicache-storage-backend", "npu_memcache", *options)
        assert look("sglang-policy", tmp_path, argv).severity == severity

    @pytest.mark.parametrize(
        ("options", "severity", "text"),
        [
            (("--hicache-size", "20", "--tp", "8"), "ok", "20 GB x 8 ranks"),
            (("--hicache-size", "150", "--tp", "8"), "fail", "the host has 512 GiB"),
            (("--hicache-size", "56", "--tp", "8"), "warn", "400 GiB are available"),
            (("--hicache-size", "150", "--tp", "8", "--nnodes", "4"), "ok", "150 GB x 2 ranks"),
            (("--hicache-size", "30", "--tp", "8", "--dp", "8", "--enable-dp-attention"), "ok", "x 8 ranks"),
            ((), "note", "2 times L1"),
        ],
    )
    def test_size(self, tmp_path, options, severity, text):
        outcome = look("hicache-size", tmp_path, sglang(*options))
        assert outcome.severity == severity
        assert text in outcome.found

    def test_a_hybrid_model_takes_it_twice_before_0_5_23(self, tmp_path):
        argv = sglang("--hicache-size", "20", "--tp", "8", model="/w/gpt-oss-120b")
        for version, taken in (("0.5.22", "x 2 pools"), ("0.5.23", "= 149.01 GiB")):
            assert taken in look("hicache-size", tmp_path, argv, inventory=installed(sglang=version)).found

    def test_the_pool_counts(self, tmp_path):
        plan = planned().model_copy(
            update={"pool": planned().pool.model_copy(update={"capacity_bytes": 480 * GIB})}
        )
        settings = {"node": {"series": "800I-A2"}, "pool": {"dram": "8GiB"}}
        argv = sglang("--hicache-size", "20", "--tp", "8")
        assert look("hicache-size", tmp_path, argv, plan=plan, settings=settings).severity == "fail"
