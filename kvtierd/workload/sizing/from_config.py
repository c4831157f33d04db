"""Bytes per token from a model's config.json and how it is spread over cards. Pure.

Keys and values: ``2 x layers x key-value heads x size of a head x bytes of a number``. MLA keeps one vector of
``kv_lora_rank + qk_rope_head_dim`` numbers for each layer instead. Layers with a state (linear attention, Mamba) take
nothing for each token. What is not known is an error, never a guess.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Final

from kvtierd.errors import WorkloadError
from kvtierd.workload.sizing.figures import TokenFigure
from kvtierd.workload.sizing.models import (
    FULL_LAYERS,
    INSIDE,
    KINDS,
    STATE_LAYERS,
    WINDOW_LAYERS,
    Kind,
)

_DTYPES: Final[Mapping[str, tuple[str, float]]] = {
    **dict.fromkeys(("bf16", "bfloat16"), ("bf16", 2.0)),
    **dict.fromkeys(("fp16", "float16", "half"), ("fp16", 2.0)),
    **dict.fromkeys(("fp32", "float32", "float"), ("fp32", 4.0)),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "float8_e4m3fn", "hif8"), ("fp8", 1.0)),
    **dict.fromkeys(("int8", "c8"), ("int8", 1.0)),
    **dict.fromkeys(("int4", "c4", "fp4"), ("int4", 0.5)),
}
DTYPE_NAMES: Final = "bf16, fp16, fp32, fp8, int8, int4"
_MOST: Final = 1_000_000  # layers, heads, sizes beyond it are no model's


@dataclasses.dataclass(frozen=True, slots=True)
class Spread:
    """How an engine is spread over cards: tensor, pipeline and data parallel. All at least 1."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1

    @property
    def cards_of_one_engine(self) -> int:
        """Cards that share one cache."""
        return self.tensor * self.pipeline


def parse_config(text: str | bytes, name: str) -> Mapping[str, Any]:
    """A config.json as a mapping.

    Raises:
        WorkloadError: ``sizing.config``.
    """
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WorkloadError(
            f"{name} is not JSON",
            why=str(error),
            hint="name the model's config.json, as it lies beside its weights",
            code="sizing.config",
        ) from None
    if not isinstance(config, dict):
        raise WorkloadError(
            f"{name} is not a model's configuration: it is {type(config).__name__}, not an object",
            hint="name the model's config.json, as it lies beside its weights",
            code="sizing.config",
        )
    return config


def figure_of_config(
    config: Mapping[str, Any], *, spread: Spread = Spread(), dtype: str | None = None
) -> TokenFigure:
    """What the pool keeps, and what the cards hold, for one token.

    Args:
        config: config.json.
        spread: Cards.
        dtype: Numbers of the KV cache (``--kv-cache-dtype``); ``None`` or ``auto``: as the configuration says.

    Raises:
        WorkloadError: ``sizing.model-unknown``, ``sizing.model-field``, ``sizing.dtype``, ``sizing.parallel``.
    """
    named = config.get("model_type")
    inner = next((config[key] for key in INSIDE if isinstance(config.get(key), dict)), None)
    model = config if inner is None else {**_shared(config), **inner}
    model_type = model.get("model_type") if inner is not None else named
    kind = KINDS.get(model_type) if isinstance(model_type, str) else None
    if kind is None and inner is not None and isinstance(named, str):
        kind, model_type = KINDS.get(named), named
    if kind is None:
        raise _unknown(config, model_type or named)
    if model.get("is_encoder_decoder"):
        raise _unknown(config, f"{model_type} (encoder and decoder)")
    reader = _Model(str(model_type), model, kind)
    number, number_bytes, dtype_note = _numbers(model, config, dtype)
    return reader.figure(spread, number, number_bytes, dtype_note)


def _shared(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in ("torch_dtype", "dtype", "quantization_config") if key in config}


class _Model:
    def __init__(self, name: str, config: Mapping[str, Any], kind: Kind) -> None:
        self.name, self.config, self.kind = name, config, kind
        self.notes: list[str] = []

    def figure(self, spread: Spread, number: str, number_bytes: float, dtype_note: str | None) -> TokenFigure:
        layers = self._whole(self.kind.layers)
        caching, windowed = self._caching_layers(layers)
        latent = self.kind.attention == "latent"
        if latent:
            rank, rope = self._whole(("kv_lora_rank",)), self._whole(("qk_rope_head_dim",))
            copies = float(spread.tensor)
            per_layer = (rank + rope) * number_bytes
            shape = f"MLA: {caching} layers x ({rank} + {rope}) x {number}"
            if self.kind.indexer:
                index = self._whole(("index_head_dim",))
                per_layer += index * 2
                shape += f", and {index} x bf16 of the indexer"
                self.notes.append("the sparse attention's indexer keys count as bf16, as on Ascend")
            if spread.tensor > 1:
                self.notes.append(
                    f"each of {spread.tensor} tensor-parallel cards holds the whole latent; the pool keeps it once"
                )
        else:
            heads = self._whole(self.kind.heads)
            kv_heads = self._kv_heads(heads)
            dim = self._head_dim(heads)
            copies = self._copies(kv_heads, spread.tensor)
            per_layer = 2 * kv_heads * dim * number_bytes
            word = "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA"
            shape = f"{word}: 2 x {caching} layers x {kv_heads} heads x {dim} x {number}"
        if caching < layers:
            shape = f"hybrid, {shape}"
            self.notes.append(
                f"{layers - caching} of {layers} layers have a state of fixed size for each request, and nothing for each"
                " token: not counted; an engine that keeps states at block ends needs more"
            )
        if windowed:
            self.notes.append(
                f"{windowed} of {caching} caching layers look at a window only; they are counted in full, as engines"
                " store whole blocks of all layers: an upper bound"
            )
        if spread.pipeline > layers:
            raise WorkloadError(
                f"{spread.pipeline} pipeline stages for {layers} layers",
                hint="--pp is at most the number of layers",
                code="sizing.parallel",
            )
        if dtype_note:
            self.notes.append(dtype_note)
        extra = self.config.get("num_nextn_predict_layers")
        if isinstance(extra, int) and extra > 0:
            self.notes.append(
                f"layers for multi-token prediction ({extra}) cache too when speculation is on: not counted"
            )
        if spread.data > 1:
            self.notes.append(f"{spread.data} data-parallel engines have a cache each and share the pool")
        total = caching * per_layer
        return TokenFigure(
            source="config",
            bytes_per_token=total,
            bytes_on_cards=total * copies,
            details=f"{self.name}, {shape}",
            notes=tuple(self.notes),
        )

    # -- fields

    def _whole(self, names: tuple[str, ...]) -> int:
        value = self._optional(names)
        if value is None:
            raise WorkloadError(
                f"the configuration of {self.name} lacks {' or '.join(names)}",
                hint="give the complete config.json of the model, or bytes per token from a log (--log)",
                code="sizing.model-field",
            )
        return value

    def _optional(self, names: tuple[str, ...]) -> int | None:
        for name in names:
            value = self.config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MOST:
                raise WorkloadError(
                    f"{name} of {self.name} is {str(value)[:60]!r}, not a number of at least 1",
                    hint="give the config.json as it came with the model",
                    code="sizing.model-field",
                )
            return value
        return None

    def _kv_heads(self, heads: int) -> int:
        if self.name == "gpt_bigcode" and self.config.get("multi_query"):
            return 1
        if self.name == "chatglm" and not self.config.get("multi_query_attention"):
            return heads
        kv_heads = self._optional(self.kind.kv_heads) or heads  # without the field every head has its own
        if kv_heads > heads or heads % kv_heads:
            raise WorkloadError(
                f"{self.name} has {heads} heads and {kv_heads} key-value heads: one must divide the other",
                hint="give the config.json as it came with the model",
                code="sizing.model-field",
            )
        return kv_heads

    def _head_dim(self, heads: int) -> int:
        dim = self._optional(self.kind.head_dim)
        if dim is not None:
            return dim
        hidden = self._whole(self.kind.hidden)
        if hidden % heads:
            raise WorkloadError(
                f"{self.name} has no head_dim, and {hidden} does not divide by {heads} heads",
                hint="give the config.json as it came with the model",
                code="sizing.model-field",
            )
        return hidden // heads

    def _copies(self, kv_heads: int, tensor: int) -> float:
        """How many cards hold the same heads."""
        if max(kv_heads, tensor) % min(kv_heads, tensor):
            raise WorkloadError(
                f"{kv_heads} key-value heads of {self.name} cannot be spread over {tensor} tensor-parallel cards",
                why="engines need one of the two numbers to divide the other",
                hint="give the --tp that the engine runs with",
                code="sizing.parallel",
            )
        if tensor <= kv_heads:
            return 1.0
        self.notes.append(
            f"{kv_heads} key-value heads on {tensor} cards: each is on {tensor // kv_heads} of them; vLLM Ascend keeps it"
            " once in the pool, SGLang once for each card"
        )
        return tensor / kv_heads

    # -- which layers

    def _caching_layers(self, layers: int) -> tuple[int, int]:
        """(layers with keys and values for each token, of those with a window)."""
        pattern = self.kind.pattern
        config = self.config
        if pattern == "all":
            return layers, 0
        if pattern == "layer_types":
            return self._by_types(layers)
        if pattern == "period":
            period, offset = self._whole(("attn_layer_period",)), config.get("attn_layer_offset", 0)
            if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset < period:
                raise self._odd("attn_layer_offset", offset)
            return len(range(offset, layers, period)), 0
        if pattern == "pattern":
            text = config.get("hybrid_override_pattern")
            if not isinstance(text, str) or len(text) != layers or set(text) - set("M*-E"):
                raise self._odd("hybrid_override_pattern", text)
            return text.count("*"), 0
        if pattern == "attn_type_list":
            kinds = config.get("attn_type_list")
            if not isinstance(kinds, list) or len(kinds) != layers or set(map(str, kinds)) - {"0", "1"}:
                raise self._odd("attn_type_list", kinds)
            return sum(bool(kind) for kind in kinds), 0
        linear = config.get("linear_attn_config")
        full = linear.get("full_attn_layers") if isinstance(linear, dict) else None
        if not isinstance(full, list) or not 0 < len(full) <= layers:
            raise self._odd("linear_attn_config.full_attn_layers", full)
        return len(full), 0

    def _by_types(self, layers: int) -> tuple[int, int]:
        types = self.config.get("layer_types")
        if types is None:
            every = self._optional(("full_attention_interval",))
            if every is not None:
                return layers // every, 0
            if self.name in {"qwen3_next", "granitemoehybrid", "lfm2", "lfm2_moe"} or self.name.startswith(
                "qwen3_5"
            ):
                raise self._odd("layer_types", None)
            self.notes.append("without layer_types every layer counts as full attention: an upper bound")
            return layers, 0
        known = FULL_LAYERS | WINDOW_LAYERS | STATE_LAYERS
        if not isinstance(types, list) or len(types) != layers:
            raise self._odd("layer_types", types)
        strange = sorted({str(entry) for entry in types} - known)
        if strange:
            raise WorkloadError(
                f"{self.name} has layers of a kind that is not known: {', '.join(strange)[:200]}",
                hint="what they cache cannot be computed: measure it, with --log of a running engine",
                code="sizing.model-unknown",
            )
        windowed = sum(entry in WINDOW_LAYERS for entry in types)
        return sum(entry not in STATE_LAYERS for entry in types), windowed

    def _odd(self, field: str, value: object) -> WorkloadError:
        return WorkloadError(
            f"{self.name} is a hybrid model, and {field} does not say which layers cache: {str(value)[:80]}",
            hint="give the config.json as it came with the model, or --log of a running engine",
            code="sizing.model-field",
        )


def _numbers(
    model: Mapping[str, Any], whole: Mapping[str, Any], dtype: str | None
) -> tuple[str, float, str | None]:
    """(name, bytes of one number, a remark) of the KV cache."""
    if dtype is not None and dtype.lower() != "auto":
        known = _DTYPES.get(dtype.lower())
        if known is None:
            raise WorkloadError(
                f"{dtype!r} is not a type of numbers that is known for the KV cache",
                hint=f"write one of {DTYPE_NAMES}",
                code="sizing.dtype",
            )
        small = known[1] < 2
        return *known, "scales of the quantised KV cache are not counted" if small else None
    quantised = _kv_quantised(model.get("quantization_config") or whole.get("quantization_config"))
    if quantised is not None:
        return (
            *quantised,
            "the configuration says that the KV cache is quantised; scales are not counted",
        )
    written = model.get("torch_dtype") or model.get("dtype")
    known = _DTYPES.get(str(written).removeprefix("torch.").lower())
    if known is None:
        raise WorkloadError(
            f"the configuration does not say of which type the numbers are (torch_dtype is {str(written)[:40]})",
            hint="name it: --dtype bf16",
            code="sizing.dtype",
        )
    return *known, None


def _kv_quantised(quantisation: Any) -> tuple[str, float] | None:
    """From ``kv_cache_scheme`` (compressed-tensors), ``kv_cache_quant_algo`` (ModelOpt), ``kv_cache_type`` (msmodelslim)."""
    if not isinstance(quantisation, dict):
        return None
    scheme = quantisation.get("kv_cache_scheme")
    if isinstance(scheme, dict):
        bits, kind = scheme.get("num_bits"), scheme.get("type")
        if bits not in {4, 8}:
            raise WorkloadError(
                f"kv_cache_scheme says {str(bits)[:20]} bits",
                hint="name the type: --dtype int8",
                code="sizing.dtype",
            )
        return (f"{'fp' if kind == 'float' else 'int'}{bits}", bits / 8)
    for field in ("kv_cache_quant_algo", "kv_cache_type", "kv_quant_type"):
        value = quantisation.get(field)
        if isinstance(value, str) and value.strip().lower() not in {"", "none", "float", "auto"}:
            known = _DTYPES.get(value.strip().lower())
            if known is None:
                raise WorkloadError(
                    f"{field} of the configuration is {value[:40]!r}, which is not known",
                    hint=f"name the type of the KV cache: --dtype, one of {DTYPE_NAMES}",
                    code="sizing.dtype",
                )
            return known
    return None


def _unknown(config: Mapping[str, Any], model_type: object) -> WorkloadError:
    if not isinstance(model_type, str):
        shown = ", ".join(sorted(config)[:6]) or "nothing"
        return WorkloadError(
            "this config.json does not say what kind of model it is: there is no model_type",
            why=f"it has {shown}",
            hint="give the config.json beside the model's weights, or --log of a running engine",
            code="sizing.model-unknown",
        )
    return WorkloadError(
        f"what {model_type} caches for each token is not known",
        why="its attention may keep more or less than its fields look like, so nothing is guessed",
        hint="start the engine once and give its log (--log), or bytes per token from elsewhere (--bytes-per-token)",
        code="sizing.model-unknown",
    )
