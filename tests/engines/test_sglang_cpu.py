"""The real SGLang 0.5.23 on the CPU, run by kvtierd: ready, tiers, a taken port, drain.

Needs the environment that ``plugins/kvtierd-sglang/engine-env/setup.py`` makes; without it these tests are skipped.
The tests build on one engine and run in the file's order.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from kvtierd_sglang.lines import LISTENS, PORT_TAKEN, host_pools, is_ready
from sglang_lab import DRIVER, STAMP, Engine, Lab, engine_spec, environment_directory, make_model

from kvtierd.engines.l3_switch import Switched, calls_of, switch
from kvtierd.engines.talk import ask
from kvtierd.errors import UnitError
from kvtierd.plan.engine import EngineObservation, HttpCall
from kvtierd.secret_files import read_secret
from kvtierd.workload.demo import free_ports

ENVIRONMENT = environment_directory()
PYTHON = ENVIRONMENT / "bin" / "python"
pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (ENVIRONMENT / STAMP).exists(),
        reason=f"no SGLang at {ENVIRONMENT}: run plugins/kvtierd-sglang/engine-env/setup.py",
    ),
]
PAGE_TOKENS = 64
PROMPT_TOKENS = 2500
READY_SECONDS = 240.0


def prompt(seed: int) -> str:
    return "".join(random.Random(seed).choices("abcdefghij klmnop", k=PROMPT_TOKENS))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("sglang"))
    yield lab
    lab.close()


@pytest.fixture(scope="module")
def model(lab: Lab) -> Path:
    return make_model(lab.base / "model", PYTHON)


@pytest.fixture(scope="module")
def engine(lab: Lab, model: Path) -> Engine:
    spec = engine_spec(lab.base, model, PYTHON, name="sgl", port=free_ports(1)[0], args='drain = "60s"')
    engine = lab.start(spec)
    began = time.monotonic()
    engine.wait_for("ready", "failed", seconds=READY_SECONDS)
    engine.ready_after_seconds = time.monotonic() - began
    print(f"\nready after {engine.ready_after_seconds:.1f} s")
    return engine


def wait_for_backup(engine: Engine) -> None:
    """L3 is written behind the request: until its counter rests."""
    name = "sglang:backuped_tokens_total"
    until, before = time.monotonic() + 30, -1.0
    while time.monotonic() < until:
        now = engine.metric(name)
        if now == before and now >= PROMPT_TOKENS // PAGE_TOKENS * PAGE_TOKENS:
            return
        before = now
        time.sleep(0.5)
    raise AssertionError(f"{name} does not rest: {before}")


def test_ready_is_proved_by_a_token_and_the_log_says_its_sizes(engine: Engine) -> None:
    assert engine.view.state == "ready", engine.view.reason
    assert engine.spec.talk is not None
    assert engine.spec.talk.generation is not None
    assert DRIVER.generated(engine.call(engine.spec.talk.generation))
    lines = engine.log_lines()
    seen = [found for line in lines if (found := DRIVER.read_line(line)) is not None]
    assert [found.kv_tokens for found in seen if found.kv_tokens is not None] == [65536]
    assert any(found.kv_memory_bytes for found in seen)
    assert any(found.running is not None for found in seen)
    assert not [found.fatal for found in seen if found.fatal]
    assert sum(map(is_ready, lines)) == 1
    (l2,) = (pool for line in lines for pool in host_pools(line))
    assert 0.9e9 < l2.size_bytes <= 1.1e9  # l2 = "1GB"


def test_every_tier_answers_in_its_turn(engine: Engine, record_property: pytest.RecordProperty) -> None:
    flush = engine.spec.talk.flush if engine.spec.talk else {}
    assert set(flush) == {"L1+L2", "L3"}  # L1 alone cannot be flushed
    whole_pages = (PROMPT_TOKENS - 1) // PAGE_TOKENS * PAGE_TOKENS
    text = prompt(1)
    answers: dict[str, bytes] = {}
    for name in ("cold", "L1", "L3", "L1 again", "cleared"):
        if name == "L3":
            wait_for_backup(engine)
        if name in {"L3", "cleared"}:
            for call in flush["L1+L2"] + (flush["L3"] if name == "cleared" else ()):
                engine.call(call)
        began = time.monotonic()
        answers[name] = engine.complete(text)
        record_property(name, round(time.monotonic() - began, 3))
        print(f"{name}: {time.monotonic() - began:.3f} s, {DRIVER.tokens(answers[name])}")
    served = {name: DRIVER.tokens(body) for name, body in answers.items()}
    assert all(tokens.prompt == PROMPT_TOKENS for tokens in served.values())
    for name in ("cold", "cleared"):
        tokens = served[name]
        assert (tokens.l1, tokens.l2, tokens.l3, tokens.computed) == (0, 0, 0, PROMPT_TOKENS)
    for name in ("L1", "L1 again"):
        assert (served[name].l1, served[name].l2, served[name].l3) == (whole_pages, 0, 0)
    assert (served["L3"].l1, served["L3"].l2, served["L3"].l3) == (0, 0, whole_pages)
    texts = {name: json.loads(body)["text"] for name, body in answers.items()}
    assert texts["L3"] == texts["L1"] == texts["L1 again"]
    assert texts["cleared"] == texts["cold"]


def test_kvtierctl_verify_proves_the_tiers(engine: Engine) -> None:
    url = engine.spec.talk.base_url if engine.spec.talk else ""
    command = [sys.executable, "-m", "kvtierd.cli", "verify", "--url", str(url), "--engine", "sglang-cpu"]
    command += ["--yes", "--length", str(PROMPT_TOKENS), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    proof = json.loads(done.stdout)
    assert proof["ok"], proof
    whole = (PROMPT_TOKENS - 1) // PAGE_TOKENS * PAGE_TOKENS
    tiers = {step["name"]: (step["l1"], step["l2"], step["l3"]) for step in proof["steps"]}
    assert tiers == {
        "cold": (0, 0, 0),
        "warm": (whole, 0, 0),
        "restored": (0, 0, whole),
        "again": (whole, 0, 0),
    }


def test_metrics_agree_with_the_answers(engine: Engine) -> None:
    def look() -> tuple[int, ...]:
        _, body = engine.request("GET", "/metrics")
        seen = DRIVER.observe(body.decode())
        assert seen.l1_capacity_tokens == 65536
        hits = (seen.l1_query_tokens, seen.l1_hit_tokens, seen.l2_hit_tokens, seen.l3_hit_tokens)
        assert None not in hits
        return tuple(hit or 0 for hit in hits)

    before = look()
    tokens = [DRIVER.tokens(engine.complete(prompt(2))) for _ in range(2)]
    time.sleep(1.5)
    change = tuple(now - then for now, then in zip(look(), before, strict=True))
    assert change == (
        sum(t.prompt or 0 for t in tokens),
        *(sum(getattr(t, tier) or 0 for t in tokens) for tier in ("l1", "l2", "l3")),
    )


@pytest.mark.parametrize("holder", ["another engine", "a mute listener"])
def test_a_taken_port_is_named_and_never_looks_ready(
    lab: Lab, model: Path, engine: Engine, holder: str
) -> None:
    """Behind a mute listener SGLang stays up: its own words end it. Behind another engine it says that it is ready."""
    with socket.socket() as listener:
        port = engine.spec.ports[0]
        if holder == "a mute listener":
            port = free_ports(1)[0]
            listener.bind(("127.0.0.1", port))
            listener.listen()
        deadline_seconds = 400  # not what ends it
        name = f"late-{port}"
        args = f'ready-deadline = "{deadline_seconds}s"\ndrain = "5s"'
        late = lab.start(engine_spec(lab.base, model, PYTHON, name=name, port=port, args=args))
        view = late.wait_for("failed", "backoff", "ready", "degraded", seconds=deadline_seconds + 30)
    print(f"{holder}: {view.state}: {view.reason}")
    lines = late.log_lines()
    (sign,) = (line for line in lines if PORT_TAKEN in line)
    found = DRIVER.read_line(sign)
    assert found is not None
    assert "Errno 98" in (found.fatal or "")
    assert not any(LISTENS in line for line in lines)
    assert view.state == "failed", view.reason
    assert "Errno 98" in view.reason
    assert not late.processes()
    lab.remove(late)
    assert engine.view.state == "ready"
    assert DRIVER.generated(engine.complete("still here"))


def test_a_stop_lets_the_running_request_end_and_leaves_nothing_behind(lab: Lab, engine: Engine) -> None:
    answers: list[bytes] = []
    tokens = 400
    client = threading.Thread(target=lambda: answers.append(engine.complete("a long story", tokens)))
    client.start()
    until = time.monotonic() + 20
    while engine.metric("sglang:num_running_reqs") < 1:
        assert time.monotonic() < until, "the request never ran"
        time.sleep(0.1)
    processes = engine.processes()
    assert len(processes) > 1
    began = time.monotonic()
    lab.do(lambda supervisor: supervisor.request_stop(engine.spec.id, remember=False))
    view = engine.wait_for("stopped", "failed", seconds=90)
    print(f"drained and stopped after {time.monotonic() - began:.1f} s")
    client.join(10)
    assert view.state == "stopped", view.reason
    assert view.last_exit is not None
    assert (view.last_exit.code, view.last_exit.signal) == (0, None)
    (answer,) = answers
    assert json.loads(answer)["meta_info"]["completion_tokens"] == tokens
    assert not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="module")
def switchable(lab: Lab, model: Path) -> Iterator[Engine]:
    """An engine whose L3 can be taken off and on. It comes last, when the other has ended."""
    spec = engine_spec(
        lab.base, model, PYTHON, name="sw", port=free_ports(1)[0], args='drain = "10s"',
        settings_lines="l3_switch = true\n",
    )  # fmt: skip
    engine = lab.start(spec)
    engine.wait_for("ready", "failed", seconds=READY_SECONDS)
    yield engine
    lab.remove(engine)


def key_of(engine: Engine) -> str:
    (path,) = engine.spec.secret_files
    return read_secret(path)


def switch_l3(engine: Engine, *, on: bool, deadline_seconds: float = 30.0) -> Switched:
    """As the daemon does it."""
    spec = engine.spec

    async def look() -> EngineObservation | None:
        return DRIVER.observe(engine.request("GET", "/metrics")[1].decode())

    async def make(call: HttpCall) -> bytes:
        return await ask(spec, call, timeout_seconds=60.0)

    calls = calls_of(spec, on=on)
    return asyncio.run(switch(spec.id, calls, make, look, deadline_seconds=deadline_seconds))


def flush(engine: Engine, name: str) -> None:
    assert engine.spec.talk is not None
    for call in engine.spec.talk.flush[name]:
        asyncio.run(ask(engine.spec, call, timeout_seconds=30.0))


def test_the_admin_key_is_in_its_file_only(lab: Lab, switchable: Engine) -> None:
    assert switchable.view.state == "ready", switchable.view.reason
    key = key_of(switchable)
    (path,) = switchable.spec.secret_files
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
    assert key not in switchable.spec.model_dump_json()
    for process in switchable.processes():
        assert key not in " ".join(process.cmdline())
        assert key not in " ".join(process.environ().values())
    # It does print it: the log has the line, and not the key.
    lines = [line for line in switchable.log_lines() if "admin_api_key" in line]
    assert lines
    assert all("'admin_api_key': '***'" in line for line in lines)
    kept = [*(lab.base / "log").rglob("*"), *(lab.base / "run").rglob("*")]
    assert not [p for p in kept if p.is_file() and key.encode() in p.read_bytes()]
    # What the plan's note says of it.
    status, body = switchable.request("GET", "/server_info")
    assert (status, key.encode() in body) == (200, True)


def test_without_the_key_nothing_is_switched_or_flushed(switchable: Engine) -> None:
    for method, path in (
        ("DELETE", "/hicache/storage-backend"),
        ("PUT", "/hicache/storage-backend"),
        ("POST", "/flush_cache"),
        ("POST", "/hicache/storage-backend/clear"),
    ):
        body = {"hicache_storage_backend": "file"} if method == "PUT" else None
        assert switchable.request(method, path, body)[0] == 401, path


def test_l3_is_taken_off_and_on_at_run_time(switchable: Engine) -> None:
    whole_pages = (PROMPT_TOKENS - 1) // PAGE_TOKENS * PAGE_TOKENS
    text = prompt(7)

    def l3_tokens() -> int | None:
        """Of the prompt, once L1 and L2 are empty."""
        flush(switchable, "L1+L2")
        return DRIVER.tokens(switchable.complete(text)).l3

    assert l3_tokens() == 0
    wait_for_backup(switchable)
    assert l3_tokens() == whole_pages
    for _ in range(2):  # twice in a row does no harm
        print(f"\ndetached {switch_l3(switchable, on=False).describe()}")
        assert not l3_tokens()
    for _ in range(2):
        print(f"attached {switch_l3(switchable, on=True).describe()}")
        assert l3_tokens() == whole_pages
    assert switchable.view.state == "ready"
    flush(switchable, "L3")
    assert l3_tokens() == 0


def test_a_running_request_is_waited_for_and_not_harmed(switchable: Engine) -> None:
    answers: list[bytes] = []
    client = threading.Thread(target=lambda: answers.append(switchable.complete("a long story", 300)))
    client.start()
    until = time.monotonic() + 20
    while switchable.metric("sglang:num_running_reqs") < 1:
        assert time.monotonic() < until, "the request never ran"
        time.sleep(0.05)
    with pytest.raises(UnitError) as busy:
        switch_l3(switchable, on=False, deadline_seconds=0.5)
    assert busy.value.stable_code == "engine.busy"
    done = switch_l3(switchable, on=False, deadline_seconds=60)
    print(f"\ndetached {done.describe()}")
    client.join(10)
    (answer,) = answers
    assert json.loads(answer)["meta_info"]["completion_tokens"] == 300
    switch_l3(switchable, on=True)
