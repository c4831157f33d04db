"""The engine commands that come out of the examples: against the practice guide, and against the golden files."""

from __future__ import annotations

import json
from typing import Any

import pytest
from vllm_plans import CURRENT, PLANS, cases, golden, planned, prefill_and_decode, settings_of, several

from kvtierd.plan.model import UnitSpec

CASES = cases()

# The guide's commands (vLLM Ascend with MemCache, 0.13, single host and two hosts), option by option.
SINGLE_HOST: dict[str, Any] = {
    "--model": "/root/.cache/DeepSeek-R1-Distill-Qwen-32B-w8a8",
    "--served-model-name": "qwen3",
    "--trust-remote-code": None,
    "--async-scheduling": None,
    "--quantization": "ascend",
    "--distributed-executor-backend": "mp",
    "--tensor-parallel-size": "2",
    "--port": "8113",
    "--max-model-len": "32K",
    "--compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"},
    "--additional_config": {
        "ascend_scheduler_config": {"enabled": False},
        "enable_shared_expert_dp": False,
        "chunked_prefill_for_mla": True,
    },
    "--gpu-memory-utilization": "0.9",
    "--kv-transfer-config": {
        "kv_connector": "AscendStoreConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"backend": "memcache", "mooncake_rpc_port": "0"},
    },
}
SINGLE_HOST_ENV = {
    "VLLM_USE_V1": "1",
    "ASCEND_RT_VISIBLE_DEVICES": "0,1",
    "ACL_OP_INIT_MODE": "1",
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    "PYTHONHASHSEED": "0",
    "HCCL_BUFFSIZE": "1024",
}
HEAD: dict[str, Any] = {
    "--host": "0.0.0.0",
    "--port": "8004",
    "--enforce-eager": None,
    "--data-parallel-size": "2",
    "--data-parallel-size-local": "1",
    "--api-server-count": "2",
    "--data-parallel-address": "10.20.0.10",
    "--data-parallel-rpc-port": "13389",
    "--tensor-parallel-size": "8",
    "--seed": "1024",
    "--served-model-name": "deepseek",
    "--max-model-len": "65536",
    "--max-num-batched-tokens": "16384",
    "--trust-remote-code": None,
    "--gpu-memory-utilization": "0.9",
    "--quantization": "ascend",
    "--max-num_seqs": "20",
    "--enable-expert-parallel": None,
    "--no-enable-prefix-caching": None,
    "--additional_config": SINGLE_HOST["--additional_config"],
    "--kv-transfer-config": SINGLE_HOST["--kv-transfer-config"],
}
FOLLOWER = {k: v for k, v in HEAD.items() if k != "--api-server-count"} | {
    "--headless": None,
    "--data-parallel-start-rank": "1",
}
TWO_HOSTS_ENV = {
    "GLOO_SOCKET_IFNAME": "enp189s0f0",
    "TP_SOCKET_IFNAME": "enp189s0f0",
    "HCCL_SOCKET_IFNAME": "enp189s0f0",
    "OMP_PROC_BIND": "false",
    "OMP_NUM_THREADS": "10",
    "PYTHONHASHSEED": "0",
    "HCCL_BUFFSIZE": "1024",
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    "VLLM_USE_V1": "1",
}


def options(argv: tuple[str, ...]) -> dict[str, Any]:
    """--x [value] as a dict, JSON parsed."""
    found: dict[str, Any] = {}
    pieces = [p for a in argv for p in (a.split("=", 1) if a.startswith("--") else [a])]
    for here, after in zip(pieces, [*pieces[1:], "--end"], strict=True):
        if here.startswith("--"):
            value = None if after.startswith("--") else after
            found[here] = json.loads(value) if value and value.startswith("{") else value
    return found


def engine(name: str, engine_name: str | None = None) -> UnitSpec:
    units = [u for u in CASES[name].units if u.kind == "engine"]
    return next(u for u in units if engine_name in {None, u.name})


def test_the_guide_s_single_host() -> None:
    unit = engine("vllm-ascend-0.13-single-host")
    assert unit.argv[:3] == (
        "/usr/local/python3.11.14/bin/python3",
        "-m",
        "vllm.entrypoints.openai.api_server",
    )
    assert options(unit.argv) == SINGLE_HOST | {"--host": "127.0.0.1"}
    assert unit.env.items() >= SINGLE_HOST_ENV.items()
    assert unit.env["MMC_LOCAL_CONFIG_PATH"] in {f.path for f in CASES["vllm-ascend-0.13-single-host"].files}
    libraries = unit.env["LD_LIBRARY_PATH"].split(":")
    packages = "/usr/local/python3.11.14/lib/python3.11/site-packages"
    assert libraries[0] == f"{packages}/memcache_hybrid/lib"
    assert f"{packages}/memfabric_hybrid/lib" in libraries


@pytest.mark.parametrize(
    ("part", "expected", "own"), [("head", HEAD, "10.20.0.10"), ("follower", FOLLOWER, "10.20.0.11")]
)
def test_the_guide_s_two_hosts(part: str, expected: dict[str, Any], own: str) -> None:
    unit = engine(f"vllm-ascend-0.13-two-hosts-{part}")
    assert unit.argv[0].endswith("/bin/vllm")
    assert unit.argv[1:3] == ("serve", "/weights/DeepSeek-V3.1-w8a8-mtp-QuaRot")
    assert options(unit.argv) == expected
    assert unit.env.items() >= (TWO_HOSTS_ENV | {"HCCL_IF_IP": own}).items()


def test_a_follower_is_not_asked_over_http() -> None:
    unit = engine("vllm-ascend-current-two-hosts-follower")
    assert unit.metrics_url is None
    assert [p.kind for p in unit.readiness.probes] == ["log"]
    assert [p.kind for p in engine("vllm-ascend-current-two-hosts-head").readiness.probes] == ["http"]


def test_the_current_form_differs_in_what_it_should_only() -> None:
    old, new = (engine(f"vllm-ascend-{form}-single-host") for form in ("0.13", "current"))
    before, after = options(old.argv), options(new.argv)
    assert after.pop("--additional_config") == {
        "enable_shared_expert_dp": False,
        "chunked_prefill_for_mla": True,
    }
    assert after.pop("--kv-transfer-config") == {
        "kv_connector": "AscendStoreConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"backend": "memcache", "lookup_rpc_port": "0"},
    }
    assert after == {k: v for k, v in before.items() if k in after}
    assert set(old.env) - set(new.env) == {"VLLM_USE_V1"}


@pytest.mark.parametrize(("form", "key"), [("0.13", "mooncake_rpc_port"), ("current", "lookup_rpc_port")])
def test_engines_on_one_host_share_nothing_they_must_not(form: str, key: str) -> None:
    plan = CASES[f"vllm-ascend-{form}-two-engines"]
    units = [u for u in plan.units if u.kind == "engine"]
    extras = [options(u.argv)["--kv-transfer-config"]["kv_connector_extra_config"] for u in units]
    assert [e[key] for e in extras] == ["0", "1"]
    assert [u.env["ASCEND_RT_VISIBLE_DEVICES"] for u in units] == ["0,1,2,3", "4,5,6,7"]
    assert [u.ports for u in units] == [(8004,), (8005,)]
    assert len({u.env["MMC_LOCAL_CONFIG_PATH"] for u in units}) == 1
    assert [u.kind for u in plan.units].count("meta") == 1


def test_prefill_and_decode_have_the_policy_outside_and_ports_of_their_own() -> None:
    plan = planned(prefill_and_decode(), "a2-8cards", node="host-a")
    configs = [options(u.argv)["--kv-transfer-config"] for u in plan.units if u.kind == "engine"]
    assert [c["kv_role"] for c in configs] == ["kv_producer", "kv_consumer"]
    assert all(c["kv_connector"] == "MultiConnector" for c in configs)
    assert all(c["kv_load_failure_policy"] == "fail" for c in configs)
    children = [c["kv_connector_extra_config"]["connectors"] for c in configs]
    names = ["MooncakeConnectorV1", "AscendStoreConnector"]
    assert [[c["kv_connector"] for c in pair] for pair in children] == [names, names]
    assert not any("kv_load_failure_policy" in c for pair in children for c in pair)
    assert [pair[0]["kv_port"] for pair in children] == ["20001", "20101"]
    assert {20001, 20101} <= {p.port for p in plan.ports}


def test_no_example_is_refused() -> None:
    assert {name: plan.refusals for name, plan in CASES.items() if plan.refusals} == {}


def test_an_engine_whose_version_nobody_knows_is_told_of() -> None:
    plan = planned(settings_of("single-host-a2", version=None), "a2-2cards")
    (note,) = [n for n in plan.notes if n.code == "engine.version-unknown"]
    assert "0.17 to 0.27" in note.message
    assert 'version = "..."' in note.message


def test_two_engines_on_one_port_are_refused() -> None:
    plan = planned(several(second={"port": 8004}), "a2-8cards", node="host-a")
    assert [r.code for r in plan.refusals]


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    """When this fails on purpose: run vllm_plans.py and read what changed."""
    assert golden(CASES[name]) == json.loads((PLANS / f"{name}.json").read_text(encoding="utf-8"))


def test_every_golden_file_has_its_case() -> None:
    assert {p.stem for p in PLANS.glob("vllm-*.json")} == set(CASES)


def test_the_current_version_of_the_tests_is_a_known_one() -> None:
    assert not [
        n for n in CASES["vllm-ascend-current-single-host"].notes if n.code == "engine.version-unknown"
    ]
    assert CURRENT == "0.23.0"
