"""Datasets and traces as blocks: forms, order, what could be hits, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from kvtierd.errors import WorkloadError
from kvtierd.workload.dataset.records import Skips
from kvtierd.workload.sizing.curve import HitCurve
from kvtierd.workload.sizing.trace import TraceFacts, read_trace


def lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def read(path: Path, block_tokens: int = 4, **options: Any) -> tuple[HitCurve, TraceFacts]:
    trace, facts = read_trace(path, block_tokens=block_tokens, skips=Skips(), **options)
    return trace.curve(), facts


def test_qa_pairs_are_prompts_as_they_are_and_the_last_token_is_computed(tmp_path: Path) -> None:
    path = lines(tmp_path / "qa.jsonl", *[{"question": "abcdefgh", "answer": "x"}] * 3)
    curve, facts = read(path)
    assert (facts.form, facts.unit, facts.requests) == ("qa", "bytes", 3)
    assert (curve.references, curve.prompt_tokens, curve.distinct) == (6, 24, 2)
    assert curve.most_hits == 2  # the second block holds the last token, so it is computed each time
    longer = lines(tmp_path / "longer.jsonl", *[{"question": "abcdefghi", "answer": ""}] * 3)
    assert read(longer)[0].most_hits == 4


def test_letters_outside_of_ascii_are_several_bytes(tmp_path: Path) -> None:
    path = lines(tmp_path / "qa.jsonl", {"question": "缓存", "answer": ""})
    assert read(path)[0].prompt_tokens == 6


SHAREGPT = {
    "id": "a",
    "conversations": [
        {"from": "human", "value": "q" * 40},
        {"from": "gpt", "value": "a" * 40},
        {"from": "human", "value": "r" * 40},
    ],
}


def test_a_conversation_is_a_request_for_each_question_with_all_before_it(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([SHAREGPT]))
    curve, facts = read(path)
    assert (facts.form, facts.requests) == ("sharegpt", 2)
    first = len("user\n") + 40 + 1
    assert curve.prompt_tokens == first + first + len("assistant\n") + 41 + first
    assert curve.most_hits == first // 4


def test_openai_messages(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s" * 100}, {"role": "user", "content": "q"}]
    path = lines(tmp_path / "openai.jsonl", {"messages": messages}, {"messages": messages})
    curve, facts = read(path)
    assert facts.form == "openai"
    assert curve.most_hits == (curve.prompt_tokens // 2 - 1) // 4


def test_conversations_that_take_turns_need_a_larger_pool(tmp_path: Path) -> None:
    talks = [
        {"conversations": [{"from": who, "value": f"{name}{turn}" * 20} for turn in range(4) for who in ("human", "gpt")]}
        for name in "abcdef"
    ]  # fmt: skip
    path = lines(tmp_path / "talks.jsonl", *talks)
    alone, together = read(path)[0], read(path, concurrent=6)[0]
    assert alone.most_hits == together.most_hits > 0
    assert together.most_blocks > 3 * alone.most_blocks


MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]},
    {"timestamp": 7, "input_length": 1024, "output_length": 5, "hash_ids": [1, 2]},
    {"timestamp": 5, "input_length": 1025, "output_length": 5, "hash_ids": [1, 2, 9]},
]


def test_a_mooncake_trace_says_its_block_size_and_its_partial_blocks_are_not_cached(tmp_path: Path) -> None:
    path = lines(tmp_path / "trace.jsonl", *MOONCAKE)
    curve, facts = read(path, block_tokens=128)
    assert (facts.form, facts.block_tokens, facts.unit) == ("mooncake", 512, "tokens")
    assert "512 tokens each, not 128" in facts.notes[0]
    assert (curve.references, curve.distinct, curve.prompt_tokens) == (6, 2, 3149)
    assert curve.most_hits == 1 + 2  # of 1,024 tokens the second block holds the last one
    assert facts.backwards == 1
    as_asked = lines(tmp_path / "128.jsonl", {"timestamp": 0, "input_length": 300, "hash_ids": [1, 2, 3]})
    assert read(as_asked, block_tokens=128)[1].block_tokens == 128


def test_no_request_of_a_trace_is_lost_behind_the_first_ones(tmp_path: Path) -> None:
    path = lines(tmp_path / "trace.jsonl", *[MOONCAKE[0]] * 1000)
    assert read(path)[0].requests == 1000


def test_block_ids_of_64_bits_and_negative_ones(tmp_path: Path) -> None:
    big = {**MOONCAKE[0], "hash_ids": [2**64 - 1, -5, 3]}
    assert read(lines(tmp_path / "trace.jsonl", big, big))[0].most_hits == 2


def test_a_trace_of_an_unusual_block_size_must_be_named(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "trace.jsonl", {"timestamp": 0, "input_length": 1000, "hash_ids": [1, 2, 3, 4, 5]}
    )
    with pytest.raises(WorkloadError) as error:
        read(path, block_tokens=128)
    assert error.value.stable_code == "sizing.block-size"
    assert read(path, block_tokens=200)[1].block_tokens == 200


VLLM_LOG = r"""INFO 11-29 16:22:07 [utils.py:347] starting
INFO 11-29 16:22:21 [logger.py:41] Received request cmpl-1: prompt: 'it\'s\na "prompt" of some length', params: SamplingParams(n=1), prompt_token_ids: None, lora_request: None.
(APIServer pid=1) INFO 11-29 16:22:22 [logger.py:41] Received request cmpl-2: prompt: "it's\na \"prompt\" of some length", params: SamplingParams(n=1), prompt_token_ids: None, lora_request: None.
INFO 11-29 16:22:23 [logger.py:41] Received request cmpl-3: prompt: 'x prompt_token_ids: [7, 7, 7, 7, 7], y', params: SamplingParams(n=1), prompt_token_ids: [1, 2, 3, 4, 5, 6, 7, 8, 9], lora_request: None.
INFO 11-29 16:22:24 [logger.py:41] Received request cmpl-4: prompt: 'cut off he
"""  # noqa: E501


def test_a_vllm_log_with_its_requests(tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    path.write_text(VLLM_LOG)
    skips = Skips()
    trace, facts = read_trace(path, block_tokens=4, skips=skips)
    curve = trace.curve()
    length = len('it\'s\na "prompt" of some length')
    assert (facts.form, facts.requests) == ("vllm-log", 3)
    assert curve.prompt_tokens == 2 * length + 9
    assert curve.most_hits == (length - 1) // 4
    assert skips.total == 1


def test_the_engine_s_tokenizer_counts(tmp_path: Path) -> None:
    words = {word: number for number, word in enumerate(["[UNK]", "one", "two", "three", "four"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    question = {"question": "one two three four one", "answer": ""}
    path = lines(tmp_path / "qa.jsonl", question, question)
    curve, facts = read(path, tokenizer=tmp_path)
    assert (facts.unit, curve.prompt_tokens, curve.most_hits) == ("tokens", 10, 1)
    assert not facts.notes
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(WorkloadError) as error:
        read(path, tokenizer=tmp_path)
    assert error.value.stable_code == "sizing.tokenizer"


def test_packed_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in MOONCAKE).encode()))
    assert read(path)[1].form == "mooncake"


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "dataset.empty"),
        (b"\n\n", "dataset.empty"),
        (b"just text\n", "sizing.form"),
        (b'{"other": 1}\n', "sizing.form"),
        (b"\x7fELF\x02\x01\x00\x00", "dataset.encoding"),
        (b'{"question": ""}\n', "dataset.empty"),
        (b"INFO Received request a: prompt: None, params: x\n", "dataset.empty"),
    ],
)
def test_what_is_no_trace_is_said(tmp_path: Path, content: bytes, code: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(WorkloadError) as error:
        read(path)
    assert error.value.stable_code == code
    assert error.value.hint
