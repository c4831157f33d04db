"""What engine plugins cost: reading an engine's output, and one observation of eight engines without the HTTP calls."""

from __future__ import annotations

import time
from pathlib import Path

from bench.report import Row
from kvtierd.plugins import load_plugins

FIXTURES = Path(__file__).parent.parent / "tests" / "fixtures" / "engines"
SECONDS = 1.0


def line_rows() -> list[Row]:
    rows = []
    for name, folder in (("vllm-cpu", "vllm"), ("sglang", "sglang")):
        driver = load_plugins().driver(name)
        logs = sorted((FIXTURES / folder).glob("*.log"))
        lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
        size = sum(len(line.encode()) + 1 for line in lines)
        done, started = 0, time.process_time()
        while time.process_time() - started < SECONDS:
            for line in lines:
                driver.read_line(line)
            done += size
        rate = done / (time.process_time() - started) / 1e6
        rows.append(
            Row(f"{name}: reading its output, one core", f"{rate:.0f} MB/s", ">= 50 MB/s", rate >= 50)
        )
    return rows


def observe_rows() -> list[Row]:
    rows = []
    for name, folder in (("vllm-cpu", "vllm"), ("sglang", "sglang")):
        driver = load_plugins().driver(name)
        text = max((p.read_text() for p in (FIXTURES / folder).glob("*metrics*.txt")), key=len)
        driver.observe(text)
        count, started = 0, time.process_time()
        while time.process_time() - started < SECONDS:
            driver.observe(text)
            count += 1
        cycle = 8 * (time.process_time() - started) / count * 1000
        what = f"{name}: one observation of 8 engines ({len(text) // 1000} kB of metrics each), CPU"
        rows.append(Row(what, f"{cycle:.1f} ms", "<= 2 ms", cycle <= 2))
    return rows


def rows() -> list[Row]:
    return [*line_rows(), *observe_rows()]
