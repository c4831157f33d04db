"""One check over a made-up host: files below a directory, an inventory and a plan as values, commands as recordings."""

from __future__ import annotations

import asyncio
import time

from kvtierd.checks import Outcome, Patient
from kvtierd.doctor.registry import built_in
from kvtierd.doctor.run import examine
from kvtierd.host.view import CommandResult, HostView, RecordedRunner
from kvtierd.plan.inventory import Inventory, Nic, Npu
from kvtierd.plan.model import NodePlan, PoolPlan, UnitSpec
from kvtierd.settings import Settings

GIB = 1024**3
DRIVER = "/usr/local/Ascend/driver/version.info"


def npus(count, name="910B3", **fields):
    """Dies of one kind, one a card."""
    about = {"hbm_total_bytes": 64 * GIB, "hbm_used_bytes": 3 * GIB, "health": "OK", **fields}
    return tuple(Npu(device=n, card=n, name=name, **about) for n in range(count))


def host(**fields):
    """An inventory."""
    return Inventory(
        **{
            "hostname": "h",
            "machine": "aarch64",
            "memory_total_bytes": 512 * GIB,
            "memory_available_bytes": 400 * GIB,
            "nics": (Nic(name="enp1s0"), Nic(name="lo")),
            **fields,
        }
    )


def engine(name="e", **fields):
    """A planned engine."""
    return UnitSpec(
        **{
            "id": f"kvtier-engine-{name}",
            "kind": "engine",
            "name": name,
            "argv": ("run",),
            "uses_pool": True,
            **fields,
        }
    )


def planned(*units, protocol="device_rdma", series="800I-A2", **fields):
    """A plan of these units."""
    return NodePlan(node="h", series=series, units=units, pool=PoolPlan(protocol=protocol), **fields)


def written(root, files):
    """Writes files (absolute name -> text or bytes) below ``root``."""
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())


def said(*argv, stdout="", **about):
    """A recorded command."""
    return CommandResult(argv, **{"code": 0, **about}, stdout=stdout)


def examined(
    check, root, *, inventory=None, plan=None, settings=None, commands=(), argv=(), confs=()
) -> Outcome:
    """What one check finds. It must come back well within doctor's time, whatever it meets."""

    async def take_inventory():
        return inventory or host()

    async def make_plan(_):
        return plan

    patient = Patient(
        HostView(root, RecordedRunner(commands), machine="aarch64"),
        inventory=take_inventory,
        settings=None if settings is None else Settings.model_validate(settings),
        plan=None if plan is None else make_plan,
        engine_argv=tuple(argv),
        confs=tuple(confs),
        now_unix=0.0,
    )
    chosen = [c for c in built_in() if c.id == check]
    assert chosen, f"there is no check {check}"
    started = time.monotonic()
    (one,) = asyncio.run(examine(patient, chosen))
    assert time.monotonic() - started < 9
    return one.outcome
