"""``python -m bench.workload_size``: the hit-rate curve of a million requests of 30 blocks, as an operator asks for it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.report import Row, print_table

REQUESTS = 1_000_000
BLOCKS = 30
BLOCK_TOKENS = 512
MOST_SECONDS = 60
MOST_BYTES = 10**9
SAMPLE = 0.1


def write_trace(path: Path) -> None:
    """A trace in Mooncake's form: more than half of the requests go on from the blocks of an earlier one."""
    rng = random.Random(1)
    talks: list[list[int]] = []
    fresh = 0
    with path.open("w") as file:
        for number in range(REQUESTS):
            known: list[int] = []
            if talks and rng.random() < 0.55:
                known = talks[-1 - int(len(talks) * rng.random() ** 3)][: rng.randint(1, BLOCKS)]
            blocks = known + list(range(fresh, fresh + BLOCKS - len(known)))
            fresh += BLOCKS - len(known)
            talks.append(blocks)
            if len(talks) > 100_000:
                del talks[:50_000]
            tokens = BLOCKS * BLOCK_TOKENS - rng.randrange(BLOCK_TOKENS)
            file.write(
                f'{{"timestamp": {10 * number}, "input_length": {tokens}, "output_length": 200, "hash_ids": {blocks}}}\n'
            )


def asked(path: Path, *options: str) -> tuple[dict[str, Any], float, float, int]:
    """The answer of ``kvtierctl size``, wall and CPU seconds, and peak memory of its process in bytes."""
    command = [
        sys.executable,
        "-m",
        "kvtierd.cli",
        "size",
        "--trace",
        str(path),
        "--block-size",
        str(BLOCK_TOKENS),
    ]
    command += ["--bytes-per-token", "262144", "--nodes", "1000", "--cards", "8", "--json", *options]
    started = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - started
        output.seek(0)
        answer = json.loads(output.read())
    return answer, seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def rows() -> list[Row]:
    """Exact, and sampled: time, memory, and how far the sample is off."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.jsonl"
        write_trace(path)
        exact, seconds, cpu_seconds, peak = asked(path)
        sampled, fast_seconds, fast_cpu_seconds, fast_peak = asked(path, "--sample", str(SAMPLE))
    off = abs(sampled["knee"]["hit_rate"] - exact["knee"]["hit_rate"])
    name = f"size --trace, {REQUESTS:,} requests of {BLOCKS} blocks"
    return [
        Row(
            f"{name}: time",
            f"{seconds:.0f} s ({cpu_seconds:.0f} s CPU)",
            f"<= {MOST_SECONDS} s",
            seconds <= MOST_SECONDS,
        ),
        Row(f"{name}: peak memory", f"{peak / 1e6:.0f} MB", "<= 1 GB", peak <= MOST_BYTES),
        Row(
            "  hit rate at the knee, of an endless pool",
            f"{exact['knee']['hit_rate']:.1%}, {exact['max_hit_rate']:.1%}",
            "",
            True,
        ),
        Row(
            f"the same with --sample {SAMPLE}: time, peak memory",
            f"{fast_seconds:.0f} s ({fast_cpu_seconds:.0f} s CPU), {fast_peak / 1e6:.0f} MB",
            "",
            True,
        ),
        Row(
            "  hit rate at the knee is off by",
            f"{100 * off:.2f} points",
            f"<= {100 * sampled['error']:.2f} (stated)",
            off <= sampled["error"],
        ),
    ]


if __name__ == "__main__":
    print_table(rows())
