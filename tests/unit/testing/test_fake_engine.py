from __future__ import annotations

import http.client
import json
import time
from typing import Any

import pytest
from kvtierd_refengine.plugin import RefengineDriver

from kvtierd.plan.engine import EngineObservation
from kvtierd.testing import FakeEngine, engine_context

DRIVER = RefengineDriver()  # reads vLLM's names


def ask(
    engine: FakeEngine, method: str, path: str, body: Any = None, timeout: float = 5
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=timeout)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def complete(engine: FakeEngine, prompt: str, **options: Any) -> tuple[int, bytes]:
    return ask(engine, "POST", "/v1/completions", {"prompt": prompt}, **options)


def observe(engine: FakeEngine) -> EngineObservation:
    return DRIVER.observe(ask(engine, "GET", "/metrics")[1].decode())


def test_the_tiers_hit_as_they_should() -> None:
    with FakeEngine() as engine:
        complete(engine, "a b c d")
        complete(engine, "a b c e")
        assert observe(engine) == EngineObservation(
            l1_query_tokens=8, l1_hit_tokens=3, l3_query_tokens=5, l3_hit_tokens=0, running=0, waiting=0
        )
        engine.restart()
        assert observe(engine).l1_query_tokens == 0
        status, body = complete(engine, "a b c d")
        assert (status, DRIVER.generated(body)) == (200, " d")
        seen = observe(engine)
        assert (seen.l1_hit_tokens, seen.l3_query_tokens, seen.l3_hit_tokens) == (0, 4, 4)


def test_without_l3_a_restart_is_cold_and_its_metrics_are_absent() -> None:
    with FakeEngine(uses_l3=False) as engine:
        complete(engine, "a b")
        engine.restart()
        complete(engine, "a b")
        seen = observe(engine)
        assert (seen.l1_hit_tokens, seen.l3_query_tokens) == (0, None)


def test_what_a_driver_generates_works() -> None:
    with FakeEngine() as engine:
        call = DRIVER.generation(engine_context(port=engine.port))
        status, body = ask(engine, call.method, call.path, call.body)
        assert status in call.ok
        assert DRIVER.generated(body)


def test_scripted_trouble() -> None:
    with FakeEngine() as engine:
        assert ask(engine, "GET", "/health")[0] == 200
        engine.healthy = False
        assert ask(engine, "GET", "/health")[0] == 503
        engine.fail_next(2, status=503)
        engine.fail_next(body=b"nonsense", status=200)
        assert [complete(engine, "a")[0] for _ in range(2)] == [503, 503]
        assert complete(engine, "a") == (200, b"nonsense")
        assert complete(engine, "a")[0] == 200
        engine.metrics_text = "<html>"
        with pytest.raises(ValueError, match="vllm"):
            observe(engine)
        assert ask(engine, "POST", "/v1/completions", [1])[0] == 400
        assert ask(engine, "GET", "/nothing")[0] == 404


def test_latency_and_a_frozen_engine_do_not_outlive_close() -> None:
    with FakeEngine(latency_seconds=0.1) as engine:
        started = time.monotonic()
        complete(engine, "a")
        assert time.monotonic() - started >= 0.1
        engine.freeze()
        with pytest.raises(TimeoutError):
            complete(engine, "a", timeout=0.2)
        engine.latency_seconds = 25
        started = time.monotonic()
    assert time.monotonic() - started < 5
