"""Engines that run: which seed their processes have, and workers that outlived their engine."""

from __future__ import annotations

from kvtierd.checks import Outcome, Patient, absent, fail, note, ok, unknown, warn, worst
from kvtierd.doctor.engine_lines import EngineLine, engine_lines, planned_engines, processes
from kvtierd.doctor.groups.engine import GROUP
from kvtierd.doctor.processes import SEED, Process, engine_processes, families, orphans
from kvtierd.plan.environment import is_hash_seed

__all__ = ["GROUP"]

_FIX = "PYTHONHASHSEED=0 in the environment in which each engine is started, on every host; in a container: docker run -e PYTHONHASHSEED=0"


@GROUP.check(
    "hash-seed",
    title="All engines are to run with one PYTHONHASHSEED",
    why="Keys of blocks are made with Python's hash(), whose seed is random for each process unless this variable fixes it (vLLM"
    " before August 2026). Engines with different seeds never find each other's blocks; nothing says so.",
    fix=_FIX,
    blocks=("engine",),
)
async def hash_seed(patient: Patient) -> Outcome:
    """The environment of planned engines, and what stands before the given command."""
    units = {f"engine {unit.name}": unit for unit in await planned_engines(patient) if unit.uses_pool}
    lines = [
        line
        for line in await engine_lines(patient)
        if line.who in units or (line.source == "given" and (line.connectors or line.uses_memcache))
    ]
    if not lines:
        return absent("no engine over the pool")
    found = [outcome for line in lines if (outcome := _seed_of(line)) is not None]
    seeds = {line.env[SEED] for line in lines if SEED in line.env}
    if len(seeds) > 1:
        told = ", ".join(f"{line.who}: {line.env.get(SEED, 'none')}" for line in lines)
        found.append(fail(f"different seeds: {told}"))
    return worst(found, f"{', '.join(sorted(seeds)) or 'not needed'} ({len(lines)} engines)")


def _seed_of(line: EngineLine) -> Outcome | None:
    seed = line.env.get(SEED)
    if seed is None:
        # A shell's export is not in the command line: the processes show it.
        told = f"{line.who}: {SEED} is not in its environment"
        return None if line.kind != "vllm" else note(told) if line.source == "given" else warn(told)
    if not is_hash_seed(seed):
        return fail(
            f"{line.who}: {SEED} is {seed!r}, which Python takes as random for each process or refuses"
        )
    return None


@GROUP.check(
    "running-seed",
    title="All engines that run have one PYTHONHASHSEED, their workers too",
    why="Setting it inside a running Python is too late, a shell's variable does not reach a container, and a worker started in"
    " another way can miss it. The hit rate between engines is then 0 % without an error.",
    fix=_FIX + "; then restart the engines",
)
async def running_seed(patient: Patient) -> Outcome:
    """/proc/PID/environ of API servers and workers."""
    found = [p for p in engine_processes(await processes(patient)) if "sglang" not in p.command]
    if not found:
        return absent("no vLLM runs here")
    hidden = [p for p in found if p.env is None]
    if len(hidden) == len(found):
        return unknown(f"the environment of {hidden[0].shown} may not be read; run doctor as root")
    seeds: dict[str, list[Process]] = {}
    for process in found:
        if process.env is not None:
            seeds.setdefault(process.env.get(SEED, ""), []).append(process)
    told = "; ".join(f"{seed or 'none'}: {_some(users)}" for seed, users in sorted(seeds.items()))
    if any(seed and not is_hash_seed(seed) for seed in seeds):
        return fail(told)
    if len(seeds) > 1:
        return fail(f"different seeds: {told}")
    if "" in seeds:
        return warn(f"{SEED} is set for none of {len(found)} processes")
    return ok(f"{next(iter(seeds))} ({len(found)} processes)")


@GROUP.check(
    "stale-workers",
    title="No worker has outlived its engine",
    why="When an API server is killed its EngineCore and workers live on and keep the card's memory; the port is free, so the next"
    ' start gets far, and ends with "Available memory: 0" or "No available memory for the cache blocks".',
    fix="kill the processes named (kill PID; kill -9 PID), then kvtierctl reload; engines under kvtierd are ended as one group",
)
async def stale_workers(patient: Patient) -> Outcome:
    """Workers whose parents lead to process 1 with no API server between, and npu-smi's cards that they hold."""
    table = await processes(patient)
    inventory = await patient.inventory()
    devices = {(npu.card, npu.chip): npu.device for npu in inventory.npus}
    found: list[Outcome] = []
    left = orphans(table)
    for process in left:
        held = sorted(
            {
                devices.get((p.card, p.chip), p.card)
                for p in inventory.npu_processes
                if process.pid in {p.pid, p.pid_in_container}
            }
        )
        told = f"{process.shown} has no API server above it"
        if held:
            found.append(fail(f"{told} and holds device {', '.join(map(str, held))}", f"kill {process.pid}"))
        else:
            found.append(warn(told, f"kill {process.pid}"))
    if any(o.severity == "fail" for o in found):
        pids = " ".join(str(process.pid) for process in left)
        return worst(found, "")._replace(fix=f"kill {pids}; kill -9 what is left of them after 30 s")
    running = families(table)
    if not running and not found:
        return ok("no engine runs here")
    workers = sum(len(family) - 1 for family in running.values())
    return worst(found, f"{len(running)} API servers with {workers} processes below them")


def _some(users: list[Process]) -> str:
    shown = ", ".join(p.shown for p in users[:3])
    return shown if len(users) <= 3 else f"{shown} and {len(users) - 3} more"
