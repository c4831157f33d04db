"""``python -m tests.sim.run``: a million elections on all cores, and one line about them."""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
import time

from .scenario import Result, Scenario

ELECTIONS_A_RUN = 400
KEYS = (
    "elections",
    "double_masters",
    "epoch_faults",
    "stuck",
    "runs",
    "faults",
    "partitions",
    "one_way",
    "freezes",
    "crashes",
    "lost_files",
    "mishaps",
    "switchovers",
    "raised",
)


def play(job: tuple[int, int, int]) -> Result:
    seed, index, elections = job
    return Scenario(seed, index).run(elections)


def simulate(elections: int, seed: int, processes: int = 1, first: int = 0) -> Result:
    """So many elections in runs of ``ELECTIONS_A_RUN``; the same for the same seed, however many processes."""
    full, rest = divmod(elections, ELECTIONS_A_RUN)
    jobs = [(seed, first + i, ELECTIONS_A_RUN) for i in range(full)]
    if rest:
        jobs.append((seed, first + full, rest))
    total = Result()
    if processes == 1:
        for job in jobs:
            total.add(play(job))
        return total
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for result in pool.imap_unordered(play, jobs, chunksize=4):
            total.add(result)
    total.takeovers.sort()
    return total


def line(total: Result, seed: int) -> str:
    """``elections=N double_masters=0 ... seed=S``."""
    parts = [f"{key}={total.counts[key]}" for key in KEYS]
    for name, seconds in (("takeover", sorted(total.takeovers)), ("switchover", sorted(total.handovers))):
        if seconds:
            at = {f"p{percent}": seconds[len(seconds) * percent // 100] for percent in (50, 99)}
            at["most"] = seconds[-1]
            parts += [f"{name}_{which}_seconds={value:.2f}" for which, value in at.items()]
            parts.append(f"{name}_samples={len(seconds)}")
    return " ".join([*parts, f"seed={seed}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elections", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=None, help="default: drawn, and printed")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else int.from_bytes(os.urandom(4))
    begun = time.monotonic()
    total = simulate(arguments.elections, seed, arguments.processes)
    print(f"{time.monotonic() - begun:.0f} s on {arguments.processes} processes", file=sys.stderr)
    for violation in itertools.islice(total.violations, 20):
        print(violation)
    print(line(total, seed))
    return 1 if total.violations else 0


if __name__ == "__main__":
    sys.exit(main())
