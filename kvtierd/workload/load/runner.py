"""A run: warm-up, sessions by concurrency or by rate, counters before and after, a result in any case."""

from __future__ import annotations

import array
import asyncio
import dataclasses
import gc
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Final, Literal

import kvtierd
from kvtierd.errors import WorkloadError
from kvtierd.workload.load import arrivals
from kvtierd.workload.load.client import Answer, Api, Dialect, OpenAiClient
from kvtierd.workload.load.counters import Counts, EngineCounters, tier_account, timeline
from kvtierd.workload.load.measure import RequestRecord, distribution, summarize, time_per_output_token
from kvtierd.workload.load.prompts import Session, warm_up_text
from kvtierd.workload.load.results import RunFiles

KIND: Final = "kvtierd-bench-run"
DEFAULT_TOKENS: Final = 128
WARM_UP_TOKENS: Final = 16
LATE_SECONDS: Final = 0.005  # a generator that is later than this at p99 is told of
SAMPLE_SECONDS: Final = 1.0
TICK_SECONDS: Final = 0.005
OTHERS_SHARE: Final = 0.05

Arrival = Literal["closed", "constant", "poisson", "burst", "trace"]
Ended = Literal["finished", "interrupted", "deadline", "gave-up"]
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, slots=True)
class LoadSettings:
    """How the load is made. Seconds, requests a second, tokens.

    ``max_tokens`` ``None``: as the dataset says, else 128. ``concurrency`` is the number of sessions at a time: with
    ``arrival`` "closed" all of them always, else the most of them (``None``: no limit). ``speed`` is for "trace".
    """

    model: str
    concurrency: int | None = 1
    arrival: Arrival = "closed"
    rate: float = 0.0
    burst_size: int = 1
    speed: float = 1.0
    seed: int = 0
    max_tokens: int | None = None
    ignore_eos: bool = True
    api: Api = "chat"
    warm_up: int = 1
    request_seconds: float = 600.0
    deadline_seconds: float | None = None


@dataclasses.dataclass(slots=True)
class Live:
    """What a run has come to, for who watches."""

    total: int
    done: int = 0
    failed: int = 0
    running: int = 0
    tokens: int = 0


class Run:
    """One run. Use: ``await run.execute(stop)`` once.

    Args:
        client: the server.
        settings: how.
        sessions: what, in order.
        files: where to.
        counters: the engine's metrics, where there are any.
        about: facts about the run that only the caller knows, for the result (dataset, salt, label).
    """

    def __init__(
        self,
        client: OpenAiClient,
        settings: LoadSettings,
        sessions: Sequence[Session],
        files: RunFiles,
        *,
        counters: EngineCounters | None = None,
        about: dict[str, Any] | None = None,
        say: Say = lambda _: None,
    ) -> None:
        self._client = client
        self._settings = settings
        self._sessions = sessions
        self._files = files
        self._counters = counters
        self._about = about or {}
        self._say = say
        self._dialect = Dialect(api=settings.api)
        self._records: list[RequestRecord] = []
        self._gaps: array.array[float] = array.array("f")
        self._samples: list[tuple[float, Counts]] = []
        self._before: Counts | None = None
        self._late: array.array[float] = array.array("f")
        self._notes: list[str] = []
        self._numbers = iter(range(1, 2**62))
        self._not_sent = 0
        self._cut_off = 0
        self._failed_in_a_row = 0
        self._zero = 0.0
        self._first_start: float | None = None
        self._last_end = 0.0
        self.live = Live(len(sessions))

    async def execute(self, stop: asyncio.Event) -> dict[str, Any]:
        """The result; it is written as well. ``stop`` ends the run early, with what there is.

        Raises:
            WorkloadError: nothing could be measured: the server does not answer, or nothing can be written.
        """
        started = time.time()
        self._files.begin(self._result(started, "running"))
        try:
            await _unless(stop, self._prepare())
        except BaseException:
            self._files.discard()  # nothing was measured
            raise
        try:
            return await self._execute(started, stop)
        except BaseException as error:
            result = self._result(started, "failed")
            if isinstance(error, WorkloadError):
                result["error"] = error.as_dict()
            self._files.end(result)
            raise

    async def _execute(self, started: float, stop: asyncio.Event) -> dict[str, Any]:
        self._say("")
        gc.collect()
        gc.freeze()  # what is loaded by now need not be looked at again in the middle of a measurement
        self._zero = time.perf_counter()
        before = self._before
        if before is not None:
            self._samples.append((0.0, before))
        watchers = [asyncio.create_task(w) for w in (self._tick(), self._sample(), self._flush())]
        try:
            ended = await self._until_ended(stop)
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
            gc.unfreeze()
        result = self._result(started, ended)
        if self._counters is not None and before is not None:
            try:
                after = await self._counters.read_settled()
            except WorkloadError as error:
                result["notes"].append(error.message)
            else:
                self._samples.append((time.perf_counter() - self._zero, after))
                result["tiers"] = {"source": self._counters.source, **tier_account(before, after)}
                result["timeline"] = timeline(self._samples)
                result["notes"] += _others(result)
        self._files.end(result)
        return result

    async def _prepare(self) -> None:
        """Looks whether the model is there, finds the server's dialect, and warms it up with prompts of no use later."""
        self._say("asking the server what it serves")
        served = await self._client.models()
        if not self._settings.model and served is not None and len(served) == 1:
            self._settings = dataclasses.replace(self._settings, model=served[0])
        settings = self._settings
        if not settings.model:
            raise WorkloadError(
                "which model?",
                why=f"the server serves: {', '.join(served)}"
                if served
                else "the server has no list of models",
                hint="name it with --model",
                code="load.model",
            )
        if served is not None and settings.model not in served:
            raise WorkloadError(
                f"the server does not serve a model named {settings.model!r}",
                why=f"it serves: {', '.join(served) or 'none'}",
                hint="--model takes the name that the server lists, not the path of its weights",
                code="load.model",
            )
        seed = secrets.token_hex(8)
        self._dialect, notes = await self._client.negotiate(
            settings.model,
            warm_up_text(seed, 200),
            api=settings.api,
            ignore_eos=settings.ignore_eos,
            timeout_seconds=settings.request_seconds,
        )
        self._notes += notes
        if settings.warm_up:
            await self._warm_up(seed)
        if self._counters is not None:
            self._before = await self._counters.read_settled()

    async def _warm_up(self, seed: str) -> None:
        settings = self._settings
        lengths = [len("".join(s.questions()[:1])) for s in self._sessions[: settings.warm_up]]
        self._say(f"warming up with {settings.warm_up} other prompts")
        limit = asyncio.Semaphore(settings.concurrency or settings.warm_up)

        async def one(number: int) -> Answer:
            async with limit:
                text = warm_up_text(f"{seed}-{number}", lengths[number % len(lengths)])
                return await self._ask([{"role": "user", "content": text}], WARM_UP_TOKENS)

        answers = await asyncio.gather(*(one(n) for n in range(settings.warm_up)))
        failed = [a.failure for a in answers if a.failure]
        if failed:
            self._notes.append(f"{len(failed)} of {len(answers)} warm-up requests failed: {failed[0].text}")

    async def _ask(self, messages: list[dict[str, str]], max_tokens: int) -> Answer:
        settings = self._settings
        return await self._client.ask(
            self._dialect,
            settings.model,
            messages,
            max_tokens=max_tokens,
            timeout_seconds=settings.request_seconds,
        )

    async def _until_ended(self, stop: asyncio.Event) -> Ended:
        closed = self._settings.arrival == "closed"
        work = asyncio.create_task(self._closed_loop() if closed else self._open_loop())
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait(
                {work, stopped},
                timeout=self._settings.deadline_seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if work.done():
                return "gave-up" if work.result() else "finished"
            return "interrupted" if stopped.done() else "deadline"
        finally:
            for task in (work, stopped):
                task.cancel()
            await asyncio.gather(work, stopped, return_exceptions=True)

    async def _closed_loop(self) -> bool:
        """``concurrency`` sessions at a time, the next one when one is through. True: gave up."""
        waiting = iter(self._sessions)

        async def worker() -> None:
            for session in waiting:  # shared: each session goes to one worker
                if self._gave_up:
                    return
                await self._session(session, 0.0)

        count = min(self._settings.concurrency or 1, len(self._sessions))
        async with asyncio.TaskGroup() as workers:
            for _ in range(count):
                workers.create_task(worker())
        return self._gave_up

    async def _open_loop(self) -> bool:
        """Sessions start at their time, however many are under way. True: gave up."""
        limit = asyncio.Semaphore(self._settings.concurrency) if self._settings.concurrency else None

        async def one(session: Session, planned: float) -> None:
            try:
                await self._session(session, max(0.0, time.perf_counter() - self._zero - planned))
            finally:
                if limit is not None:
                    limit.release()

        async with asyncio.TaskGroup() as running:
            for session, planned in zip(self._sessions, self._start_times(), strict=False):
                wait = planned - (time.perf_counter() - self._zero)
                if wait > 0:
                    await asyncio.sleep(wait)
                if limit is not None:
                    await limit.acquire()
                if self._gave_up:
                    break
                running.create_task(one(session, planned))
        return self._gave_up

    def _start_times(self) -> Iterator[float]:
        settings = self._settings
        if settings.arrival == "trace":
            return arrivals.replay((s.timestamp_seconds for s in self._sessions), settings.speed)
        if settings.arrival == "burst":
            return arrivals.burst(settings.rate, settings.burst_size)
        if settings.arrival == "poisson":
            return arrivals.poisson(settings.rate, settings.seed)
        return arrivals.constant(settings.rate)

    @property
    def _gave_up(self) -> bool:
        """Nothing but failures, more in a row than are under way at a time: the server is gone."""
        return self._failed_in_a_row >= max(20, 2 * (self._settings.concurrency or 1))

    async def _session(self, session: Session, lag: float) -> None:
        settings = self._settings
        messages: list[dict[str, str]] = []
        if session.system:
            messages.append({"role": "system", "content": session.system})
        tokens = settings.max_tokens or session.output_tokens or DEFAULT_TOKENS
        questions = session.questions()
        self.live.running += 1
        try:
            for turn, question in enumerate(questions, 1):
                messages.append({"role": "user", "content": question})
                answer = await self._ask(messages, tokens)
                self._keep(session, turn, messages, answer, lag if turn == 1 else 0.0)
                if answer.failure is not None:
                    self._not_sent += len(questions) - turn
                    break
                messages.append({"role": "assistant", "content": answer.text})
        except asyncio.CancelledError:
            self._cut_off += 1
            raise
        finally:
            self.live.running -= 1
        self.live.done += 1

    def _keep(
        self, session: Session, turn: int, messages: list[dict[str, str]], answer: Answer, lag: float
    ) -> None:
        now = time.perf_counter()
        counted = answer.usage_count("completion_tokens")
        tokens = counted or answer.chunks
        failure = answer.failure
        record = RequestRecord(
            number=next(self._numbers),
            conversation=session.id,
            turn=turn,
            started_seconds=round(answer.started - self._zero, 6),
            lag_seconds=round(lag, 6),
            ttft_seconds=answer.first_seconds,
            e2e_seconds=answer.last_seconds if failure is None else now - answer.started,
            tpot_seconds=time_per_output_token(answer.first_seconds, answer.last_seconds, tokens),
            prompt_tokens=answer.usage_count("prompt_tokens"),
            output_tokens=tokens,
            tokens_from="usage" if counted else "events",
            cached_tokens=answer.cached_tokens,
            prompt_chars=sum(len(m["content"]) for m in messages),
            error=failure.kind if failure else "",
            error_text=failure.text if failure else "",
        )
        self._records.append(record)
        self._files.add(record)
        self._first_start = min(answer.started, self._first_start or answer.started)
        self._last_end = max(self._last_end, now)
        if failure is None:
            self._failed_in_a_row = 0
            self._gaps.extend(answer.gaps)
            self.live.tokens += tokens
        else:
            self._failed_in_a_row += 1
            self.live.failed += 1

    # -- beside the load

    async def _tick(self) -> None:
        """How late this process is: what waits for it is measured too long by so much."""
        while True:
            due = time.perf_counter() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            self._late.append(max(0.0, time.perf_counter() - due))

    async def _sample(self) -> None:
        while self._counters is not None:
            await asyncio.sleep(SAMPLE_SECONDS)
            try:
                self._samples.append((time.perf_counter() - self._zero, await self._counters.read()))
            except WorkloadError:
                continue  # a scrape that came too late; the last reading counts

    async def _flush(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._files.flush()

    # -- the result

    def _result(self, started: float, ended: str) -> dict[str, Any]:
        seconds = self._last_end - self._first_start if self._first_start is not None else 0.0
        summary = summarize(self._records, self._gaps, seconds=seconds)
        lag = distribution(self._late)
        notes = list(self._notes)
        if lag is not None and lag["p99"] > LATE_SECONDS:
            notes.append(
                f"the load generator itself was late (p99 {lag['p99'] * 1000:.0f} ms): times may be too long by that;"
                " give it a core of its own, or less load"
            )
        if ended == "gave-up":
            notes.append(f"gave up after {self._failed_in_a_row} failures in a row")
        if summary["output_tokens_from"] == "events":
            notes.append("the server gives no usage: output tokens are the events with text")
        return {
            "kind": KIND,
            "version": kvtierd.__version__,
            "complete": ended == "finished",
            "ended": ended,
            "started_unix_seconds": started,
            **self._about,
            "server": {"url": self._client.origin.url, **dataclasses.asdict(self._dialect)},
            "settings": dataclasses.asdict(self._settings),
            "sessions": {"planned": self.live.total, "done": self.live.done, "cut_off": self._cut_off},
            "requests_not_sent": self._not_sent,
            "summary": summary,
            "tiers": None,
            "timeline": [],
            "generator_lag_seconds": lag,
            "notes": notes,
        }


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Does it, unless it is stopped meanwhile: KeyboardInterrupt then."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise KeyboardInterrupt
        task.result()
    finally:
        for each in (task, stopped):
            each.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


def _others(result: dict[str, Any]) -> list[str]:
    """A note when the engine's counters tell of more than was sent."""
    looked_up, sent = result["tiers"]["looked_up_tokens"], result["summary"]["prompt_tokens"]
    if looked_up is None or not sent or result["summary"]["failed"] or not result["complete"]:
        return []
    if looked_up > sent * (1 + OTHERS_SHARE):
        told = f"the engine looked up {looked_up} prompt tokens and this run sent {sent}"
        return [f"{told}: somebody else used it as well, and the hit rates are of both"]
    return []
