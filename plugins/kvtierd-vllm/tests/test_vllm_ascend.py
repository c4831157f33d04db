"""The driver vllm-ascend: arguments, versions, what it refuses and why."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from typing import Any

import pluggy
import pytest
from kvtierd_vllm.arguments import command_line
from kvtierd_vllm.ascend import VllmAscendDriver
from kvtierd_vllm.forms import FORMS, form_of
from packaging.specifiers import SpecifierSet
from vllm_contexts import TWO_NODES, context, noted, option, refused, transfer

from kvtierd import hookspecs
from kvtierd.plan.engine import Remarks
from kvtierd.plan.inventory import Inventory
from kvtierd.plan.model import HttpProbe

DRIVER = VllmAscendDriver()


def launch(**changes: Any) -> Any:
    return DRIVER.launch(context(**changes))


def with_args(**args: Any) -> Any:
    return launch(args={"tensor-parallel-size": 2, **{k.replace("_", "-"): v for k, v in args.items()}})


def with_transfer(table: dict[str, Any], **changes: Any) -> Any:
    return launch(args={"tensor-parallel-size": 2, "kv-transfer": table}, **changes)


def test_without_l3_it_has_no_connector_and_no_ranks() -> None:
    made = with_args(l3="off")
    assert "--kv-transfer-config" not in made.argv
    assert made.clients == 0
    assert refused(made) == []
    assert "engine.l3-off-role" in refused(
        launch(role="prefill", args={"tensor-parallel-size": 2, "l3": "off"})
    )


def test_found_through_its_entry_point() -> None:
    (entry,) = metadata.entry_points(group=hookspecs.ENTRY_POINT_GROUP, name="vllm")
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(entry.load())
    manager.check_pending()
    (drivers,) = manager.hook.kvtierd_engine_drivers()
    assert [(d.name, d.package) for d in drivers] == [("vllm-ascend", "vllm-ascend"), ("vllm-cpu", "vllm")]


def test_importing_it_costs_little() -> None:
    heavy = {"torch", "numpy", "aiohttp", "prometheus_client", "vllm", "memcache_hybrid"}
    code = f"import sys, kvtierd_vllm.plugin; print(*({heavy!r} & set(sys.modules)))"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.split() == []


def test_a_plain_engine() -> None:
    made = launch()
    assert (refused(made), noted(made)) == ([], [])
    assert made.clients == 2
    assert made.serves_http
    assert made.readiness.probes == (HttpProbe(url="http://127.0.0.1:8113/health"),)
    assert made.readiness.deadline_seconds == 1800
    assert DRIVER.metrics_url(context()) == "http://127.0.0.1:8113/metrics"
    assert DRIVER.metrics_url(context(host="::")) == "http://[::1]:8113/metrics"


# -- arguments


@pytest.mark.parametrize(
    ("value", "argv"),
    [
        (True, ("--x-y",)),
        (False, ("--no-x-y",)),
        (0, ("--x-y", "0")),
        (0.5, ("--x-y", "0.5")),
        ("a b", ("--x-y", "a b")),
        ("-1", ("--x-y=-1",)),
        (-1, ("--x-y=-1",)),
        (["a", "b"], ("--x-y", "a", "b")),
        ({"a": [1, True], "b": "ü"}, ("--x-y", '{"a":[1,true],"b":"ü"}')),
        ([{"a": 1}], ("--x-y", '[{"a":1}]')),
    ],
)
def test_values(value: Any, argv: tuple[str, ...]) -> None:
    findings = Remarks()
    assert command_line({"x-y": value}, findings) == argv
    assert findings.refusals == []


@pytest.mark.parametrize("value", ["", [], {}, None, {"a": object()}, object()])
def test_values_that_say_nothing_are_refused(value: Any) -> None:
    findings = Remarks()
    assert command_line({"x-y": value}, findings) == ()
    assert [r.code for r in findings.refusals] == ["engine.bad-argument"]


def test_spelling_is_kept_and_the_same_option_twice_is_refused() -> None:
    findings = Remarks()
    assert command_line({"max-num_seqs": 20}, findings) == ("--max-num_seqs", "20")
    command_line({"max-num_seqs": 20, "max_num_seqs": 30}, findings)
    assert [r.code for r in findings.refusals] == ["engine.argument-twice"]


@pytest.mark.parametrize("key", ["x y", "--x", "", "x=y", "x;y"])
def test_what_is_no_option_is_refused(key: str) -> None:
    findings = Remarks()
    command_line({key: 1}, findings)
    assert findings.refusals


@pytest.mark.parametrize(
    "key", ["port", "host", "model", "kv-transfer-config", "kv_transfer_config", "headless"]
)
def test_what_kvtierd_sets_is_refused_with_a_hint(key: str) -> None:
    made = launch(args={"tensor-parallel-size": 2, key: "1"})
    assert refused(made) == ["engine.owned-argument"]
    assert made.refusals[0].hint


# -- versions


@pytest.mark.parametrize(
    ("version", "key"),
    [
        ("0.13.0", "mooncake_rpc_port"),
        ("0.13.0rc2", "mooncake_rpc_port"),
        ("v0.13.1.post1", "mooncake_rpc_port"),
        ("0.17.0", "lookup_rpc_port"),
        ("0.23.0", "lookup_rpc_port"),
        ("0.27.1rc1+g12", "lookup_rpc_port"),
    ],
)
def test_the_version_decides_the_form(version: str, key: str) -> None:
    made = launch(version=version)
    assert transfer(made)["kv_connector_extra_config"] == {"backend": "memcache", key: "0"}
    assert noted(made) == []


@pytest.mark.parametrize("version", [None, "0.12.0", "0.15.1", "0.28.0", "1.0", "nightly"])
def test_an_unknown_version_is_said_with_what_is_assumed(version: str | None) -> None:
    made = launch(version=version)
    assert noted(made) == ["engine.version-unknown"]
    assert "lookup_rpc_port" in transfer(made)["kv_connector_extra_config"]
    assert "written as for 0.17 to 0.27" in made.notes[0].message
    assert (version or "the version") in made.notes[0].message


def test_the_declared_versions_are_those_of_the_table() -> None:
    declared = SpecifierSet(DRIVER.versions)
    for minor in range(10, 31):
        inside = any(f.first <= (0, minor) < f.before for f in FORMS)
        assert (f"0.{minor}.0" in declared) == inside
        findings = Remarks()
        form_of(f"0.{minor}.0", findings)
        assert bool(findings.notes) != inside


def test_a_dropped_switch_goes_when_it_is_off_and_is_refused_when_on() -> None:
    off = with_args(additional_config={"ascend_scheduler_config": {"enabled": False}})
    assert noted(off) == ["engine.option-dropped"]
    assert "--additional-config" not in off.argv
    on = with_args(additional_config={"ascend_scheduler_config": {"enabled": True}, "x": 1})
    assert refused(on) == ["engine.option-dropped"]
    old = launch(
        version="0.13.0",
        args={"tensor-parallel-size": 2, "additional_config": {"ascend_scheduler_config": {"enabled": True}}},
    )
    assert (refused(old), noted(old)) == ([], [])


# -- the KV connector


def test_the_connector_s_options_are_typed_and_named() -> None:
    made = with_transfer({"load_async": True, "consumer_is_to_put": False})
    assert transfer(made)["kv_connector_extra_config"] == {
        "backend": "memcache",
        "lookup_rpc_port": "0",
        "load_async": True,
        "consumer_is_to_put": False,
    }
    wrong = with_transfer({"load_asinc": True})
    assert refused(wrong) == ["engine.kv-transfer"]
    assert wrong.refusals[0].hint == "did you mean load_async?"
    assert refused(with_transfer({"load_async": "yes"})) == ["engine.kv-transfer"]
    assert refused(launch(args={"tensor-parallel-size": 2, "kv-transfer": "x"})) == ["engine.kv-transfer"]


def test_recompute_is_warned_of_and_refused_for_hybrid_models() -> None:
    made = with_transfer({"kv_load_failure_policy": "recompute"}, version="0.22.1rc1")
    assert transfer(made)["kv_load_failure_policy"] == "recompute"
    assert (refused(made), noted(made)) == ([], ["engine.recompute-risk"])
    assert "12522" in made.notes[0].message
    early = with_transfer({"kv_load_failure_policy": "recompute"}, version="0.18.0")
    assert "does not report" in early.notes[0].message
    for model in ("/w/DeepSeek-V4", "Qwen3.5-35B", "qwen3-next-80b"):
        hybrid = with_transfer({"kv_load_failure_policy": "recompute"}, model=model)
        assert refused(hybrid) == ["engine.recompute-hybrid"]
    said = with_transfer({"kv_load_failure_policy": "recompute", "hybrid": True})
    assert refused(said) == ["engine.recompute-hybrid"]
    not_hybrid = with_transfer(
        {"kv_load_failure_policy": "recompute", "hybrid": False}, model="DeepSeek-V4-distilled"
    )
    assert refused(not_hybrid) == []
    assert refused(with_transfer({"kv_load_failure_policy": "recompute"}, version="0.13.0")) == [
        "engine.kv-transfer"
    ]


def test_a_role_needs_the_split_of_both_sides() -> None:
    assert refused(launch(role="prefill")) == ["engine.kv-transfer"]
    made = with_transfer(
        {"prefill": {"tp_size": 2}, "decode": {"tp_size": 4, "dp_size": 2}, "kv_port": 30000}, role="decode"
    )
    assert refused(made) == []
    assert transfer(made)["kv_connector_extra_config"]["connectors"][0] == {
        "kv_connector": "MooncakeConnectorV1",
        "kv_role": "kv_consumer",
        "kv_port": "30000",
        "kv_connector_extra_config": {
            "prefill": {"dp_size": 1, "tp_size": 2},
            "decode": {"dp_size": 2, "tp_size": 4},
        },
    }
    assert list(made.extra_ports.values()) == [30000]
    assert refused(with_transfer({"kv_port": 30000})) == ["engine.kv-transfer"]


def test_prefill_and_decode_on_several_hosts_use_their_links() -> None:
    sides = {"prefill": {"tp_size": 2}, "decode": {"tp_size": 2}}
    made = with_transfer(sides, role="prefill", **TWO_NODES)
    assert made.env["HCCL_IF_IP"] == "10.1.0.1"
    assert made.env["HCCL_SOCKET_IFNAME"] == "enp1s0"
    assert "HCCL_IF_IP" not in with_transfer(sides, role="prefill").env


def test_layerwise_needs_piecewise_graphs() -> None:
    table = {"use_layerwise": True}
    assert refused(with_args(kv_transfer=table)) == ["engine.layerwise-graphs"]
    full = {"cudagraph_mode": "FULL_DECODE_ONLY"}
    assert refused(with_args(kv_transfer=table, compilation_config=full)) == ["engine.layerwise-graphs"]
    cut = {"cudagraph_mode": "PIECEWISE"}
    assert refused(with_args(kv_transfer=table, compilation_config=cut)) == []
    assert refused(with_args(kv_transfer=table, enforce_eager=True)) == []


# -- devices and hosts


def test_pipeline_parallelism_is_refused() -> None:
    assert "engine.pipeline-parallel" in refused(
        launch(args={"tensor-parallel-size": 1, "pipeline-parallel-size": 2})
    )


def test_workers_and_devices_must_fit() -> None:
    assert refused(launch(devices=())) == ["engine.no-devices"]
    assert refused(launch(devices=(0,))) == ["engine.too-few-devices"]
    assert noted(launch(devices=(0, 1, 2))) == ["engine.devices-unused"]
    assert launch(args={"data_parallel_size": 2}).clients == 2
    assert refused(launch(args={"tensor-parallel-size": "two"})) == ["engine.bad-argument"]


def spanning(**changes: Any) -> Any:
    args = {"tensor-parallel-size": 1, "data-parallel-size": 4, "data-parallel-size-local": 2}
    return context(**{"args": args, **TWO_NODES, **changes})


def test_ranks_start_where_the_node_s_place_says() -> None:
    follower = DRIVER.launch(spanning(node="b", node_index=1))
    assert option(follower, "--data-parallel-start-rank") == "2"
    assert option(follower, "--data-parallel-address") == "10.1.0.1"
    assert option(follower, "--data-parallel-rpc-port") == "13389"
    assert follower.env["HCCL_IF_IP"] == "10.1.0.2"
    assert not follower.serves_http
    assert DRIVER.metrics_url(spanning(node="b", node_index=1)) is None
    assert not any(isinstance(p, HttpProbe) for p in follower.readiness.probes)
    head = DRIVER.launch(spanning())
    assert "--headless" not in head.argv
    assert "--data-parallel-start-rank" not in head.argv
    assert list(head.extra_ports.values()) == [13389]
    assert head.serves_http


def test_api_servers_are_for_the_head() -> None:
    args = {
        "tensor-parallel-size": 2,
        "data-parallel-size": 2,
        "data-parallel-size-local": 1,
        "api_server_count": 4,
    }
    assert "--api_server_count" in DRIVER.launch(spanning(args=args)).argv
    assert "--api_server_count" not in DRIVER.launch(spanning(args=args, node="b", node_index=1)).argv


def test_an_unknown_interface_is_said() -> None:
    made = DRIVER.launch(spanning(nic=None))
    assert noted(made) == ["engine.nic-unknown"]
    assert "HCCL_SOCKET_IFNAME" not in made.env
    assert made.env["HCCL_IF_IP"] == "10.1.0.1"


def test_ranks_that_do_not_add_up_are_refused() -> None:
    args = {"tensor-parallel-size": 2, "data-parallel-size": 3, "data-parallel-size-local": 1}
    assert refused(DRIVER.launch(spanning(args=args))) == ["engine.data-parallel"]
    assert "engine.head-address" in refused(DRIVER.launch(spanning(addresses={})))
    bad = {**args, "data-parallel-size": 2, "data-parallel-rpc-port": 99_999}
    assert refused(DRIVER.launch(spanning(args=bad))) == ["engine.bad-argument"]


def test_without_a_split_every_node_runs_an_engine_of_its_own() -> None:
    made = launch(node_index=1, **(TWO_NODES | {"node": "b"}))
    assert "--headless" not in made.argv
    assert DRIVER.metrics_url(context(node_index=1, **(TWO_NODES | {"node": "b"}))) is not None


# -- environment


@pytest.mark.parametrize("seed", ["random", "", "-1", "0x1", "4294967296", "١"])
def test_a_hash_seed_that_others_cannot_have_is_refused(seed: str) -> None:
    made = launch(env={"PYTHONHASHSEED": seed})
    assert refused(made) == ["engine.hash-seed"]


def test_a_hash_seed_of_the_operator_s_is_used() -> None:
    made = launch(env={"PYTHONHASHSEED": "1024", "HCCL_BUFFSIZE": "512"})
    assert refused(made) == []
    assert (made.env["PYTHONHASHSEED"], made.env["HCCL_BUFFSIZE"]) == ("1024", "512")


@pytest.mark.parametrize("name", ["MMC_LOCAL_CONFIG_PATH", "ASCEND_RT_VISIBLE_DEVICES"])
def test_variables_that_kvtierd_sets_are_refused(name: str) -> None:
    assert refused(launch(env={name: "x"})) == ["engine.owned-environment"]


def test_memcache_s_libraries_come_first_and_the_operator_s_last() -> None:
    made = launch(env={"LD_LIBRARY_PATH": "/mine"})
    libraries = made.env["LD_LIBRARY_PATH"].split(":")
    assert libraries[0] == "/wheel/lib"
    assert libraries[-1] == "/mine"
    assert "/usr/local/Ascend/nnal/atb/latest/atb/cxx_abi_1/lib" in libraries
    assert made.env["PATH"].split(":")[0] == "/venv/bin"


def test_without_cann_it_is_said_and_a_container_has_its_own() -> None:
    bare = Inventory(hostname="n1", machine="aarch64", memory_total_bytes=1, memory_available_bytes=1)
    made = launch(inventory=bare)
    assert noted(made) == ["engine.cann-unknown"]
    assert "ASCEND_OPP_PATH" not in made.env
    boxed = launch(inventory=bare, runner="docker")
    assert noted(boxed) == []
    assert boxed.env["ASCEND_OPP_PATH"] == "/usr/local/Ascend/ascend-toolkit/latest/opp"


# -- flush


def test_flushing_needs_the_developer_endpoints_and_never_claims_l3() -> None:
    with pytest.raises(ValueError, match="VLLM_SERVER_DEV_MODE"):
        DRIVER.flush(context(), frozenset({"L1"}))
    on = context(env={"VLLM_SERVER_DEV_MODE": "1"})
    assert [c.path for c in DRIVER.flush(on, frozenset({"L1"}))] == ["/reset_prefix_cache"]
    assert DRIVER.flush(on, frozenset()) == ()
    with pytest.raises(ValueError, match="purge"):
        DRIVER.flush(on, frozenset({"L1", "L3"}))
    with pytest.raises(ValueError, match="L2"):
        DRIVER.flush(on, frozenset({"L2"}))
