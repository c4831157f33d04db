"""Answers of SGLang's HTTP API: the proving token, and which tier served the prompt."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtierd_sglang.answers import generated, generation, tokens
from sglang_contexts import context

from kvtierd.plan.engine import TierTokens


def body(value: Any) -> bytes:
    return json.dumps(value).encode()


def native(cached: int | None, details: Any) -> bytes:
    about = {
        "prompt_tokens": 2500,
        "completion_tokens": 4,
        "cached_tokens": cached,
        "cached_tokens_details": details,
    }
    return body({"text": "x", "meta_info": about})


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (native(0, None), TierTokens(prompt=2500, l1=0, l2=0, l3=0, computed=2500)),
        (
            native(2496, {"device": 2496, "host": 0, "storage": 0, "storage_backend": "HiCacheFile"}),
            TierTokens(prompt=2500, l1=2496, l2=0, l3=0, computed=4),
        ),
        (
            native(2496, {"device": 0, "host": 0, "storage": 2496, "storage_backend": "NpuMemcacheStore"}),
            TierTokens(prompt=2500, l1=0, l2=0, l3=2496, computed=4),
        ),
        (native(100, {"device": 60, "host": 40}), TierTokens(prompt=2500, l1=60, l2=40, computed=2400)),
        (native(100, None), TierTokens(prompt=2500, computed=2400)),
        (native(None, None), TierTokens(prompt=2500)),
        (
            body(
                {
                    "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}},
                    "sglext": {"cached_tokens_details": {"device": 0, "host": 8}},
                }
            ),
            TierTokens(prompt=9, l1=0, l2=8, computed=1),
        ),
        (body({"usage": {"prompt_tokens": 9, "prompt_tokens_details": None}}), TierTokens(prompt=9)),
        (body({"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}}),
         TierTokens(prompt=9, computed=1)),
        (body({}), TierTokens()),
    ],
)  # fmt: skip
def test_tiers(answer: bytes, expected: TierTokens) -> None:
    assert tokens(answer) == expected


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"text": " the", "meta_info": {"completion_tokens": 1}}, " the"),
        ({"text": "", "meta_info": {"completion_tokens": 1}}, "\ufffd"),
        ({"choices": [{"text": "a"}]}, "a"),
        ({"choices": [{"message": {"content": "b"}}]}, "b"),
        ({"choices": [{"text": ""}], "usage": {"completion_tokens": 1}}, "\ufffd"),
    ],
)
def test_a_generated_token(answer: Any, text: str) -> None:
    assert generated(body(answer)) == text


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b"<html>",
        body({"error": {"message": "no"}}),
        body({"text": "", "meta_info": {"completion_tokens": 0}}),
        body({"choices": []}),
        body({"text": None}),
    ],
)
def test_no_generated_token(answer: bytes) -> None:
    with pytest.raises(ValueError, match=r"no generated token|not"):
        generated(answer)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5),
                    lambda inner: st.dictionaries(
                        st.sampled_from(["text", "meta_info", "usage", "choices", "cached_tokens", "device",
                                         "cached_tokens_details", "prompt_tokens", "sglext"]), inner)
                    | st.lists(inner, max_size=3)))  # fmt: skip
def test_any_json_is_survived(value: Any) -> None:
    for read in (tokens, generated):
        try:
            read(body(value))
        except ValueError:
            continue


def test_the_proof_is_one_token_and_half_a_pair_can_give_it_too() -> None:
    call = generation(context())
    assert (call.method, call.path) == ("POST", "/generate")
    assert call.body is not None
    assert call.body["sampling_params"]["max_new_tokens"] == 1
    assert "bootstrap_host" not in call.body
    half = generation(context(role="prefill")).body
    assert half is not None
    assert half["bootstrap_room"] == 0
