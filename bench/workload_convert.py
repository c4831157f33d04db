"""What `kvtierctl dataset convert` costs: speed, peak memory, and the published script beside it.

``python -m bench.workload_convert [SCRIPT]``. SCRIPT is a copy of the conversion script that the practice guide prints
(not ours to ship); with it both convert the same file in one run, in turn, each in a process of its own.
"""

from __future__ import annotations

import filecmp
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.report import Row, print_table
from kvtierd.workload.dataset.sample import write_sample

RECORDS = 20_000
ROUNDS = 5
ARGUMENTS = [
    "--top-n",
    "100000",
    "--min-length",
    "0",
    "--max-length",
    "8192",
    "--repeat",
    "2",
    "--output-format",
    "qa",
]
OURS = [sys.executable, "-m", "kvtierd.cli", "dataset", "convert"]


def _run(command: list[str], source: Path, output: Path) -> tuple[float, float]:
    """Seconds of CPU and peak memory in MB."""
    measure = (
        "import resource, subprocess, sys\n"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)\n"
        "use = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(use.ru_utime + use.ru_stime, use.ru_maxrss / 1024)\n"
    )
    line = subprocess.run(
        [sys.executable, "-c", measure, *command, "--input", str(source), "--output", str(output), *ARGUMENTS],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    seconds, peak = map(float, line.split())
    return seconds, peak


def rows(script: str | None = None) -> list[Row]:
    """Measures; with a script also the ratio."""
    with tempfile.TemporaryDirectory() as directory:
        source, small = Path(directory) / "in.jsonl", Path(directory) / "small.jsonl"
        write_sample(source, records=RECORDS, shortest=1024, longest=8000, seed=1)
        write_sample(small, records=RECORDS // 10, shortest=1024, longest=8000, seed=1)
        size_mb = source.stat().st_size / 1e6
        ours, theirs = [], []
        for _ in range(ROUNDS):
            ours.append(_run(OURS, source, Path(directory) / "ours"))
            if script:
                theirs.append(_run([sys.executable, script], source, Path(directory) / "theirs"))
        if script and not filecmp.cmp(Path(directory) / "ours", Path(directory) / "theirs", shallow=False):
            raise SystemExit("the two outputs differ")
        seconds, peak = statistics.median(s for s, _ in ours), max(p for _, p in ours)
        tenth = _run(OURS, small, Path(directory) / "ours")[1]
    result = [
        Row(
            f"dataset convert, {size_mb:.0f} MB in, twice out: speed; peak memory",
            f"{size_mb / seconds:.0f} MB/s; {peak:.0f} MB",
            "constant",
            peak < tenth * 1.2,
        ),
        Row("the same, a tenth of the input: peak memory", f"{tenth:.0f} MB", "", True),
    ]
    if script:
        other = statistics.median(s for s, _ in theirs)
        result.append(
            Row(
                "the published script on the same file: speed; peak memory",
                f"{size_mb / other:.0f} MB/s; {max(p for _, p in theirs):.0f} MB",
                "",
                True,
            )
        )
        result.append(Row("ratio of CPU times", f"{other / seconds:.1f}", ">= 3", other / seconds >= 3))
    return result


if __name__ == "__main__":
    print_table(rows(sys.argv[1] if len(sys.argv) > 1 else None))
