import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.doctor.redact import MASK, redactor

PLANTED = "pl4nted-s3cret"
redact = redactor(["kn0wn-by-this-host", "abc"])


@pytest.mark.parametrize(
    "text",
    [
        f"API_KEY={PLANTED}",
        f'export HF_TOKEN="{PLANTED}"',
        f"vllm serve m --api-key {PLANTED} --port 8000",
        f"vllm serve m --api-key={PLANTED}",
        f'"argv": ["vllm", "--api-key", "{PLANTED}", "--port"]',
        f"['sglang', '--admin-api-key', '{PLANTED}']",
        f'password = "{PLANTED} with blanks"',
        f"password='{PLANTED}'",
        f'{{"password": "{PLANTED}", "x": 1}}',
        f"db_password: {PLANTED}",
        f"AWS_SECRET_ACCESS_KEY={PLANTED}",
        f'adminApiKey: "{PLANTED}"',
        f"clientSecret={PLANTED}",
        f"PGPASSWORD={PLANTED}",
        f"Authorization: Basic {PLANTED}",
        f'"Authorization": "Bearer {PLANTED}"',
        f"cookie: a={PLANTED}; b={PLANTED}",
        f"http://user:{PLANTED}@proxy:3128/",
        f"-----BEGIN RSA PRIVATE KEY-----\n{PLANTED}\n-----END RSA PRIVATE KEY-----",
        f"-----BEGIN PRIVATE KEY-----\n{PLANTED}\n(cut off here",
        "hf_abcdefghijklmnopqrstuv",
        "sk-abcdefghijklmnopqrstuv",
        "AKIAABCDEFGHIJKLMNOP",
        "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl",
        "the word kn0wn-by-this-host anywhere",
        "password=12345678",
    ],
)
def test_secrets_go(text):
    result = redact(f"before\n{text}\nafter")
    assert MASK in result
    for secret in (PLANTED, "kn0wn", "abcdefghij", "ABCDEFGHIJ", "c2lnbmF0", "12345678"):
        assert secret not in result
    assert result.startswith("before\n")


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens=16, token=5",
        '"max_tokens": 16',
        "GPU KV cache size: 277,760 tokens",
        "l1_query_tokens 12",
        "token_usage: 0.5",
        "tokenizer=/models/x",
        'key = "/etc/kvtierd/tls/node.key"',
        "private_key = /etc/kvtierd/tls/node.key",
        "--api-key-file /etc/kvtierd/api.key",
        "PYTHONHASHSEED=0",
        "monkey=banana",
        "Key k1 was evicted.",
        "password: null",
        "http://10.0.0.1:8000/metrics",
        "abc is too short to be taken out everywhere",
    ],
)
def test_what_is_no_secret_stays(text):
    assert redact(text) == text


@given(st.text())
def test_redacting_twice_is_redacting_once(text):
    once = redact(text)
    assert redact(once) == once


@pytest.mark.parametrize("piece", ["a-", "-", "a", ".", '"', "://", "x:y@", "token ", "Bearer ", "BEGIN "])
def test_no_text_takes_it_long(piece):
    started = time.process_time()
    redact(piece * (200_000 // len(piece)))
    assert time.process_time() - started < 5
