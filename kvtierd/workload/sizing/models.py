"""Which kinds of attention the models have that we know, by ``model_type`` of their config.json. Pure data.

A model that is not listed is not guessed at: two models of one field set can cache quite different things. Read from
the models' published configurations and the engines' cache layouts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final, Literal

Attention = Literal["heads", "latent"]
Pattern = Literal[
    "all", "layer_types", "interval", "period", "pattern", "attn_type_list", "linear_attn_config"
]


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """How a model family says what it caches.

    ``attention``: ``heads`` caches keys and values of its key-value heads (MHA, GQA, MQA), ``latent`` one compressed
    vector for each token and layer (MLA). ``pattern``: how the configuration says which layers have attention at all,
    for hybrid models. Names are the fields of config.json; the first that is there counts.
    """

    attention: Attention = "heads"
    pattern: Pattern = "all"
    layers: tuple[str, ...] = ("num_hidden_layers",)
    heads: tuple[str, ...] = ("num_attention_heads",)
    kv_heads: tuple[str, ...] = ("num_key_value_heads",)
    hidden: tuple[str, ...] = ("hidden_size",)
    head_dim: tuple[str, ...] = ("head_dim",)
    indexer: bool = False  # DeepSeek's sparse attention keeps one more vector for each token and layer


_PLAIN: Final = Kind()
_BY_LAYER_TYPES: Final = Kind(pattern="layer_types")
_LATENT: Final = Kind("latent")
_GPT2: Final = Kind(layers=("n_layer",), heads=("n_head",), kv_heads=(), hidden=("n_embd",))

KINDS: Final[Mapping[str, Kind]] = {
    **dict.fromkeys(
        (
            "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen2_vl", "qwen2_5_vl", "qwen3_vl",
            "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe", "qwen3_vl_moe_text", "phi", "phi3",
            "phimoe", "gemma", "starcoder2", "cohere", "olmo", "olmo2", "olmoe", "stablelm", "internlm", "internlm2",
            "internlm3", "baichuan", "minicpm", "glm", "glm4", "glm4_moe", "seed_oss", "granite", "granitemoe",
            "ernie4_5", "ernie4_5_moe", "hunyuan_v1_dense", "minimax_m2", "aquila",
            "xverse", "orion", "gpt_neox", "opt", "dots1", "bailing_moe",
        ),
        _PLAIN,
    ),
    **dict.fromkeys(
        (
            "gemma2", "gemma3", "gemma3_text", "gpt_oss", "cohere2", "exaone4", "qwen3_next", "qwen3_5", "qwen3_5_text",
            "qwen3_5_moe", "qwen3_5_moe_text", "granitemoehybrid", "lfm2", "lfm2_moe", "smollm3", "olmo3", "llama4_text",
        ),
        _BY_LAYER_TYPES,
    ),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"), _LATENT
    ),
    "deepseek_v32": Kind("latent", indexer=True),
    "glm_moe_dsa": Kind("latent", indexer=True),
    "kimi_linear": Kind("latent", pattern="linear_attn_config"),
    "jamba": Kind(pattern="period"),
    "nemotron_h": Kind(pattern="pattern"),
    "falcon_h1": _PLAIN,  # attention and a state in every layer
    "minimax_text_01": Kind(pattern="attn_type_list"),
    "minimax": Kind(pattern="attn_type_list"),
    "minimax_m1": Kind(pattern="attn_type_list"),
    "gpt2": _GPT2,
    "gpt_bigcode": dataclasses.replace(_GPT2, kv_heads=("num_key_value_heads",)),
    "bloom": Kind(
        layers=("n_layer", "num_hidden_layers"), heads=("n_head", "num_attention_heads"), kv_heads=()
    ),
    "chatglm": Kind(
        layers=("num_layers",), kv_heads=("multi_query_group_num",), head_dim=("kv_channels",)
    ),
}  # fmt: skip

INSIDE: Final = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where models that also see or hear keep the configuration of the part that caches."""

FULL_LAYERS: Final = frozenset({"full_attention", "attention", "global_attention", "global"})
WINDOW_LAYERS: Final = frozenset({"sliding_attention", "chunked_attention", "local_attention", "local"})
STATE_LAYERS: Final = frozenset({"linear_attention", "mamba", "mamba2", "conv", "recurrent"})
"""Layers with one state of fixed size for a request instead of keys and values for each token."""
