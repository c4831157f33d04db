"""What the planner's tests share: recorded hosts, settings, and a driver that says what a test wants."""

from __future__ import annotations

from pathlib import Path

from kvtierd.plan.engine import EngineLaunch, EngineObservation, HttpCall
from kvtierd.plan.inventory import Inventory
from kvtierd.plan.model import NodePlan
from kvtierd.plan.planner import make_plan
from kvtierd.plan.toolchain import Emulation, Toolchain
from kvtierd.settings import Settings

GIB = 1024**3
MIB = 1024**2
FIXTURES = Path("tests/fixtures/inventory")
TOOLS = Toolchain(
    python="/opt/kvtierd/bin/python",
    run_meta_script="/opt/kvtierd/run_meta.py",
    run_pool_script="/opt/kvtierd/run_pool.py",
    emulation=Emulation(root="/run/emu", prefix=("launch", "--"), env={"ASCEND_HOME_PATH": "/emu"}),
)


class FakeDriver:
    name = "fake"
    api_version = 1
    default_port = 8000
    package = "fake-engine"
    versions = ""

    def __init__(self, **launch):
        self.launch_fields = launch
        self.contexts = []

    def launch(self, context):
        self.contexts.append(context)
        return EngineLaunch(
            **{"argv": ("engine", str(context.port)), "env": context.memcache_env, **self.launch_fields}
        )

    def metrics_url(self, context):
        return f"http://127.0.0.1:{context.port}/metrics"

    def observe(self, metrics_text):
        return EngineObservation()

    def generation(self, context):
        return HttpCall(path="/v1/completions", body={"model": context.model})

    def flush(self, context, tiers):
        if "L3" in tiers:
            raise ValueError("cannot")
        return (HttpCall(path="/flush"),)

    def l3_switch(self, context, *, on):
        if not context.l3_switch:
            raise ValueError("not asked for")
        return (HttpCall(method="PUT" if on else "DELETE", path="/l3"),)


def host(name: str, **changes) -> Inventory:
    return Inventory.model_validate_json((FIXTURES / f"{name}.json").read_bytes()).model_copy(update=changes)


def configured(**sections) -> Settings:
    return Settings(**{"pool": {"dram": 256 * GIB}, **sections})


def engine(**fields):
    return {"name": "e", "plugin": "fake", "devices": [0, 1], "port": 8113, **fields}


def plan(settings, inventory, drivers=None, **options) -> NodePlan:
    drivers = {"fake": FakeDriver()} if drivers is None else drivers
    return make_plan(settings, inventory, drivers, TOOLS, **options)
