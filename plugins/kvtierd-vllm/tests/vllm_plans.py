"""The plans whose engine commands are kept as JSON under tests/fixtures/plans.

Run this file to write them anew, then read the difference: it is what operators will get.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kvtierd_vllm.plugin import kvtierd_engine_drivers

from kvtierd.plan.inventory import Inventory
from kvtierd.plan.model import NodePlan
from kvtierd.plan.planner import make_plan
from kvtierd.plan.toolchain import Toolchain
from kvtierd.settings import Settings, load_settings

ROOT = Path(__file__).parents[3]
PLANS = ROOT / "tests/fixtures/plans"
CURRENT = "0.23.0"
SPLIT = {"prefill": {"dp_size": 1, "tp_size": 4}, "decode": {"dp_size": 1, "tp_size": 4}}


def settings_of(example: str, **engine: Any) -> Settings:
    """An example's settings, its engine changed."""
    settings = load_settings(ROOT / f"examples/{example}.toml", {})
    return settings.model_copy(update={"engine": tuple(e.model_copy(update=engine) for e in settings.engine)})


def planned(settings: Settings, inventory: str, *, node: str | None = None) -> NodePlan:
    """The plan on a recorded host."""
    host = Inventory.model_validate_json((ROOT / f"tests/fixtures/inventory/{inventory}.json").read_bytes())
    tools = Toolchain(
        python="/opt/kvtierd/bin/python",
        run_meta_script="/opt/kvtierd/run_meta.py",
        run_pool_script="/opt/kvtierd/run_pool.py",
    )
    drivers = {d.name: d for d in kvtierd_engine_drivers()}
    return make_plan(settings, host, drivers, tools, node=node)


def several(**changes: Any) -> Settings:
    """Two engines of four cards each on one host, sharing one MetaService."""
    settings = settings_of("two-hosts-a2")
    (engine,) = settings.engine
    args = {
        k: v
        for k, v in engine.args.items()
        if not k.startswith(("data-parallel", "api-server", "additional"))
    } | {"tensor-parallel-size": 4}
    engines = [
        engine.model_copy(
            update={
                "name": name,
                "nodes": ("host-a",),
                "devices": devices,
                "port": port,
                "args": args,
                **extra,
            }
        )
        for name, devices, port, extra in (
            ("first", (0, 1, 2, 3), 8004, changes.get("first", {})),
            ("second", (4, 5, 6, 7), 8005, changes.get("second", {})),
        )
    ]
    return settings.model_copy(update={"engine": tuple(engines)})


def prefill_and_decode() -> Settings:
    """One engine for prefill and one for decode, on one host."""
    settings = several(
        first={"name": "prefill", "role": "prefill", "version": CURRENT},
        second={"name": "decode", "role": "decode", "version": CURRENT},
    )
    engines = [e.model_copy(update={"args": {**e.args, "kv-transfer": SPLIT}}) for e in settings.engine]
    return settings.model_copy(update={"engine": tuple(engines)})


def cases() -> dict[str, NodePlan]:
    """Golden file's name -> plan."""
    made: dict[str, NodePlan] = {}
    for form, engine in (("0.13", {}), ("current", {"version": CURRENT})):
        made[f"vllm-ascend-{form}-single-host"] = planned(
            settings_of("single-host-a2", **engine), "a2-2cards"
        )
        for node, part in (("host-a", "head"), ("host-b", "follower")):
            made[f"vllm-ascend-{form}-two-hosts-{part}"] = planned(
                settings_of("two-hosts-a2", **engine), "a2-8cards", node=node
            )
        made[f"vllm-ascend-{form}-two-engines"] = planned(
            several(first=engine, second=engine), "a2-8cards", node="host-a"
        )
    made["vllm-ascend-current-prefill-decode"] = planned(prefill_and_decode(), "a2-8cards", node="host-a")
    return made


def golden(plan: NodePlan) -> dict[str, Any]:
    """What of a plan the golden files hold."""
    return {
        "engines": {
            unit.name: {
                "argv": list(unit.argv),
                "env": dict(sorted(unit.env.items())),
                "ports": list(unit.ports),
                "readiness": [probe.model_dump(mode="json") for probe in unit.readiness.probes],
                "metrics_url": unit.metrics_url,
            }
            for unit in plan.units
            if unit.kind == "engine"
        },
        "notes": sorted(note.code for note in plan.notes),
        "refusals": [refusal.code for refusal in plan.refusals],
    }


def main() -> int:
    """Writes the golden files."""
    PLANS.mkdir(exist_ok=True)
    for name, plan in cases().items():
        (PLANS / f"{name}.json").write_text(json.dumps(golden(plan), indent=2, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
