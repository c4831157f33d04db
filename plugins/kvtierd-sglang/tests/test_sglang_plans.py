"""Golden plans: settings and a recorded host give the engine's unit, its files and what is said about it.

``UPDATE_GOLDENS=1 pytest plugins/kvtierd-sglang/tests/test_sglang_plans.py`` writes them anew: read the difference.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from kvtierd_sglang.plugin import SglangDriver
from sglang_contexts import FIXTURES

from kvtierd.mmc_conf.sglang_check import check_sglang_meta, check_sglang_storage
from kvtierd.plan.inventory import Inventory
from kvtierd.plan.model import NodePlan
from kvtierd.plan.planner import make_plan
from kvtierd.plan.toolchain import Toolchain
from kvtierd.settings import load_settings

EXAMPLES = FIXTURES.parents[1] / "examples"
PLANS = FIXTURES / "plans"
TOOLS = Toolchain(
    python="/opt/kvtierd/bin/python",
    run_meta_script="/opt/kvtierd/run_meta.py",
    run_pool_script="/opt/kvtierd/run_pool.py",
)
CASES = {
    "sglang-a3": (EXAMPLES / "sglang-a3.toml", "a3-16dies"),
    "sglang-a5": (PLANS / "sglang-a5.toml", "a5-8"),
    "sglang-a3-prefill-decode": (PLANS / "sglang-a3-prefill-decode.toml", "a3-16dies"),
    "sglang-a3-deepseek-v4": (PLANS / "sglang-a3-deepseek-v4.toml", "a3-16dies"),
}


def plan(settings_path: Path, host: str) -> NodePlan:
    inventory = Inventory.model_validate_json((FIXTURES / "inventory" / f"{host}.json").read_text())
    return make_plan(load_settings(settings_path), inventory, {"sglang": SglangDriver()}, TOOLS)


def summary(made: NodePlan) -> dict[str, Any]:
    """What of a plan is this plugin's."""
    return {
        "pool": made.pool.model_dump(),
        "engines": [
            unit.model_dump(
                mode="json",
                include={
                    "id",
                    "argv",
                    "env",
                    "devices",
                    "after",
                    "ports",
                    "readiness",
                    "stop",
                    "metrics_url",
                },
            )
            for unit in made.units
            if unit.kind == "engine"
        ],
        "files": {f.path: json.loads(f.content) for f in made.files if f.path.endswith("_config.json")},
        "notes": [note.model_dump() for note in made.notes],
        "refusals": [refusal.model_dump() for refusal in made.refusals],
    }


@pytest.mark.parametrize("case", CASES)
def test_golden(case: str) -> None:
    got = summary(plan(*CASES[case]))
    golden = PLANS / f"{case}.json"
    if os.environ.get("UPDATE_GOLDENS") == "1":
        golden.write_text(json.dumps(got, indent=2) + "\n")
    assert got == json.loads(golden.read_text())
    assert got["refusals"] == []


@pytest.mark.parametrize(("case", "protocol"), [("sglang-a3", "device_sdma"), ("sglang-a5", "device_urma")])
def test_the_seeds_storage_configuration_comes_out(case: str, protocol: str) -> None:
    made = plan(*CASES[case])
    (unit,) = (unit for unit in made.units if unit.kind == "engine")
    text = unit.argv[unit.argv.index("--hicache-storage-backend-extra-config") + 1]
    assert check_sglang_storage(text.encode(), made.memcache_version, a3=made.series == "A3") == ()
    seed = {
        "meta_service_url": "tcp://127.0.0.1:5000",
        "config_store_url": "tcp://127.0.0.1:6000",
        "log_level": "info",
        "world_size": 256,
        "protocol": protocol,
        "prefetch_threshold": 1,
        "dram_size": "50GB",
    }
    got = json.loads(text)
    assert {name: got[name] for name in seed} == seed
    assert "--disable-radix-cache" not in unit.argv
    (file,) = (f for f in made.files if f.path.endswith("metaservice_config.json"))
    assert check_sglang_meta(file.content.encode(), made.memcache_version) == ()


def test_decode_has_none_of_the_flags_that_prefill_has() -> None:
    made = plan(*CASES["sglang-a3-prefill-decode"])
    prefill, decode = (unit for unit in made.units if unit.kind == "engine")
    flags = {argument for argument in prefill.argv if "hicache" in argument or "hierarchical" in argument}
    assert {"--enable-hierarchical-cache", "--hicache-storage-backend"} <= flags
    assert not flags & set(decode.argv)
