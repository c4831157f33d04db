"""What an upgrade of the package does to requests: p99 before, during and after, under steady load, in one run.

Needs root and what ``make test-systemd`` needs: the packages are installed in a booted Debian, the reference engine answers
a request every 100 ms, and the daemon is upgraded meanwhile. The unpacking alone is measured too: it is what any package of
this size costs on the machine.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from bench.report import Row, print_table

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS / "systemd"), str(TESTS / "packaging"), str(TESTS.parent / "packaging")]

from installed import Host  # noqa: E402
from lab import INSTALLING, booted  # noqa: E402
from packages import NEXT_VERSION, build  # noqa: E402

PHASE_SECONDS = 30.0
# Open loop: a slow answer does not make the next question late.
CLIENT = """
    import json, pathlib, sys, threading, time
    from kvtierd.workload.stream import complete
    samples, failures, lock = [], [], threading.Lock()
    def ask(number):
        began = time.time()
        try:
            complete("127.0.0.1", 8113, model="refengine", prompt=f"{number % 7} tell me more " * 20, max_tokens=8)
        except Exception as error:
            failures.append(str(error))
        with lock:
            samples.append((began, time.time() - began))
    started, number = time.monotonic(), 0
    while not pathlib.Path("/mnt/enough").exists():
        number += 1
        threading.Thread(target=ask, args=(number,)).start()
        time.sleep(max(0.0, started + number * 0.1 - time.monotonic()))
    time.sleep(5)
    pathlib.Path("/mnt/latencies.json").write_text(json.dumps([samples, failures]))
"""


def _p99(samples: list[tuple[float, float]], since: float, until: float) -> tuple[float, int]:
    taken = sorted(seconds for began, seconds in samples if since <= began < until)
    return statistics.quantiles(taken, n=100)[98] * 1000, len(taken)


def measure(this: Path, following: Path) -> list[Row]:
    """The rows; ``this`` and ``following`` are directories with the packages of two versions."""
    with booted("bench", extra=INSTALLING) as guest:
        host = Host(guest, (this, following))
        host.install("this")
        host.allow_emulation()
        host.stand_in_for_hugepages()
        host.type(
            ["cp /mnt/kvtierd.toml /etc/kvtierd/", "systemctl daemon-reload", "systemctl start kvtierd"]
        )
        before = host.pids()
        (guest.shared / "client.py").write_text(textwrap.dedent(CLIENT))
        client = subprocess.Popen(guest.argv(sys.executable, "/mnt/client.py"))
        time.sleep(5)
        marks = {"before": time.time()}
        time.sleep(PHASE_SECONDS)
        marks["unpacking"] = time.time()
        for deb in sorted((guest.shared / "next/dist").iterdir()):
            host.run("dpkg-deb", "--extract", f"/mnt/next/dist/{deb.name}", "/tmp/unpacked")
        marks["pause"] = time.time()
        time.sleep(5)
        marks["during"] = time.time()
        old = host.daemon_pid()
        host.install("next")
        host.until_another_daemon(old, 60)
        kept = host.pids() == before
        marks["after"] = time.time()
        time.sleep(PHASE_SECONDS)
        marks["end"] = time.time()
        (guest.shared / "enough").touch()
        client.wait(60)
        samples, failures = json.loads((guest.shared / "latencies.json").read_text())
    names = list(marks)
    rows = []
    figures = {}
    for name, following_name in itertools.pairwise(names):
        if name == "pause":
            continue
        figures[name], count = _p99(samples, marks[name], marks[following_name])
        seconds = marks[following_name] - marks[name]
        rows.append(
            Row(
                f"upgrade: p99 {name} ({count} requests in {seconds:.0f} s)",
                f"{figures[name]:.0f} ms",
                "-",
                holds=True,
            )
        )
    noise = max(figures["before"], figures["unpacking"], figures["after"])
    rows.append(
        Row("upgrade: p99 during / highest of before, unpacking alone, after", f"{figures['during'] / noise:.2f}",
            "within noise", figures["during"] <= noise * 1.25)
    )  # fmt: skip
    rows.append(
        Row(
            "upgrade: failed requests; same processes",
            f"{len(failures)}; {kept}",
            "0; True",
            kept and not failures,
        )
    )
    return rows


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print_table(measure(Path(sys.argv[1]), Path(sys.argv[2])))
    else:
        with tempfile.TemporaryDirectory() as made:
            first = build(Path(made) / "this")
            second = build(Path(made) / "next", "--package-version", NEXT_VERSION)
            print_table(measure(first, second))
