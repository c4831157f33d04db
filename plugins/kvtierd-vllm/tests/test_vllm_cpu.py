"""The driver vllm-cpu, and what both drivers read of answers and last lines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import kvtierd_vllm
import pytest
from kvtierd_vllm import cpu
from kvtierd_vllm.cpu import VllmCpuDriver
from kvtierd_vllm.serving import FATAL_PATTERNS
from vllm_contexts import context, noted, option, refused, transfer

from kvtierd.plan.engine import TierTokens
from kvtierd.plan.model import HttpProbe

DRIVER = VllmCpuDriver()
LOGS = Path(__file__).parents[3] / "tests/fixtures/engines/vllm"


def cpu_context(**changes: Any) -> Any:
    values = {
        "series": "emulated", "devices": (), "version": "0.32.0+cpu", "model": "/models/tiny", "args": {},
        "memcache_env": {"LD_LIBRARY_PATH": "/emulated/lib", "ASCEND_HOME_PATH": "/emulated"},
    }  # fmt: skip
    return context(**(values | changes))


def test_the_launch() -> None:
    made = DRIVER.launch(cpu_context(args={"max-model-len": 8192, "served-model-name": "tiny"}))
    assert (refused(made), noted(made)) == ([], [])
    assert made.argv[:3] == ("/venv/bin/vllm", "serve", "/models/tiny")
    assert option(made, "--host") == "127.0.0.1"
    assert option(made, "--port") == "8113"
    assert option(made, "--max-model-len") == "8192"
    assert "--enable-prompt-tokens-details" in made.argv
    assert transfer(made) == {
        "kv_connector": "KvtierConnector",
        "kv_connector_module_path": "kvtierd_vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"namespace": "kv"},
    }
    assert (
        made.env.items()
        >= {
            "MMC_LOCAL_CONFIG_PATH": "/var/lib/kvtierd/conf/mmc-local.conf",
            "PYTHONHASHSEED": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "LD_LIBRARY_PATH": "/emulated/lib",
            "ASCEND_HOME_PATH": "/emulated",
        }.items()
    )
    assert made.clients == 1
    assert made.readiness.probes == (HttpProbe(url="http://127.0.0.1:8113/health"),)
    assert made.readiness.deadline_seconds == 300


def test_operators_may_change_the_rest() -> None:
    made = DRIVER.launch(
        cpu_context(
            env={"VLLM_CPU_KVCACHE_SPACE": "4", "PYTHONPATH": "/mine"},
            args={
                "enable-prompt-tokens-details": False,
                "kv-transfer": {"namespace": "b", "lane_bytes": 1024},
            },
        )
    )
    assert made.env["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert made.env["PYTHONPATH"].endswith(":/mine")
    assert "--no-enable-prompt-tokens-details" in made.argv
    assert "--enable-prompt-tokens-details" not in made.argv
    assert transfer(made)["kv_connector_extra_config"] == {"namespace": "b", "lane_bytes": 1024}


def test_without_l3_it_has_no_connector_and_no_rank() -> None:
    made = DRIVER.launch(cpu_context(args={"l3": "off", "enable-prefix-caching": False}))
    assert "--kv-transfer-config" not in made.argv
    assert "--no-enable-prefix-caching" in made.argv
    assert not any("l3" in word for word in made.argv)
    assert made.clients == 0
    assert made.refusals == ()
    assert DRIVER.launch(cpu_context(args={"l3": "on"})) == DRIVER.launch(cpu_context(args={}))
    assert refused(DRIVER.launch(cpu_context(args={"l3": "maybe"}))) == ["engine.bad-argument"]


def test_refusals_and_notes() -> None:
    assert refused(DRIVER.launch(cpu_context(args={"kv-transfer": {"namespac": "x"}}))) == [
        "engine.kv-transfer"
    ]
    assert refused(DRIVER.launch(cpu_context(args={"kv-transfer": 3}))) == ["engine.kv-transfer"]
    assert refused(DRIVER.launch(cpu_context(args={"port": 1}))) == ["engine.owned-argument"]
    assert refused(DRIVER.launch(cpu_context(env={"PYTHONHASHSEED": "random"}))) == ["engine.hash-seed"]
    assert noted(DRIVER.launch(cpu_context(version=None))) == ["engine.version-unknown"]
    assert noted(DRIVER.launch(cpu_context(version="0.33.0"))) == ["engine.version-unknown"]
    assert noted(DRIVER.launch(cpu_context(devices=(0,)))) == ["engine.devices-unused"]


def importable(path: str) -> bool:
    """Whether an interpreter with nothing else finds the connector's package, and not kvtierd."""
    code = (
        "import importlib.util as u, kvtierd_vllm.connector.options\n"
        "assert u.find_spec('kvtierd') is None and u.find_spec('pydantic') is None\n"
    )
    return (
        subprocess.run(
            [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {path!r})\n{code}"],
            check=False,
            timeout=60,
        ).returncode
        == 0
    )


def test_the_engine_finds_the_connector_in_a_source_tree() -> None:
    made = DRIVER.launch(cpu_context())
    assert made.files == ()
    assert made.env["PYTHONPATH"] == str(Path(kvtierd_vllm.__file__).parents[1])
    assert importable(made.env["PYTHONPATH"])


def test_the_engine_finds_the_connector_of_an_installed_kvtierd_and_not_its_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "lib/python3.11/site-packages"
    site.mkdir(parents=True)
    (site / "kvtierd_vllm").symlink_to(Path(kvtierd_vllm.__file__).parent)
    (site / "pydantic").mkdir()
    monkeypatch.setattr(cpu, "_PACKAGE_DIRECTORY", site / "kvtierd_vllm")
    made = DRIVER.launch(cpu_context(work_dir=str(tmp_path / "work")))
    (file,) = made.files
    path = Path(file.path)
    path.parent.mkdir(parents=True)
    path.write_text(file.content, encoding="utf-8")
    assert made.env["PYTHONPATH"] == str(tmp_path / "work/python")
    assert importable(made.env["PYTHONPATH"])


def test_flush() -> None:
    assert [c.path for c in DRIVER.flush(cpu_context(), frozenset({"L1"}))] == ["/reset_prefix_cache"]
    both = DRIVER.flush(cpu_context(), frozenset({"L1", "L3"}))
    assert [(c.method, c.path) for c in both] == [("POST", "/reset_prefix_cache?reset_external=true")]
    with pytest.raises(ValueError, match="only together with L1"):
        DRIVER.flush(cpu_context(), frozenset({"L3"}))
    with pytest.raises(ValueError, match="off"):
        DRIVER.flush(cpu_context(env={"VLLM_SERVER_DEV_MODE": "0"}), frozenset({"L1"}))


# -- answers


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def test_the_proof_of_life_names_the_served_model() -> None:
    call = DRIVER.generation(cpu_context(args={"served_model_name": ["tiny", "other"]}))
    assert call.body is not None
    assert (call.path, call.body["model"], call.body["max_tokens"]) == ("/v1/completions", "tiny", 1)
    plain = DRIVER.generation(cpu_context()).body
    assert plain is not None
    assert plain["model"] == "/models/tiny"


def test_a_generated_token_need_not_be_printable_but_must_be_counted() -> None:
    assert DRIVER.generated(body(choices=[{"text": "i"}])) == "i"
    assert DRIVER.generated(body(choices=[{"text": ""}], usage={"completion_tokens": 1})) == ""
    for answer in (
        body(choices=[{"text": ""}], usage={"completion_tokens": 0}),
        body(choices=[{"text": ""}]),
        body(choices=[]),
        body(choices=[{"text": None}]),
        body(error={"message": "no"}),
        b"[]",
        b"",
        b"\xff",
    ):
        with pytest.raises(ValueError, match=r".+"):
            DRIVER.generated(answer)


def test_tokens_by_tier_say_only_what_vllm_says() -> None:
    def tokens(**usage: Any) -> TierTokens:
        return DRIVER.tokens(body(usage=usage))

    cold = tokens(prompt_tokens=2500, prompt_tokens_details={"cached_tokens": 0})
    assert cold == TierTokens(prompt=2500, l1=0, l3=0, computed=2500)
    warm = tokens(prompt_tokens=2500, prompt_tokens_details={"cached_tokens": 2432})
    assert warm == TierTokens(prompt=2500, computed=68)
    assert tokens(prompt_tokens=2500, prompt_tokens_details=None) == TierTokens(prompt=2500)
    assert tokens(prompt_tokens=2500, prompt_tokens_details={"cached_tokens": None}) == TierTokens(
        prompt=2500
    )
    assert DRIVER.tokens(b"{}") == TierTokens()
    assert DRIVER.tokens(body(usage=[1])) == TierTokens()
    with pytest.raises(ValueError, match=r".+"):
        DRIVER.tokens(b"<html>")


# -- last lines


@pytest.mark.parametrize(
    "log", ["bad-transfer-json.log", "bad-transfer-role.log", "unknown-connector.log", "bad-model.log"]
)
def test_a_start_that_can_never_work_is_recognised_in_the_real_last_lines(log: str) -> None:
    last = (LOGS / log).read_text(encoding="utf-8").splitlines()[-8:]
    assert [line for line in last if any(p in line for p in FATAL_PATTERNS)]


@pytest.mark.parametrize("log", ["port-in-use.log", "worker-killed.log", "engine-crashed.log", "serving.log"])
def test_what_passes_is_tried_again(log: str) -> None:
    text = (LOGS / log).read_text(encoding="utf-8")
    assert [p for p in FATAL_PATTERNS if p in text] == []


def test_wrong_usage_is_never_tried_again() -> None:
    assert 2 in DRIVER.launch(cpu_context()).restart.fatal_exit_codes


@pytest.mark.parametrize("on", [True, False])
def test_l3_stays_as_it_was_started(on: bool) -> None:
    with pytest.raises(ValueError, match="restart"):
        DRIVER.l3_switch(cpu_context(l3_switch=True), on=on)
