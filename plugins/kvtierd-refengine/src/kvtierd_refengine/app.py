"""The HTTP side: routes, streaming, limits, and errors in OpenAI's form. One :class:`EngineServer` per process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, Literal

from aiohttp import web
from prometheus_client import generate_latest

from kvtierd_refengine import NOTICE, __version__
from kvtierd_refengine.api import Answer, ApiError, ChatRequest, CompletionRequest, error_body, parse_request
from kvtierd_refengine.core import EngineCore, Event, Finished, QueueFullError, StoppingError, build
from kvtierd_refengine.l3store import BlockStore
from kvtierd_refengine.l3tier import L3Tier, TierBusyError, TierOptions
from kvtierd_refengine.model import PRESETS, Model
from kvtierd_refengine.options import EngineOptions
from kvtierd_refengine.stats import EngineStats
from kvtierd_refengine.tokenizer import decode

_log = logging.getLogger(__name__)
_READ_SECONDS: Final = 30.0  # for a request's body
_WRITE_SECONDS: Final = 30.0  # for one chunk of a stream
_ABORT_SECONDS: Final = 2.0
_SETTLE_POLL_SECONDS: Final = 0.02
_METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Status = Literal["starting", "ok", "stopping"]


class EngineServer:
    """The engine with its HTTP application.

    Life: :meth:`load` once (the server listens already and answers 503), then requests, then :meth:`drain` and
    :meth:`close`.
    """

    def __init__(self, options: EngineOptions, store: BlockStore | None) -> None:
        self._options = options
        self._store = store
        self._status: Status = "starting"
        self._core: EngineCore | None = None
        self._tier: L3Tier | None = None
        self._stats: EngineStats | None = None
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._reporter: asyncio.Task[None] | None = None
        self.app = web.Application(client_max_size=options.max_body, middlewares=[_openai_errors])
        self.app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/version", self._version),
                web.get("/metrics", self._metrics),
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat_completions),
                web.post("/reset_prefix_cache", self._reset_prefix_cache),
                web.put("/l3", self._attach_l3),
                web.delete("/l3", self._detach_l3),
            ]
        )

    # --- life --------------------------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Builds the model and joins the pool; returns when requests are served. Raises ValueError or MemoryError."""
        core = await asyncio.to_thread(self._build_core)
        stats = EngineStats(self._options.served_model_name, load=core.load)
        stats.describe_cache(block_size=self._options.block_size, blocks=core.pool.total)
        tier = self._start_tier(core, stats)
        core.start(stats, tier)
        self._core, self._stats, self._tier = core, stats, tier
        self._reporter = asyncio.create_task(self._report(stats))
        # A restarted engine that is ready should find its warm tier at once; a missing one must not stop it.
        while tier is not None and not tier.settled and self._status == "starting":  # noqa: ASYNC110 - set by threads
            await asyncio.sleep(_SETTLE_POLL_SECONDS)
        if self._status == "starting":
            self._status = "ok"
        state = tier.state if tier else "off"
        _log.info("ready: model %s, %d KV blocks in L1, L3 %s", self._options.preset, core.pool.total, state)

    async def drain(self, timeout_seconds: float) -> bool:
        """Refuses new requests and waits for the running ones. False when some were still running."""
        self._status = "stopping"
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_seconds)
        return self._idle.is_set()

    async def close(self) -> None:
        """Ends what still runs with ``abort`` and leaves the pool. Bounded: about 7 s at worst."""
        self._status = "stopping"
        if self._reporter is not None:
            self._reporter.cancel()
        if self._core is not None:
            await asyncio.to_thread(self._core.stop, _ABORT_SECONDS)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), _ABORT_SECONDS / 2)
        if self._tier is not None and not await asyncio.to_thread(self._tier.close):
            _log.warning("the MemCache client did not close in time; leaving without it")

    @property
    def tier(self) -> L3Tier | None:
        """L3, once loaded and when on."""
        return self._tier

    @property
    def core(self) -> EngineCore:
        """The engine core. Raises ``ApiError`` 503 before it is there."""
        if self._core is None:
            raise ApiError(503, "The engine is starting.", code="starting")
        return self._core

    def _build_core(self) -> EngineCore:
        options = self._options
        config = PRESETS[options.preset].with_seed(options.seed)
        model = Model(config, block_size=options.block_size, max_tokens=options.max_model_len)
        return build(
            model,
            l1_bytes=options.l1,
            max_sequences=options.max_num_seqs,
            max_queue=options.max_queue,
            prefix_cache=options.prefix_cache,
        )

    def _start_tier(self, core: EngineCore, stats: EngineStats) -> L3Tier | None:
        if self._store is None:
            return None
        options = self._options
        tier = L3Tier(
            self._store,
            TierOptions(
                namespace=options.l3_namespace,
                call_limit_seconds=options.l3_call_limit,
                cooldown_seconds=options.l3_cooldown,
                init_deadline_seconds=options.l3_init_deadline,
                most_pending_saves=min(options.l3_save_queue, max(1, core.pool.total // 2)),
            ),
            model_identity=core.identity,
            block_bytes=core.pool.block_bytes,
            events=stats,
        )
        stats.watch_l3(attached=lambda: tier.state == "attached", skipping=lambda: tier.skipping)
        tier.start()
        return tier

    async def _report(self, stats: EngineStats) -> None:
        while True:
            await asyncio.sleep(self._options.stats_interval)
            if line := stats.log_line(self._options.stats_interval):
                _log.info("%s", line)

    # --- routes ------------------------------------------------------------------------------------------------------

    async def _health(self, _request: web.Request) -> web.Response:
        tier = self._tier
        body = {
            "status": self._status,
            "engine": "kvtierd reference engine",
            "l3": {
                "enabled": self._store is not None,
                "state": tier.state if tier else ("attaching" if self._store else "off"),
                "skipping": bool(tier and tier.skipping),
                "problem": tier.problem if tier else "",
            },
        }
        return web.json_response(body, status=200 if self._status == "ok" else 503)

    async def _attach_l3(self, _request: web.Request) -> web.Response:
        """L3 on again. Answers when it is; else why not."""
        tier = self._switchable_tier()
        try:
            await asyncio.to_thread(tier.attach)
        except TierBusyError as error:
            raise ApiError(409, f"L3 cannot be attached now: {error}.", code="l3_busy") from None
        while not tier.settled and self._status == "ok":  # noqa: ASYNC110 - set by threads
            await asyncio.sleep(_SETTLE_POLL_SECONDS)
        if tier.state != "attached":
            why = tier.problem or "MemCache's init has not returned"
            raise ApiError(503, f"L3 is not attached: {why}. It is tried again.", code="l3_not_attached")
        return web.json_response({"l3": tier.state})

    async def _detach_l3(self, _request: web.Request) -> web.Response:
        """L3 off: the MemCache client is closed, requests are computed."""
        tier = self._switchable_tier()
        try:
            await asyncio.to_thread(tier.detach)
        except TierBusyError as error:
            raise ApiError(409, f"L3 cannot be detached now: {error}.", code="l3_busy") from None
        return web.json_response({"l3": tier.state})

    def _switchable_tier(self) -> L3Tier:
        self._accepting_core()
        if not self._options.l3_switch:
            raise ApiError(
                403, "L3 is fixed: the engine was started without --l3-switch on.", code="l3_fixed"
            )
        if self._tier is None:
            raise ApiError(400, "The engine has no L3 (--l3 off).", code="no_l3")
        return self._tier

    async def _version(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": __version__, "engine": "refengine", "notice": NOTICE})

    async def _metrics(self, _request: web.Request) -> web.Response:
        if self._stats is None:
            raise ApiError(503, "The engine is starting.", code="starting")
        return web.Response(
            body=generate_latest(self._stats.registry), headers={"Content-Type": _METRICS_TYPE}
        )

    async def _models(self, _request: web.Request) -> web.Response:
        model = {
            "id": self._options.served_model_name,
            "object": "model",
            "created": 0,
            "owned_by": "kvtierd-refengine",
            "max_model_len": self._options.max_model_len,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        core = self.core
        if request.query.get("reset_external", "").lower() in {"1", "true"} and self._tier is not None:
            raise ApiError(
                501,
                "L3 was not cleared, nor was L1. MemCache cannot list the keys of one model, so other engines' blocks "
                "would be missed or lost. Purge the pool with kvtierctl instead.",
                param="reset_external",
            )
        forgotten = core.pool.reset()
        _log.info("Successfully reset prefix cache (%d blocks)", forgotten)
        return web.json_response({"forgotten_blocks": forgotten})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, CompletionRequest)

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, ChatRequest)

    # --- requests ----------------------------------------------------------------------------------------------------

    async def _answer(
        self, http: web.Request, kind: type[CompletionRequest] | type[ChatRequest]
    ) -> web.StreamResponse:
        core = self._accepting_core()
        with self._counted():
            try:
                async with asyncio.timeout(_READ_SECONDS):
                    body = await http.read()
            except TimeoutError:
                raise ApiError(408, f"The body did not arrive within {_READ_SECONDS:.0f} s.") from None
            request = parse_request(kind, body)
            if request.model not in {None, self._options.served_model_name}:
                message = f"The model `{request.model}` does not exist."
                raise ApiError(404, message, param="model", code="model_not_found")
            prompt = request.prompt_tokens()
            max_tokens = request.wanted_tokens(self._options.max_model_len - len(prompt))
            if refusal := core.refusal(len(prompt), max_tokens):
                raise ApiError(400, refusal, param="messages" if kind is ChatRequest else "prompt")
            answer = Answer(self._options.served_model_name, chat=kind is ChatRequest)
            async with _submitted(core, prompt, max_tokens, ignore_eos=request.ignore_eos) as events:
                if request.stream:
                    wants_usage = request.stream_options is not None and request.stream_options.include_usage
                    return await _stream(http, answer, events, wants_usage=wants_usage)
                return await _whole(answer, events)

    def _accepting_core(self) -> EngineCore:
        if self._status == "stopping":
            raise ApiError(503, "The engine is stopping.", code="stopping")
        if self._status == "starting":
            raise ApiError(503, "The engine is starting.", code="starting")
        return self.core

    @contextlib.contextmanager
    def _counted(self) -> Any:
        self._active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()


@contextlib.asynccontextmanager
async def _submitted(
    core: EngineCore, prompt: list[int], max_tokens: int, *, ignore_eos: bool
) -> AsyncIterator[asyncio.Queue[Event]]:
    """The events of one request. However the block is left, also by a client that went away, its work ends."""
    loop = asyncio.get_running_loop()
    # Not bounded by itself, but by max_tokens: the engine never waits for a slow reader.
    events: asyncio.Queue[Event] = asyncio.Queue()

    def sink(event: Event) -> None:
        loop.call_soon_threadsafe(events.put_nowait, event)

    try:
        cancel = core.submit(prompt, max_tokens, ignore_eos=ignore_eos, sink=sink)
    except QueueFullError:
        raise ApiError(429, "Too many requests are waiting. Try again later.", code="queue_full") from None
    except StoppingError:
        raise ApiError(503, "The engine is stopping.", code="stopping") from None
    try:
        yield events
    finally:
        cancel()


async def _whole(answer: Answer, events: asyncio.Queue[Event]) -> web.Response:
    tokens: list[int] = []
    while not isinstance(event := await events.get(), Finished):
        tokens.append(event.token)
    if event.reason == "error":
        raise ApiError(500, "The engine failed on this request; its log says why.")
    if event.reason == "abort":
        raise ApiError(503, "The engine stopped before the answer was complete.", code="stopping")
    return web.json_response(answer.whole(decode(tokens), event.reason, event.usage))


async def _stream(
    http: web.Request, answer: Answer, events: asyncio.Queue[Event], *, wants_usage: bool
) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    )

    async def send(data: str) -> None:
        # A reader that takes nothing for so long is gone.
        async with asyncio.timeout(_WRITE_SECONDS):
            await response.write(f"data: {data}\n\n".encode())

    try:
        await response.prepare(http)
        first = True
        while not isinstance(event := await events.get(), Finished):
            await send(json.dumps(answer.chunk(decode([event.token]), first=first)))
            first = False
        if event.reason == "error":
            await send(json.dumps(error_body(500, "The engine failed on this request; its log says why.")))
        else:
            await send(json.dumps(answer.chunk("", finish_reason=event.reason, first=first)))
            if wants_usage:
                await send(json.dumps(answer.usage_chunk(event.usage)))
        await send("[DONE]")
        await response.write_eof()
    except (ConnectionError, TimeoutError) as error:
        _log.info("a client went away during its stream: %s", type(error).__name__)
    return response


@web.middleware
async def _openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error as JSON in OpenAI's form, with its status."""
    headers: dict[str, str] = {}
    try:
        return await handler(request)
    except ApiError as error:
        status, body = error.status, error.body()
        if status in {429, 503}:
            headers["Retry-After"] = "1"
    except web.HTTPException as error:
        status, body = error.status, error_body(error.status, error.text or error.reason)
        if allow := error.headers.get("Allow"):
            headers["Allow"] = allow
    except Exception:  # noqa: BLE001 - the client gets an answer, the log the traceback
        _log.exception("%s %s failed", request.method, request.path)
        status, body = 500, error_body(500, "Internal error; the engine's log says more.")
    return web.json_response(body, status=status, headers=headers)
