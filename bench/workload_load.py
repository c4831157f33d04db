"""``python -m bench.workload_load``: what the load generator can carry on one core, and how exact its TTFT is.

The server runs on another core. ``--vllm`` runs ``vllm bench serve`` of the installed vLLM beside it, on the same core as
ours before.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import uvloop

from bench.real_vllm import CACHE, PYTHON
from bench.report import Row, print_table
from kvtierd.workload.demo import free_ports
from kvtierd.workload.load.client import Dialect, OpenAiClient
from kvtierd.workload.load.http_stream import read_origin
from kvtierd.workload.load.measure import quantile
from kvtierd.workload.load.runner import TICK_SECONDS, LoadSettings
from kvtierd.workload.load.start import RunRequest, run_load
from kvtierd.workload.load.target import address_target

STREAMS, TOKENS, GAP_SECONDS = 1000, 400, 0.04
EXACT_STREAMS, EXACT_REQUESTS, EXACT_TOKENS, EXACT_GAP_SECONDS = 200, 4000, 20, 0.05
SIDE_DELAY_SECONDS = 0.2


@contextlib.contextmanager
def serving(cpu: int) -> Iterator[str]:
    (port,) = free_ports(1)
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.load_server", str(port), str(cpu)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


def capacity(url: str, directory: Path) -> tuple[float, float, int]:
    """(tokens/s, tokens for each second of CPU time, failed requests) with all streams at once, through all of a run."""
    dataset = directory / "capacity.jsonl"
    question = {"question": f"delay=0.5 gap={GAP_SECONDS} " + "some words of a prompt " * 20}
    dataset.write_text((json.dumps(question) + "\n") * STREAMS)
    load = LoadSettings("fake", concurrency=STREAMS, max_tokens=TOKENS, warm_up=0)
    before = time.process_time()
    result, _ = run_load(RunRequest(dataset, directory / "capacity", load), address_target(url, None, None))
    cpu = time.process_time() - before
    summary = result["summary"]
    return summary["output_tokens_per_second"], summary["output_tokens"] / cpu, summary["failed"]


async def exactness(url: str) -> list[float]:
    """TTFT as measured minus the delay as the server has measured it itself, ascending."""
    client = OpenAiClient(read_origin(url))
    dialect = Dialect(usage=False)
    chance = random.Random(1)
    left = iter(range(EXACT_REQUESTS))
    errors: list[float] = []

    async def worker(number: int) -> None:
        await asyncio.sleep(number * 0.005)
        for _ in left:
            prompt = f"delay={chance.uniform(0.05, 0.5):.3f} gap={EXACT_GAP_SECONDS}"
            answer = await client.ask(
                dialect,
                "fake",
                [{"role": "user", "content": prompt}],
                max_tokens=EXACT_TOKENS,
                timeout_seconds=60,
            )
            assert answer.failure is None, answer.failure
            assert answer.first_seconds is not None
            errors.append(answer.first_seconds - float(answer.content[0]))

    async def tick() -> None:  # as a run has one
        while True:
            await asyncio.sleep(TICK_SECONDS)

    gc.collect()
    gc.freeze()  # as a run does
    ticker = asyncio.create_task(tick())
    await asyncio.gather(*(worker(n) for n in range(EXACT_STREAMS)))
    ticker.cancel()
    client.close()
    return sorted(errors[EXACT_STREAMS:])  # without the first of each stream, which had to connect


def beside_vllm(url: str, cpu: int, directory: Path) -> list[Row]:
    """The same 200 streams with a delay that is always the same, by our run and by vLLM's own tool."""
    prompt = f"delay={SIDE_DELAY_SECONDS} gap={EXACT_GAP_SECONDS}"
    dataset = directory / "side.jsonl"
    dataset.write_text((json.dumps({"question": prompt, "prompt": prompt}) + "\n") * 2000)
    load = LoadSettings("fake", concurrency=EXACT_STREAMS, max_tokens=EXACT_TOKENS, warm_up=EXACT_STREAMS)
    request = RunRequest(dataset, directory / "side", load, salt="")
    ours = run_load(request, address_target(url, None, None))[0]["summary"]
    command = [
        str(PYTHON.with_name("vllm")), "bench", "serve", "--backend", "openai-chat", "--endpoint", "/v1/chat/completions",
        "--base-url", url, "--model", "fake", "--tokenizer", str(CACHE / "demo-model"), "--dataset-name", "custom",
        "--dataset-path", str(dataset), "--custom-output-len", str(EXACT_TOKENS), "--num-prompts", "2000",
        "--max-concurrency", str(EXACT_STREAMS), "--disable-shuffle", "--skip-chat-template", "--save-result",
        "--save-detailed", "--result-dir", str(directory), "--result-filename", "vllm.json",
    ]  # fmt: skip
    done = subprocess.run(
        ["taskset", "-c", str(cpu), *command], check=False, capture_output=True, text=True, timeout=600
    )
    if done.returncode != 0:
        return [
            Row(
                "vllm bench serve",
                "did not run: " + (done.stdout + done.stderr).strip().splitlines()[-1],
                "",
                True,
            )
        ]
    theirs = json.loads((directory / "vllm.json").read_text())
    ttfts = sorted(theirs["ttfts"])
    mine = ours["ttft_seconds"]

    def told(p50: float, p99: float) -> str:
        return f"+{(p50 - SIDE_DELAY_SECONDS) * 1000:.1f} / +{(p99 - SIDE_DELAY_SECONDS) * 1000:.1f} ms"

    return [
        Row(
            f"{EXACT_STREAMS} streams, delay {SIDE_DELAY_SECONDS} s: TTFT over it, p50 / p99",
            told(mine["p50"], mine["p99"]), "", True,
        ),
        Row("  the same by vllm bench serve", told(quantile(ttfts, 50), quantile(ttfts, 99)), "", True),
    ]  # fmt: skip


def rows(*, vllm: bool) -> list[Row]:
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[0]})
    with contextlib.suppress(PermissionError):
        # The server inherits it: what else runs on this machine should not be measured.
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(5))
    found = []
    with tempfile.TemporaryDirectory() as name, serving(cpus[-1]) as url:
        directory = Path(name)
        rate, for_cpu, failed = capacity(url, directory)
        found += [
            Row(
                f"{STREAMS:,} streams at once on one core", f"{rate:,.0f} tokens/s, {failed} failed", ">= 20,000 tokens/s",
                rate >= 20_000 and not failed,
            ),
            Row("  for each second of CPU time", f"{for_cpu:,.0f} tokens", ">= 20,000", for_cpu >= 20_000),
        ]  # fmt: skip
        errors = uvloop.run(exactness(url))
        p50, p99, worst = quantile(errors, 50), quantile(errors, 99), errors[-1]
        found.append(
            Row(
                f"TTFT error at {EXACT_STREAMS} streams, {len(errors):,} requests: p50, p99, worst",
                f"{p50 * 1000:.2f}, {p99 * 1000:.2f}, {worst * 1000:.2f} ms", "p99 <= 2 ms", p99 <= 0.002,
            )
        )  # fmt: skip
        if vllm:
            found += beside_vllm(url, cpus[0], directory)
    return found


if __name__ == "__main__":
    print_table(rows(vllm="--vllm" in sys.argv))
