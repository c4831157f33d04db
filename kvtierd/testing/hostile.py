"""What a driver may be handed: recorded forms of real engines, and everything that can go wrong with them."""

from __future__ import annotations

from collections.abc import Iterator

# No value is zero, so that a zero in an observation was made up by the driver.
VLLM_METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 25000.0
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.7959693302299192e+09
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 9000.0
vllm:external_prefix_cache_queries_total{engine="0",model_name="m"} 16000.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 4000.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 12000.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_cache_hit"} 9000.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} 4000.0
vllm:cache_config_info{block_size="128",engine="0",kv_cache_size_tokens="1048576",num_gpu_blocks="8192"} 1.0
"""
SGLANG_METRICS = """\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0"} 3.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",tp_rank="0"} 2.0
sglang:token_usage{engine_type="unified",model_name="m",tp_rank="0"} 0.25
sglang:cache_hit_rate{engine_type="unified",model_name="m",tp_rank="0"} 0.5
sglang:max_total_num_tokens{engine_type="unified",model_name="m",tp_rank="0"} 65536.0
sglang:prompt_tokens_total{model_name="m"} 25000.0
sglang:cached_tokens_total{cache_source="device",model_name="m"} 9000.0
sglang:cached_tokens_total{cache_source="host",model_name="m"} 2000.0
sglang:cached_tokens_total{cache_source="storage",model_name="m"} 4000.0
sglang:hicache_host_used_tokens{model_name="m",tp_rank="0"} 4096.0
sglang:hicache_host_total_tokens{model_name="m",tp_rank="0"} 976576.0
"""
OUTPUT_LINES = tuple(
    """\
(EngineCore pid=71) INFO 11-29 08:15:02 [kv_cache_utils.py:2327] GPU KV cache size: 1,048,576 tokens, Maximum\
 concurrency for 8,192 tokens per request: 128.00x
(Worker pid=72) INFO 11-29 08:15:01 [gpu_worker.py:298] Available KV cache memory: 14.96 GiB
(APIServer pid=70) INFO 11-29 08:16:00 [loggers.py:335] Engine 000: Avg prompt throughput: 40.8 tokens/s, Avg\
 generation throughput: 2.4 tokens/s, Running: 1 reqs, Waiting: 2 reqs, GPU KV cache usage: 12.5%, Prefix cache\
 hit rate: 36.0%, External prefix cache hit rate: 41.2%
[2026-11-29 08:15:00] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 65536, K size: 0.03 GB, V size: 0.03 GB
[2026-11-29 08:15:00] max_total_num_tokens=65536, chunked_prefill_size=4096, max_prefill_tokens=16384,\
 max_running_requests=4096, context_len=8192, available_cpu_mem=21.33 GB
[2026-11-29 08:15:01] Prefill batch, #new-seq: 1, #new-token: 4, #cached-token: 2496, token usage: 0.04,\
 #running-req: 1, #queue-req: 2
""".splitlines()
)
HARMLESS_LINES = (
    "INFO:     Application startup complete.",
    'INFO:     127.0.0.1:51234 - "POST /v1/completions HTTP/1.1" 200 OK',
    "INFO 11-29 08:15:00 [api_server.py:10] vLLM API server version 0.13.0",
    "WARNING 11-29 08:15:00 [config.py:7] error_handling is not set; using the default",
    "prompt: 'what does a fatal error look like?'",
)
_HTML = "<html><head><title>502 Bad Gateway</title></head><body>502 Bad Gateway</body></html>"
BIG_BYTES = 2 * 1024**2
LONG_LINE_CHARS = 64 * 1024


def hostile_metrics() -> Iterator[tuple[str, str]]:
    """(what it is, text) of bodies that are no scrape of an engine."""
    yield "empty", ""
    yield "blank", " \n\n\t\r\n"
    yield "HTML", _HTML
    yield "JSON", '{"error": "not found"}'
    yield "binary", "\x00\x01\x02\ufffd\ud83d\ude00\x1b[31m"
    yield (
        "another program's metrics",
        "# TYPE process_cpu_seconds_total counter\nprocess_cpu_seconds_total 12.0\n",
    )
    for name, text in (("vLLM", VLLM_METRICS), ("SGLang", SGLANG_METRICS)):
        yield f"{name} cut in a line", text[: text.index('model_name="m"') + 8]
        yield f"{name} with a value that is no number", text.replace(" 3.0\n", " many\n")
        yield f"{name} with NaN", text.replace(" 3.0\n", " NaN\n")
        yield f"{name} with infinity", text.replace(" 3.0\n", " +Inf\n")
        yield f"{name} without values", "\n".join(line.rpartition(" ")[0] for line in text.splitlines())
        yield f"{name} with an open label", text.replace('"} ', "} ")
        yield f"{name} with Windows' line ends", text.replace("\n", "\r\n")


def big_metrics() -> Iterator[tuple[str, str]]:
    """(what it is, text) of up to 2 MiB each."""
    yield "2 MiB of one letter", "a" * BIG_BYTES
    yield "2 MiB of open braces", "{" * BIG_BYTES
    yield "128 KiB of line ends", "\n" * (BIG_BYTES // 16)
    line = 'other_seconds_bucket{le="0.5",model_name="m"} 12.0\n'
    yield "2 MiB of other metrics around vLLM's", line * (BIG_BYTES // len(line)) + VLLM_METRICS
    yield "2 MiB of other metrics around SGLang's", line * (BIG_BYTES // len(line)) + SGLANG_METRICS


def hostile_lines() -> Iterator[tuple[str, str]]:
    """(what it is, line) of output that no parser expects."""
    yield "an empty line", ""
    yield "blanks", " \t "
    yield "binary", "\x00\x01\x02\ufffd\udcff\x7f"
    yield "only an escape", "\x1b["
    yield "a progress bar", "\rLoading:  50%|#####     | 1/2\rLoading: 100%|##########| 2/2"
    yield "a number of 400 digits", f"GPU KV cache size: {'9' * 400} tokens"
    yield "a rate of more than all", "Prefix cache hit rate: 99999.0%, External prefix cache hit rate: -5.0%"
    yield "numbers in Arabic digits", "GPU KV cache size: ١٢٣ tokens, #tokens: ٦٥"
    yield "JSON", '{"level": "info", "msg": "Prefix cache hit rate"}'
    for line in OUTPUT_LINES:
        yield "colours", f"\x1b[36m{line[:20]}\x1b[0m{line[20:]}\x1b[0m"
        yield "two lines in one", f"{line} {line}"


def long_lines() -> Iterator[tuple[str, str]]:
    """(what it is, line) of 64 KiB each: what a backtracking expression takes for ever on."""
    for unit in (
        "a",
        " ",
        "0",
        ",",
        "9,",
        "(",
        "\x1b[",
        "\r",
        ": ",
        "Prefix cache hit rate: ",
        "#tokens: ",
        "KV cache size: 1",
    ):
        yield f"64 KiB of {unit!r}", (unit * (LONG_LINE_CHARS // len(unit) + 1))[:LONG_LINE_CHARS]
    for line in OUTPUT_LINES:
        yield "a known line and 64 KiB of digits", line + "9" * LONG_LINE_CHARS


def hostile_bodies() -> Iterator[tuple[str, bytes]]:
    """(what it is, body) of answers to a completion that are none."""
    yield "an empty body", b""
    yield "half an object", b'{"choices": [{"te'
    yield "no UTF-8", b"\xff\xfe\x00"
    yield "HTML", _HTML.encode()
    yield "an error", b'{"error": {"message": "model not found", "code": 404}}'
    for text in (
        "null", "true", "7", '"text"', "[]", "[1]", "{}", '{"choices": null}', '{"choices": []}', '{"choices": {}}',
        '{"choices": [null]}', '{"choices": [{}]}', '{"choices": [{"text": null}]}', '{"choices": [{"text": 5}]}',
        '{"text": null}', '{"text": ["a"]}', '{"usage": 5}', '{"usage": null}', '{"usage": []}', '{"meta_info": 5}',
        '{"meta_info": {"prompt_tokens": "x"}}', '{"usage": {"prompt_tokens": "x"}}',
        '{"usage": {"prompt_tokens": 1.5}}', '{"usage": {"prompt_tokens_details": 5}}',
    ):  # fmt: skip
        yield text, text.encode()
