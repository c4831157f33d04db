"""Asks an engine the same prompt four times and finds out which tier answered.

Cold; from L1; then L1 and L2 are emptied and it must come from L3; then from L1 again. L3 itself is never emptied.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
import re
import time
from collections.abc import Callable
from importlib import resources

from kvtierd.errors import KvtierError, WorkloadError
from kvtierd.http_get import http_get
from kvtierd.plan.engine import EngineObservation, HttpCall, TierTokens
from kvtierd.workload.verify.subject import Subject
from kvtierd.workload.verify.verdict import (
    ENOUGH,
    Fault,
    Step,
    StepName,
    Stored,
    enough_restored,
    judge_again,
    judge_cold,
    judge_restored,
    judge_texts,
    judge_warm,
)

TEXT = "alice_in_wonderland.txt"
TRIES = 3
REST_SECONDS = 1.5
COUNTED_SECONDS = 5.0
SCRAPE_SECONDS = 5.0
FEW_TOKENS = 64
"""What kvtierd's own proof of readiness may have asked an engine that nobody else uses."""

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class ProofOptions:
    """How to prove.

    ``length`` is the prompt's in characters. ``settle_seconds`` is waited before L1 is emptied when the engine does not
    say how much it has written to L3. ``yes``: others' blocks in L1 and L2 may be dropped. ``restart``: empty them by a
    restart.
    """

    seed: int
    length: int = 3000
    max_tokens: int = 16
    model: str = ""
    deadline_seconds: float = 180.0
    settle_seconds: float = 5.0
    yes: bool = False
    restart: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Proof:
    """What came out. ``fault`` ``None``: every step held."""

    engine: str
    seed: int
    steps: tuple[Step, ...]
    fault: Fault | None
    remarks: tuple[str, ...]


async def prove(subject: Subject, options: ProofOptions, say: Say) -> Proof:
    """The whole proof, within its deadline.

    Raises:
        KvtierError: The engine does not answer, or others' blocks would be dropped without leave (``verify.in-use``).
    """
    run = _Run(subject, options, say)
    try:
        async with asyncio.timeout(options.deadline_seconds):
            await run.everything()
    except TimeoutError:
        run.fault = Fault(
            "deadline",
            f"not done within {options.deadline_seconds:g} s; the last step was {run.doing}",
            "raise --deadline; kvtierctl status shows whether the engine is ready and how many requests wait",
        )
    return Proof(subject.spec.name, options.seed, tuple(run.steps), run.fault, tuple(run.remarks))


class _Run:
    def __init__(self, subject: Subject, options: ProofOptions, say: Say) -> None:
        self._subject, self._options, self._say = subject, options, say
        self._prompt = prompt_of(options.seed, options.length)
        self._model = options.model
        self._written_before: int | None = None
        self.steps: list[Step] = []
        self.remarks: list[str] = []
        self.fault: Fault | None = None
        self.doing = "none"

    async def everything(self) -> None:
        self._model = self._model or await self._served_model()
        first = await self._look()
        self._check_leave(first)
        self._written_before = None if first is None else first.l3_written_tokens
        cold = await self._step("cold")
        if self._stop(judge_cold(cold)):
            return
        warm = await self._step("warm")
        if self._stop(judge_warm(warm)):
            return
        restored = await self._restore(warm)
        if restored is None:
            return
        again = await self._step("again")
        fault, remark = judge_texts(cold, warm, restored, again)
        if remark:
            self.remarks.append(remark)
        if not self._stop(fault):
            self._stop(judge_again(again))

    async def _restore(self, warm: Step) -> Step | None:
        """Empties L1 and L2 and asks; some times, since L3 is written behind the request."""
        wanted = warm.tokens.l1 or 0
        await self._wait_written(wanted)
        for attempt in range(TRIES):
            if not await self._empty():
                return None
            restored = await self._step("restored")
            if enough_restored(warm, restored):
                if attempt:
                    self.remarks.append(f"L3 had the prompt at attempt {attempt + 1} of {TRIES} only")
                break
            if restored.tokens.l1 or restored.tokens.l1 is None or attempt == TRIES - 1:
                break
            self._say(f"L3 gave back {restored.tokens.l3 or 0} of {wanted} tokens: once more")
            await asyncio.sleep(2.0 * 2**attempt)
        look = await self._look()
        stored = Stored(
            written_tokens=self._written(look),
            has_l3=None if look is None else look.l3_query_tokens is not None,
            l2_capacity_tokens=None if look is None else look.l2_capacity_tokens,
            after_restart=self._options.restart,
            hash_seed=self._subject.spec.env.get("PYTHONHASHSEED"),
        )
        return None if self._stop(judge_restored(warm, restored, stored)) else restored

    def _check_leave(self, look: EngineObservation | None) -> None:
        """Emptying L1 and L2 costs whoever uses the engine what it has cached for them."""
        if self._options.yes:
            return
        asked = None if look is None else look.l1_query_tokens
        if asked is not None and asked <= FEW_TOKENS:
            return
        how = "is not known to be unused" if asked is None else f"has served {asked:,} prompt tokens already"
        what = "restarted" if self._options.restart else "emptied"
        raise WorkloadError(
            f"{self._subject.spec.name} {how}: its L1 and L2 have to be {what} for the proof",
            why="whoever uses it then waits for what was cached there; L3 is not touched",
            hint="add --yes when that may be",
            code="verify.in-use",
        )

    async def _empty(self) -> bool:
        """Empties L1 and L2. ``False``: it could not, and the fault says why."""
        subject = self._subject
        if self._options.restart:
            if subject.restart is None:
                self._stop(
                    Fault("no-restart", "this engine is not kvtierd's: it cannot be restarted from here")
                )
                return False
            self._say("restarting the engine: that empties L1 and L2")
            await asyncio.to_thread(subject.restart)
            self._written_before = None
            return True
        if subject.flush is None:
            self._stop(
                Fault(
                    "no-flush",
                    f"L1 and L2 cannot be emptied without L3: {subject.no_flush}",
                    "or use --restart, which empties them by restarting the engine (--env NAME=VALUE tells what a server"
                    " given by --url was started with)",
                )
            )
            return False
        self._say("emptying L1 and L2, not L3")
        for call in subject.flush:
            await subject.ask(call, timeout_seconds=30.0)
        return True

    async def _wait_written(self, wanted: int) -> None:
        """Until L3 has what it is to give back and its counter rests, or for a fixed time where nothing counts."""
        self.doing = "writing to L3"
        look = await self._look()
        if look is None or look.l3_written_tokens is None:
            self._say(
                f"waiting {self._options.settle_seconds:g} s for L3 to be written (the engine does not count it)"
            )
            await asyncio.sleep(self._options.settle_seconds)
            return
        self._say("waiting until L3 has been written")
        deadline = time.monotonic() + self._options.deadline_seconds / 3
        last, rested = self._written(look), time.monotonic()
        while time.monotonic() < deadline:
            now = self._written(await self._look())
            if now != last:
                last, rested = now, time.monotonic()
            if (now or 0) >= ENOUGH * wanted and time.monotonic() - rested >= REST_SECONDS:
                return
            await asyncio.sleep(0.25)

    def _written(self, look: EngineObservation | None) -> int | None:
        if look is None or look.l3_written_tokens is None:
            return None
        return look.l3_written_tokens - (self._written_before or 0)

    async def _step(self, name: StepName) -> Step:
        self.doing = name
        self._say(f"asking: {name}")
        before = await self._look()
        started = time.perf_counter()
        body = await self._subject.ask(self._call(), timeout_seconds=self._options.deadline_seconds + 5)
        seconds = time.perf_counter() - started
        try:
            tokens, text = self._subject.driver.tokens(body), self._subject.driver.generated(body)
        except ValueError as error:
            raise WorkloadError(
                f"{self._subject.spec.name} gave an answer that its driver cannot read",
                why=str(error),
                hint="is --engine right?",
                code="verify.answer",
            ) from None
        if tokens.l1 is None:
            tokens = await self._counted(tokens, before)
        step = Step(name, tokens, text, seconds)
        if name == "restored":  # an attempt before this one did not count
            self.steps = [s for s in self.steps if s.name != "restored"]
        self.steps.append(step)
        return step

    async def _counted(self, tokens: TierTokens, before: EngineObservation | None) -> TierTokens:
        """The tiers' parts by the growth of the engine's counters, where its answer does not say them."""
        if before is None or before.l1_query_tokens is None or tokens.prompt is None:
            return tokens
        asked = 0
        deadline = time.monotonic() + COUNTED_SECONDS
        while True:
            after = await self._look()
            if after is not None and after.l1_query_tokens is not None:
                asked = after.l1_query_tokens - before.l1_query_tokens
            if asked >= tokens.prompt or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.1)
        if after is None or asked < tokens.prompt:
            return tokens
        if asked > tokens.prompt:
            remark = "others used the engine meanwhile: its counters are of all requests together"
            if remark not in self.remarks:
                self.remarks.append(remark)
        l1, l2, l3 = (_grown(before, after, f"{tier}_hit_tokens") for tier in ("l1", "l2", "l3"))
        found = sum(part or 0 for part in (l1, l2, l3))
        return TierTokens(prompt=tokens.prompt, l1=l1, l2=l2, l3=l3, computed=max(0, tokens.prompt - found))

    def _call(self) -> HttpCall:
        """Greedy and of a fixed length. ``return_cached_tokens_details`` is SGLang's; others pass over it."""
        body = {
            "model": self._model,
            "prompt": self._prompt,
            "max_tokens": self._options.max_tokens,
            "temperature": 0,
            "seed": 0,
            "ignore_eos": True,
            "return_cached_tokens_details": True,
        }
        return HttpCall(path="/v1/completions", body=body)

    async def _served_model(self) -> str:
        body = await self._subject.ask(HttpCall(method="GET", path="/v1/models"), timeout_seconds=10.0)
        try:
            return str(json.loads(body)["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise WorkloadError(
                f"{self._subject.spec.name} lists no model at /v1/models",
                why=f"{type(error).__name__}: {error}",
                hint="is it an OpenAI-compatible server?",
                code="verify.answer",
            ) from None

    async def _look(self) -> EngineObservation | None:
        """What the engine's metrics say; ``None`` when there are none to be had."""
        url = self._subject.spec.metrics_url
        if url is None:
            return None
        with contextlib.suppress(KvtierError, ValueError):
            answer = await http_get(url, timeout_seconds=SCRAPE_SECONDS)
            if answer.status == 200:
                return self._subject.driver.observe(answer.body.decode(errors="replace"))
        return None

    def _stop(self, fault: Fault | None) -> bool:
        self.fault = fault or self.fault
        return fault is not None


def prompt_of(seed: int, length: int) -> str:
    """Words at random, so that no other prompt begins like this one; the same seed gives the same prompt."""
    text = resources.files("kvtierd.data").joinpath(TEXT).read_text(encoding="utf-8")
    words = sorted(set(re.findall(r"[a-z]{3,}", text)))
    chance = random.Random(seed)
    drawn = [f"{seed:x}"]
    size = len(drawn[0])
    while size < length:
        drawn.append(chance.choice(words))
        size += len(drawn[-1]) + 1
    return " ".join(drawn)[:length]


def _grown(before: EngineObservation, after: EngineObservation, field: str) -> int | None:
    """The growth of a counter. One that appears with its first count has grown from nothing."""
    new = getattr(after, field)
    return None if new is None else new - (getattr(before, field) or 0)
