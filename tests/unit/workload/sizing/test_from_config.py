"""Bytes per token out of a model's configuration, for each kind of attention; what is not known is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvtierd.errors import WorkloadError
from kvtierd.workload.sizing.figures import TokenFigure, best_of, disagreements
from kvtierd.workload.sizing.from_config import Spread, figure_of_config, parse_config

# Fields as in the published configurations; only those that matter.
QWEN3_32B = {
    "model_type": "qwen3",
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 5120,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "hidden_size": 7168,
    "torch_dtype": "bfloat16",
    "num_nextn_predict_layers": 1,
}
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "hidden_size": 2048,
    "dtype": "bfloat16",
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 4,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size": 2880,
    "torch_dtype": "bfloat16",
}
JAMBA = {
    "model_type": "jamba",
    "num_hidden_layers": 32,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("config", "bytes_per_token", "says"),
    [
        (QWEN3_32B, 2 * 64 * 8 * 128 * 2, "GQA"),
        (DEEPSEEK_V3, 61 * 576 * 2, "MLA"),
        ({**DEEPSEEK_V3, "model_type": "deepseek_v32", "index_head_dim": 128}, 61 * (576 + 128) * 2, "MLA"),
        (
            {
                "model_type": "baichuan",
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "hidden_size": 4096,
                "torch_dtype": "float16",
            },
            2 * 32 * 32 * 128 * 2,
            "MHA",
        ),
        ({**QWEN3_32B, "num_key_value_heads": 1}, 2 * 64 * 128 * 2, "MQA"),
        (
            {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "torch_dtype": "float32"},
            2 * 12 * 12 * 64 * 4,
            "MHA",
        ),
        (
            {
                "model_type": "chatglm",
                "num_layers": 28,
                "num_attention_heads": 32,
                "multi_query_attention": True,
                "multi_query_group_num": 2,
                "kv_channels": 128,
                "hidden_size": 4096,
                "torch_dtype": "float16",
            },
            2 * 28 * 2 * 128 * 2,
            "GQA",
        ),
        (QWEN3_NEXT, 2 * 12 * 2 * 256 * 2, "hybrid"),
        (
            {**QWEN3_NEXT, "layer_types": ["linear_attention"] * 47 + ["full_attention"]},
            2 * 1 * 2 * 256 * 2,
            "hybrid",
        ),
        (JAMBA, 2 * 4 * 8 * 128 * 2, "hybrid"),
        (
            {**JAMBA, "model_type": "nemotron_h", "num_hidden_layers": 5, "hybrid_override_pattern": "M-*M*"},
            2 * 2 * 8 * 128 * 2,
            "hybrid",
        ),
        (
            {**JAMBA, "model_type": "minimax_m1", "num_hidden_layers": 4, "attn_type_list": [0, 0, 0, 1]},
            2 * 1 * 8 * 128 * 2,
            "hybrid",
        ),
        (
            {
                **DEEPSEEK_V3,
                "model_type": "kimi_linear",
                "num_hidden_layers": 4,
                "linear_attn_config": {"full_attn_layers": [4]},
            },
            576 * 2,
            "hybrid, MLA",
        ),
        (GPT_OSS, 2 * 4 * 8 * 64 * 2, "GQA"),
        (
            {
                "model_type": "qwen2_5_vl",
                "torch_dtype": "bfloat16",
                "text_config": {**QWEN3_32B, "model_type": "qwen2_5_vl_text", "torch_dtype": None},
            },
            None,
            "",
        ),
        (
            {
                "model_type": "qwen3_vl",
                "vision_config": {"hidden_size": 1},
                "text_config": {**QWEN3_32B, "model_type": "qwen3_vl_text"},
            },
            2 * 64 * 8 * 128 * 2,
            "GQA",
        ),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else None,
)
def test_each_kind_of_attention(config: dict[str, Any], bytes_per_token: int | None, says: str) -> None:
    if bytes_per_token is None:
        with pytest.raises(WorkloadError, match="type the numbers"):
            figure_of_config(config)
        return
    found = figure_of_config(config)
    assert found.bytes_per_token == bytes_per_token
    assert says in found.details
    assert found.source == "config"


def test_the_model_of_the_known_logs_comes_out() -> None:
    """A 32B model with GQA takes a quarter of a GB for 1,000 tokens, as engines' logs of it say."""
    assert figure_of_config(QWEN3_32B, spread=Spread(4)).gb_per_1k_tokens == pytest.approx(0.25, rel=0.05)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("bf16", 2),
        ("fp16", 2),
        ("fp32", 4),
        ("fp8", 1),
        ("fp8_e4m3", 1),
        ("int8", 1),
        ("C8", 1),
        ("int4", 0.5),
        ("auto", 2),
        (None, 2),
    ],
)
def test_numbers_of_the_cache(dtype: str | None, size: float) -> None:
    assert figure_of_config(QWEN3_32B, dtype=dtype).bytes_per_token == 2 * 64 * 8 * 128 * size


@pytest.mark.parametrize(
    ("quantisation", "size"),
    [
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, 1),
        ({"kv_cache_scheme": {"num_bits": 4, "type": "int"}}, 0.5),
        ({"kv_cache_quant_algo": "FP8"}, 1),
        ({"kv_cache_type": "C8"}, 1),
        ({"kv_cache_scheme": None, "quant_method": "ascend", "bits": 8}, 2),  # weights only
        ({"kv_cache_quant_algo": "none"}, 2),
    ],
)
def test_a_configuration_that_quantises_the_cache(quantisation: dict[str, Any], size: float) -> None:
    config = {**QWEN3_32B, "quantization_config": quantisation}
    found = figure_of_config(config)
    assert found.bytes_per_token == 2 * 64 * 8 * 128 * size
    assert any("quantised" in note for note in found.notes) == (size < 2)
    assert (
        figure_of_config(config, dtype="bf16").bytes_per_token == 2 * 64 * 8 * 128 * 2
    )  # what is asked for wins


def test_cards_that_hold_the_same_are_counted_once_for_the_pool() -> None:
    gqa = figure_of_config(QWEN3_32B, spread=Spread(tensor=16, pipeline=2))
    assert (gqa.bytes_per_token, gqa.bytes_on_cards) == (262_144, 524_288)
    mla = figure_of_config(DEEPSEEK_V3, spread=Spread(tensor=8, data=2))
    assert (mla.bytes_per_token, mla.bytes_on_cards) == (70_272, 8 * 70_272)
    assert any("2 data-parallel" in note for note in mla.notes)
    assert figure_of_config(QWEN3_32B, spread=Spread(tensor=8, pipeline=4)).bytes_on_cards == 262_144


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"model_type": "deepseek_v4"}, "sizing.model-unknown"),
        ({"model_type": None}, "sizing.model-unknown"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "sizing.model-unknown"),
        ({"is_encoder_decoder": True}, "sizing.model-unknown"),
        (
            {"model_type": "gemma3", "layer_types": ["full_attention"] * 63 + ["warp_attention"]},
            "sizing.model-unknown",
        ),
        ({"model_type": "gemma3", "layer_types": ["full_attention"]}, "sizing.model-field"),
        ({"model_type": "qwen3_next"}, "sizing.model-field"),
        ({"model_type": "jamba"}, "sizing.model-field"),
        ({"model_type": "jamba", "attn_layer_period": 8, "attn_layer_offset": 8}, "sizing.model-field"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "MM"}, "sizing.model-field"),
        ({"model_type": "minimax", "attn_type_list": [2] * 64}, "sizing.model-field"),
        ({"model_type": "kimi_linear", "kv_lora_rank": 1, "qk_rope_head_dim": 1}, "sizing.model-field"),
        ({"model_type": "deepseek_v3"}, "sizing.model-field"),
        ({"num_hidden_layers": None}, "sizing.model-field"),
        ({"num_hidden_layers": 0}, "sizing.model-field"),
        ({"num_hidden_layers": -3}, "sizing.model-field"),
        ({"num_hidden_layers": True}, "sizing.model-field"),
        ({"num_hidden_layers": "64"}, "sizing.model-field"),
        ({"num_key_value_heads": 7}, "sizing.model-field"),
        ({"num_key_value_heads": 128}, "sizing.model-field"),
        ({"head_dim": None, "hidden_size": 5121}, "sizing.model-field"),
        ({"torch_dtype": None}, "sizing.dtype"),
        ({"torch_dtype": "complex64"}, "sizing.dtype"),
        ({"quantization_config": {"kv_cache_quant_algo": "NVFP2"}}, "sizing.dtype"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 3}}}, "sizing.dtype"),
    ],
)
def test_what_is_not_known_is_never_guessed(changes: dict[str, Any], code: str) -> None:
    with pytest.raises(WorkloadError) as error:
        figure_of_config({**QWEN3_32B, **changes})
    assert error.value.stable_code == code
    assert error.value.hint


@pytest.mark.parametrize(
    ("spread", "dtype", "code"),
    [
        (Spread(3), None, "sizing.parallel"),
        (Spread(1, 65), None, "sizing.parallel"),
        (Spread(), "q8", "sizing.dtype"),
    ],
)
def test_cards_and_types_that_do_not_fit(spread: Spread, dtype: str | None, code: str) -> None:
    with pytest.raises(WorkloadError) as error:
        figure_of_config(QWEN3_32B, spread=spread, dtype=dtype)
    assert error.value.stable_code == code


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "[" * 100_000, b"\xff\xfe\x00"])
def test_files_that_are_no_configuration(text: str | bytes) -> None:
    with pytest.raises(WorkloadError) as error:
        parse_config(text, "config.json")
    assert error.value.stable_code == "sizing.config"


def test_sources_that_agree_and_that_do_not() -> None:
    config = figure_of_config(QWEN3_32B, spread=Spread(4))
    log = TokenFigure("log", 262_312.0, 262_312.0, kv_tokens=150_800)
    assert disagreements([log, config]) == []
    assert best_of([config, log]) is log
    wrong_cards = TokenFigure("log", 131_156.0, 131_156.0, kv_tokens=150_800)
    (told,) = disagreements([wrong_cards, config])
    assert "131,156" in told
    assert "262,144" in told
    assert "--cards" in told
    (rooms,) = disagreements([log, TokenFigure("metrics", None, None, kv_tokens=301_600)])
    assert "2 data-parallel engines" in rooms
    assert best_of([TokenFigure("metrics", None, None)]) is None


def test_a_log_of_cards_that_hold_copies_counts_one_of_them() -> None:
    config = figure_of_config(DEEPSEEK_V3, spread=Spread(8))
    log = TokenFigure("log", 8 * 70_300.0, 8 * 70_300.0, kv_tokens=1000)
    assert disagreements([log, config]) == []
    best = best_of([log, config])
    assert best is not None
    assert (best.source, best.bytes_per_token) == ("log", 70_300)
    assert "one copy" in best.notes[-1]


def test_the_configuration_survives_json() -> None:
    assert figure_of_config(parse_config(json.dumps(QWEN3_32B), "x")).bytes_per_token == 262_144
