"""What a unit backend costs: a start over a plain exec, and finding units again. ``python -m bench.units`` alone prints it.

For systemd's figures inside a booted one: ``python tests/systemd/lab.py .venv/bin/python -m bench.units``.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.report import Row, print_table
from kvtierd.plan.model import UnitSpec
from kvtierd.units.backend import UnitBackend
from kvtierd.units.choice import systemd_problem
from kvtierd.units.shim_backend import ShimBackend
from kvtierd.units.systemd_backend import SystemdBackend

ROUNDS = 20
UNITS = 16
SLEEP = ("/bin/sleep", "300")


def _spec(number: int) -> UnitSpec:
    return UnitSpec(id=f"kvtier-engine-bench{number}", kind="engine", name=f"bench{number}", argv=SLEEP)


async def _plain_exec() -> float:
    taken = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        process = await asyncio.create_subprocess_exec(*SLEEP)
        taken.append(time.perf_counter() - started)
        process.kill()
        await process.wait()
    return statistics.median(taken)


async def _measure(make: Callable[[Path], UnitBackend], base: Path) -> list[Row]:
    plain = await _plain_exec()
    backend = make(base)
    name = backend.name
    taken = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        await backend.start(_spec(0))
        taken.append(time.perf_counter() - started)
        await backend.stop(_spec(0).id, signal="SIGKILL", timeout_seconds=5)
    over = (statistics.median(taken) - plain) * 1000
    for number in range(UNITS):
        await backend.start(_spec(number))
    await backend.close()
    successor = make(base)
    started = time.perf_counter()
    found = await successor.list()
    adopted = time.perf_counter() - started
    assert sum(process.running for process in found) == UNITS
    for process in found:
        await successor.stop(process.unit_id, signal="SIGKILL", timeout_seconds=5)
        await successor.forget(process.unit_id)
    await successor.close()
    # The promise is systemd's: a shim is an interpreter of its own.
    promise = "<= 50 ms" if name == "systemd" else "-"
    return [
        Row(f"{name}: unit start over a plain exec, median of {ROUNDS}", f"{over:.0f} ms", promise,
            name != "systemd" or over <= 50),
        Row(f"{name}: {UNITS} units found again by another daemon", f"{adopted:.2f} s", "<= 1 s", adopted <= 1),
    ]  # fmt: skip


async def _all(base: Path) -> list[Row]:
    rows = await _measure(lambda path: ShimBackend(path / "run", path / "log"), base / "shim")
    problem = await systemd_problem()
    if problem is not None:
        return [*rows, Row("systemd: unit start, adoption", f"not here: {problem}", "-", holds=True)]
    return [*rows, *await _measure(lambda path: SystemdBackend(path / "run"), base / "systemd")]


def rows() -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="kvtierd-bench-") as directory:
        return asyncio.run(_all(Path(directory)))


if __name__ == "__main__":
    print_table(rows())
