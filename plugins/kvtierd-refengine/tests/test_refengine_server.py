"""The HTTP side, through real sockets, with a tiny model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientResponse, web
from aiohttp.test_utils import TestClient, TestServer
from kvtierd_refengine.app import EngineServer
from kvtierd_refengine.options import options
from refengine_fakes import FakeStore

SMALL: dict[str, Any] = {
    "preset": "tiny", "block_size": 16, "max_model_len": 4096, "l1": 2 * 1024**2, "max_num_seqs": 2, "max_queue": 2,
    "max_body": 20_000, "l3_call_limit": 0.2, "l3_cooldown": 0.2, "l3_init_deadline": 0.3,
}  # fmt: skip
PROMPT = "Happy families are all alike; every unhappy family is unhappy in its own way. " * 2
CHAT = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 5, "ignore_eos": True}
COMPLETION = {"prompt": PROMPT, "max_tokens": 5, "ignore_eos": True}


class Lab:
    def __init__(self, server: EngineServer, client: TestClient[web.Request, web.Application]) -> None:
        self.server, self.client = server, client

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        data = body if isinstance(body, (bytes, str)) else json.dumps(body)
        async with self.client.post(path, data=data) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.client.get(path) as response:
            return response.status, await response.json()

    async def until_idle(self) -> None:
        async with asyncio.timeout(10):
            while self.server.core.load().running or self.server.core.pool.owned:
                await asyncio.sleep(0.01)

    def metric(self, name: str, **labels: str) -> float | None:
        stats = self.server._stats
        assert stats is not None
        return stats.registry.get_sample_value(name, {"engine": "0", "model_name": "refengine", **labels})


@asynccontextmanager
async def running(store: FakeStore | None = None, *, load: bool = True, **changes: Any) -> AsyncIterator[Lab]:
    server = EngineServer(options(**(SMALL | changes)), store)
    test_server = TestServer(server.app)
    await test_server.start_server()  # with handler_cancellation, as in production
    async with TestClient(test_server) as client:
        if load:
            await server.load()
        try:
            yield Lab(server, client)
        finally:
            for gate in store.gates.values() if store else ():
                gate.set()
            await server.close()


async def events_of(response: ClientResponse) -> list[Any]:
    """The data of every server-sent event; fails on anything that is not one."""
    events = []
    for part in (await response.text()).split("\n\n"):
        if part:
            assert part.startswith("data: ")
            data = part.removeprefix("data: ")
            events.append(data if data == "[DONE]" else json.loads(data))
    return events


async def test_completion_has_openais_form() -> None:
    async with running() as lab:
        status, body = await lab.post("/v1/completions", COMPLETION)
        assert status == 200
        assert body["object"] == "text_completion"
        assert body["model"] == "refengine"
        (choice,) = body["choices"]
        assert (choice["index"], choice["finish_reason"], len(choice["text"])) == (0, "length", 5)
        usage = body["usage"]
        assert usage["prompt_tokens"] == len(PROMPT)
        assert usage["total_tokens"] == len(PROMPT) + 5
        assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
        again = (await lab.post("/v1/completions", COMPLETION))[1]
        cached = (len(PROMPT) - 1) // 16 * 16
        assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}
        tiers = again["usage"]["kvtier"]
        assert (tiers["l1_tokens"], tiers["l3_tokens"], tiers["computed_tokens"]) == (
            cached,
            0,
            len(PROMPT) - cached,
        )
        assert tiers["logits_digest"] == usage["kvtier"]["logits_digest"]
        assert again["choices"] == body["choices"]


async def test_chat_has_openais_form_and_counts_its_template() -> None:
    async with running() as lab:
        status, body = await lab.post("/v1/chat/completions", CHAT)
        assert (status, body["object"]) == (200, "chat.completion")
        message = body["choices"][0]["message"]
        assert (message["role"], len(message["content"])) == ("assistant", 5)
        assert body["usage"]["prompt_tokens"] > len(PROMPT)
        parts = CHAT | {"messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]}
        assert (await lab.post("/v1/chat/completions", parts))[1]["choices"] == body["choices"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stream_is_the_same_answer_in_order(path: str) -> None:
    chat = "chat" in path
    request = CHAT if chat else COMPLETION
    async with running() as lab:
        whole = (await lab.post(path, request))[1]
        body = request | {"stream": True, "stream_options": {"include_usage": True}}
        async with lab.client.post(path, json=body) as response:
            assert response.status == 200
            assert response.headers["Content-Type"].startswith("text/event-stream")
            events = await events_of(response)
        *chunks, usage, done = events
        assert done == "[DONE]"
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 5
        assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["length"]
        if chat:
            assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
            assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
            text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
            assert text == whole["choices"][0]["message"]["content"]
        else:
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]


async def test_a_stream_without_usage_has_none() -> None:
    async with (
        running() as lab,
        lab.client.post("/v1/completions", json=COMPLETION | {"stream": True}) as response,
    ):
        events = await events_of(response)
    assert events[-1] == "[DONE]"
    assert all(event["choices"] for event in events[:-1])


async def test_tokens_stream_as_they_come() -> None:
    body = COMPLETION | {"stream": True, "max_tokens": 3000}
    async with running() as lab, lab.client.post("/v1/completions", json=body) as response:
        await response.content.readuntil(b"\n\n")
        assert lab.server.core.load().running == 1  # long before the end
        response.close()
        await lab.until_idle()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_frees_everything(stream: bool) -> None:
    async with running() as lab:
        host, port = lab.client.host, lab.client.port
        body = json.dumps(COMPLETION | {"stream": stream, "max_tokens": 3900}).encode()
        reader, writer = await asyncio.open_connection(host, port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        if stream:
            await reader.readuntil(b"data: ")
        else:
            async with asyncio.timeout(10):
                while not lab.server.core.load().running:
                    await asyncio.sleep(0.005)
        writer.transport.abort()
        await lab.until_idle()
        generated = lab.metric("vllm:generation_tokens_total")
        assert generated is not None
        assert generated < 3900
        assert lab.metric("vllm:request_success_total", finished_reason="abort") == 1
        assert (await lab.post("/v1/completions", COMPLETION))[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "text"),
    [
        ("completions", b"{not json", 400, None, "JSON"),
        ("completions", b"\xff\xfe", 400, None, "JSON"),
        ("completions", "[]", 400, None, "object"),
        ("completions", {}, 400, "prompt", "Field required"),
        ("completions", {"prompt": ""}, 400, "prompt", "empty"),
        ("completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens", "greater"),
        ("completions", {"prompt": "x", "max_tokens": "5"}, 400, "max_tokens", "integer"),
        (
            "completions",
            {"prompt": "x", "max_tokens": 10**30},
            400,
            "prompt",
            "maximum context length is 4096",
        ),
        ("completions", {"prompt": "x" * 5000}, 400, "prompt", "5000 in the prompt"),
        ("completions", {"prompt": "x", "model": "gpt"}, 404, "model", "does not exist"),
        ("completions", {"prompt": "x", "temperature": 0.7}, 400, "temperature", "temperature 0"),
        ("completions", {"prompt": "x", "n": 2}, 400, "n", "n=1"),
        ("completions", {"prompt": "x", "stop": ["a"]}, 400, "stop", "stop"),
        ("completions", {"prompt": "x", "logprobs": 1}, 400, "logprobs", "logprobs"),
        ("completions", {"prompt": "x", "stream": "yes"}, 400, "stream", "boolean"),
        ("chat/completions", {"messages": []}, 400, "messages", "at least 1"),
        (
            "chat/completions",
            {"messages": [{"role": "king", "content": "x"}]},
            400,
            "messages.0.role",
            "Input",
        ),
        ("chat/completions", {"messages": [{"role": "user"}]}, 400, "messages.0.content", "required"),
        ("chat/completions", CHAT | {"response_format": {"type": "json"}}, 400, "response_format", "text"),
        ("completions", {"prompt": "x" * 30_000}, 413, None, "size"),
        ("nowhere", {}, 404, None, "Not Found"),
    ],
)
async def test_errors_have_openais_form(
    path: str, body: Any, status: int, param: str | None, text: str
) -> None:
    async with running() as lab:
        got, answer = await lab.post(f"/v1/{path}", body)
        assert got == status
        error = answer["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert text in error["message"]
        if param:
            assert error["param"].startswith(param)
        assert lab.server.core.load().running == 0


async def test_a_wrong_method_is_told_the_right_one() -> None:
    async with running() as lab, lab.client.get("/v1/completions") as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert "error" in await response.json()


async def test_tokens_as_a_prompt_and_harmless_fields_are_taken() -> None:
    async with running() as lab:
        text = (
            await lab.post("/v1/completions", COMPLETION | {"seed": 1, "user": "me", "temperature": 0.0})
        )[1]
        tokens = (
            await lab.post("/v1/completions", COMPLETION | {"prompt": list(PROMPT.encode()), "seed": 2})
        )[1]
        assert tokens["choices"] == text["choices"]
        assert (await lab.post("/v1/completions", {"prompt": [1, 300]}))[0] == 400


async def test_too_many_requests_get_429_and_the_others_their_answers() -> None:
    async with running(max_num_seqs=1, max_queue=2) as lab:
        long = COMPLETION | {"max_tokens": 200}
        requests = [asyncio.create_task(lab.post("/v1/completions", long)) for _ in range(8)]
        answers = await asyncio.gather(*requests)
        statuses = sorted(status for status, _ in answers)
        assert set(statuses) == {200, 429}
        assert statuses.count(200) in {2, 3, 4}
        refused = next(body for status, body in answers if status == 429)
        assert refused["error"]["code"] == "queue_full"
        async with lab.client.post("/v1/completions", json=COMPLETION) as response:
            assert response.status == 200


async def test_refusals_for_load_say_when_to_come_back() -> None:
    async with running(load=False) as lab, lab.client.post("/v1/completions", json=COMPLETION) as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"


async def test_not_ready_until_loaded() -> None:
    async with running(load=False) as lab:
        status, body = await lab.get("/health")
        assert (status, body["status"]) == (503, "starting")
        assert (await lab.get("/metrics"))[0] == 503
        await lab.server.load()
        status, body = await lab.get("/health")
        assert (status, body["status"]) == (200, "ok")
        assert body["l3"] == {"enabled": False, "state": "off", "skipping": False, "problem": ""}


async def test_it_says_what_it_is() -> None:
    async with running() as lab:
        assert "not for serving" in (await lab.get("/version"))[1]["notice"]
        (model,) = (await lab.get("/v1/models"))[1]["data"]
        assert (model["id"], model["max_model_len"]) == ("refengine", 4096)


async def test_metrics_are_prometheus_text() -> None:
    async with running() as lab:
        await lab.post("/v1/completions", COMPLETION)
        async with lab.client.get("/metrics") as response:
            assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert (
                f'vllm:prompt_tokens_total{{engine="0",model_name="refengine"}} {len(PROMPT)}.0'
                in await response.text()
            )


async def test_reset_clears_l1_only() -> None:
    store = FakeStore()
    async with running(store) as lab:
        await lab.post("/v1/completions", COMPLETION)
        assert lab.server.tier is not None
        async with asyncio.timeout(5):
            while not lab.server.tier.drained():
                await asyncio.sleep(0.01)
        status, body = await lab.post("/reset_prefix_cache", b"")
        assert (status, body) == (200, {"forgotten_blocks": len(PROMPT) // 16})
        usage = (await lab.post("/v1/completions", COMPLETION))[1]["usage"]["kvtier"]
        assert (usage["l1_tokens"], usage["l3_tokens"]) == (0, (len(PROMPT) - 1) // 16 * 16)
        status, body = await lab.post("/reset_prefix_cache?reset_external=true", b"")
        assert status == 501
        assert "kvtierctl" in body["error"]["message"]
        assert (await lab.post("/v1/completions", COMPLETION))[1]["usage"]["kvtier"]["l1_tokens"] > 0


@pytest.mark.parametrize(("codes", "hangs", "state"), [([-1] * 9, False, "failed"), ([], True, "hung")])
async def test_serves_from_l1_when_the_pool_cannot_be_joined(
    codes: list[int], hangs: bool, state: str
) -> None:
    import threading

    store = FakeStore()
    store.open_codes = codes
    if hangs:
        store.gates["open"] = threading.Event()
    async with running(store) as lab:
        status, body = await lab.get("/health")
        assert (status, body["status"], body["l3"]["state"]) == (200, "ok", state)
        assert (await lab.post("/v1/completions", COMPLETION))[0] == 200


async def test_stopping_finishes_what_runs_and_refuses_the_rest() -> None:
    async with running() as lab:
        long = asyncio.create_task(lab.post("/v1/completions", COMPLETION | {"max_tokens": 400}))
        async with asyncio.timeout(5):
            while not lab.server.core.load().running:
                await asyncio.sleep(0.005)
        drained = asyncio.create_task(lab.server.drain(10))
        await asyncio.sleep(0.01)
        assert (await lab.post("/v1/completions", COMPLETION))[0] == 503
        assert (await lab.get("/health"))[0] == 503
        status, body = await long
        assert (status, body["usage"]["completion_tokens"]) == (200, 400)
        assert await drained


async def test_a_drain_that_takes_too_long_cuts_off() -> None:
    async with running() as lab:
        body = COMPLETION | {"max_tokens": 3900, "stream": True}
        async with lab.client.post("/v1/completions", json=body) as response:
            await response.content.readuntil(b"\n\n")
            assert not await lab.server.drain(0.05)
            await lab.server.close()
            rest = (await response.text()).split("\n\n")
        assert rest[-2] == "data: [DONE]"
        assert json.loads(rest[-3].removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"


async def test_an_internal_fault_is_an_openai_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as lab:
        monkeypatch.setattr(lab.server.core.model, "forward", lambda *_: 1 / 0)
        status, body = await lab.post("/v1/completions", COMPLETION)
        assert (status, body["error"]["type"]) == (500, "server_error")
        async with lab.client.post("/v1/completions", json=COMPLETION | {"stream": True}) as response:
            events = await events_of(response)
        assert events[0]["error"]["type"] == "server_error"
        assert events[-1] == "[DONE]"


async def l3(lab: Lab, method: str) -> tuple[int, Any]:
    async with lab.client.request(method, "/l3") as response:
        return response.status, await response.json()


async def test_l3_goes_off_and_on_and_no_request_fails() -> None:
    async with running(FakeStore(), l3_switch=True) as lab:
        _, first = await lab.post("/v1/completions", COMPLETION)
        tier = lab.server.tier
        assert tier is not None
        async with asyncio.timeout(10):
            while not tier.drained():
                await asyncio.sleep(0.01)

        async def cold() -> tuple[int, str]:
            await lab.post("/reset_prefix_cache", "")
            status, body = await lab.post("/v1/completions", COMPLETION)
            assert status == 200
            return body["usage"]["kvtier"]["l3_tokens"], body["usage"]["kvtier"]["logits_digest"]

        digest = first["usage"]["kvtier"]["logits_digest"]
        hits, _ = await cold()
        assert hits > 0
        queries = lab.metric("vllm:external_prefix_cache_queries_total")
        assert await l3(lab, "DELETE") == (200, {"l3": "closed"})
        assert await cold() == (0, digest)
        assert lab.metric("vllm:external_prefix_cache_queries_total") == queries, "it was not asked"
        assert lab.metric("refengine:l3_attached") == 0
        assert (await lab.get("/health"))[0] == 200
        assert await l3(lab, "PUT") == (200, {"l3": "attached"})
        assert await cold() == (hits, digest)


async def test_l3_is_fixed_unless_it_was_asked_for() -> None:
    async with running(FakeStore()) as lab:
        for method in ("PUT", "DELETE"):
            status, body = await l3(lab, method)
            assert (status, body["error"]["code"]) == (403, "l3_fixed")
    async with running(l3_switch=True) as lab:
        status, body = await l3(lab, "DELETE")
        assert (status, body["error"]["code"]) == (400, "no_l3")


async def test_a_pool_that_cannot_be_joined_again_is_said() -> None:
    store = FakeStore()
    async with running(store, l3_switch=True) as lab:
        await l3(lab, "DELETE")
        store.open_codes = [-3000]
        status, body = await l3(lab, "PUT")
        assert (status, body["error"]["code"]) == (503, "l3_not_attached")
        assert "-3000" in body["error"]["message"]
        assert (await lab.post("/v1/completions", COMPLETION))[0] == 200
