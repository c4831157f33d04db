"""Measurements of the decider and the journal of actions, in this process."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

from bench.report import Row
from kvtierd.act.journal import ActionJournal
from kvtierd.decide.decider import Decider
from kvtierd.decide.policy import default_policy
from kvtierd.decide.proposals import AddHolder, Proposal
from kvtierd.observe.picture import (
    EnginePicture,
    HostPicture,
    Picture,
    PoolPicture,
    PoolWindow,
    SegmentPicture,
    TierWindow,
)

GIB = 1024**3
STEPS = 300
EVENTS = 5000


def large_picture(now: float) -> Picture:
    """8 engines, 256 segments of 32 nodes, under pressure."""
    window = PoolWindow(20.0, 4e8, 3.0, 10, 1000, 10_000, 4_000)
    tier = TierWindow(1_000_000, 300_000)
    engines = tuple(
        EnginePicture(
            f"kvtier-engine-{i}", group="chat", instance="1", ready=True, at_seconds=now, registered=True,
            failed_loads_windows={60: 0, 300: 0, 3600: 0}, windows={3600: {"L1": tier, "L2": tier, "L3": tier}},
            l2_capacity_bytes=GIB,
        )
        for i in range(8)
    )  # fmt: skip
    segments = tuple(
        SegmentPicture(f"rank-{i}-dram", "cpu", i, 40 * GIB, 30 * GIB, f"n{i // 8}", f"kvtier-pool-{i % 8}")
        for i in range(256)
    )
    pool = PoolPicture(
        now, "1", 10_240 * GIB, 7_680 * GIB, segments, 4_000_000, 2e6, 90, 80, {60: window, 300: window, 3600: window}
    )  # fmt: skip
    hosts = [
        HostPicture(f"n{i}", now, 90 * GIB, 1024 * GIB, 16 * GIB, room_bytes=50 * GIB) for i in range(32)
    ]
    return Picture(
        now, "n0", "n0", is_master=True, pool=pool, engines=engines, host=hosts[0], peers=tuple(hosts[1:]),
        tiers={3600: {"L3": tier}},
    )  # fmt: skip


def decide_time() -> list[Row]:
    decider, taken = Decider(default_policy()), []
    for i in range(STEPS):
        picture = large_picture(100.0 + i)
        started = time.process_time()
        for proposal in decider.step(picture):
            decider.outcome(proposal.id, ok=True, text="", now_seconds=picture.now_seconds)
        taken.append(time.process_time() - started)
    median, most = statistics.median(taken), max(taken)
    return [
        Row(
            f"decide, 8 engines and 256 segments, CPU, median (most) of {STEPS}",
            f"{median * 1000:.1f} ({most * 1000:.1f}) ms", "<= 30 ms with observing", most <= 0.030,
        )
    ]  # fmt: skip


def journal_rate() -> list[Row]:
    proposal = Proposal(
        "pool-small", "pool", AddHolder("b", GIB), "the pool turns over 3.00 times an hour", numbers={"n": 1}
    )
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:  # a disk, not a tmpfs
        journal = ActionJournal(Path(directory), "a")
        started = time.perf_counter()
        for _ in range(EVENTS // 2):
            journal.end(journal.begin(proposal), "done", "verified")
        taken = time.perf_counter() - started
        lost = journal.unwritten
        journal.close()
    rate = EVENTS / taken
    return [
        Row(
            f"journal of actions, {EVENTS} committed writes", f"{rate:.0f}/s", ">= 1,000/s",
            rate >= 1000 and not lost,
        )
    ]  # fmt: skip


def rows() -> list[Row]:
    return [*decide_time(), *journal_rate()]


if __name__ == "__main__":
    from bench.report import print_table

    print_table(rows())
