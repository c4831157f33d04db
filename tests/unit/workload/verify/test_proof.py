"""The whole proof against a small engine over HTTP that can be wrong in the ways real ones are."""

import asyncio
import contextlib
import json

import pytest

from kvtierd.errors import KvtierError, WorkloadError
from kvtierd.plan.engine import EngineObservation, HttpCall, TierTokens
from kvtierd.plan.model import EngineTalk, UnitSpec
from kvtierd.workload.verify import proof as proof_module
from kvtierd.workload.verify.proof import ProofOptions, prompt_of, prove
from kvtierd.workload.verify.subject import Subject

BLOCK = 100


class Engine:
    """Caches whole blocks of 100 characters. ``faults`` says in what it is wrong."""

    def __init__(self, *faults, written=True, details=True, asked=0):
        self.faults, self.written, self.details = set(faults), written, details
        self.l1, self.l3, self.pending = set(), set(), set()
        self.counts = {"asked": asked, "l1": 0, "l3": 0, "written": 0}
        self.requests, self.flushes = [], 0

    def complete(self, body):
        self.requests.append(body)
        prompt = body["prompt"]
        blocks = [prompt[: (n + 1) * BLOCK] for n in range((len(prompt) - 1) // BLOCK)]
        l1 = sum(block in self.l1 for block in blocks)
        l3 = sum(block in self.l3 for block in blocks[l1:])
        if "small host" in self.faults:
            l3 = min(l3, 3)
        if "others" in self.faults:
            self.counts["asked"] += 77
        self.counts["asked"] += len(prompt)
        self.counts["l1"] += l1 * BLOCK
        self.counts["l3"] += l3 * BLOCK
        self.l1 |= set(blocks)
        late = "late" in self.faults and self.flushes < 2
        if "not persisted" not in self.faults and not late:
            new = set(blocks) - self.l3
            self.l3 |= new
            self.counts["written"] += len(new) * BLOCK
        text = "wrong" if "wrong text" in self.faults and l3 else "right"
        usage = {"prompt": len(prompt)}
        if self.details:
            usage |= {"l1": l1 * BLOCK, "l3": l3 * BLOCK}
        return {"text": text, "usage": usage}

    def flush(self):
        self.flushes += 1
        if "no flush" not in self.faults:
            self.l1 = set()
        if "purged" in self.faults:
            self.l3 = set()

    def metrics(self):
        counts = dict(self.counts)
        if not self.written:
            del counts["written"]
        return counts

    async def serve(self, reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            size = next(
                (int(h.split(":")[1]) for h in head.split("\r\n") if h.lower().startswith("content-length")),
                0,
            )
            body = json.loads(await reader.readexactly(size) or b"null")
            _, path, _ = head.split("\r\n")[0].split(" ")
            if path == "/v1/completions":
                if "hangs" in self.faults:
                    await asyncio.Event().wait()
                answer = self.complete(body)
            elif path == "/flush":
                self.flush()
                answer = {}
            elif path == "/v1/models":
                answer = {"data": [{"id": "m"}]}
            else:
                answer = self.metrics()
            data = json.dumps(answer).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
            await writer.drain()
        writer.close()


class Driver:
    name = "fake"

    def tokens(self, body):
        usage = json.loads(body)["usage"]
        return TierTokens(prompt=usage["prompt"], l1=usage.get("l1"), l3=usage.get("l3"))

    def generated(self, body):
        return json.loads(body)["text"]

    def observe(self, text):
        c = json.loads(text)
        return EngineObservation(
            l1_query_tokens=c["asked"], l1_hit_tokens=c["l1"], l3_query_tokens=c["asked"], l3_hit_tokens=c["l3"],
            l3_written_tokens=c.get("written"),
        )  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(proof_module, "REST_SECONDS", 0.05)
    monkeypatch.setattr(proof_module, "COUNTED_SECONDS", 0.3)
    real = asyncio.sleep
    monkeypatch.setattr(proof_module.asyncio, "sleep", lambda seconds: real(min(seconds, 0.02)))


async def run(engine, *, flush=(HttpCall(path="/flush"),), restarter=None, **options):
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    base = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    spec = UnitSpec(
        id="kvtier-engine-e",
        kind="engine",
        name="e",
        argv=(),
        metrics_url=f"{base}/metrics",
        talk=EngineTalk(base_url=base),
    )
    subject = Subject(spec=spec, driver=Driver(), flush=flush, no_flush="it cannot", restart=restarter)
    defaults = {"seed": 7, "length": 1050, "deadline_seconds": 5.0, "settle_seconds": 0.01}
    try:
        return await prove(subject, ProofOptions(**{**defaults, **options}), lambda _: None)
    finally:
        server.close()


async def test_a_sound_engine_is_proved():
    engine = Engine()
    proof = await run(engine)
    assert proof.fault is None
    assert [(s.name, s.tokens.l1, s.tokens.l3) for s in proof.steps] == [
        ("cold", 0, 0),
        ("warm", 1000, 0),
        ("restored", 0, 1000),
        ("again", 1000, 0),
    ]
    assert proof.remarks == ()
    assert engine.l3  # was never emptied
    assert {(r["temperature"], r["model"], r["prompt"]) for r in engine.requests} == {
        (0, "m", prompt_of(7, 1050))
    }


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        (Engine("not persisted"), "not-persisted"),
        (Engine("purged"), "not-prefetched"),
        (Engine("purged", written=False), "not-restored"),
        (Engine("small host"), "partly-restored"),
        (Engine("wrong text"), "wrong-text"),
        (Engine("no flush"), "flush-no-effect"),
        (Engine(details=False), None),
        (Engine(written=False), None),
        (Engine("hangs"), "deadline"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_each_fault_has_its_reason(engine, expected):
    proof = await run(engine, deadline_seconds=1.5)
    assert (proof.fault and proof.fault.code) == expected


async def test_l3_that_is_late_is_asked_again_and_that_is_said():
    proof = await run(Engine("late", written=False))
    assert proof.fault is None
    assert "attempt 3" in proof.remarks[0]
    assert [s.name for s in proof.steps] == ["cold", "warm", "restored", "again"]


async def test_counters_of_others_are_noticed():
    proof = await run(Engine("others", details=False))
    assert any("others used the engine" in remark for remark in proof.remarks)


async def test_an_engine_in_use_is_left_alone_without_leave():
    engine = Engine(asked=5000)
    with pytest.raises(WorkloadError) as caught:
        await run(engine)
    assert caught.value.stable_code == "verify.in-use"
    assert "5,000 prompt tokens" in caught.value.message
    assert engine.requests == []
    assert engine.flushes == 0
    assert (await run(engine, yes=True)).fault is None


async def test_an_engine_that_cannot_be_flushed_is_restarted_when_asked():
    engine = Engine()
    assert (await run(engine, flush=None)).fault.code == "no-flush"
    proof = await run(engine, flush=None, restarter=engine.flush, restart=True, yes=True, seed=8)
    assert proof.fault is None
    proof = await run(engine, restart=True, yes=True, seed=9)
    assert proof.fault.code == "no-restart"


async def test_a_dead_engine_is_an_error():
    spec = UnitSpec(id="e", kind="engine", name="e", argv=(), talk=EngineTalk(base_url="http://127.0.0.1:9"))
    with pytest.raises(KvtierError) as caught:
        await prove(Subject(spec=spec, driver=Driver(), flush=()), ProofOptions(seed=1), lambda _: None)
    assert caught.value.stable_code == "engine.no-answer"


def test_prompts_repeat_by_seed_and_share_no_beginning():
    assert prompt_of(1, 500) == prompt_of(1, 500)
    assert len(prompt_of(1, 500)) == 500
    assert len({prompt_of(seed, 300)[:10] for seed in range(50)}) == 50
