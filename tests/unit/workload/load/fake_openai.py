"""An OpenAI-compatible server that streams with known delays and has every fault a run must bear."""

import asyncio
import json
import socket
import threading
import time
from contextlib import contextmanager

from aiohttp import web


def chunk(delta=None, *, text=None, finish=None, **more):
    choice = {"index": 0, "finish_reason": finish}
    choice |= {"text": text} if text is not None else {"delta": delta or {}}
    return {"id": "x", "object": "chat.completion.chunk", "model": "fake", "choices": [choice], **more}


def event(value):
    return (
        b"data: "
        + (value if isinstance(value, bytes) else json.dumps(value, ensure_ascii=False).encode())
        + b"\n\n"
    )


class FakeOpenAi:
    """``fault`` chooses what goes wrong; ``every`` (n) makes only each n-th request go wrong.

    Attributes:
        bodies: every request's body, in order; ``counted()`` leaves out the first ones of a run.
        running, most_running: requests under way.
        prefixes: prompts seen, for the hit counters: a prompt seen before counts as found in L1.
    """

    def __init__(
        self, *, ttft=0.0, gap=0.0, fault="", every=1, models=("fake",), tokens=None, metrics=True, early=True
    ):
        self.ttft, self.gap, self.fault, self.every, self.models = ttft, gap, fault, every, models
        self.tokens, self.metrics = tokens, metrics
        self.bodies, self.at, self.running, self.most_running = [], [], 0, 0
        self.seen, self.looked_up, self.hits = set(), 0, 0
        self.early = early  # a comment and the role come at once; else with the first token, as from vLLM
        self.after = 0  # requests without faults before the first with one

    def app(self):
        app = web.Application()
        app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.get("/metrics", self._metrics),
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completions),
            ]
        )
        return app

    async def _models(self, request):
        if self.fault == "html":
            return web.Response(text="<html><h1>Welcome to nginx</h1></html>", content_type="text/html")
        if self.fault == "no-models":
            raise web.HTTPNotFound
        if self.fault == "key" and request.headers.get("Authorization") != "Bearer right-key-of-many-letters":
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        return web.json_response({"object": "list", "data": [{"id": m} for m in self.models]})

    async def _metrics(self, _):
        if not self.metrics:
            raise web.HTTPNotFound
        return web.Response(
            text=f'vllm:prefix_cache_queries_total{{engine="0"}} {self.looked_up}\n'
            f'vllm:prefix_cache_hits_total{{engine="0"}} {self.hits}\n'
        )

    async def _chat(self, request):
        if self.fault == "no-chat":
            return web.json_response({"detail": "Not Found"}, status=404)
        return await self._answer(request, chat=True)

    async def _completions(self, request):
        return await self._answer(request, chat=False)

    async def _answer(self, request, *, chat):
        body = await request.json()
        self.bodies.append(body)
        self.at.append(time.monotonic())
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._stream(request, body, chat)
        finally:
            self.running -= 1

    async def _stream(self, request, body, chat):
        number = len(self.bodies)
        fault = self.fault if number > self.after and number % self.every == 0 else ""
        if self.fault == "strict" and "ignore_eos" in body:
            return web.json_response(
                {"error": {"message": "Unrecognized request argument: ignore_eos"}}, status=400
            )
        if self.fault == "no-usage" and "stream_options" in body:
            return web.json_response({"error": {"message": "stream_options is not supported"}}, status=400)
        if fault == "429":
            return web.json_response({"error": {"message": "too many requests"}}, status=429)
        if fault == "500":
            return web.Response(
                text="<html>Internal Server Error</html>", status=500, content_type="text/html"
            )
        if fault == "whole":
            return web.json_response({"choices": [{"message": {"content": "all at once"}}]})
        prompt = json.dumps(body.get("messages") or body.get("prompt"))
        count = self.tokens or body["max_tokens"]
        prompt_tokens = len(prompt)
        self.looked_up += prompt_tokens
        if prompt in self.seen:
            self.hits += prompt_tokens
        self.seen.add(prompt)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        if not self.early:
            await asyncio.sleep(self.ttft)
        await response.write(b": ping\n\n" if self.early else b"")
        if chat:
            await response.write(event(chunk({"role": "assistant", "content": ""})))
        if self.early:
            await asyncio.sleep(self.ttft)
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "empty":
            count = 0
        for index in range(count):
            if index:
                await asyncio.sleep(self.gap)
            word = f"w{index} "
            if fault == "reasoning":
                data = event(chunk({"reasoning_content": word}))
            elif fault == "utf8":
                data = event(chunk({"content": "语 "}))
            else:
                data = event(chunk({"content": word}) if chat else chunk(text=word))
            if fault == "utf8":
                for byte in data:
                    await response.write(bytes([byte]))
            else:
                await response.write(data)
            if fault == "cut" and index == count // 2:
                request.transport.abort()
                return response
            if (
                fault == "short" and index == count // 2
            ):  # a clean end of the body without an end of the stream
                return response
            if fault == "error-event" and index == count // 2:
                await response.write(event({"error": {"message": "KV load failed", "code": 500}}))
                return response
        await response.write(event(chunk({}, finish="length") if chat else chunk(text="", finish="length")))
        if body.get("stream_options"):
            usage = {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": count,
                "total_tokens": prompt_tokens + count,
            }
            await response.write(event({"object": "chat.completion.chunk", "choices": [], "usage": usage}))
        await response.write(event(b"[DONE]"))
        return response


@contextmanager
def serving(server):
    """Serves in a thread with a loop of its own; gives the address."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(server.app(), shutdown_timeout=0.1)

    async def start():
        await runner.setup()
        await web.SockSite(runner, listener).start()

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
